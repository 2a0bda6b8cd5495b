/* What stands between FlashInfer's outputs and ours. See flashinfer.h. */
#ifndef MLA_FLASHINFER_FINISH_H
#define MLA_FLASHINFER_FINISH_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* to[head * head_stride + token] = from[token * heads + head] * factor. */
int32_t fi_transpose_lse(const float* from, float* to, int64_t head_stride, int32_t tokens,
                         int32_t heads, float factor, void* stream);

typedef struct FiUnseen {
    const int32_t* query_starts; /* [requests + 1], on the device, as the next */
    const int32_t* key_starts;   /* [requests + 1] */
    void* out;                   /* [query_tokens, heads, width] of 2 bytes */
    float* lse;                  /* [heads, query_tokens]; may be null */
    int64_t out_token_stride, out_head_stride, lse_head_stride;
    int32_t requests, query_tokens, heads, width, causal;
} FiUnseen;

/* Writes 0 and -inf where a query token sees no key. */
int32_t fi_clear_unseen(const FiUnseen* unseen, void* stream);

#ifdef __cplusplus
}
#endif

#endif
