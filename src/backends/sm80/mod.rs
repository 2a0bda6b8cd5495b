//! Kernels for every GPU since Ampere, on `mma.sync`, `ldmatrix` and `cp.async`.

#[cfg(feature = "sm80")]
mod dense;
mod mma_attn;
mod mma_mla;
mod mma_mla_sparse;

use mla_runtime::capability::Capability;
use mla_runtime::kernels::Run;
pub use mma_attn::MmaAttn;
pub use mma_mla::{MmaMla, MmaMlaDs};
pub use mma_mla_sparse::MmaMlaSparse;

/// Where the backends' conformance passed as machine code for 9.0, and the kernels' own checks as PTX that the
/// driver compiled.
const RUN_ON: &[Run] = &[Run {
    gpu: "H200",
    capability: Capability::new(9, 0),
    date: "2026-11-22",
    commit: "7c721a7",
}];

/// Of a backend whose conformance has not run on a GPU yet.
const NOWHERE: &[Run] = &[];
