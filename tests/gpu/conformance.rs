//! Conformance tests of Hopper's backends.

use mla_kernels::backends::sm90::{
    WgmmaAttn, WgmmaMla, WgmmaMlaNarrow, WgmmaMlaPerToken, WgmmaMlaSparse,
};

use crate::of_row::OfRow;

conformance! {
    "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored conformance";
    wgmma_mla: decode_conformance of WgmmaMla;
    wgmma_mla_sparse: decode_conformance of WgmmaMlaSparse;
    wgmma_mla_per_token: decode_conformance of WgmmaMlaPerToken;
    wgmma_mla_512_0: decode_conformance of OfRow<WgmmaMlaNarrow, 512, 0>;
    wgmma_mla_256_64: decode_conformance of OfRow<WgmmaMlaNarrow, 256, 64>;
    wgmma_mla_256_32: decode_conformance of OfRow<WgmmaMlaNarrow, 256, 32>;
    wgmma_mla_sparse_512_0: decode_conformance of OfRow<WgmmaMlaSparse, 512, 0>;
    wgmma_attn: prefill_conformance of WgmmaAttn;
}
