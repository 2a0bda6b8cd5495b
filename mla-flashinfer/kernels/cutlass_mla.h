/* Absorbed decode on Blackwell by CUTLASS's kernel, as FlashInfer keeps it, one query token per
 * request.
 *
 * That kernel reads keys in tiles: past a request's end, too, in entries of the block table and in
 * rows of the cache, which may hold anything. So fi_cutlass_mla_split divides each request into its
 * whole tiles, which it reads in place, and the rest, which is copied into a tile of its own behind
 * which there are zeros. The kernel attends to each, and fi_cutlass_mla_merge makes one result of
 * both. See flashinfer.h. */
#ifndef MLA_FLASHINFER_CUTLASS_MLA_H
#define MLA_FLASHINFER_CUTLASS_MLA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

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
    const void* query_latent; /* [requests, 128, 512] */
    const void* query_rope;   /* [requests, 128, 64] */
    const void* cache;        /* pages of rows of 512 + 64 */
    const int32_t* seq_lens;  /* [requests], each at least 1 */
    /* [requests, table_width], page_size * table_width a multiple of 128: every tile that a request
     * begins is read whole, so that all of its entries name pages, and all of its rows are
     * numbers. */
    const int32_t* block_table;
    void* out;       /* [requests, 128, 512] without gaps */
    float* lse;      /* [requests, 128] without gaps, natural */
    void* workspace; /* fi_cutlass_mla_workspace_bytes */
    int64_t workspace_bytes;
    int64_t query_latent_token_stride, query_latent_head_stride;
    int64_t query_rope_token_stride, query_rope_head_stride;
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

#ifdef __cplusplus
}
#endif

#endif
