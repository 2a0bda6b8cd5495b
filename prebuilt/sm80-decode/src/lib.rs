//! The decode kernels of mla-kernels' family `sm80`, compiled; `mla-kernels-sm80` has the others.
//!
//! mla-kernels takes them in its build script if its sources are those that they were made of, and
//! then needs neither nvcc nor CUTLASS. In a checkout there are none before `cargo xtask release`
//! makes them, and the kernels are compiled. NOTICE says what they contain.

/// The folder of the objects, as `mla_build::Kernels::prebuilt` takes it.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/objects");
