//! Conformance tests of the backends on a GPU. Without a GPU each test is ignored, and names the
//! command that runs it.
#![cfg(feature = "gpu")]

use mla_kernels::Cuda;

fn gpu() -> Cuda {
    Cuda::new(0).expect("a GPU that the kernels were built for")
}

#[cfg(feature = "fa")]
mod mla {
    use super::gpu;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a GPU: \
            cargo test --package mla-flashinfer --features sm90 -- --include-ignored"]
        mla_flashinfer::FlashInferMla,
        gpu()
    );
}

mod ragged {
    use super::gpu;

    mla_conformance::prefill_conformance!(
        #[ignore = "needs a GPU: \
            cargo test --package mla-flashinfer --features sm90 -- --include-ignored"]
        mla_flashinfer::FlashInfer,
        gpu()
    );
}
