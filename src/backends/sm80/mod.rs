//! Kernels for every GPU since Ampere, on `mma.sync`, `ldmatrix` and `cp.async`.

#[cfg(feature = "sm80")]
mod kernel;
mod mma_attn;
mod mma_mla;
mod mma_mla_sparse;

use mla_runtime::backends;
use mla_runtime::spec::{Capability, Run};
pub use mma_attn::MmaAttn;
pub use mma_mla::{MmaMla, MmaMlaScaled};
pub use mma_mla_sparse::{MmaMlaSparse, MmaMlaSparseNarrow};

/// Prepends this family's prefill backends to a list.
pub(super) type Prefill<Rest> = backends![MmaAttn, ..Rest];

/// Prepends this family's decode backends to a list.
pub(super) type Decode<Rest> = backends![
    MmaMla,
    MmaMlaScaled,
    MmaMlaSparse,
    MmaMlaSparseNarrow,
    ..Rest
];

/// GPUs on which the conformance tests of all of this family's backends passed, with machine code
/// for compute capability 9.0.
const RUN_ON: &[Run] = &[Run {
    gpu: "H200",
    capability: Capability::new(9, 0),
    date: "2026-11-29",
    commit: "1289b65",
}];

#[cfg(feature = "sm80")]
macro_rules! limited_to {
    ($($backend:ident),*) => {$(
        impl $backend {
            /// Uses no more of the device than `limits` say, as if the device were smaller.
            #[must_use]
            pub fn limited_to(mut self, limits: crate::raw::MlaDeviceLimits) -> Self {
                self.kernel = kernel::Portable(limits);
                self
            }
        }
    )*};
}

#[cfg(feature = "sm80")]
limited_to!(
    MmaAttn,
    MmaMla,
    MmaMlaScaled,
    MmaMlaSparse,
    MmaMlaSparseNarrow
);
