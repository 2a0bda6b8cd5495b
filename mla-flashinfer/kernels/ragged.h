/* Expanded prefill over ragged batches, keys of 192 and values of 128. See flashinfer.h. */
#ifndef MLA_FLASHINFER_RAGGED_H
#define MLA_FLASHINFER_RAGGED_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* fa: 2 or 3, the version of FlashInfer's kernel; or this, for CUTLASS's. */
#define FI_CUTLASS 10

/* The query tokens of a tile of CUTLASS's kernel. */
#define FI_CUTLASS_QUERY_TILE 256

typedef struct FiRaggedSizes {
    int64_t lists;     /* bytes of a plan's lists, on the host and on the device */
    int64_t workspace; /* bytes of device memory for partial results */
} FiRaggedSizes;

/* The maximum sizes of a plan of these numbers of requests and query tokens. */
int32_t fi_ragged_sizes(int32_t fa, int32_t requests, int32_t tokens, int32_t heads, int32_t sms,
                        FiRaggedSizes* sizes);

typedef struct FiRaggedPlan {
    const int32_t* query_starts; /* [requests + 1], on the host, as the next two */
    const int32_t* key_starts;   /* [requests + 1] */
    const int32_t* key_lens;     /* [requests] */
    void* staging;               /* as many bytes as the lists, on the host, 16-byte aligned */
    void* lists;                 /* on the device */
    int64_t lists_bytes, workspace_bytes;
    int32_t fa, requests, heads, causal;
    int64_t numbers[15]; /* written: what FlashInfer calls the plan's info */
} FiRaggedPlan;

/* Divides the work of a batch of at least one request and copies the lists to the device. */
int32_t fi_ragged_plan(FiRaggedPlan* plan, void* stream);

typedef struct FiRaggedRun {
    const void* query;           /* [query_tokens, heads, 192] */
    const void* key;             /* [key_tokens, heads, 192] */
    const void* value;           /* [key_tokens, heads, 128] */
    const int32_t* query_starts; /* [requests + 1], on the device, as the next */
    const int32_t* key_starts;   /* [requests + 1] */
    const int64_t* numbers;      /* of the plan, on the host */
    const void* lists;           /* of the plan, on the device */
    void* workspace;
    void* out;  /* [query_tokens, heads, 128]; without gaps, but for fa3 */
    float* lse; /* [query_tokens, heads] without gaps, base 2; may be null */
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
    int64_t value_token_stride, value_head_stride, out_token_stride, out_head_stride;
    int32_t query_tokens, key_tokens, heads, causal, dtype;
    float softmax_scale;
} FiRaggedRun;

int32_t fi_ragged_fa2(const FiRaggedRun* run, void* stream);
int32_t fi_ragged_fa3(const FiRaggedRun* run, void* stream);
int32_t fi_ragged_cutlass(const FiRaggedRun* run, void* stream);

#ifdef __cplusplus
}
#endif

#endif
