#![doc = include_str!("../docs/engine.md")]
//!
//! # Features
//!
//! Each family of kernels has a feature: `sm80` runs on every GPU since Ampere, `sm90` on Hopper,
//! `sm100` on Blackwell. [`backends`] lists them all. Each of these features turns on `gpu`, the
//! GPU device. `gpu` can also be used alone, for kernels of your own. With no feature, nothing here
//! needs CUDA, and [`present_gpu`] says so. `raw` is the C interface in Rust, `cpu` the CPU device,
//! `conformance` the tests of a backend, `nccl` layers over several GPUs, `nvtx` ranges for a
//! profiler.

pub mod backends;
#[cfg(all(feature = "nccl", feature = "gpu"))]
pub mod context_parallel;
#[cfg(feature = "gpu")]
pub mod decode_graph;
#[cfg(feature = "gpu")]
pub mod device;
#[cfg(any(feature = "gpu", test))]
mod drivers;
mod gpu;
#[cfg(feature = "gpu")]
mod library;
#[cfg(all(feature = "gpu", feature = "raw"))]
pub mod raw;
#[cfg(all(feature = "gpu", not(feature = "raw")))]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the feature `raw` shows all of it"
)]
mod raw;

pub use backends::{DecodeBackends, FAMILIES, FAMILY_FEATURES, PrefillBackends};
#[cfg(feature = "gpu")]
pub use device::Cuda;
pub use gpu::{Gpu, present_gpu};
#[cfg(feature = "conformance")]
pub use mla_conformance as conformance;
#[cfg(feature = "cpu")]
pub use mla_cpu as cpu;

pub use mla_runtime as runtime;
pub use mla_runtime::prelude;
pub use mla_runtime::{Error, Result, mla_backend};
