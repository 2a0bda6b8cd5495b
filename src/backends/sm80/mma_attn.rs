//! MMA_ATTN: expanded prefill on every GPU since Ampere, one launch per attention.
//!
//! `docs/kernels/portable.md` tells how the kernel works. It finds its tiles from the lengths on
//! the device, so nothing is prepared.

use crate::backends::template::expanded_backend;

expanded_backend! {
    /// Expanded attention on every GPU since Ampere, for new tokens and for context chunks.
    ///
    /// Keys may come as two sources, the heads' parts and the shared rotary part, or packed. The
    /// kernel never uses memory behind the end of a request. Pointers and strides in bytes are
    /// multiples of 16.
    MmaAttn: super::kernel::Portable,
    feature = "sm80",
    name = "MMA_ATTN",
    provider = "native",
    sm = "80+",
    compiled = crate::raw::compiled::SM80,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    dims = "(128,64,128)|(192,64,256)|(192,64,128)|(64,64,128)|(256,0,256)|(64,32,64)",
    key_layout = "split",
    alignment = 16,
    graphs = "always",
    dependent_launch = true,
    features = "deterministic,batch_invariant,nan_propagation,strided_outputs,non_causal",
    priority = "50"
}
