//! MMA_MLA_SPARSE, and its sibling for rows without a rotary part: sparse absorbed attention on
//! every GPU since Ampere, one launch per step.
//!
//! It is the kernel of dense decode with another loader, described in `docs/kernels/portable.md`.
//! Nothing is prepared, so a captured step can be replayed with other lists in the same arrays.

use crate::backends::template::sparse_backend;

// A backend of this kernel: the caches and rows that it takes together.
macro_rules! portable_backend {
    (
        $(#[$about:meta])*
        $backend:ident, name = $name:tt, kv = $kv:tt, cache_dims = $rows:tt
    ) => {
        sparse_backend! {
            $(#[$about])*
            $backend: super::kernel::Portable,
            feature = "sm80",
            name = $name,
            provider = "native",
            sm = "80+",
            compiled = crate::raw::compiled::SM80,
            run_on = super::RUN_ON,
            dtypes = "f16,bf16",
            kv = $kv,
            cache_dims = $rows,
            heads = "1..=128",
            query_len = "ragged",
            alignment = 16,
            graphs = "always",
            dependent_launch = true,
            sparse = "required",
            // The maximum of the C interface: `width` in mla.h.
            max_list_width = 8192,
            features = "sinks,deterministic,nan_propagation,strided_outputs,split_cache",
            priority = "50"
        }
    };
}

portable_backend! {
    /// Sparse absorbed attention on every GPU since Ampere.
    ///
    /// Each query token attends to the cache rows in its list of slots. There may be 1 to 128
    /// heads. Lists have up to 8192 slots, any of which may be invalid. Pages have any size. Caches
    /// have the queries' dtype, e4m3 with one scale, or `fp8_ds_mla` or `fp8_per_token` with any
    /// scales. A sink per head takes part in the softmax.
    MmaMlaSparse,
    name = "MMA_MLA_SPARSE",
    kv = "f16,bf16,fp8,fp8_ds_mla,fp8_per_token",
    cache_dims = "(512,64)"
}

portable_backend! {
    /// Sparse absorbed attention like `MmaMlaSparse`, for rows without a rotary part: those of
    /// GLM-5.3-Flash. Caches have the queries' dtype, or e4m3 with one scale.
    MmaMlaSparseNarrow,
    name = "MMA_MLA_SPARSE_NARROW",
    kv = "f16,bf16,fp8",
    cache_dims = "(512,0)"
}
