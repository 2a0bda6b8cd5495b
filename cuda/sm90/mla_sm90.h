/*
 * The launch functions of Hopper's kernels. mla.h has the parameters and the rules.
 */
#ifndef MLA_SM90_H
#define MLA_SM90_H

#include "../include/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Leading bytes of a workspace of mla_decode_sm90 that must be zero before its first use. */
#define MLA_DECODE_COUNTER_BYTES 4096

/* Bytes of workspace that mla_decode_sm90 needs. Reads the fields that decide which kernel is
 * launched (heads, query_len, requests, latent_dim, rope_dim, q_dtype, cache_format) and the
 * current device's properties. The result depends neither on the number of requests nor on any
 * length. If max_pages is above 0, numbers of requests, pages and tokens in a page that no launch
 * accepts are refused. */
MlaStatus mla_decode_sm90_workspace(const MlaDecodeParams* params, size_t* bytes);

/* Enqueues one kernel on `stream`. A split_patience of 0 is 100 000 cycles. Strides are below 2^39
 * elements; those of queries, cache and output are multiples of 16 bytes. A request has room for at
 * most 2^29 tokens (max_pages * page_size). The number of KV tiles of 64 tokens is counted over all
 * tiles of query rows of all requests, and one is added for each tile of query rows. This number is
 * less than 2^31.
 *
 * The cache has values of q_dtype, or is of MLA_CACHE_FP8, or of MLA_CACHE_FP8_PER_TOKEN with any
 * scales.
 *
 * It also takes rows of (latent_dim, rope_dim) (512, 0), (256, 64) and (256, 32), of a cache of
 * q_dtype's values. Without a rotary part, q_rope and cache_rope are ignored. */
MlaStatus mla_decode_sm90(const MlaDecodeParams* params, void* stream);

/* Enqueues one kernel on `stream`, or two: one for whole waves of the batch, and one for the rest.
 * Enqueues none if there are no tokens. Needs no workspace. The kernel may start while the previous
 * one in the stream is ending. It waits for that end before it reads or writes anything. It also
 * takes rows of (latent_dim, rope_dim) (512, 0), whose q_rope and cache_rope are ignored. */
MlaStatus mla_sparse_sm90(const MlaSparseParams* params, void* stream);

/* The rotation of the first 64 values of an index key or query. */
typedef struct MlaIndexRotary {
    /* [tokens] int64, or null: nothing is rotated. A position outside the tables gives NaN. */
    const int64_t* positions;
    /* [positions_len, 32] f32 each */
    const float* cos;
    const float* sin;
    int64_t table_stride;
    int64_t positions_len;
    /* MLA_ROTARY_INTERLEAVED or MLA_ROTARY_HALVES */
    int32_t style;
} MlaIndexRotary;

/*
 * Writes index keys of new tokens. A key is normalised (LayerNorm), rotated, transformed (Hadamard)
 * if `hadamard`, and rounded to e4m3. Its scale is the smallest power of two that is at least
 * max(|x|, 1e-4) / 448. The cache is that of mla_index_logits_sm90. A slot outside the cache, such
 * as -1, is skipped. The other slots are all different.
 */
typedef struct MlaIndexKeysParams {
    /* [tokens, 128] of keys_dtype */
    const void* keys;
    /* [128] each */
    const void* norm_weight;
    const void* norm_bias;
    /* [tokens] int64 */
    const int64_t* slots;
    /* pages that begin at multiples of 4 bytes */
    void* cache;
    MlaIndexRotary rotary;

    int64_t key_stride;
    /* in bytes: a multiple of 4 */
    int64_t page_stride;
    int64_t pages;

    /* less than 2^24 */
    int32_t tokens;
    int32_t page_size;
    /* must be 128 */
    int32_t width;
    /* MLA_DTYPE_BF16, MLA_DTYPE_F16 or MLA_DTYPE_F32, each */
    int32_t keys_dtype;
    int32_t norm_weight_dtype;
    int32_t norm_bias_dtype;
    /* 0 or 1 */
    int32_t hadamard;
    /* of the LayerNorm */
    float epsilon;
} MlaIndexKeysParams;

/* Enqueues one kernel on `stream`; none if there are no tokens. */
MlaStatus mla_index_keys_sm90(const MlaIndexKeysParams* params, void* stream);

/* Quantises index queries as mla_index_keys_sm90 does keys, without a LayerNorm, and multiplies
 * heads' weights by weight_scale and by the scale of their query. */
typedef struct MlaIndexQueriesParams {
    /* [tokens, heads, 128] of queries_dtype */
    const void* queries;
    /* [tokens, heads] of head_weights_dtype */
    const void* head_weights;
    /* [tokens, heads, 128] e4m3, without gaps */
    void* values;
    /* [tokens, heads] f32, without gaps */
    float* weights;
    MlaIndexRotary rotary;

    int64_t query_token_stride;
    int64_t query_head_stride;
    int64_t head_weight_stride;

    /* less than 2^24 */
    int32_t tokens;
    /* 1..=1024 */
    int32_t heads;
    /* must be 128 */
    int32_t width;
    /* MLA_DTYPE_BF16, MLA_DTYPE_F16 or MLA_DTYPE_F32, each */
    int32_t queries_dtype;
    int32_t head_weights_dtype;
    /* 0 or 1 */
    int32_t hadamard;
    float weight_scale;
} MlaIndexQueriesParams;

/* Enqueues one kernel on `stream`; none if there are no tokens. */
MlaStatus mla_index_queries_sm90(const MlaIndexQueriesParams* params, void* stream);

/*
 * The logits of sparse attention's indexer, over a paged cache of index keys:
 *
 *   logit[t, s] = scale[s] * sum over h of weight[t, h] * max(0, query[t, h] . key[s])
 *
 * Rows are query tokens as in mla_topk_sm90, and columns are positions. Only positions that a token
 * sees are read and written; a position whose block table entry is no page of the cache gets 0. A
 * page of the cache has the values of all its tokens, then their scales: value d of the token at
 * `offset` is at offset * 128 + d bytes, its scale at page_size * 128 + offset * 4.
 */
typedef struct MlaIndexLogitsParams {
    /* [rows, heads, 128] e4m3, without gaps */
    const void* queries;
    /* [rows, heads] f32, without gaps: with every factor, including the scale of the query */
    const float* weights;
    /* pages that begin at multiples of 16 bytes */
    const void* cache;
    /* [requests + 1] int32, as in mla_topk_sm90 */
    const int32_t* query_starts;
    /* [requests] int32, at most `columns` */
    const int32_t* seq_lens;
    /* [requests, max_pages] int32 */
    const int32_t* block_table;
    /* [rows, columns] f32 */
    float* logits;

    /* in bytes: a multiple of 16 */
    int64_t page_stride;
    int64_t block_table_stride;
    int64_t logits_stride;
    /* number of pages of the cache */
    int64_t pages;

    /* less than 2^24 */
    int32_t rows;
    int32_t first_token;
    int32_t requests;
    int32_t columns;
    int32_t max_pages;
    /* 1..=1048576; powers of two are faster */
    int32_t page_size;
    /* 32 or 64 */
    int32_t heads;
    /* must be 128 */
    int32_t width;
    /* 0 or 1: the launch before this one on the stream is mla_index_queries_sm90 or
     * mla_index_write_sm90, and query_starts, seq_lens and block_table were enqueued before that
     * one. They are then read while it is running. */
    int32_t after_queries;
} MlaIndexLogitsParams;

/* Enqueues one kernel on `stream`; none if there are no rows. */
MlaStatus mla_index_logits_sm90(const MlaIndexLogitsParams* params, void* stream);

/*
 * The selection of that indexer: the `topk` largest logits of each row, as slots of the cache. Row
 * r is query token first_token + r of the batch. Token i of n of a request with `len` tokens sees
 * columns 0 .. len - n + i + 1 of its row, one for each position of the request.
 *
 * The result is exact and deterministic. Among equal logits, those of the lowest positions are
 * chosen. -0 equals +0, -inf is the smallest number, and NaN ranks below it. Slots are in ascending
 * order of position. A row that sees no more than topk columns gets them all, and -1 behind them. A
 * position whose block table entry is no page of the cache gets -1. Columns that are not seen may
 * hold anything.
 */
typedef struct MlaTopkParams {
    /* [rows, columns] f32 */
    const float* logits;
    /* [requests + 1] int32: first query token of each request, ascending from 0 */
    const int32_t* query_starts;
    /* [requests] int32: the tokens of each request, its query tokens included, at most `columns` */
    const int32_t* seq_lens;
    /* [requests, max_pages] int32 */
    const int32_t* block_table;
    /* [rows, topk] int32 */
    int32_t* lists;

    int64_t logits_stride;
    int64_t block_table_stride;
    int64_t list_stride;
    /* number of pages of the cache; slots from 2^31 - 1 on get -1 */
    int64_t pages;

    /* less than 2^24 */
    int32_t rows;
    int32_t first_token;
    int32_t requests;
    /* 1..=786432 */
    int32_t columns;
    /* 1..=1048576 */
    int32_t topk;
    int32_t max_pages;
    /* tokens per page: any number from 1 on; powers of two are faster */
    int32_t page_size;
    /* 0 or 1: the launch before this one on the stream is mla_index_logits_sm90, of these logits;
     * writes of everything else that is read here were enqueued before that one. */
    int32_t after_logits;
} MlaTopkParams;

/* Enqueues one kernel on `stream`; none if there are no rows. */
MlaStatus mla_topk_sm90(const MlaTopkParams* params, void* stream);

/* Does the work of mla_cache_write and mla_index_keys_sm90, for the caches of one layer, and that
 * of mla_index_queries_sm90 if `queries` is not null. Enqueues one kernel for rows of 512 + 64
 * values of f16 or bf16 that can be accessed 16 bytes at a time, otherwise one for each of these
 * functions. None of them writes data that another one reads or writes. */
MlaStatus mla_index_write_sm90(const MlaCacheWriteParams* rows, const MlaIndexKeysParams* keys,
                               const MlaIndexQueriesParams* queries, void* stream);

/* Bytes of workspace that mla_prefill_sm90 needs. Reads value_dim, and the current device's
 * properties; the result depends on no number of tokens, requests or heads. */
MlaStatus mla_prefill_sm90_workspace(const MlaPrefillParams* params, size_t* bytes);

/* Enqueues one kernel on `stream`. With batch_invariant it enqueues several, one after another, if
 * the workspace does not suffice for all requests at once. batch_invariant is refused if keys may be
 * divided and a request may have more than 2^20 query tiles over all heads, or KV tiles.
 *
 * If rope_dim is 0, key_rope and its strides are not read. Strides are below 2^39 elements, and
 * those of tensors are multiples of 8. max_query_len or max_key_len rows of a tensor take no more
 * bytes than the tensor's address, as a number: its TMA descriptor begins that far before the
 * tensor. */
MlaStatus mla_prefill_sm90(const MlaPrefillParams* params, void* stream);

/* Loads the kernels for the dims and dtype of these parameters into the current context, as
 * mla_load_helpers does the helpers. */
MlaStatus mla_load_prefill_sm90(const MlaPrefillParams* params);

#ifdef __cplusplus
}
#endif

#endif
