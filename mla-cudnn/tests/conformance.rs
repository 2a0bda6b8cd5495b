//! Conformance tests of the backend on a GPU, with the cuDNN of the machine.
#![cfg(feature = "cudnn")]

mla_conformance::prefill_conformance!(
    #[ignore = "needs a GPU and cuDNN: \
        cargo test --package mla-cudnn --features cudnn -- --include-ignored"]
    mla_cudnn::Cudnn,
    mla_kernels::Cuda::new(0).expect("a GPU")
);
