/*
 * The C interface of the kernels.
 *
 * One plain-old-data parameter struct and one function per launch. The rules are the same for all of them:
 *
 *   - Device memory, workspace and stream belong to the caller. No function allocates device memory, synchronises,
 *     reads device memory on the host, prints, or throws; every launch can be captured in a CUDA graph.
 *   - `stream` is a cudaStream_t (CUstream) of the current device. Null means the legacy default stream, and is what
 *     the caller asked for: no function chooses it by itself.
 *   - Strides are in elements of the tensor they belong to. The innermost dimension is always contiguous.
 *   - A refused argument is reported before anything is launched: `field` names it, `given` is its value and
 *     `accepted` says what would have been taken. Both texts are static.
 *   - Log-sum-exp is natural log, f32, [heads, tokens]; minus infinity where a row attends to nothing, and then the
 *     output row is zero.
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
    const char *field;
    /* The value that was given (for a pointer, its address). */
    int64_t given;
    /* What would have been accepted, as a sentence fragment; null when code is MLA_OK. */
    const char *accepted;
} MlaStatus;

enum {
    MLA_DTYPE_BF16 = 0,
    MLA_DTYPE_F16 = 1,
    /* e4m3 bytes with one scale per tensor: value = byte * scale. */
    MLA_DTYPE_E4M3 = 2
};

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
    const void *q_latent;
    /* [tokens, heads, 64] of q_dtype; q_latent + 512 when both parts lie in one row of 576 */
    const void *q_rope;
    /* [pages, page_size, 576] of cache_dtype: 512 latent values, then 64 rotary ones */
    const void *cache;
    /* [requests, max_pages] int32; entries past a request's last page are never read */
    const int32_t *block_table;
    /* [requests] int32: cached tokens of each request, its query tokens included; 0 is allowed */
    const int32_t *kv_lens;
    /* [requests + 1] int32, or null: then every request has query_len tokens */
    const int32_t *cu_q_lens;
    /* [tokens, heads, 512] of q_dtype */
    void *out;
    /* [heads, tokens] f32, or null */
    float *lse;
    /* workspace_bytes bytes, aligned to 256. The first MLA_DECODE_COUNTER_BYTES must be zero before the first launch
     * that uses it; every launch leaves them zero. Launches that share a workspace must not overlap. */
    void *workspace;
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
    /* the most query tokens any request has, 1..=8; without cu_q_lens what each of them has */
    int32_t query_len;
    /* tokens per page: a multiple of 16 */
    int32_t page_size;
    /* columns of block_table */
    int32_t max_pages;
    /* must be 512 and 64 */
    int32_t latent_dim;
    int32_t rope_dim;
    /* MLA_DTYPE_BF16 or MLA_DTYPE_F16 */
    int32_t q_dtype;
    /* q_dtype, or MLA_DTYPE_E4M3 */
    int32_t cache_dtype;
    /* non-zero: causal among a request's query tokens */
    int32_t causal;
    float softmax_scale;
    /* what an e4m3 byte is multiplied by; ignored otherwise */
    float cache_scale;
} MlaDecodeParams;

/* Leading bytes of a decode workspace that must be zero before its first use. */
#define MLA_DECODE_COUNTER_BYTES 4096

/* Bytes of workspace that mla_decode_sm90 needs. Reads heads and query_len, and the current device's properties;
 * the result does not depend on the number of requests nor on any length. */
MlaStatus mla_decode_sm90_workspace(const MlaDecodeParams *params, size_t *bytes);

/* Enqueues one kernel on `stream`. */
MlaStatus mla_decode_sm90(const MlaDecodeParams *params, void *stream);

#ifdef __cplusplus
}
#endif

#endif
