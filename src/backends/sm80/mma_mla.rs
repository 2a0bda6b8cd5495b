//! MMA_MLA and its variants for rows with scales: dense absorbed decode on every GPU since Ampere,
//! one launch per step.
//!
//! `docs/kernels/portable.md` tells how the kernel works. It divides a batch on the device, from
//! the lengths there. A captured step can therefore be replayed with other lengths and pages in the
//! same arrays.

use crate::backends::template::dense_backend;

// A backend of this kernel: the caches and rows that it takes together, and what else differs.
macro_rules! portable_backend {
    (
        $(#[$about:meta])*
        $backend:ident, name = $name:tt, kv = $kv:tt, cache_dims = $rows:tt, features = $features:tt
    ) => {
        dense_backend! {
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
            page_sizes = "x16",
            query_len = "ragged",
            // The maximum of the C interface: `query_len` in mla.h.
            max_query_len = 16,
            alignment = 16,
            graphs = "always",
            dependent_launch = true,
            features = $features,
            priority = "50"
        }
    };
}

portable_backend! {
    /// Dense absorbed decode on every GPU since Ampere.
    ///
    /// It takes 1 to 128 heads, up to 16 query tokens per request, and pages of any multiple of 16.
    /// Caches have the queries' dtype, or e4m3 with one scale.
    MmaMla,
    name = "MMA_MLA",
    kv = "f16,bf16,fp8",
    cache_dims = "(512,64)|(256,64)|(256,32)|(512,0)",
    features = "deterministic,batch_invariant,nan_propagation,strided_outputs,split_cache,\
                non_causal"
}

portable_backend! {
    /// Dense absorbed decode like `MmaMla`, for rows with scales of their own: `fp8_ds_mla`, of
    /// which only rows of dimensions (512, 64) are a multiple of 16 bytes, and `fp8_per_token`,
    /// whose row pitch is a multiple of 16 bytes, at least 656.
    MmaMlaScaled,
    name = "MMA_MLA_SCALED",
    kv = "fp8_ds_mla,fp8_per_token",
    cache_dims = "(512,64)",
    features = "deterministic,batch_invariant,nan_propagation,strided_outputs,non_causal"
}
