/*
 * The launch functions of the portable kernels, which run on every GPU since Ampere. mla.h has the
 * parameters and the rules.
 */
#ifndef MLA_SM80_H
#define MLA_SM80_H

#include "../include/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Limits on what mla_decode_sm80 and mla_prefill_sm80 use of a device, so that their behaviour on a
 * smaller one can be tested; null, or a 0, means all that the current device has.
 */
typedef struct MlaDeviceLimits {
    /* bytes of shared memory that a CTA may ask for: 101376 on 8.6, 8.9 and 12.x, 166912 on 8.0 */
    int32_t shared_memory_bytes;
    int32_t multiprocessors;
} MlaDeviceLimits;

/* Leading bytes of a workspace of mla_decode_sm80 that must be zero before its first use; every
 * launch leaves them zero. */
#define MLA_DECODE_SM80_COUNTER_BYTES 8192

/* Bytes of workspace that mla_decode_sm80 needs for requests of up to query_len tokens. Reads
 * heads, query_len, requests, latent_dim, rope_dim, q_dtype and cache_format, and what the current
 * device has. `requests` has to be a number that a launch accepts, but the result depends neither
 * on it nor on any length. With batch_invariant, launches have the same query_len. It then also
 * reads max_pages and page_size, and no launch may have room for more tokens per request; if
 * max_pages is 0, the result is enough for any. If max_pages is above 0, numbers of requests, pages
 * and tokens in a page that no launch accepts are refused here. Loads the kernels, so that no
 * launch has to. */
MlaStatus mla_decode_sm80_workspace(const MlaDecodeParams* params, const MlaDeviceLimits* limits,
                                    size_t* bytes);

/* The same as mla_decode_sm90 on every GPU since Ampere: one kernel on `stream`. It also takes rows
 * of (latent_dim, rope_dim) (512, 0), (256, 64) and (256, 32), 1..=16 query tokens, 1..=65535
 * requests, and, with rows of (512, 64), a cache of MLA_CACHE_FP8_DS_MLA or of
 * MLA_CACHE_FP8_PER_TOKEN, whose strides are in bytes and whose scales are any f32. A
 * split_patience of 0 means 100 000 cycles more than the maximum time of a CTA's share of the work.
 * Batches that are short, by requests, max_pages and page_size, have kernels of their own. These
 * save up to half of the time, provided that max_pages has no more columns than may be used.
 * max_pages * page_size is at most 2^31 - 65. The number of tiles of 16 tokens is counted over all
 * tiles of 16 query rows of all requests, and four are added for each tile of query rows. This
 * number is less than 2^31. cache_slot_stride is less than 2^27 bytes, and cache_page_stride less
 * than 2^48 elements. */
MlaStatus mla_decode_sm80(const MlaDecodeParams* params, const MlaDeviceLimits* limits,
                          void* stream);

/* Bytes of workspace that mla_sparse_sm80 needs, for any number of tokens and any width. Reads
 * heads, latent_dim, rope_dim, q_dtype and cache_format, and what the current device has. Loads the
 * kernels, so that no launch has to. */
MlaStatus mla_sparse_sm80_workspace(const MlaSparseParams* params, const MlaDeviceLimits* limits,
                                    size_t* bytes);

/* The same as mla_sparse_sm90 on every GPU since Ampere: one kernel on `stream`. There is no second
 * cache, and no request is dense: second.width and dense_within are 0. Rows of (512, 64) may be of
 * MLA_CACHE_FP8_PER_TOKEN, too, and those of (512, 0) have no scales. There are less than 2^31 tiles
 * of 16 entries over all tokens and tiles of 16 heads. `workspace` holds workspace_bytes bytes,
 * aligned to 256; the rules for the workspace of mla_decode_sm80 hold for it, too. */
MlaStatus mla_sparse_sm80(const MlaSparseParams* params, const MlaDeviceLimits* limits,
                          void* workspace, size_t workspace_bytes, void* stream);

/* Loads the kernel for these dimensions and dtype into the current context, as mla_load_helpers
 * does the helpers. Reads nope_dim, rope_dim, value_dim and dtype. */
MlaStatus mla_load_prefill_sm80(const MlaPrefillParams* params);

/* Bytes of workspace with which mla_prefill_sm80 divides the keys of query tiles if these are few.
 * Reads nope_dim, rope_dim, value_dim and dtype, and what the current device has; the result
 * depends on no number of tokens, requests or heads. */
MlaStatus mla_prefill_sm80_workspace(const MlaPrefillParams* params, const MlaDeviceLimits* limits,
                                     size_t* bytes);

/* The same as mla_prefill_sm90 on every GPU since Ampere: one kernel on `stream`. With a workspace
 * of null, or with batch_invariant, it divides no keys. It also takes (64, 64, 128) and
 * (256, 0, 256), for which key_rope may be null. */
MlaStatus mla_prefill_sm80(const MlaPrefillParams* params, const MlaDeviceLimits* limits,
                           void* stream);

#ifdef __cplusplus
}
#endif

#endif
