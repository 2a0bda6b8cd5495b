//! The built-in GPU backends do what their specs say.

mod flash_mla {
    use mla_kernels::backends::sm90::FlashMla;

    use crate::common::gpu;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        FlashMla,
        gpu()
    );
}

mod flash_mla_sparse {
    use mla_kernels::backends::sm90::FlashMlaSparse;

    use crate::common::gpu;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        FlashMlaSparse,
        gpu()
    );
}

mod flash_attn {
    use mla_kernels::backends::sm90::FlashAttn;

    use crate::common::gpu;

    mla_conformance::prefill_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        FlashAttn,
        gpu()
    );
}
