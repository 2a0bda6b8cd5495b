//! WGMMA_MLA_SPARSE: sparse absorbed attention on Hopper GPUs, one or two launches per step.
//!
//! `docs/kernels/sparse.md` tells how the kernel works. It needs no workspace, and nothing is
//! prepared, so a captured step can be replayed with other lists in the same arrays.

use crate::backends::template::sparse_backend;

sparse_backend! {
    /// Sparse absorbed attention on Hopper GPUs.
    ///
    /// Each query token attends to the cache rows in its list of slots. There may be 1 to 128
    /// heads, without padding. Lists have up to 8192 slots, any of which may be invalid. Pages have
    /// any size. Caches have the queries' dtype, e4m3 with one scale, or `fp8_ds_mla` or
    /// `fp8_per_token` with any scales. A second cache with its own lists and a sink per head take
    /// part in the same softmax. Short requests may use their block tables instead of lists.
    WgmmaMlaSparse: super::kernel::Hopper,
    feature = "sm90",
    name = "WGMMA_MLA_SPARSE",
    provider = "native",
    sm = "90",
    compiled = crate::raw::compiled::SM90,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    kv = "f16,bf16,fp8,fp8_ds_mla,fp8_per_token",
    cache_dims = "(512,64)|(512,0)",
    heads = "1..=128",
    query_len = "ragged",
    graphs = "always",
    dependent_launch = true,
    alignment = 16,
    sparse = "required",
    // The maximum of the C interface: `width` in mla.h.
    max_list_width = 8192,
    features = "sinks,deterministic,nan_propagation,strided_outputs,dense_requests,\
                second_cache,split_cache",
    priority = "100"
}
