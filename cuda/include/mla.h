/*
 * The C interface of the kernels.
 *
 * One plain-old-data parameter struct and one function per launch. The rules are the same for all
 * of them:
 *
 *   - Device memory, workspace and stream belong to the caller. No function allocates device
 *     memory, synchronises, reads device memory on the host, prints, or throws; every launch can be
 *     captured in a CUDA graph.
 *   - `stream` is a cudaStream_t (CUstream) of the current device. Null means the legacy default
 *     stream, and is what the caller asked for: no function chooses it by itself.
 *   - Strides are in elements of the tensor they belong to. The innermost dimension is always
 *     contiguous.
 *   - A refused argument is reported before anything is launched: `field` names it, `given` is its
 *     value and `accepted` says what would have been taken. Both texts are static.
 *   - Log-sum-exp is natural log, f32, [heads, tokens]; minus infinity where a row attends to
 *     nothing, and then the output row is zero.
 */
#ifndef MLA_H
#define MLA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MLA_OK = 0,
    /* An argument was refused; nothing was launched. */
    MLA_BAD_ARGUMENT = 1,
    /* The CUDA runtime or driver refused; `cuda_error` holds its code. */
    MLA_CUDA_ERROR = 2,
    /* This device cannot run the kernel: `field` says what is lacking. */
    MLA_UNSUPPORTED_DEVICE = 3
};

typedef struct MlaStatus {
    /* MLA_OK or one of the codes above. */
    int32_t code;
    /* A cudaError_t, or 0. */
    int32_t cuda_error;
    /* Name of the offending parameter or CUDA call; null when code is MLA_OK. */
    const char* field;
    /* The value that was given (for a pointer, its address). */
    int64_t given;
    /* What would have been accepted, as a sentence fragment; null when code is MLA_OK. */
    const char* accepted;
} MlaStatus;

enum { MLA_DTYPE_BF16 = 0, MLA_DTYPE_F16 = 1, MLA_DTYPE_F32 = 3 };

/* How one token's row lies in the cache: the latent (L values), then the rotary key (R values). */
typedef enum MlaCacheFormat {
    /* L + R values of f32, f16 or bf16 */
    MLA_CACHE_F32 = 0,
    MLA_CACHE_F16 = 1,
    MLA_CACHE_BF16 = 2,
    /* L + R bytes of e4m3 with one scale for the whole tensor: stored = value / scale, saturated at
     * 448 */
    MLA_CACHE_FP8 = 3,
    /* L bytes of e4m3, L/128 f32 scales (a power of two for each 128 values), then R values of
     * bf16 */
    MLA_CACHE_FP8_DS_MLA = 4
} MlaCacheFormat;

/*
 * Absorbed MLA decode: every query row attends to one shared row per cached token.
 *
 *   score[r, s] = softmax_scale * (q_latent[r] . latent[s] + q_rope[r] . rope[s])
 *   out[r]      = sum over s of softmax(score)[r, s] * latent[s]
 *
 * A request's query tokens are its last ones: with `causal`, token i of n attends to the first
 * kv_len - n + i + 1 cached tokens.
 */
typedef struct MlaDecodeParams {
    /* [tokens, heads, 512] of q_dtype */
    const void* q_latent;
    /* [tokens, heads, 64] of q_dtype; q_latent + 512 when both parts lie in one row of 576 */
    const void* q_rope;
    /* [pages, page_size] rows of cache_format: 512 latent values, then 64 rotary ones */
    const void* cache;
    /* [requests, max_pages] int32; entries past a request's last page may hold anything */
    const int32_t* block_table;
    /* [requests] int32: cached tokens of each request, its query tokens included: 0 to max_pages
     * * page_size, which the caller guarantees, as it does that the table's entries are below
     * `pages` and that cu_q_lens rises by at most query_len */
    const int32_t* kv_lens;
    /* [requests + 1] int32, or null: then every request has query_len tokens */
    const int32_t* cu_q_lens;
    /* [tokens, heads, 512] of q_dtype */
    void* out;
    /* [heads, tokens] f32, or null */
    float* lse;
    /* workspace_bytes bytes, aligned to 256. The first MLA_DECODE_COUNTER_BYTES must be zero
     * before the first launch that uses it; every launch leaves them zero. Launches that share a
     * workspace must not overlap. */
    void* workspace;
    size_t workspace_bytes;

    int64_t q_latent_token_stride;
    int64_t q_latent_head_stride;
    int64_t q_rope_token_stride;
    int64_t q_rope_head_stride;
    int64_t cache_page_stride;
    int64_t cache_slot_stride;
    int64_t block_table_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    int64_t lse_head_stride;
    /* number of pages behind `cache` */
    int64_t pages;

    /* number of requests, 1..=1024 */
    int32_t requests;
    /* number of query tokens of all requests */
    int32_t tokens;
    /* query heads, 1..=128 */
    int32_t heads;
    /* the most query tokens any request has, 1..=16; without cu_q_lens what each of them has */
    int32_t query_len;
    /* tokens per page: a multiple of 16 */
    int32_t page_size;
    /* columns of block_table: with page_size at most 2^29 tokens, and over all requests and
     * tiles of their query rows less than 2^31 blocks of 64 tokens */
    int32_t max_pages;
    /* must be 512 and 64 */
    int32_t latent_dim;
    int32_t rope_dim;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16 */
    int32_t q_dtype;
    /* MlaCacheFormat: that of q_dtype's values, or MLA_CACHE_FP8 */
    int32_t cache_format;
    /* non-zero: causal among a request's query tokens */
    int32_t causal;
    float softmax_scale;
    /* what a byte of MLA_CACHE_FP8 is multiplied by, 2^-60 to 2^60; ignored otherwise */
    float cache_scale;
    /* cycles for which a CTA waits for the others that share its query tile before it falls back to
     * one CTA combining everything; 0: 100 000, and in mla_decode_sm80 what a CTA's share of the
     * work takes at most; negative: it never waits. The result is the same bit for bit. */
    int32_t split_patience;
} MlaDecodeParams;

/* Leading bytes of a decode workspace that must be zero before its first use. */
#define MLA_DECODE_COUNTER_BYTES 4096

/* Bytes of workspace that mla_decode_sm90 needs. Reads what decides about the kernel (heads, query_len,
 * requests, latent_dim, rope_dim, q_dtype, cache_format) and the current device's properties; the
 * result does not depend on the number of requests nor on any length. If max_pages is above 0, what no
 * launch takes of so many requests, pages and tokens in a page is refused here. */
MlaStatus mla_decode_sm90_workspace(const MlaDecodeParams* params, size_t* bytes);

/* Enqueues one kernel on `stream`. */
MlaStatus mla_decode_sm90(const MlaDecodeParams* params, void* stream);

/* A work item of mla_decode_sm90: some KV tiles, of 64 cached tokens each, of one query tile, for a
 * group of CTAs. A group is one CTA, or two with more than 64 rows (heads * query_len), which do
 * different rows of the same query tile. */
typedef struct MlaDecodeWorkItem {
    int32_t request;
    /* the query tile's first row, counting a request's query tokens and heads together, and the
     * most rows that it has */
    int32_t first_row;
    int32_t rows;
    /* KV tiles of the request, the last one excluded */
    int32_t kv_tile_begin;
    int32_t kv_tile_end;
    /* this is split `split` of `splits` of the query tile; group first_group + i has split i */
    int32_t split;
    int32_t splits;
    int32_t first_group;
    /* splits, the first ones, whose groups have no work item after them and combine the results */
    int32_t combiners;
    /* non-zero: the group's last work item */
    int32_t last;
} MlaDecodeWorkItem;

/* How mla_decode_sm90 divides a batch: writes the work items of one group, in their order, and
 * their number, and no more items than `room`. The host computes what the device would. Reads
 * heads, query_len, requests, q_dtype, cache_format, and, in host memory, kv_lens and cu_q_lens,
 * which may be null. `groups`, 1..=160: those of a launch; `group` is one of them. */
MlaStatus mla_decode_sm90_work_items(const MlaDecodeParams* params, int32_t groups, int32_t group,
                                     MlaDecodeWorkItem* items, int32_t room, int32_t* count);

/* What a CTA does next for a query tile that is divided among CTAs. */
typedef enum MlaSplitRole {
    /* nothing yet */
    MLA_SPLIT_NONE = 0,
    /* combine its slice */
    MLA_SPLIT_SLICE = 1,
    /* write its slice to the workspace and yield */
    MLA_SPLIT_YIELD = 2,
    /* combine everything */
    MLA_SPLIT_EVERYTHING = 3
} MlaSplitRole;

/* The split protocol's counters of one query tile: zero before and after. */
typedef struct MlaSplitCounters {
    int32_t arrived;
    int32_t left;
} MlaSplitCounters;

/* A step of the split protocol: at most one atomic operation. */
typedef enum MlaSplitStep {
    /* by a CTA that has other work; answers a role */
    MLA_SPLIT_ARRIVE = 0,
    /* by a combiner */
    MLA_SPLIT_ARRIVE_COMBINER = 1,
    /* answers what a combiner sees of the counters */
    MLA_SPLIT_LOOK = 2,
    /* answers the role of a combiner that has seen `seen` */
    MLA_SPLIT_ROLE_OF = 3,
    /* by a combiner that has waited long enough; answers 1 if the counters are still as `seen` */
    MLA_SPLIT_FALL_BACK = 4,
    /* by a combiner that has written its slice to the workspace; answers a role */
    MLA_SPLIT_YIELDED = 5,
    /* answers how many have left */
    MLA_SPLIT_LEAVE = 6,
    MLA_SPLIT_RESET = 7
} MlaSplitStep;

/* Takes a step of the split protocol on counters in host memory, by the code of the kernel, for tests
 * that try all orders. cuda/common/split_protocol.cuh draws the states and says who takes which step,
 * when. Steps without an answer leave `answer` alone, which may then be null. */
MlaStatus mla_split_step(int32_t step, MlaSplitCounters* counters, int32_t splits,
                         int32_t combiners, int32_t seen, int32_t* answer);

/*
 * What mla_decode_sm80 and mla_prefill_sm80 may use of a device at most, so that what they do on a
 * smaller one can be tested; null, or a 0, means all that the current device has.
 */
typedef struct MlaDeviceLimits {
    /* bytes of shared memory that a CTA may ask for: 101376 on 8.6, 8.9 and 12.x, 166912 on 8.0 */
    int32_t shared_memory_bytes;
    int32_t multiprocessors;
} MlaDeviceLimits;

/* Leading bytes of a workspace of mla_decode_sm80 that must be zero before its first use; every
 * launch leaves them zero. */
#define MLA_DECODE_SM80_COUNTER_BYTES 8192

/* Bytes of workspace that mla_decode_sm80 needs for requests of up to query_len tokens. Reads heads,
 * query_len, latent_dim, rope_dim, q_dtype and cache_format, and what the current device has; the
 * result does not depend on the number of requests nor on any length. If max_pages is above 0, what no
 * launch takes of so many requests, pages and tokens in a page is refused here. Loads the kernels, so
 * that no launch has to. */
MlaStatus mla_decode_sm80_workspace(const MlaDecodeParams* params, const MlaDeviceLimits* limits,
                                    size_t* bytes);

/* The same as mla_decode_sm90 on every GPU since Ampere: one kernel on `stream`. It also takes rows
 * of (latent_dim, rope_dim) (512, 0), (256, 64) and (256, 32), 1..=16 query tokens, 1..=65535
 * requests, and, with rows of (512, 64), a cache of MLA_CACHE_FP8_DS_MLA, of which strides are in
 * bytes and scales any f32. */
MlaStatus mla_decode_sm80(const MlaDecodeParams* params, const MlaDeviceLimits* limits,
                          void* stream);

/* A cache, and which of its rows each query token attends to. */
typedef struct MlaListedCache {
    /* [pages, page_size] rows of the first cache's format and scale; each begins on 16 bytes */
    const void* cache;
    /* [tokens, width] int32: slots */
    const int32_t* lists;
    /* [tokens] int32, or null, as of the first cache */
    const int32_t* counts;
    /* in bytes: multiples of 16 */
    int64_t cache_page_stride;
    int64_t cache_slot_stride;
    int64_t list_stride;
    /* number of pages behind `cache` */
    int64_t pages;
    /* entries of a list, 0..=8192 */
    int32_t width;
    /* slots per page: any number from 1 on */
    int32_t page_size;
} MlaListedCache;

/*
 * Sparse absorbed MLA, for decode and prefill: every query token attends to the cache rows that its
 * list names, whatever request they belong to. As in decode,
 *
 *   score[t, h, s] = softmax_scale * (q_latent[t, h] . latent[s] + q_rope[t, h] . rope[s])
 *   out[t, h]      = sum over s in list[t] of softmax(score)[t, h, s] * latent[s]
 *
 * An entry of a list is a slot, page * page_size + place in the page. An entry that is no slot of
 * the cache (-1, or any other number below 0 or past the end) is skipped wherever it stands, and no
 * memory is read for it; a slot that stands twice counts twice. Rows that no list names are not
 * read. There is no causality beside what the lists say. It takes time in proportion to the valid
 * entries.
 *
 * Two caches take part in one softmax, such as a window of uncompressed rows beside chosen ones; the
 * second is absent where its width is 0, and then nothing else of it is looked at.
 */
typedef struct MlaSparseParams {
    /* [tokens, heads, 512] of q_dtype */
    const void* q_latent;
    /* [tokens, heads, 64] of q_dtype; q_latent + 512 when both parts lie in one row of 576 */
    const void* q_rope;
    /* [pages, page_size] rows of cache_format; each begins on 16 bytes */
    const void* cache;
    /* [tokens, width] int32: slots; not looked at where width is 0 */
    const int32_t* lists;
    /* [tokens] int32: how many entries of each list count, the first ones; or null: all. What is
     * below 0 counts as 0, what is above width as width. */
    const int32_t* counts;
    MlaListedCache second;
    /* Of the requests, if dense_within is not 0: the pages of each, [requests, any] int32; its tokens in
     * the cache, the query tokens included, [requests] int32; where its query tokens begin, and where
     * the last one's end, [requests + 1] int32. */
    const int32_t* block_table;
    const int32_t* seq_lens;
    const int32_t* query_starts;
    /* [heads] f32, or null: a score for each head that takes part in the softmax without a value.
     * The log-sum-exp leaves it out. */
    const float* sinks;
    /* [tokens, heads, 512] of q_dtype */
    void* out;
    /* [heads, tokens] f32, or null */
    float* lse;

    int64_t q_latent_token_stride;
    int64_t q_latent_head_stride;
    int64_t q_rope_token_stride;
    int64_t q_rope_head_stride;
    /* in bytes: multiples of 16 */
    int64_t cache_page_stride;
    int64_t cache_slot_stride;
    int64_t list_stride;
    int64_t block_table_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    int64_t lse_head_stride;
    /* number of pages behind `cache` */
    int64_t pages;

    /* The query tokens of a request of at most so many tokens attend to all of them, each to those up to
     * itself: the first cache's slots come from the block table, and their lists and counts are not
     * looked at. At most `width`; 0: there are none. */
    int32_t dense_within;
    int32_t requests;
    /* query tokens, less than 2^24 */
    int32_t tokens;
    /* query heads, 1..=128 */
    int32_t heads;
    /* entries of a list, 0..=8192 */
    int32_t width;
    /* slots per page: any number from 1 on */
    int32_t page_size;
    /* must be 512 and 64 */
    int32_t latent_dim;
    int32_t rope_dim;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16 */
    int32_t q_dtype;
    /* MlaCacheFormat: that of q_dtype's values, MLA_CACHE_FP8, or MLA_CACHE_FP8_DS_MLA */
    int32_t cache_format;
    float softmax_scale;
    /* what an e4m3 byte of MLA_CACHE_FP8 is multiplied by, 2^-60 to 2^60; ignored otherwise */
    float cache_scale;
} MlaSparseParams;

/* Enqueues one kernel on `stream`, without a workspace; none where there are no tokens. */
MlaStatus mla_sparse_sm90(const MlaSparseParams* params, void* stream);

/* Bytes of workspace that mla_sparse_sm80 needs, for any number of tokens and any width. Reads heads,
 * latent_dim, rope_dim, q_dtype and cache_format, and what the current device has. Loads the kernels,
 * so that no launch has to. */
MlaStatus mla_sparse_sm80_workspace(const MlaSparseParams* params, const MlaDeviceLimits* limits,
                                    size_t* bytes);

/* The same as mla_sparse_sm90 on every GPU since Ampere: one kernel on `stream`. There is no second
 * cache, and no request is dense: second.width and dense_within are 0. There are less than
 * 2^31 tiles of 16 entries over all tokens and tiles of 16 heads. `workspace` holds workspace_bytes
 * bytes, aligned to 256; the rules of mla_decode_sm80's hold for it. */
MlaStatus mla_sparse_sm80(const MlaSparseParams* params, const MlaDeviceLimits* limits,
                          void* workspace, size_t workspace_bytes, void* stream);

/* How mla_sparse_sm90 divides a batch: how many thread blocks share the lists of a token. Reads heads,
 * tokens and both widths. `clusters` is [16] in host memory: how many clusters of 1, 2, ... 16 blocks
 * the device runs at the same time, 0 where it does not take them. */
MlaStatus mla_sparse_sm90_splits(const MlaSparseParams* params, const int32_t* clusters,
                                 int32_t* splits);

/* The rotation of the first 64 values of an index key or query. */
typedef struct MlaIndexRotary {
    /* [tokens] int64, or null: nothing is rotated. One outside the tables gives NaN. */
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
 * Writes index keys of new tokens: LayerNorm, the rotation, the Hadamard transform if it is wanted, and
 * rounding to e4m3 with the least power of two that is not below max(|x|, 1e-4) / 448. The cache is that
 * of mla_index_logits_sm90. A slot outside the cache, such as -1, is skipped. Slots differ.
 */
typedef struct MlaIndexKeysParams {
    /* [tokens, 128] of keys_dtype */
    const void* keys;
    /* [128] each */
    const void* norm_weight;
    const void* norm_bias;
    /* [tokens] int64 */
    const int64_t* slots;
    /* pages that begin on 4 bytes */
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

/* Enqueues one kernel on `stream`; none where there are no tokens. */
MlaStatus mla_index_keys_sm90(const MlaIndexKeysParams* params, void* stream);

/* Quantises index queries as mla_index_keys_sm90 does keys, without a LayerNorm, and multiplies heads'
 * weights by weight_scale and by the scale of their query. */
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

/* Enqueues one kernel on `stream`; none where there are no tokens. */
MlaStatus mla_index_queries_sm90(const MlaIndexQueriesParams* params, void* stream);

/*
 * The logits of sparse attention's indexer, over a paged cache of index keys:
 *
 *   logit[t, s] = scale[s] * sum over h of weight[t, h] * max(0, query[t, h] . key[s])
 *
 * Rows are query tokens as in mla_topk_sm90, and columns are positions. Only what a token sees is
 * read and written; a position whose entry of the block table is no page of the cache gets 0. A page
 * of the cache has the values of all its tokens, then their scales: value d of the token at `offset`
 * is at offset * 128 + d bytes, its scale at page_size * 128 + offset * 4.
 */
typedef struct MlaIndexLogitsParams {
    /* [rows, heads, 128] e4m3, without gaps */
    const void* queries;
    /* [rows, heads] f32, without gaps: with every factor, the scale of the query among them */
    const float* weights;
    /* pages that begin on 16 bytes */
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
} MlaIndexLogitsParams;

/* Enqueues one kernel on `stream`; none where there are no rows. */
MlaStatus mla_index_logits_sm90(const MlaIndexLogitsParams* params, void* stream);

/*
 * The selection of that indexer: of each row of logits the `topk` largest, as slots of
 * the cache. Row r is query token first_token + r of the batch; token i of n of a request with `len`
 * tokens sees columns 0 .. len - n + i + 1 of its row, one for each position of the request.
 *
 * It is exact, and always the same: of equal logits those of the lowest positions are chosen; -0
 * equals +0, -inf is the smallest number, and NaN ranks below it. Slots are in ascending order of
 * position; a row that sees no more than topk columns gets them all, with -1 behind. A position whose
 * entry of the block table is no page of the cache gets -1. What is not seen may hold anything.
 */
typedef struct MlaTopkParams {
    /* [rows, columns] f32 */
    const float* logits;
    /* [requests + 1] int32: where each request's query tokens begin, ascending from 0 */
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
} MlaTopkParams;

/* Enqueues one kernel on `stream`; none where there are no rows. */
MlaStatus mla_topk_sm90(const MlaTopkParams* params, void* stream);

/*
 * Expanded MLA prefill: each head's query rows attend to keys and values of their own.
 *
 *   score[i, j] = softmax_scale * (query[i] . [key_nope[j], key_rope[j]])
 *   out[i]      = sum over j of softmax(score)[i, j] * value[j]
 *
 * Requests are packed one after another. With `causal`, query row i of n sees the first k - n + i + 1 of a request's k
 * keys (none where that is not positive); otherwise all of them. No memory behind a request's last row is used.
 */
typedef struct MlaPrefillParams {
    /* [query_tokens, heads, nope_dim + rope_dim] */
    const void* query;
    /* [key_tokens, heads, nope_dim] */
    const void* key_nope;
    /* [key_tokens, heads, rope_dim]; key_nope + nope_dim where keys are packed. With
     * key_rope_head_stride 0 all heads share [key_tokens, rope_dim]. */
    const void* key_rope;
    /* [key_tokens, heads, value_dim] */
    const void* value;
    /* [query_tokens, heads, value_dim] */
    void* out;
    /* [heads, query_tokens] f32, or null */
    float* lse;
    /* [requests + 1] int32: where each request's query rows begin, and the end of the last */
    const int32_t* cu_query_lens;
    /* [requests + 1] int32: the same for keys and values */
    const int32_t* cu_key_lens;
    /* workspace_bytes bytes, aligned to 256. The first MLA_PREFILL_COUNTER_BYTES must be zero
     * before the first launch that uses it; every launch leaves them zero. Launches that share a
     * workspace must not overlap. */
    void* workspace;
    size_t workspace_bytes;

    int64_t query_token_stride;
    int64_t query_head_stride;
    int64_t key_nope_token_stride;
    int64_t key_nope_head_stride;
    int64_t key_rope_token_stride;
    int64_t key_rope_head_stride;
    int64_t value_token_stride;
    int64_t value_head_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    int64_t lse_head_stride;

    /* rows of query and out, and of the keys and values */
    int32_t query_tokens;
    int32_t key_tokens;
    /* number of requests, at least 1 */
    int32_t requests;
    /* heads of queries, keys and values */
    int32_t heads;
    /* bounds on the rows of one request: no request may have more */
    int32_t max_query_len;
    int32_t max_key_len;
    /* (128, 64, 128), (192, 64, 256) or (64, 32, 64) */
    int32_t nope_dim;
    int32_t rope_dim;
    int32_t value_dim;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16, of every tensor but the log-sum-exp */
    int32_t dtype;
    /* non-zero: causal, aligned at the bottom right */
    int32_t causal;
    float softmax_scale;
} MlaPrefillParams;

/* Leading bytes of a prefill workspace that must be zero before its first use. */
#define MLA_PREFILL_COUNTER_BYTES 4096

/* Bytes of workspace that mla_prefill_sm90 needs. Reads value_dim, and the current device's
 * properties; the result depends on no number of tokens, requests or heads. */
MlaStatus mla_prefill_sm90_workspace(const MlaPrefillParams* params, size_t* bytes);

/* Enqueues one kernel on `stream`. */
MlaStatus mla_prefill_sm90(const MlaPrefillParams* params, void* stream);

/* Keys of a query tile, up to 128 query rows of one request and head, that one CTA goes through
 * without a stop. */
typedef struct MlaPrefillItem {
    int32_t request;
    int32_t head;
    /* the tile's first query row within its request */
    int32_t query;
    /* KV tiles of 128 keys (of 64 with values of 256), the last one excluded: none in an item
     * that is void */
    int32_t begin;
    int32_t end;
    /* this is split `split` of `splits`; from `splits` on they are void */
    int32_t split;
    int32_t splits;
    /* where its partial result is kept */
    int32_t slot;
} MlaPrefillItem;

/* How mla_prefill_sm90 divides the keys of query tiles: writes the items in the order in which
 * CTAs take them, and their number, and no more of them than `room`. No items: every query tile
 * is one CTA's. The host computes what the device would. Reads heads, requests, query_tokens,
 * key_tokens, max_query_len, max_key_len, causal, value_dim, and, in host memory, cu_query_lens and
 * cu_key_lens. `ctas`, 1..=256: those of the launch, as many as the device has SMs where there is so
 * much work. */
MlaStatus mla_prefill_sm90_items(const MlaPrefillParams* params, int32_t ctas,
                                 MlaPrefillItem* items, int32_t room, int32_t* count);

/* Loads the prefill kernels into the current context, as mla_load_helpers does the helpers. */
MlaStatus mla_load_prefill_sm90(void);

/* Loads the kernel for these dimensions and dtype into the current context, as mla_load_helpers does
 * the helpers. Reads nope_dim, rope_dim, value_dim and dtype. */
MlaStatus mla_load_prefill_sm80(const MlaPrefillParams* params);

/* Bytes of workspace with which mla_prefill_sm80 divides the keys of query tiles that are few. Reads
 * nope_dim, rope_dim, value_dim and dtype, and what the current device has; the result depends on no
 * number of tokens, requests or heads. */
MlaStatus mla_prefill_sm80_workspace(const MlaPrefillParams* params, const MlaDeviceLimits* limits,
                                     size_t* bytes);

/* The same as mla_prefill_sm90 on every GPU since Ampere: one kernel on `stream`. With a workspace of
 * null it divides no keys. It also takes (64, 64, 128) and (256, 0, 256), for which key_rope may be
 * null. */
MlaStatus mla_prefill_sm80(const MlaPrefillParams* params, const MlaDeviceLimits* limits,
                           void* stream);

/*
 * The helpers around attention. They run on every architecture that the library was built for, and
 * on any dimensions and strides: where pointers, strides (in bytes) and widths are multiples of 16
 * bytes (8 elements), every access is 16 bytes wide; elsewhere elements move one by one, which is
 * several times slower. In this part `dtype` is one of MLA_DTYPE_BF16, MLA_DTYPE_F16 and
 * MLA_DTYPE_F32, and rounding is to nearest, ties to even.
 */

/* Which elements of a rotary vector form a pair. */
enum {
    /* 2i and 2i + 1 */
    MLA_ROTARY_INTERLEAVED = 0,
    /* i and i + R/2 */
    MLA_ROTARY_HALVES = 1
};

/*
 * Writes one cache row per token, and rotates what has not been rotated yet:
 *
 *   x'[a] = x[a] * cos[p, i] - x[b] * sin[p, i]      for pair i = (a, b) and p = positions[t]
 *   x'[b] = x[b] * cos[p, i] + x[a] * sin[p, i]
 *
 * in f32, rounded to dtype, as if the rotation had been done in place beforehand.
 */
typedef struct MlaCacheWriteParams {
    /* [tokens, latent_dim] of dtype */
    const void* latent;
    /* [tokens, rope_dim] of dtype: the rotary key; rotated already where positions is null */
    const void* rope;
    /* [tokens] int64: where each row goes; a slot below 0 or past the cache is skipped */
    const int64_t* slots;
    /* [pages, page_size] rows of cache_format */
    void* cache;
    /* [tokens] int64, or null: then nothing is rotated. A position outside the tables gives NaN. */
    const int64_t* positions;
    /* [positions_len, rope_dim / 2] f32 each */
    const float* cos;
    const float* sin;
    /* [tokens, heads, rope_dim] of dtype, or null: queries to rotate, which needs positions */
    const void* query_rope;
    /* [tokens, heads, rope_dim] of dtype: may be query_rope itself with its strides; must not
     * overlap it otherwise */
    void* query_rope_out;

    int64_t latent_token_stride;
    int64_t rope_token_stride;
    /* in bytes */
    int64_t cache_page_stride;
    int64_t cache_slot_stride;
    int64_t table_stride;
    int64_t query_token_stride;
    int64_t query_head_stride;
    int64_t query_out_token_stride;
    int64_t query_out_head_stride;
    int64_t pages;
    /* rows of cos and sin */
    int64_t positions_len;

    int32_t tokens;
    int32_t page_size;
    /* of query_rope */
    int32_t heads;
    /* a multiple of 128 for MLA_CACHE_FP8_DS_MLA */
    int32_t latent_dim;
    /* even where something is rotated */
    int32_t rope_dim;
    int32_t dtype;
    /* MlaCacheFormat */
    int32_t cache_format;
    int32_t rotary_style;
    /* what an e4m3 byte of MLA_CACHE_FP8 is multiplied by, 2^-60 to 2^60; ignored otherwise */
    float cache_scale;
} MlaCacheWriteParams;

/* Enqueues one kernel on `stream`; none where there are no tokens. */
MlaStatus mla_cache_write(const MlaCacheWriteParams* params, void* stream);

/* mla_cache_write and mla_index_keys_sm90, for the caches of one layer: one kernel for rows of 512 + 64
 * values of f16 or bf16 that can be accessed 16 bytes at a time, otherwise two. */
MlaStatus mla_index_write_sm90(const MlaCacheWriteParams* rows, const MlaIndexKeysParams* keys,
                               void* stream);

/*
 * Reads cache rows, dequantised: rows row_starts[i] .. row_starts[i + 1] of the output are the
 * tokens of request i of the block table from token_starts[i] on. A page number outside the cache
 * gives NaN.
 */
typedef struct MlaCacheGatherParams {
    /* [pages, page_size] rows of cache_format */
    const void* cache;
    /* [segments, max_pages] int32 */
    const int32_t* block_table;
    /* [segments] int32 */
    const int32_t* token_starts;
    /* [segments + 1] int32, ascending from 0 to rows */
    const int32_t* row_starts;
    /* [rows, latent_dim] of dtype */
    void* latent;
    /* [rows, rope_dim] of dtype */
    void* rope;

    /* in bytes */
    int64_t cache_page_stride;
    int64_t cache_slot_stride;
    int64_t block_table_stride;
    int64_t latent_row_stride;
    int64_t rope_row_stride;
    int64_t pages;

    int32_t rows;
    int32_t segments;
    int32_t max_pages;
    int32_t page_size;
    int32_t latent_dim;
    int32_t rope_dim;
    int32_t dtype;
    int32_t cache_format;
    /* what an e4m3 byte of MLA_CACHE_FP8 is multiplied by, 2^-60 to 2^60; ignored otherwise */
    float cache_scale;
} MlaCacheGatherParams;

/* Enqueues one kernel on `stream`; none where there are no rows. */
MlaStatus mla_cache_gather(const MlaCacheGatherParams* params, void* stream);

/*
 * Merges a partial result into another over the same queries: with a = lse and b = other_lse per
 * token and head, lse = ln(e^a + e^b) and out = out * e^(a - lse) + other * e^(b - lse). Plus
 * infinity is taken as minus infinity; a part that weighs nothing may hold NaN; two parts that
 * attended to nothing give 0 and minus infinity.
 */
typedef struct MlaMergeParams {
    /* [tokens, heads, width] of dtype, read and written */
    void* out;
    /* [heads, tokens] f32, read and written */
    float* lse;
    /* [tokens, heads, width] of dtype */
    const void* other;
    /* [heads, tokens] f32 */
    const float* other_lse;

    int64_t out_token_stride;
    int64_t out_head_stride;
    int64_t other_token_stride;
    int64_t other_head_stride;
    int64_t lse_head_stride;
    int64_t other_lse_head_stride;

    int32_t tokens;
    int32_t heads;
    int32_t width;
    int32_t dtype;
} MlaMergeParams;

/* Enqueues one kernel on `stream`; none where there is nothing to merge. */
MlaStatus mla_merge(const MlaMergeParams* params, void* stream);

/* Rewrites log-sum-exps as natural ones, heads first: to[h, t] = from[t, h] * unit, or from[h,
 * t] * unit. */
typedef struct MlaLseParams {
    /* [heads, tokens] f32 where heads_first, [tokens, heads] otherwise */
    const float* from;
    /* [heads, tokens] f32 */
    float* to;

    /* from one head to the next where heads_first, from one token to the next otherwise */
    int64_t from_row_stride;
    int64_t to_head_stride;

    int32_t tokens;
    int32_t heads;
    int32_t heads_first;
    /* what one unit is worth in natural logarithms: ln 2 for base 2 */
    float unit;
} MlaLseParams;

/* Enqueues one kernel on `stream`; none where there is nothing to convert. */
MlaStatus mla_lse_natural(const MlaLseParams* params, void* stream);

/* Copies three axes of elements with any strides; a stride of 0 in `from` repeats. */
typedef struct MlaCopyParams {
    /* [shape] elements, or null: then zeros are written */
    const void* from;
    /* [shape] elements, no two at one address, none in `from` */
    void* to;

    int64_t shape[3];
    int64_t from_strides[3];
    int64_t to_strides[3];

    /* 1, 2 or 4 */
    int32_t element_bytes;
} MlaCopyParams;

/* Enqueues one kernel on `stream`; none where there are no elements. */
MlaStatus mla_copy(const MlaCopyParams* params, void* stream);

/* Few tokens times a matrix per head: out[t, h, j] = sum over i of input[t, h, i] * weights[h,
 * i, j], summed in f32 and rounded once. */
typedef struct MlaHeadProductParams {
    /* [tokens, heads, k] of dtype */
    const void* input;
    /* [heads, k, n] of dtype */
    const void* weights;
    /* [tokens, heads, n] of dtype */
    void* out;

    int64_t input_token_stride;
    int64_t input_head_stride;
    int64_t weights_head_stride;
    /* one of these two is 1 */
    int64_t weights_k_stride;
    int64_t weights_n_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;

    int32_t tokens;
    int32_t heads;
    /* multiples of 16 and 64 where weights_n_stride is 1, of 32 and 16 otherwise */
    int32_t k;
    int32_t n;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16 */
    int32_t dtype;
    /* nonzero where no work on the stream that is not yet done writes the weights: then they are
     * read ahead of it */
    int32_t constant_weights;
} MlaHeadProductParams;

/* Enqueues one kernel on `stream`; none where there is nothing to multiply. Pointers are aligned
 * to 16 bytes, and strides other than 1 are multiples of 8. The kernel may start while the one
 * before it in the stream is ending; it waits for that one's end before it reads or writes
 * anything but constant weights. */
MlaStatus mla_head_product(const MlaHeadProductParams* params, void* stream);

/* What a step begins with on the absorbed path: mla_cache_write and mla_head_product of q_nope
 * and W_UK, of which neither writes what the other reads or writes. One kernel where neighbours
 * of the weights lie along n, k is 128, rows have 512 + 64 values of 16 bits, can be accessed 16
 * bytes at a time and are at most 256, and the cache is of their dtype or of e4m3 with one
 * scale; otherwise two. The one kernel may start while the one before it in the stream is
 * ending, as mla_head_product's does. */
MlaStatus mla_absorb(const MlaCacheWriteParams* write, const MlaHeadProductParams* product,
                     void* stream);

/* Loads every helper kernel into the current context, so that no later launch has to: a launch
 * that loads its kernel first takes milliseconds, and may not be possible while a graph is
 * captured. */
MlaStatus mla_load_helpers(void);

#ifdef __cplusplus
}
#endif

#endif
