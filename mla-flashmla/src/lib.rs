//! DeepSeek's FlashMLA as a backend of `mla-runtime`: FLASHMLA, dense decode on Hopper.
//!
//! A program that depends on this crate and names it (`use mla_flashmla as _;`) has it in every
//! registry. The feature `sm90` compiles it. The kernels are FlashMLA's own, from a checkout of one
//! commit that `MLA_CHECKOUT_FLASHMLA` names. This crate does not contain them; it adds the C
//! interface in `kernels` and the code between FlashMLA's conventions and `mla-runtime`'s.
//!
//! FlashMLA launches its kernels as programmatic dependents and does not wait in them. The backend
//! therefore does not declare `dependent_launch`, and each call has a fence before and after it. A
//! program that calls it without a stage must add the fences itself, as [`mla_runtime::backend`]
//! says.
//!
//! The backend has not run on a GPU yet, so it is only chosen by name. This command runs its tests
//! on a Hopper GPU, with a checkout and the toolkit:
//!
//! ```text
//! cargo test --release --package mla-flashmla --features sm90,mla-kernels/sm90 \
//!     -- --include-ignored
//! ```

mod decode;
#[cfg(feature = "sm90")]
mod rows;
#[cfg(feature = "sm90")]
mod status;

use mla_runtime::spec::Run;

pub use decode::FlashMla;

/// The C interface, as bindgen wraps it.
#[cfg(feature = "sm90")]
#[allow(
    missing_docs,
    dead_code,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod ffi {
    include!(concat!(env!("OUT_DIR"), "/flashmla.rs"));
}

/// The targets that this build compiled the kernels for.
#[cfg(feature = "sm90")]
pub mod compiled {
    include!(concat!(env!("OUT_DIR"), "/flashmla_compiled.rs"));
}

/// No GPU yet.
const RUN_ON: &[Run] = &[];
