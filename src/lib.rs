//! Multi-head Latent Attention kernels for NVIDIA GPUs, as backends of `mla-runtime`.
//!
//! The features `sm90` and `sm100` compile the kernels for an architecture and turn on `cuda`, the
//! GPU device. With neither, nothing here needs CUDA, and [`present_gpu`] says so.

#[cfg(all(feature = "nccl", any(feature = "sm90", feature = "sm100")))]
pub mod context_parallel;
#[cfg(any(feature = "sm90", feature = "sm100"))]
pub mod cuda;
#[cfg(any(feature = "sm90", feature = "sm100"))]
pub mod decode_graph;
#[cfg(feature = "sm90")]
pub mod flash_attn;
#[cfg(feature = "sm90")]
pub mod flash_mla;
mod gpu;
#[cfg(any(feature = "sm90", feature = "sm100"))]
mod library;
#[cfg(any(not(feature = "sm90"), test))]
mod off;
#[cfg(any(feature = "sm90", feature = "sm100"))]
pub mod raw;

#[cfg(any(feature = "sm90", feature = "sm100"))]
pub use cuda::Cuda;
pub use gpu::{ARCHITECTURES, Gpu, present_gpu};

/// The built-in prefill backends, to [choose from](mla_runtime::dispatch). Those of an architecture that
/// this build leaves out are listed as absent, so that a refusal names the feature.
#[cfg(feature = "sm90")]
pub type PrefillBackends = mla_runtime::backends![flash_attn::FlashAttn];

/// The built-in decode backends, to [choose from](mla_runtime::dispatch). Those of an architecture that
/// this build leaves out are listed as absent, so that a refusal names the feature.
#[cfg(feature = "sm90")]
pub type DecodeBackends = mla_runtime::backends![flash_mla::FlashMla];

/// The built-in prefill backends, to [choose from](mla_runtime::dispatch): this build leaves them out,
/// and a refusal names the feature.
#[cfg(not(feature = "sm90"))]
pub type PrefillBackends = mla_runtime::dispatch::Without<off::NoFlashAttn, ()>;

/// The built-in decode backends, to [choose from](mla_runtime::dispatch): this build leaves them out,
/// and a refusal names the feature.
#[cfg(not(feature = "sm90"))]
pub type DecodeBackends = mla_runtime::dispatch::Without<off::NoFlashMla, ()>;

// Its examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/engine.md")]
struct EngineGuide;
