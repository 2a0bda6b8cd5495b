//! Kernels for Hopper, by its own instructions (`sm_90a`).

mod flash_attn;
mod flash_mla;
mod flash_mla_sparse;
#[cfg(feature = "sm90")]
mod indexer;
#[cfg(feature = "sm90")]
mod kernel;

pub use flash_attn::FlashAttn;
pub use flash_mla::FlashMla;
pub use flash_mla_sparse::FlashMlaSparse;
use mla_runtime::backends;
use mla_runtime::capability::Capability;
use mla_runtime::kernels::Run;

/// This family's prefill backends, and then those of a list.
pub type Prefill<Rest> = backends![FlashAttn, ..Rest];

/// This family's decode backends, and then those of a list.
pub type Decode<Rest> = backends![FlashMla, FlashMlaSparse, ..Rest];

/// Where all tests of this family's backends passed, the latest commit for each GPU.
const RUN_ON: &[Run] = &[
    Run {
        gpu: "H200",
        capability: Capability::new(9, 0),
        date: "2026-11-28",
        commit: "2501cb2",
    },
    Run {
        gpu: "H100",
        capability: Capability::new(9, 0),
        date: "2026-11-28",
        commit: "2501cb2",
    },
];
