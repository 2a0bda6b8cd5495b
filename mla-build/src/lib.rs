//! Compiles CUDA kernels from a Cargo build script: nvcc for the sources, bindgen for the header,
//! one static library at the end.
//!
//! ```no_run
//! fn main() -> Result<(), mla_build::Error> {
//!     mla_build::Kernels::new()
//!         .sources("cuda/**/*.cu")
//!         .header("cuda/include/mla.h")
//!         .compile("mla")?;
//!     Ok(())
//! }
//! ```
//!
//! An object is compiled once and kept in a cache of the user. Its key depends on what the object
//! is made of, but not on the place or the time. Other checkouts, profiles and target folders
//! therefore find it. Start with [`Kernels`]. `docs/kernel-build.md` tells how a build works.

#[cfg(feature = "bindings")]
mod bindings;
mod bounded;
#[cfg(feature = "budget")]
pub mod budget;
mod build;
mod cache;
mod clangd;
pub mod code;
mod compiled;
mod compiler;
mod depfile;
mod diagnostic;
mod error;
mod exposure;
mod family;
mod fatbin;
mod flags;
mod headers;
mod include_root;
mod kernels;
mod memory;
mod process;
pub mod progress;
mod ptxas;
pub mod report;
mod roles;
mod schedule;
mod shell;
mod symbols;
mod target;
pub mod toolkit;
mod unit;
mod variables;
mod version;
mod work_folder;

pub use build::Built;
pub use diagnostic::{FailedUnit, FailedUnits};
pub use error::Error;
pub use family::Family;
pub use kernels::Kernels;
pub use toolkit::{Checkout, Wheel};
