//! Backend selection, step planning and the layer of Multi-head Latent Attention (MLA), for any
//! device.
//!
//! This crate contains no kernels and no GPU code. Backends come from other crates: `mla-kernels`
//! has the backends for NVIDIA GPUs and re-exports this crate as `mla_kernels::runtime`; `mla-cpu`
//! has the backends for processors. An engine depends on `mla-kernels`. The first page of that
//! crate is the guide, with a whole program. A crate with kernels of its own depends on this crate.
//!
//! # Where to look
//!
//! | to | see |
//! |---|---|
//! | read a model's configuration | [`model`] |
//! | describe the computation | [`spec::Problem`], [`backend::LayerConfig`] |
//! | choose backends, with the reasons | [`select`] |
//! | choose backends by type, at compile time | [`dispatch`] |
//! | run attention | [`layer::MlaLayer`] |
//! | describe a batch; plan its memory | [`batch`]; [`plan`] |
//! | choose the tokens that sparse attention reads | [`indexer`] |
//! | view an engine's tensors | [`tensor`] |
//! | add a backend | [`macro@mla_backend`], [`backend`], and [`spec`] for what it declares |
//! | add a device | [`device`] |
//!
//! # Letters in shapes
//!
//! Shapes are written with the slowest axis first. L is the width of the latent. P, R and V are
//! widths of one head: P of its key part without rotary embedding, R of its rotary part, V of its
//! value ([`model::MlaDims`]). H is the number of query heads, T the number of new tokens in a
//! step, and B the number of requests. A cache row has L + R values.

// The attribute names this crate by an absolute path. This declaration makes the path valid inside
// the crate itself.
extern crate self as mla_runtime;

pub mod backend;
pub mod batch;
pub mod device;
pub mod dispatch;
mod error;
pub mod indexer;
pub mod layer;
pub mod model;
pub mod plan;
pub mod prelude;
pub mod room;
pub mod select;
mod setters;
pub mod spec;
mod suggestion;
pub mod tensor;
mod text;

pub use error::{Error, Result, named};
pub(crate) use error::{check_len, check_range};
pub use mla_macros::mla_backend;

/// An item that only this crate has. If the attribute's key `crate` names another crate, the
/// compiler's error quotes the name of this module.
#[doc(hidden)]
pub mod the_key_crate_has_to_name_mla_runtime {
    pub const FOUND: () = ();
}

/// Items that the attribute's expansion uses. They are not meant for direct use.
#[doc(hidden)]
pub mod private {
    pub use crate::spec::build::Build;
    pub use crate::{__build as build, __families as families, __link as link};
    pub use linkme;
}

/// The kernels of the package that is being compiled, as its build script describes them.
#[doc(hidden)]
#[macro_export]
macro_rules! __build {
    ($($feature:literal),*) => {
        $crate::private::Build::new(::core::option_env!("MLA_BUILD_COMPILED"), &[$($feature),*])
    };
}

/// The families of those kernels, as a constant.
#[doc(hidden)]
#[macro_export]
macro_rules! __families {
    ($($feature:literal),*) => {{
        const BUILD: $crate::private::Build = $crate::private::build!($($feature),*);
        const TARGETS: [&::core::primitive::str; BUILD.targets()] = BUILD.read_targets();
        const FAMILIES: [$crate::spec::CompiledFamily; BUILD.families()] =
            BUILD.read_families(&TARGETS);
        ::core::option::Option::Some(&FAMILIES)
    }};
}

/// Registers an entry of the registry through linkme. The attribute macro calls this macro and does
/// not emit linkme's own attribute. If this crate is not found, the compiler therefore reports only
/// that, and not a missing linkme too.
#[doc(hidden)]
#[macro_export]
macro_rules! __link {
    ($entry:expr) => {
        #[cfg(not(miri))]
        #[$crate::private::linkme::distributed_slice($crate::backend::LINKED)]
        #[linkme(crate = $crate::private::linkme)]
        static ENTRY: $crate::backend::Entry = $entry;
    };
}
