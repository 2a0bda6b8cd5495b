//! The backends of the portable family do what their specs say. With `CUDA_FORCE_PTX_JIT=1` the driver compiles
//! the PTX for this GPU, as it does for one that no machine code was made for.

mod mma_mla {
    use mla_kernels::backends::sm80::MmaMla;

    use crate::common::gpu;

    mla_runtime::decode_conformance!(
        #[ignore = "needs a GPU: cargo test --release --features sm80 --test gpu -- --include-ignored portable"]
        MmaMla,
        gpu()
    );
}

mod mma_attn {
    use mla_kernels::backends::sm80::MmaAttn;

    use crate::common::gpu;

    mla_runtime::prefill_conformance!(
        #[ignore = "needs a GPU: cargo test --release --features sm80 --test gpu -- --include-ignored portable"]
        MmaAttn,
        gpu()
    );
}
