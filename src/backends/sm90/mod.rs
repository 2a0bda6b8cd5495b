//! Kernels for Hopper that use its own instructions (`sm_90a`).

#[cfg(feature = "sm90")]
mod indexer;
#[cfg(feature = "sm90")]
mod kernel;
mod wgmma_attn;
mod wgmma_mla;
mod wgmma_mla_sparse;

use mla_runtime::backends;
use mla_runtime::spec::{Capability, Run};
pub use wgmma_attn::WgmmaAttn;
pub use wgmma_mla::{WgmmaMla, WgmmaMlaNarrow, WgmmaMlaPerToken};
pub use wgmma_mla_sparse::WgmmaMlaSparse;

/// Prepends this family's prefill backends to a list.
pub(super) type Prefill<Rest> = backends![WgmmaAttn, ..Rest];

/// Prepends this family's decode backends to a list.
pub(super) type Decode<Rest> = backends![
    WgmmaMla,
    WgmmaMlaNarrow,
    WgmmaMlaPerToken,
    WgmmaMlaSparse,
    ..Rest
];

/// GPUs on which all tests of this family's backends passed, each with the latest commit.
const RUN_ON: &[Run] = &[Run {
    gpu: "H200",
    capability: Capability::new(9, 0),
    date: "2026-11-29",
    commit: "1289b65",
}];
