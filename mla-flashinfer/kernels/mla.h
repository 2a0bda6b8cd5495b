/* Absorbed decode over a paged cache, whose rows are of 512 + 64. See flashinfer.h. */
#ifndef MLA_FLASHINFER_MLA_H
#define MLA_FLASHINFER_MLA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A plan has this many lists of int32, each of `capacity` entries, one behind the other. */
#define FI_MLA_LISTS 14

/* Bytes of host memory that fi_mla_plan works in, for a GPU with `sms` SMs. */
int64_t fi_mla_staging_bytes(int32_t sms);

/* Bytes of device memory for partial results. */
int64_t fi_mla_workspace_bytes(int32_t sms);

typedef struct FiMlaPlan {
    const int32_t* query_starts; /* [requests + 1], on the host, as the next two */
    const int32_t* table_starts; /* [requests]: where each one's row of the block table begins */
    const int32_t* seq_lens;     /* [requests] */
    void* staging;               /* staging_bytes on the host, 16-byte aligned */
    int32_t* lists;              /* [FI_MLA_LISTS, capacity] on the host: what is written */
    int64_t staging_bytes;
    int32_t requests, heads, capacity;
    int32_t grid_x, grid_y; /* written: the CTAs of the launch */
} FiMlaPlan;

/* Divides the work of a batch of at least one request. The lists are then copied to the device. */
int32_t fi_mla_plan(FiMlaPlan* plan);

typedef struct FiMlaRun {
    const void* query_latent;   /* [tokens, heads, 512] */
    const void* query_rope;     /* [tokens, heads, 64] */
    const void* cache;          /* pages of rows that begin with 512 latent values */
    const void* cache_rope;     /* pages of rotary keys of 64, of a tensor or behind the latents */
    const int32_t* block_table; /* [requests, max_pages] */
    const int32_t* lists;       /* [FI_MLA_LISTS, capacity] of the plan, on the device */
    void* workspace;            /* fi_mla_workspace_bytes */
    void* out;                  /* [tokens, heads, 512] */
    float* lse;                 /* [tokens, heads] without gaps, natural; may be null */
    int64_t workspace_bytes;
    uint32_t query_latent_token_stride, query_latent_head_stride;
    uint32_t query_rope_token_stride, query_rope_head_stride;
    uint32_t page_stride, row_stride;
    uint32_t rope_page_stride, rope_row_stride;
    uint32_t out_token_stride, out_head_stride;
    int32_t heads, page_size, capacity, grid_x, grid_y, dtype;
    float softmax_scale;
} FiMlaRun;

int32_t fi_mla_fa2(const FiMlaRun* run, void* stream);
int32_t fi_mla_fa3(const FiMlaRun* run, void* stream);

#ifdef __cplusplus
}
#endif

#endif
