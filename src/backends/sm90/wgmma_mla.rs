//! WGMMA_MLA, and its siblings for narrower rows and for rows with scales: dense absorbed decode on
//! Hopper GPUs, one launch per step.
//!
//! `docs/kernels/decode.md` tells how the kernel works. It plans a step on the device, from the
//! lengths there. A captured step can therefore be replayed with other lengths and pages in the
//! same arrays.

use super::RUN_ON;
use crate::backends::template::dense_backend;

// A backend of this kernel: the caches and rows that it takes together.
macro_rules! hopper_backend {
    (
        $(#[$about:meta])*
        $backend:ident, name = $name:tt, kv = $kv:tt, cache_dims = $rows:tt,
        features = $features:tt
    ) => {
        dense_backend! {
            $(#[$about])*
            $backend: super::kernel::Hopper,
            feature = "sm90",
            name = $name,
            provider = "native",
            sm = "90",
            compiled = crate::raw::compiled::SM90,
            run_on = RUN_ON,
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
            priority = "100"
        }
    };
}

hopper_backend! {
    /// Dense absorbed decode on Hopper GPUs.
    ///
    /// It takes 1 to 128 heads without padding waste, up to 16 query tokens per request, batches of
    /// up to 1024 requests, and pages of any multiple of 16. Caches have the queries' dtype, or
    /// e4m3 with one scale.
    WgmmaMla,
    name = "WGMMA_MLA",
    kv = "f16,bf16,fp8",
    cache_dims = "(512,64)",
    features = "deterministic,nan_propagation,strided_outputs,split_cache,non_causal"
}

hopper_backend! {
    /// Dense absorbed decode like `WgmmaMla`, for narrower rows: those of GLM-5.3-Flash, which have
    /// no rotary part, of Mistral-Small-4 and of MiniCPM3. Caches have the queries' dtype.
    WgmmaMlaNarrow,
    name = "WGMMA_MLA_NARROW",
    kv = "f16,bf16",
    cache_dims = "(512,0)|(256,64)|(256,32)",
    features = "deterministic,nan_propagation,strided_outputs,split_cache,non_causal"
}

hopper_backend! {
    /// Dense absorbed decode like `WgmmaMla`, for caches of `fp8_per_token` with any scales. The
    /// row pitch is a multiple of 16 bytes, at least 656.
    WgmmaMlaPerToken,
    name = "WGMMA_MLA_PER_TOKEN",
    kv = "fp8_per_token",
    cache_dims = "(512,64)",
    features = "deterministic,nan_propagation,strided_outputs,non_causal"
}
