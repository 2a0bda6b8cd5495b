/*
 * The C interface that all families of kernels share. The helpers' launch functions are declared
 * here; those of a family are declared in its folder (sm90/mla_sm90.h).
 *
 * Each launch has one function and one plain-old-data struct of parameters. The rules are the same
 * for all launches:
 *
 *   - Device memory, workspace and stream belong to the caller. No function allocates device
 *     memory, synchronises, reads device memory on the host, prints, or throws; every launch can be
 *     captured in a CUDA graph.
 *   - `stream` is a cudaStream_t (CUstream) of the current device. Null means the legacy default
 *     stream; it is used only if the caller passes it.
 *   - Strides are in elements of the tensor they belong to. The innermost dimension is always
 *     contiguous.
 *   - A refused argument is reported before anything is launched: `field` names it, `given` is its
 *     value and `accepted` describes the values that are accepted. Both texts are static.
 *   - Log-sum-exp is natural log, f32, [heads, tokens]. If a row attends to nothing, it is minus
 *     infinity, and the output row is zero.
 *   - Arrays in device memory are trusted, since the host cannot read them. Unless a struct says
 *     otherwise, the caller has to keep the contract of a call of mla_runtime::backend. Starts
 *     (cu_q_lens, query_starts, cu_query_lens, cu_key_lens) begin at 0, never fall, and end at the
 *     rows of their tensors; no two neighbours differ by more than the struct's bound. Lengths
 *     (kv_lens, seq_lens) are 0 or above and at most max_pages * page_size. Entries of a block
 *     table that a length uses are 0 or above and below `pages`; others may hold anything, and so
 *     may lists of slots and their counts.
 */
#ifndef MLA_H
#define MLA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum MlaStatusCode {
    MLA_OK = 0,
    /* An argument was refused; nothing was launched. */
    MLA_BAD_ARGUMENT = 1,
    /* The CUDA runtime or driver refused; `cuda_error` holds its code. */
    MLA_CUDA_ERROR = 2,
    /* This device cannot run the kernel: `field` says what is lacking. */
    MLA_UNSUPPORTED_DEVICE = 3
} MlaStatusCode;

typedef struct MlaStatus {
    /* MlaStatusCode */
    int32_t code;
    /* A cudaError_t, or 0. */
    int32_t cuda_error;
    /* Name of the offending parameter or CUDA call; null when code is MLA_OK. */
    const char* field;
    /* The value that was given (for a pointer, its address). */
    int64_t given;
    /* The accepted values, as a sentence fragment; null when code is MLA_OK. */
    const char* accepted;
} MlaStatus;

typedef enum MlaDtype { MLA_DTYPE_BF16 = 0, MLA_DTYPE_F16 = 1, MLA_DTYPE_F32 = 3 } MlaDtype;

/*
 * The layout of one token's row in the cache: the latent (L values), then the rotary key (R).
 *
 * If `cache_rope` is null, rotary keys lie behind the latents, and the strides of cache_rope are
 * not read. Otherwise, cache_rope and its strides say where rotary keys lie. They may have a tensor
 * of their own; the rows of `cache` are then of latents alone. With MLA_CACHE_FP8_DS_MLA and
 * MLA_CACHE_FP8_PER_TOKEN, both always lie in one row.
 */
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
    MLA_CACHE_FP8_DS_MLA = 4,
    /* L bytes of e4m3, R values of bf16, then the latent's f32 scale at the next multiple of 4
     * bytes. The scale may be any number; it is written as the largest magnitude divided by 448.
     * Rows begin at multiples of 16 bytes, and kernels may read the 16 bytes in which a row ends. A
     * row of (512, 64) takes 656 bytes, and the last 12 of them mean nothing. */
    MLA_CACHE_FP8_PER_TOKEN = 5
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
    /* null, or [pages, page_size] rotary keys of 64 values of cache_format; points to the first
     * value of slot 0 */
    const void* cache_rope;
    /* [requests, max_pages] int32; entries past a request's last page may hold anything */
    const int32_t* block_table;
    /* [requests] int32: number of cached tokens of each request, including its query tokens; from 0
     * to max_pages * page_size */
    const int32_t* kv_lens;
    /* [requests + 1] int32, or null: then every request has query_len tokens */
    const int32_t* cu_q_lens;
    /* [tokens, heads, 512] of q_dtype */
    void* out;
    /* [heads, tokens] f32, or null */
    float* lse;
    /* workspace_bytes bytes, aligned to 256. The family's header says how many of the first bytes
     * must be zero before the first launch that uses the workspace; every launch leaves them zero.
     * Launches that share a workspace must not overlap. */
    void* workspace;
    size_t workspace_bytes;

    int64_t q_latent_token_stride;
    int64_t q_latent_head_stride;
    int64_t q_rope_token_stride;
    int64_t q_rope_head_stride;
    int64_t cache_page_stride;
    int64_t cache_slot_stride;
    int64_t cache_rope_page_stride;
    int64_t cache_rope_slot_stride;
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
    /* maximum query tokens of a request, 1..=16; without cu_q_lens, those of each request */
    int32_t query_len;
    /* tokens per page: a multiple of 16 */
    int32_t page_size;
    /* columns of block_table; the limits are given at mla_decode_sm90 and mla_decode_sm80 */
    int32_t max_pages;
    /* 512 and 64, or those of another row that the family's header lists */
    int32_t latent_dim;
    int32_t rope_dim;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16 */
    int32_t q_dtype;
    /* MlaCacheFormat: that of q_dtype's values, or MLA_CACHE_FP8 */
    int32_t cache_format;
    /* non-zero: causal among a request's query tokens */
    int32_t causal;
    float softmax_scale;
    /* scale of MLA_CACHE_FP8: factor of a byte's value, 2^-60 to 2^60; ignored otherwise */
    float cache_scale;
    /* number of cycles that a CTA waits for the others that share its query tile. They then fall
     * back to one CTA that combines everything. 0 means the family's default, which its header
     * gives. With a negative number, no CTA waits. The result is the same, bit for bit. */
    int32_t split_patience;
    /* non-zero: the bits of a request follow its own tokens, lengths and rows, and query_len, which
     * is then the maximum of all launches. They do not follow the other requests. The workspace is
     * larger. mla_decode_sm90 refuses it. */
    int32_t batch_invariant;
} MlaDecodeParams;

/* A cache, and for each query token a list of the rows that it attends to in this cache. */
typedef struct MlaListedCache {
    /* [pages, page_size] rows of the first cache's format and scale; each row begins at a multiple
     * of 16 bytes */
    const void* cache;
    /* null, or [pages, page_size] rotary keys, as for the first cache */
    const void* cache_rope;
    /* [tokens, width] int32: slots */
    const int32_t* lists;
    /* [tokens] int32, or null, as for the first cache */
    const int32_t* counts;
    /* in bytes: multiples of 16 */
    int64_t cache_page_stride;
    int64_t cache_slot_stride;
    int64_t cache_rope_page_stride;
    int64_t cache_rope_slot_stride;
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
 * An entry of a list is a slot, page * page_size + index in the page. An entry that is no slot of
 * the cache (-1, or any other number below 0 or past the end) is skipped, wherever in the list it
 * is, and no memory is read for it. A slot that is listed twice counts twice. Rows that no list
 * names are not read. There is no causality except by the lists. Time is proportional to the number
 * of valid entries.
 *
 * Two caches take part in one softmax, such as a window of uncompressed rows beside selected ones.
 * If the width of the second is 0 it is absent, and none of its other fields is read.
 */
typedef struct MlaSparseParams {
    /* [tokens, heads, 512] of q_dtype */
    const void* q_latent;
    /* [tokens, heads, 64] of q_dtype; q_latent + 512 when both parts lie in one row of 576 */
    const void* q_rope;
    /* [pages, page_size] rows of cache_format; each row begins at a multiple of 16 bytes */
    const void* cache;
    /* null, or [pages, page_size] rotary keys of 64 values; each key begins at a multiple of 16
     * bytes */
    const void* cache_rope;
    /* [tokens, width] int32: slots; not read if width is 0 */
    const int32_t* lists;
    /* [tokens] int32: number of leading entries of each list that count, or null if all count.
     * Numbers below 0 mean 0, and numbers above width mean width. */
    const int32_t* counts;
    MlaListedCache second;
    /* Used if dense_within is not 0. block_table, [requests, any] int32: the pages of each request.
     * seq_lens, [requests] int32: number of cached tokens of each request, including its query
     * tokens. query_starts, [requests + 1] int32: first query token of each request, and the end of
     * the last. */
    const int32_t* block_table;
    const int32_t* seq_lens;
    const int32_t* query_starts;
    /* [heads] f32, or null: a score for each head, which takes part in the softmax without a value.
     * The log-sum-exp leaves the score out. */
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
    int64_t cache_rope_page_stride;
    int64_t cache_rope_slot_stride;
    int64_t list_stride;
    int64_t block_table_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    int64_t lse_head_stride;
    /* number of pages behind `cache` */
    int64_t pages;

    /* Requests with at most this number of tokens are dense: each query token attends to all tokens
     * up to itself. The first cache's slots then come from the block table, and lists and counts
     * are not read. At most `width`; 0 means that no request is dense. */
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
    /* 512 and 64, or those of another row that the family's header lists */
    int32_t latent_dim;
    int32_t rope_dim;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16 */
    int32_t q_dtype;
    /* MlaCacheFormat: that of q_dtype's values, MLA_CACHE_FP8, or MLA_CACHE_FP8_DS_MLA */
    int32_t cache_format;
    float softmax_scale;
    /* scale of MLA_CACHE_FP8: factor of a byte's value, 2^-60 to 2^60; ignored otherwise */
    float cache_scale;
} MlaSparseParams;

/*
 * Expanded MLA prefill: each head's query rows attend to keys and values of their own.
 *
 *   score[i, j] = softmax_scale * (query[i] . [key_nope[j], key_rope[j]])
 *   out[i]      = sum over j of softmax(score)[i, j] * value[j]
 *
 * Requests are packed one after another. With `causal`, query row i of n sees the first k - n + i +
 * 1 of a request's k keys, or none if that number is not positive. Without `causal`, every row sees
 * all keys. No memory behind a request's last row is used.
 */
typedef struct MlaPrefillParams {
    /* [query_tokens, heads, nope_dim + rope_dim] */
    const void* query;
    /* [key_tokens, heads, nope_dim] */
    const void* key_nope;
    /* [key_tokens, heads, rope_dim]; key_nope + nope_dim if keys are packed. With
     * key_rope_head_stride 0 all heads share [key_tokens, rope_dim]. */
    const void* key_rope;
    /* [key_tokens, heads, value_dim] */
    const void* value;
    /* [query_tokens, heads, value_dim] */
    void* out;
    /* [heads, query_tokens] f32, or null */
    float* lse;
    /* [requests + 1] int32: first query row of each request, and the end of the last */
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

    /* number of rows of query and out, and of the keys and values */
    int32_t query_tokens;
    int32_t key_tokens;
    /* number of requests, at least 1 */
    int32_t requests;
    /* heads of queries, keys and values */
    int32_t heads;
    /* bounds on the rows of one request: no request may have more */
    int32_t max_query_len;
    int32_t max_key_len;
    /* (128, 64, 128), (192, 64, 256), (192, 64, 128), (64, 64, 128), (256, 0, 256) or
     * (64, 32, 64) */
    int32_t nope_dim;
    int32_t rope_dim;
    int32_t value_dim;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16, of every tensor but the log-sum-exp */
    int32_t dtype;
    /* non-zero: causal, aligned at the bottom right */
    int32_t causal;
    float softmax_scale;
    /* non-zero: the bits of a request's results do not depend on other requests, nor on the bounds
     * of lengths */
    int32_t batch_invariant;
} MlaPrefillParams;

/* Leading bytes of a prefill workspace that must be zero before its first use. */
#define MLA_PREFILL_COUNTER_BYTES 4096

/*
 * The helpers around attention. They run on every architecture that the library was built for, and
 * on any dimensions and strides. If pointers, strides (in bytes) and widths are multiples of 16
 * bytes (8 elements), every access is 16 bytes wide. Otherwise elements move one by one, which is
 * several times slower. Their `dtype` is MLA_DTYPE_BF16, MLA_DTYPE_F16 or MLA_DTYPE_F32. They round
 * to nearest, ties to even.
 */

/* The pairs of a rotary vector, for i below R/2. */
typedef enum MlaRotaryStyle {
    /* 2i and 2i + 1 */
    MLA_ROTARY_INTERLEAVED = 0,
    /* i and i + R/2 */
    MLA_ROTARY_HALVES = 1
} MlaRotaryStyle;

/*
 * Writes one cache row per token, and rotates what has not been rotated yet:
 *
 *   x'[a] = x[a] * cos[p, i] - x[b] * sin[p, i]      for pair i = (a, b) and p = positions[t]
 *   x'[b] = x[b] * cos[p, i] + x[a] * sin[p, i]
 *
 * The rotation is computed in f32 and rounded to dtype, as if it had been done in place beforehand.
 */
typedef struct MlaCacheWriteParams {
    /* [tokens, latent_dim] of dtype */
    const void* latent;
    /* [tokens, rope_dim] of dtype: the rotary key; rotated already if positions is null */
    const void* rope;
    /* [tokens] int64: slot of each row; a row whose slot is below 0 or past the cache is skipped */
    const int64_t* slots;
    /* [pages, page_size] rows of cache_format */
    void* cache;
    /* null, or [pages, page_size] rotary keys of cache_format */
    void* cache_rope;
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
    int64_t cache_rope_page_stride;
    int64_t cache_rope_slot_stride;
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
    /* a multiple of 128 for MLA_CACHE_FP8_DS_MLA, and of 4 for MLA_CACHE_FP8_PER_TOKEN */
    int32_t latent_dim;
    /* even if something is rotated */
    int32_t rope_dim;
    int32_t dtype;
    /* MlaCacheFormat */
    int32_t cache_format;
    int32_t rotary_style;
    /* scale of MLA_CACHE_FP8: factor of a byte's value, 2^-60 to 2^60; ignored otherwise */
    float cache_scale;
} MlaCacheWriteParams;

/* Enqueues one kernel on `stream`; none if there are no tokens. */
MlaStatus mla_cache_write(const MlaCacheWriteParams* params, void* stream);

/*
 * Reads cache rows, dequantised. Rows row_starts[i] .. row_starts[i + 1] of the output are tokens
 * of request i of the block table, from token_starts[i] on. A page number outside the cache gives
 * NaN.
 */
typedef struct MlaCacheGatherParams {
    /* [pages, page_size] rows of cache_format */
    const void* cache;
    /* null, or [pages, page_size] rotary keys of cache_format */
    const void* cache_rope;
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
    int64_t cache_rope_page_stride;
    int64_t cache_rope_slot_stride;
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
    /* scale of MLA_CACHE_FP8: factor of a byte's value, 2^-60 to 2^60; ignored otherwise */
    float cache_scale;
} MlaCacheGatherParams;

/* Enqueues one kernel on `stream`; none if there are no rows. */
MlaStatus mla_cache_gather(const MlaCacheGatherParams* params, void* stream);

/*
 * Computes keys and values of all heads from cache rows, row by row:
 *
 *     out[row, column] = sum over i of latent[row, i] * weights[column, i]
 *
 * The rows are those of mla_cache_gather. Sums are accumulated in f32 and rounded once. The rows'
 * rotary parts are gathered, too. Runs on devices of compute capability 9.0, if the helpers are
 * compiled for sm_90a.
 */
typedef struct MlaCacheExpandParams {
    /* dtype is f16 or bf16, and cache_format is that of dtype. latent_dim is 512, rope_dim is 64,
     * page_size is a multiple of 64, and there are at most 32 segments. cache, rope and their
     * strides are aligned to 16 bytes. `latent` is not used. If row_starts is null, the rows are
     * the tensor `cache` [rows, 512] at cache_slot_stride; fields of pages, tables and rotary parts
     * are then not used, except rope_dim. */
    MlaCacheGatherParams rows;
    /* [columns, 512] of dtype, aligned to 16 bytes */
    const void* weights;
    /* [rows, columns] of dtype, aligned to 16 bytes */
    void* out;

    /* in elements, a multiple of 8 */
    int64_t weights_stride;
    int64_t out_row_stride;

    /* a multiple of 256 */
    int32_t columns;
} MlaCacheExpandParams;

/* Enqueues one kernel on `stream`; none if there are no rows. */
MlaStatus mla_cache_expand(const MlaCacheExpandParams* params, void* stream);

/*
 * Merges a partial result into another over the same queries: with a = lse and b = other_lse per
 * token and head, lse = ln(e^a + e^b) and out = out * e^(a - lse) + other * e^(b - lse). Plus
 * infinity is taken as minus infinity. A result of weight 0 may hold NaN. Two results that attended
 * to nothing give 0 and minus infinity.
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

/* Enqueues one kernel on `stream`; none if there is nothing to merge. */
MlaStatus mla_merge(const MlaMergeParams* params, void* stream);

/* Multiplies outputs in f32, rounded once: by 1 / (1 + e^(sink - lse)) of each head and token, if
 * there are sinks, and by 1 / (1 + e^-gate), if there is a gate. An output whose log-sum-exp is
 * minus infinity is not changed by its sink.
 */
typedef struct MlaOutputsParams {
    /* [tokens, heads, width] of dtype, read and written */
    void* out;
    /* [heads] f32, or null */
    const float* sinks;
    /* [heads, tokens] f32; not read without sinks */
    const float* lse;
    /* [tokens, heads, gate_width] of dtype, apart from out, or null */
    const void* gate;

    int64_t out_token_stride;
    int64_t out_head_stride;
    int64_t gate_token_stride;
    int64_t gate_head_stride;
    int64_t lse_head_stride;

    int32_t tokens;
    int32_t heads;
    int32_t width;
    /* 1 or width; not read without a gate */
    int32_t gate_width;
    int32_t dtype;
} MlaOutputsParams;

/* Enqueues one kernel on `stream`; none if there is nothing to multiply. */
MlaStatus mla_outputs(const MlaOutputsParams* params, void* stream);

/* Converts log-sum-exps to natural ones, heads first: to[h, t] = from[t, h] * unit, or from[h,
 * t] * unit. */
typedef struct MlaLseParams {
    /* [heads, tokens] f32 if heads_first, [tokens, heads] otherwise */
    const float* from;
    /* [heads, tokens] f32 */
    float* to;

    /* from one head to the next if heads_first, from one token to the next otherwise */
    int64_t from_row_stride;
    int64_t to_head_stride;

    int32_t tokens;
    int32_t heads;
    int32_t heads_first;
    /* natural logarithm of the base: ln 2 for base 2 */
    float unit;
} MlaLseParams;

/* Enqueues one kernel on `stream`; none if there is nothing to convert. */
MlaStatus mla_lse_natural(const MlaLseParams* params, void* stream);

/* Copies three axes of elements with any strides; a stride of 0 in `from` repeats. */
typedef struct MlaCopyParams {
    /* [shape] elements, or null: then zeros are written */
    const void* from;
    /* [shape] elements; no two have the same address, and none is an element of `from` */
    void* to;

    int64_t shape[3];
    int64_t from_strides[3];
    int64_t to_strides[3];

    /* 1, 2 or 4 */
    int32_t element_bytes;
} MlaCopyParams;

/* Enqueues one kernel on `stream`; none if there are no elements. */
MlaStatus mla_copy(const MlaCopyParams* params, void* stream);

/* Copies rows of [heads, width] elements to the rows that an index names, with any strides. */
typedef struct MlaCopyRowsParams {
    /* [rows, heads, width] elements */
    const void* from;
    /* [rows] int64: the row of `to` for each row of `from`. Rows below 0 or past the last one are
     * skipped, and no two are the same. */
    const int64_t* places;
    /* [to_rows, heads, width] elements; no two have the same address, and none is an element of
     * `from` */
    void* to;

    int64_t rows;
    int64_t to_rows;
    int64_t heads;
    int64_t width;
    /* of rows, heads and columns */
    int64_t from_strides[3];
    int64_t to_strides[3];

    /* 1, 2 or 4 */
    int32_t element_bytes;
} MlaCopyRowsParams;

/* Enqueues one kernel on `stream`; none if there are no elements. */
MlaStatus mla_copy_rows(const MlaCopyRowsParams* params, void* stream);

/* Dequantises a matrix in block fp8: out[i, j] = codes[i, j] * scales[(first_row + i) / 128, j /
 * 128] in f32, rounded once. */
typedef struct MlaDequantizeParams {
    /* [rows, columns] e4m3 */
    const void* codes;
    /* [ceil((first_row + rows) / 128), ceil(columns / 128)] f32 */
    const float* scales;
    /* [rows, columns] of dtype */
    void* out;

    int64_t out_row_stride;
    int64_t rows;
    int64_t columns;

    /* 0..=127 */
    int32_t first_row;
    /* MLA_DTYPE_BF16, MLA_DTYPE_F16 or MLA_DTYPE_F32 */
    int32_t dtype;
} MlaDequantizeParams;

/* Enqueues one kernel on `stream`; none if there are no elements. */
MlaStatus mla_dequantize(const MlaDequantizeParams* params, void* stream);

/* GEMM of few tokens with a matrix per head: out[t, h, j] = sum over i of input[t, h, i] *
 * weights[h, i, j], summed in f32 and rounded once. */
typedef struct MlaHeadGemmParams {
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
    /* multiples of 16 and 64 if weights_n_stride is 1, of 32 and 16 otherwise */
    int32_t k;
    int32_t n;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16 */
    int32_t dtype;
    /* nonzero if no unfinished work on the stream writes the weights: they are then read before
     * that work ends */
    int32_t constant_weights;
    /* nonzero if no unfinished work on the stream writes `input` or accesses `out`: the kernel may
     * then do all of its work while the previous one is running, and ends after it */
    int32_t ready;
} MlaHeadGemmParams;

/* Enqueues one kernel on `stream`; none if there is nothing to multiply. Pointers are aligned to 16
 * bytes, and strides other than 1 are multiples of 8. The kernel may start while the previous one
 * in the stream is ending. It waits for that end before it reads or writes anything but constant
 * weights. */
MlaStatus mla_head_gemm(const MlaHeadGemmParams* params, void* stream);

/* The start of a step on the absorbed path: mla_cache_write, and mla_head_gemm of q_nope and W_UK.
 * Neither of them writes data that the other reads or writes. Enqueues one kernel if the weights
 * are contiguous along n, k is 128, there are at most 256 rows of 512 + 64 values of 16 bits,
 * accesses can be 16 bytes wide, and the cache has the rows' dtype or e4m3 with one scale.
 * Otherwise it enqueues two. The one kernel may start while the previous one in the stream is
 * ending, like that of mla_head_gemm. */
MlaStatus mla_absorb(const MlaCacheWriteParams* write, const MlaHeadGemmParams* product,
                     void* stream);

/* Enqueues an empty kernel that begins when all earlier work on the stream has ended, and lets
 * later work begin only when it has ended itself. It belongs before and after kernels that do not
 * keep the contract of programmatic dependent launch: a kernel that may start early waits
 * (griddepcontrol.wait) before it first reads or writes memory, and does not end before that wait
 * is over. */
MlaStatus mla_fence(void* stream);

/* Loads every helper kernel into the current context, so that no later launch has to. A launch that
 * loads its kernel first takes milliseconds, and may not be possible while a graph is captured. */
MlaStatus mla_load_helpers(void);

#ifdef __cplusplus
}
#endif

#endif
