//! Conformance tests of the backend on a GPU. Without a GPU each test is ignored, and names the
//! command that runs it.
#![cfg(feature = "sm90")]

use mla_kernels::Cuda;

mla_conformance::decode_conformance!(
    #[ignore = "needs a Hopper GPU: \
        cargo test --release --package mla-flashmla --features sm90,mla-kernels/sm90 -- \
        --include-ignored"]
    mla_flashmla::FlashMla,
    Cuda::new(0).expect("a GPU that the kernels were built for")
);
