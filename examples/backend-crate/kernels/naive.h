/* Absorbed decode in bf16, L = 512 and R = 64: one block per query token and head. */
#ifndef NAIVE_H
#define NAIVE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct NaiveParams {
    const void *q_latent;        /* [tokens, heads, 512] */
    const void *q_rope;          /* [tokens, heads, 64] */
    const void *cache;           /* pages of rows of 512 + 64 */
    const int32_t *block_table;  /* [requests, max_pages] */
    const int32_t *kv_lens;      /* [requests] */
    const int32_t *query_starts; /* [requests + 1] */
    void *out;                   /* [tokens, heads, 512] */
    float *lse;                  /* [heads, tokens], natural; may be null */
    /* In elements. */
    int64_t q_latent_token_stride, q_latent_head_stride;
    int64_t q_rope_token_stride, q_rope_head_stride;
    int64_t page_stride, row_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_head_stride;
    int32_t requests, tokens, heads, page_size, max_pages;
    float softmax_scale;
} NaiveParams;

/* Enqueues on `stream` (a CUstream) of the current context. Returns a cudaError_t: 0 where it was launched. */
int32_t naive_decode(const NaiveParams *params, void *stream);

#ifdef __cplusplus
}
#endif

#endif
