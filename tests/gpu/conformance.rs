//! Conformance tests of the built-in GPU backends.

mod wgmma_mla {
    use mla_kernels::backends::sm90::WgmmaMla;

    use crate::common::gpu;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        WgmmaMla,
        gpu()
    );
}

mod wgmma_mla_sparse {
    use mla_kernels::backends::sm90::WgmmaMlaSparse;

    use crate::common::gpu;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        WgmmaMlaSparse,
        gpu()
    );
}

mod wgmma_mla_per_token {
    use mla_kernels::backends::sm90::WgmmaMlaPerToken;

    use crate::common::gpu;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        WgmmaMlaPerToken,
        gpu()
    );
}

mod wgmma_mla_512_0 {
    use mla_kernels::backends::sm90::WgmmaMlaNarrow;

    use crate::common::gpu;
    use crate::of_row::OfRow;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        OfRow<WgmmaMlaNarrow, 512, 0>,
        gpu()
    );
}

mod wgmma_mla_256_64 {
    use mla_kernels::backends::sm90::WgmmaMlaNarrow;

    use crate::common::gpu;
    use crate::of_row::OfRow;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        OfRow<WgmmaMlaNarrow, 256, 64>,
        gpu()
    );
}

mod wgmma_mla_256_32 {
    use mla_kernels::backends::sm90::WgmmaMlaNarrow;

    use crate::common::gpu;
    use crate::of_row::OfRow;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        OfRow<WgmmaMlaNarrow, 256, 32>,
        gpu()
    );
}

mod wgmma_mla_sparse_512_0 {
    use mla_kernels::backends::sm90::WgmmaMlaSparse;

    use crate::common::gpu;
    use crate::of_row::OfRow;

    mla_conformance::decode_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        OfRow<WgmmaMlaSparse, 512, 0>,
        gpu()
    );
}

mod wgmma_attn {
    use mla_kernels::backends::sm90::WgmmaAttn;

    use crate::common::gpu;

    mla_conformance::prefill_conformance!(
        #[ignore = "needs a Hopper GPU: \
                    cargo test -r --features sm90 --test gpu -- --ignored conformance"]
        WgmmaAttn,
        gpu()
    );
}
