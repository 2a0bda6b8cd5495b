/* cuDNN's attention over ragged batches by a C interface, through its frontend and the library
 * that the machine has.
 *
 * Every function returns 0, or another number that mc_last_error() tells in words. Strides count
 * elements. */
#ifndef MLA_CUDNN_SHIM_H
#define MLA_CUDNN_SHIM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What went wrong last on this thread: valid until its next call. Never null. */
const char* mc_last_error(void);

/* Opens the library by its path or, if it is null, by its name; a second call keeps what the first
 * opened. Its version is 10000 * major + 100 * minor + patch. */
int32_t mc_open(const char* library, int32_t* version);

/* A handle for the current device, of one thread at a time. */
int32_t mc_handle_new(void** handle);
void mc_handle_free(void* handle);

/* What a plan is built for. */
typedef struct McKey {
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
    int64_t value_token_stride, value_head_stride, out_token_stride, out_head_stride;
    int64_t lse_head_stride; /* of [heads, tokens]; 0: no log-sum-exp */
    int32_t requests;
    int32_t max_query_len, max_key_len;
    int32_t heads, key_dim, value_dim;
    int32_t dtype;  /* 0 is f16, 1 is bf16 */
    int32_t causal; /* bottom-right aligned */
    /* Every request has exactly max_query_len query tokens and max_key_len keys, one request behind
     * the other: the lists of a run are not read. */
    int32_t equal;
    float softmax_scale;
} McKey;

int32_t mc_plan_new(void* handle, const McKey* key, void** plan, int64_t* workspace_bytes);
void mc_plan_free(void* plan);

typedef struct McRun {
    const void *query, *key, *value;
    void* out;
    float* lse;                /* null if the plan has none */
    const int32_t* query_lens; /* [requests], on the device, as all that follow */
    const int32_t* key_lens;   /* [requests] */
    /* [requests + 1]: where each request begins, in elements of the tensor, and the last's end. */
    const int32_t *query_offsets, *key_offsets, *value_offsets, *out_offsets;
    const int32_t* lse_offsets;
    void* workspace;
} McRun;

int32_t mc_run(void* handle, void* plan, const McRun* run, void* stream);

#ifdef __cplusplus
}
#endif

#endif
