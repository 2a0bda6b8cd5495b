//! WGMMA_ATTN: expanded prefill on Hopper GPUs, one launch per attention.
//!
//! `docs/kernels/prefill.md` tells how the kernel works. It makes its schedule from the lengths on
//! the device, so nothing is prepared. Its workspace holds the counters by which CTAs share out
//! their work, and the partial results of query tiles with divided keys.

use crate::backends::template::expanded_backend;

expanded_backend! {
    /// Expanded attention on sm_90a, for new tokens and for context chunks.
    ///
    /// Keys may come as two sources, the heads' parts and the shared rotary part. Packed keys are
    /// taken as well, a little slower. The kernel never uses memory behind the end of a request.
    /// Pointers and strides in bytes are multiples of 16.
    WgmmaAttn: super::kernel::Hopper,
    feature = "sm90",
    name = "WGMMA_ATTN",
    provider = "native",
    sm = "90",
    compiled = crate::raw::compiled::SM90,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    dims = "(128,64,128)|(192,64,256)|(192,64,128)|(64,64,128)|(256,0,256)|(64,32,64)",
    key_layout = "split",
    alignment = 16,
    graphs = "always",
    dependent_launch = true,
    features = "deterministic,batch_invariant,nan_propagation,strided_outputs,non_causal",
    priority = "100"
}
