//! Multi-head Latent Attention kernels for NVIDIA GPUs, as backends of `mla-runtime`.
//!
//! A feature such as `sm90` compiles a family of kernels; [`backends`] has them all. Each turns on `gpu`,
//! the GPU device, which can also be had alone, for kernels of your own. With no feature, nothing here
//! needs CUDA, and [`present_gpu`] says so.

pub mod backends;
#[cfg(all(feature = "nccl", feature = "gpu"))]
pub mod context_parallel;
#[cfg(feature = "gpu")]
pub mod decode_graph;
#[cfg(feature = "gpu")]
pub mod device;
mod gpu;
#[cfg(feature = "gpu")]
mod library;
#[cfg(feature = "gpu")]
pub mod raw;

pub use backends::{DecodeBackends, FAMILIES, PrefillBackends};
#[cfg(feature = "gpu")]
pub use device::Cuda;
pub use gpu::{Gpu, present_gpu};
#[cfg(feature = "conformance")]
pub use mla_conformance as conformance;
#[cfg(feature = "cpu")]
pub use mla_cpu as cpu;

// Its examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/engine.md")]
struct EngineGuide;
