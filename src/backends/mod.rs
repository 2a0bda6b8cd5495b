//! The built-in backends, in a folder for each family of kernels.
//!
//! A family is what is compiled together: a Cargo feature that turns on `gpu`, the targets that
//! nvcc compiles its sources for, a folder here and one below `cuda`. `build.rs` reads the features
//! and writes what is included below: each family's module, and the lists of all backends, to which
//! a family's `Prefill` and `Decode` add its own. With its feature off, its backends stay in the
//! lists and in every registry, with the same constraints and the feature as the reason why they
//! cannot run: `#[mla_backend(feature = "…")]` sees to that.

use mla_runtime::kernels::CompiledFamily;

// Modules that the backends share.
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "which of it a build uses depends on its families")]
#[allow(
    unreachable_pub,
    reason = "the types of backends are public, and name the state"
)]
mod absorbed;
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "as above")]
mod expanded;
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "as above")]
mod sparse;
mod template;
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "as above")]
mod workspace;

include!(concat!(env!("OUT_DIR"), "/families.rs"));
