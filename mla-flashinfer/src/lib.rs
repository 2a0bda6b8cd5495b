//! FlashInfer's attention kernels as backends of `mla-runtime`: FLASHINFER_MLA and CUTLASS_MLA for
//! decode, FLASHINFER for prefill.
//!
//! A program that depends on this crate and names it (`use mla_flashinfer as _;`) has all of them
//! in every registry. The feature `sm80` compiles FlashInfer's fa2 for every GPU since Ampere.
//! `sm90` compiles its fa3 for Hopper, which is preferred there if both features are on. `sm100`
//! compiles CUTLASS's kernels for Blackwell.
//!
//! The kernels are FlashInfer's own, compiled from the headers of its pinned wheel. This crate adds
//! the C interface in `kernels`, and the code between FlashInfer's conventions and those of
//! `mla-runtime`.

mod cutlass_mla;
#[cfg(feature = "gpu")]
mod host;
mod mla;
mod ragged;
#[cfg(feature = "gpu")]
mod status;

use mla_runtime::spec::{Capability, Run};

pub use cutlass_mla::CutlassMla;
pub use mla::FlashInferMla;
pub use ragged::FlashInfer;

/// The C interface, as bindgen wraps it.
#[cfg(feature = "gpu")]
#[allow(
    missing_docs,
    dead_code,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod ffi {
    include!(concat!(env!("OUT_DIR"), "/flashinfer.rs"));
}

/// Targets for which this build compiled the kernels.
#[cfg(feature = "gpu")]
pub mod compiled {
    include!(concat!(env!("OUT_DIR"), "/flashinfer_compiled.rs"));
}

/// GPUs on which all tests passed: with fa3 in builds that have it, and otherwise with fa2.
/// CUTLASS's kernels were not tested, since Hopper cannot run them.
const RUN_ON: &[Run] = &[Run {
    gpu: "H200",
    capability: Capability::new(9, 0),
    date: "2026-11-23",
    commit: "755fc48",
}];

/// No GPU yet, since the kernel needs Blackwell.
const CUTLASS_RUN_ON: &[Run] = &[];
