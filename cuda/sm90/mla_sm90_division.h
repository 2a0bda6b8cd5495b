/*
 * The division of batches by the kernels of mla_sm90.h, computed on the host by their own code, for
 * tests. Nothing here is enqueued.
 */
#ifndef MLA_SM90_DIVISION_H
#define MLA_SM90_DIVISION_H

#include "../include/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A work item of mla_decode_sm90: some KV tiles of one query tile, for a group of CTAs. A KV tile
 * has 64 cached tokens. A group is one CTA. With more than 64 rows (heads * query_len), it is 2, 3,
 * 5, 7, 11 or 13 CTAs, which do different rows of the same query tile. */
typedef struct MlaDecodeWorkItem {
    int32_t request;
    /* the query tile's first row, counting a request's query tokens and heads together, and its
     * maximum number of rows */
    int32_t first_row;
    int32_t rows;
    /* KV tiles of the request, from kv_tile_begin to before kv_tile_end */
    int32_t kv_tile_begin;
    int32_t kv_tile_end;
    /* split `split` of `splits` of the query tile; group first_group + i has split i */
    int32_t split;
    int32_t splits;
    int32_t first_group;
    /* number of leading splits whose groups have no work item after them and combine the results */
    int32_t combiners;
    /* non-zero: the group's last work item */
    int32_t last;
} MlaDecodeWorkItem;

/* The division of a batch by mla_decode_sm90, computed on the host as the device would: writes the
 * work items of one group in their order, up to `room` of them, and their number. Reads heads,
 * query_len, requests, page_size, max_pages, latent_dim, rope_dim, q_dtype, cache_format, and, in
 * host memory, kv_lens, and cu_q_lens, which may be null. `groups`, 1..=160, is the number of
 * groups of a launch, and `group` is one of them. */
MlaStatus mla_decode_sm90_work_items(const MlaDecodeParams* params, int32_t groups, int32_t group,
                                     MlaDecodeWorkItem* items, int32_t room, int32_t* count);

/* The next step of a CTA for a query tile that is divided among CTAs. */
typedef enum MlaSplitRole {
    /* nothing yet */
    MLA_SPLIT_NONE = 0,
    /* combine its slice */
    MLA_SPLIT_SLICE = 1,
    /* write its slice to the workspace and yield */
    MLA_SPLIT_YIELD = 2,
    /* combine everything */
    MLA_SPLIT_EVERYTHING = 3
} MlaSplitRole;

/* The split protocol's counters of one query tile: zero before and after. */
typedef struct MlaSplitCounters {
    int32_t arrived;
    int32_t left;
} MlaSplitCounters;

/* A step of the split protocol: at most one atomic operation. */
typedef enum MlaSplitStep {
    /* by a CTA that has other work; returns a role */
    MLA_SPLIT_ARRIVE = 0,
    /* by a combiner */
    MLA_SPLIT_ARRIVE_COMBINER = 1,
    /* returns what a combiner reads of the counters */
    MLA_SPLIT_LOOK = 2,
    /* returns the role of a combiner that has read `seen` */
    MLA_SPLIT_ROLE_OF = 3,
    /* by a combiner that has waited long enough; returns 1 if the counters are still as `seen` */
    MLA_SPLIT_FALL_BACK = 4,
    /* by a combiner that has written its slice to the workspace; returns a role */
    MLA_SPLIT_YIELDED = 5,
    /* returns how many have left */
    MLA_SPLIT_LEAVE = 6,
    MLA_SPLIT_RESET = 7
} MlaSplitStep;

/* Takes a step of the split protocol on counters in host memory, by the code of the kernel, for
 * tests that try all orders. cuda/common/split_protocol.cuh draws the states and describes the
 * steps. A step that returns nothing does not write `answer`, which may then be null. */
MlaStatus mla_split_step(int32_t step, MlaSplitCounters* counters, int32_t splits,
                         int32_t combiners, int32_t seen, int32_t* answer);

/* The division of a batch by mla_sparse_sm90. `splits` is the number of CTAs that share the lists
 * of a token. If other tokens fill the device in whole waves, it holds for the remaining tokens.
 * `tile_heads` is the number of heads that a CTA works on at a time. Reads heads, tokens, both
 * widths, latent_dim, rope_dim, q_dtype and cache_format. `clusters` is [16] in host memory: the
 * number of clusters of 1, 2, ... 16 CTAs that the device runs at the same time, 0 if it does not
 * accept them. */
MlaStatus mla_sparse_sm90_splits(const MlaSparseParams* params, const int32_t* clusters,
                                 int32_t* splits, int32_t* tile_heads);

/* A work item of mla_prefill_sm90: KV tiles of one query tile, which is up to 128 query rows of one
 * request and head. */
typedef struct MlaPrefillWorkItem {
    int32_t request;
    int32_t head;
    /* the tile's first query row within its request */
    int32_t query;
    /* KV tiles, from `begin` to before `end`; an empty item has none. A KV tile has 128 keys, or 64
     * if value_dim is 256. */
    int32_t begin;
    int32_t end;
    /* split `split` of `splits`; items from `splits` on are empty */
    int32_t split;
    int32_t splits;
    /* slot of its partial result, if there are several splits */
    int32_t slot;
} MlaPrefillWorkItem;

/* The division of query tiles' keys by mla_prefill_sm90, computed on the host as host and device
 * would for a launch: writes the items in the order in which CTAs take them, up to `room` of them,
 * and their number. There are no items if no query tile is divided. With batch_invariant there may
 * be several launches, whose items follow each other; each begins with slot 0, and has no items if
 * none of its query tiles is divided. Reads heads, requests, query_tokens, key_tokens,
 * max_query_len, max_key_len, causal, value_dim, batch_invariant, and, in host memory,
 * cu_query_lens and cu_key_lens. `ctas`, 1..=256, is the number of CTAs of the launch: one for each
 * SM of the device if there is enough work. */
MlaStatus mla_prefill_sm90_work_items(const MlaPrefillParams* params, int32_t ctas,
                                      MlaPrefillWorkItem* items, int32_t room, int32_t* count);

/* Writes the work items of query tiles that are not divided, whether or not
 * mla_prefill_sm90_work_items divides them. Tiles are taken in blocks of `swizzle_requests`
 * requests and `swizzle_heads` heads. */
MlaStatus mla_prefill_sm90_unsplit_work_items(const MlaPrefillParams* params, int32_t ctas,
                                              int32_t swizzle_requests, int32_t swizzle_heads,
                                              MlaPrefillWorkItem* items, int32_t room,
                                              int32_t* count);

#ifdef __cplusplus
}
#endif

#endif
