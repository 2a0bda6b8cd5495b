/* FlashMLA's dense decode for Hopper, as Rust calls it. Every function gives 0, a cudaError, or -1;
   fm_last_error has the text. Strides are in elements, addresses on the device. */
#ifndef MLA_FLASHMLA_H
#define MLA_FLASHMLA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FM_LATENT 512
#define FM_WIDTH 576
#define FM_PAGE 64
/* Query rows (tokens times heads) of a CTA. */
#define FM_ROWS 64
/* The most parts that the work of a batch is divided into. */
#define FM_MAX_PARTS 160
#define FM_PART_BYTES 32
/* A schedule is made in the shared memory of one CTA. */
#define FM_MAX_REQUESTS 11600

/* What went wrong last on this thread: valid until its next call. Never null. */
const char* fm_last_error(void);

typedef struct FmSchedule {
    const int32_t* seq_lens; /* [requests] */
    int32_t* lens;           /* [requests], written: the same, within 0 and max_len */
    void* parts;             /* [num_parts, FM_PART_BYTES], written: the blocks of each part */
    int32_t* splits;         /* [requests + 1], written: where each request's splits begin */
    int32_t requests, query_len, num_parts, max_len;
} FmSchedule;

/* Divides the work of a batch of at least one request. */
int32_t fm_schedule(const FmSchedule* schedule, void* stream);

typedef struct FmDecode {
    const void* query;          /* [requests, query_len * heads, FM_WIDTH] */
    const void* cache;          /* [pages, FM_PAGE, FM_WIDTH] */
    const int32_t* block_table; /* [requests, max_pages] */
    const int32_t* lens;        /* of the schedule, as the next two */
    const void* parts;
    const int32_t* splits;
    void* out;        /* [requests, query_len, heads, FM_LATENT] without gaps */
    float* lse;       /* [requests, query_len, heads] without gaps, natural; +inf of no keys */
    float* out_parts; /* [requests + num_parts, query_len * heads, FM_LATENT] */
    float* lse_parts; /* [requests + num_parts, query_len * heads] */
    int64_t query_request_stride, query_row_stride;
    int64_t page_stride, row_stride;
    int32_t requests, query_len, heads, pages, max_pages, num_parts;
    int32_t is_bf16;
    float softmax_scale;
} FmDecode;

/* FlashMLA's kernel, which does not wait for one in front of it that lets others begin early. */
int32_t fm_attend(const FmDecode* call, void* stream);

/* The kernel that combines its splits. It may end before the one in front of it, of which requests
   without splits are the work alone: a fence stands between the two. */
int32_t fm_combine(const FmDecode* call, void* stream);

typedef struct FmQueries {
    const void* from; /* [tokens, heads, FM_WIDTH] */
    void* to;         /* the same without gaps */
    int64_t token_stride, head_stride;
    int32_t tokens, heads;
} FmQueries;

int32_t fm_pack_queries(const FmQueries* queries, void* stream);

typedef struct FmLse {
    const float* from; /* [tokens, heads], of fm_combine */
    float* to;         /* [heads, tokens], with -inf of no keys */
    int64_t head_stride;
    int32_t tokens, heads;
} FmLse;

int32_t fm_finish_lse(const FmLse* lse, void* stream);

/* lens of a schedule. */
int32_t fm_bound_lens(const FmSchedule* schedule, void* stream);

#ifdef __cplusplus
}
#endif

#endif
