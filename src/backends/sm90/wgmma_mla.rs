//! WGMMA_MLA, and its sibling for narrower rows: dense absorbed decode on Hopper GPUs, one launch
//! per step.
//!
//! `docs/kernels/decode.md` tells how the kernel works. It plans a step on the device, from the
//! lengths there. A captured step can therefore be replayed with other lengths and pages in the
//! same arrays.

use mla_runtime::spec::Run;

use crate::backends::template::dense_backend;

// GPUs on which all tests of WGMMA_MLA_NARROW passed. On an H200 all but one did: the comparison of
// random batches with f64 did not end within 490 s.
const NOT_YET: &[Run] = &[];

dense_backend! {
    /// Dense absorbed decode on Hopper GPUs.
    ///
    /// It takes 1 to 128 heads without padding waste, up to 16 query tokens per request, batches of
    /// up to 1024 requests, and pages of any multiple of 16. Caches have the queries' dtype, or
    /// e4m3 with one scale.
    WgmmaMla: super::kernel::Hopper,
    feature = "sm90",
    name = "WGMMA_MLA",
    provider = "native",
    sm = "90",
    compiled = crate::raw::compiled::SM90,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    kv = "f16,bf16,fp8",
    cache_dims = "(512,64)",
    heads = "1..=128",
    page_sizes = "x16",
    query_len = "ragged",
    // The maximum of the C interface: `query_len` in mla.h.
    max_query_len = 16,
    alignment = 16,
    graphs = "always",
    dependent_launch = true,
    features = "deterministic,nan_propagation,strided_outputs,split_cache,non_causal",
    priority = "100"
}

dense_backend! {
    /// The same for narrower rows: of GLM-5.3-Flash, which has no rotary part, of Mistral-Small-4
    /// and of MiniCPM3; caches of the queries' dtype alone.
    WgmmaMlaNarrow: super::kernel::Hopper,
    feature = "sm90",
    name = "WGMMA_MLA_NARROW",
    provider = "native",
    sm = "90",
    compiled = crate::raw::compiled::SM90,
    run_on = NOT_YET,
    dtypes = "f16,bf16",
    kv = "f16,bf16",
    cache_dims = "(512,0)|(256,64)|(256,32)",
    heads = "1..=128",
    page_sizes = "x16",
    query_len = "ragged",
    // The maximum of the C interface: `query_len` in mla.h.
    max_query_len = 16,
    alignment = 16,
    graphs = "always",
    dependent_launch = true,
    features = "deterministic,nan_propagation,strided_outputs,split_cache,non_causal",
    priority = "100"
}
