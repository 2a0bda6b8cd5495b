/* FlashInfer's attention kernels by a C interface: plain structs of addresses, extents and strides.
 *
 * Every function returns 0, a cudaError_t above 0, or -1; fi_last_error() tells the last in words.
 * Strides count elements. A launch enqueues on `stream` (a CUstream) of the current context,
 * allocates nothing and waits for nothing. Plans are made on the host and read nothing of the
 * device but its number of SMs. */
#ifndef MLA_FLASHINFER_H
#define MLA_FLASHINFER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What went wrong last on this thread: valid until its next call. Never null. */
const char* fi_last_error(void);

/* Absorbed decode over a paged cache, whose rows are of 512 + 64. */

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
    int32_t sms;            /* those of the current device, which FlashInfer counts, too */
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

/* Expanded prefill over ragged batches, keys of 192 and values of 128. */

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

/* Absorbed decode on Blackwell by CUTLASS's kernel, as FlashInfer keeps it, one query token per
 * request.
 *
 * That kernel reads keys in tiles: past a request's end, too, in entries of the block table and in
 * rows of the cache, which may hold anything. So fi_cutlass_mla_split divides each request into its
 * whole tiles, which it reads in place, and the rest, which is copied into a tile of its own behind
 * which there are zeros. The kernel attends to each, and fi_cutlass_mla_merge makes one result of
 * both. */

/* The heads that the kernel computes, whatever the model has, and the keys of a tile. */
#define FI_CUTLASS_MLA_HEADS 128
#define FI_CUTLASS_MLA_TILE 128

typedef struct FiCutlassMlaSplit {
    const void* query_latent;   /* [requests, heads, 512] of 2 bytes, as all elements here */
    const void* query_rope;     /* [requests, heads, 64] */
    const void* cache;          /* pages of rows of 512 + 64 */
    const int32_t* seq_lens;    /* [requests] */
    const int32_t* block_table; /* [requests, max_pages] */
    void* query; /* written: [requests, 128, 512 + 64], zeros for heads that there are not */
    void* tail;  /* written: [requests, 128, 512 + 64] */
    /* written: [requests], the tokens in whole tiles, or one tile of no matter what */
    int32_t* tile_lens;
    int32_t* tail_lens;  /* written: [requests], the others, or 1 */
    int32_t* tile_table; /* written: [requests, table_width], whose unused entries are 0 */
    int32_t* tail_table; /* written: [requests], each its own number */
    int64_t query_latent_token_stride, query_latent_head_stride;
    int64_t query_rope_token_stride, query_rope_head_stride;
    int64_t page_stride, row_stride;
    int32_t requests, heads, page_size, max_pages, table_width;
} FiCutlassMlaSplit;

/* Every address is a multiple of 16 bytes, and so is every stride. */
int32_t fi_cutlass_mla_split(const FiCutlassMlaSplit* call, void* stream);

typedef struct FiCutlassMla {
    const void* query;       /* [requests, 128, 512 + 64] without gaps */
    const void* cache;       /* pages of rows of 512 + 64 */
    const int32_t* seq_lens; /* [requests], each at least 1 */
    /* [requests, table_width], page_size * table_width a multiple of 128: every tile that a request
     * begins is read whole, so that all of its entries name pages, and all of its rows are
     * numbers. */
    const int32_t* block_table;
    void* out;       /* [requests, 128, 512] without gaps */
    float* lse;      /* [requests, 128] without gaps, natural */
    void* workspace; /* fi_cutlass_mla_workspace_bytes */
    int64_t workspace_bytes;
    int64_t page_stride, row_stride;
    int32_t requests, table_width, page_count;
    int32_t page_size; /* a power of two up to 128 */
    int32_t sms, dtype;
    float softmax_scale;
} FiCutlassMla;

/* Bytes of device memory for the partial results of up to `requests` requests. */
int64_t fi_cutlass_mla_workspace_bytes(int32_t requests, int32_t sms);

int32_t fi_cutlass_mla(const FiCutlassMla* call, void* stream);

typedef struct FiCutlassMlaMerge {
    const void* tile_out;    /* [requests, 128, 512] */
    const void* tail_out;    /* [requests, 128, 512] */
    const float* tile_lse;   /* [requests, 128] */
    const float* tail_lse;   /* [requests, 128] */
    const int32_t* seq_lens; /* [requests] */
    void* out;               /* [requests, heads, 512] */
    float* lse;              /* [heads, requests]; may be null */
    int64_t out_token_stride, out_head_stride, lse_head_stride;
    int32_t requests, heads, dtype;
} FiCutlassMlaMerge;

/* A request without tokens gives 0 and -inf. */
int32_t fi_cutlass_mla_merge(const FiCutlassMlaMerge* call, void* stream);

/* What stands between FlashInfer's outputs and ours. */

typedef struct FiLse {
    const float* from; /* [tokens, heads] without gaps */
    float* to;         /* [heads, tokens] */
    int64_t head_stride;
    int32_t tokens, heads;
    /* The launch may be programmatically dependent on the one before it, as from 9.0 on. */
    int32_t dependent;
    float factor;
} FiLse;

/* to[head * head_stride + token] = from[token * heads + head] * factor. */
int32_t fi_transpose_lse(const FiLse* lse, void* stream);

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
