mla_conformance::decode_conformance!(
    #[ignore = "needs a GPU: cargo test --test conformance -- --ignored"]
    backend_crate::Naive,
    mla_kernels::Cuda::new(0).expect("a GPU that the kernels were built for")
);
