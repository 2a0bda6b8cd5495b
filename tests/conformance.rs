//! The built-in GPU backends do what their specs say.

#![cfg(feature = "sm90")]

mod flash_mla {
    use mla_kernels::Cuda;
    use mla_kernels::flash_mla::FlashMla;

    mla_runtime::decode_conformance!(
        #[ignore = "needs a Hopper GPU: cargo test --features sm90 --test conformance -- --ignored"]
        FlashMla,
        Cuda::new(0).expect("a GPU that the kernels were built for")
    );
}

mod flash_attn {
    use mla_kernels::Cuda;
    use mla_kernels::flash_attn::FlashAttn;

    mla_runtime::prefill_conformance!(
        #[ignore = "needs a Hopper GPU: cargo test --features sm90 --test conformance -- --ignored"]
        FlashAttn,
        Cuda::new(0).expect("a GPU that the kernels were built for")
    );
}
