//! Multi-head Latent Attention kernels for NVIDIA GPUs, as backends of `mla-runtime`.
//!
//! The features `sm90` and `sm100` compile the kernels for an architecture and turn on `cuda`, the
//! GPU device. With neither, nothing here needs CUDA, and [`present_gpu`] says so.

#[cfg(any(feature = "sm90", feature = "sm100"))]
pub mod cuda;
#[cfg(feature = "sm90")]
pub mod flash_attn;
#[cfg(feature = "sm90")]
pub mod flash_mla;
mod gpu;
#[cfg(any(not(feature = "sm90"), test))]
mod off;
#[cfg(any(feature = "sm90", feature = "sm100"))]
pub mod raw;

#[cfg(any(feature = "sm90", feature = "sm100"))]
pub use cuda::Cuda;
pub use gpu::{Gpu, present_gpu};
