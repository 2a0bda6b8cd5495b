//! Conformance tests of the backends of the portable family, with the whole GPU and with the
//! resources of smaller ones. A build with `MLA_BUILD_TARGETS_SM80=compute_80` has only PTX. The
//! driver then compiles it for this GPU, as it does for a GPU without machine code.

mod impatient;
mod smaller;

use mla_kernels::backends::sm80::{
    MmaAttn, MmaMla, MmaMlaScaled, MmaMlaSparse, MmaMlaSparseNarrow,
};
use smaller::Smaller;

/// Shared memory per CTA on GPUs of 8.0.
const A100: i32 = 163 * 1024;
/// Shared memory per CTA on GPUs of 8.6, 8.9 and 12.x.
const GEFORCE: i32 = 99 * 1024;

conformance! {
    "needs a GPU: cargo test -r --features sm80 --test gpu -- --ignored portable";
    mma_mla: decode_conformance of MmaMla;
    mma_mla_with_99_kb: decode_conformance of Smaller<MmaMla, GEFORCE, 48>;
    mma_mla_with_163_kb: decode_conformance of Smaller<MmaMla, A100, 72>;
    mma_mla_scaled: decode_conformance of MmaMlaScaled;
    mma_mla_scaled_with_99_kb: decode_conformance of Smaller<MmaMlaScaled, GEFORCE, 48>;
    mma_mla_scaled_with_163_kb: decode_conformance of Smaller<MmaMlaScaled, A100, 72>;
    mma_mla_sparse: decode_conformance of MmaMlaSparse;
    mma_mla_sparse_with_99_kb: decode_conformance of Smaller<MmaMlaSparse, GEFORCE, 48>;
    mma_mla_sparse_with_163_kb: decode_conformance of Smaller<MmaMlaSparse, A100, 72>;
    mma_mla_sparse_narrow: decode_conformance of MmaMlaSparseNarrow;
    mma_attn: prefill_conformance of MmaAttn;
    mma_attn_with_99_kb: prefill_conformance of Smaller<MmaAttn, GEFORCE, 48>;
    mma_attn_with_163_kb: prefill_conformance of Smaller<MmaAttn, A100, 72>;
}
