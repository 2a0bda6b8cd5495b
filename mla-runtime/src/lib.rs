//! Selection, planning and the layer of Multi-head Latent Attention (MLA), for any device.

// The attribute names this crate by an absolute path; so can this crate itself.
extern crate self as mla_runtime;

pub mod backend;
pub mod batch;
pub mod device;
pub mod dispatch;
pub mod error;
mod facts;
pub mod indexer;
pub mod layer;
pub mod plan;
pub mod prelude;
mod rules;
mod select;
mod setters;
mod suggestion;
mod text;
mod views;

// The folders are for those who read the source; a user finds each module here.
pub use facts::{capability, dims, dtype, feature, kv_format, model};
pub use rules::{availability, kernels, problem, reason, spec};
pub use select::{explain, known, registry, selection};
pub use views::{cache, host, lse, rotary, tensor};

pub use error::{Error, Result};
pub use mla_macros::mla_backend;

/// What only this crate has: where the attribute's `crate` names another, the compiler's error says
/// so.
#[doc(hidden)]
pub mod the_key_crate_has_to_name_mla_runtime {
    pub const FOUND: () = ();
}

/// What the attribute's expansion names; not for use by hand.
#[doc(hidden)]
pub mod private {
    pub use crate::rules::build::Build;
    pub use crate::{__build as build, __families as families, __link as link};
    pub use linkme;
}

/// What the build script of the package that is being compiled says of its kernels.
#[doc(hidden)]
#[macro_export]
macro_rules! __build {
    ($($feature:literal),*) => {
        $crate::private::Build::new(::core::option_env!("MLA_BUILD_COMPILED"), &[$($feature),*])
    };
}

/// The same as families, for a constant.
#[doc(hidden)]
#[macro_export]
macro_rules! __families {
    ($($feature:literal),*) => {{
        const BUILD: $crate::private::Build = $crate::private::build!($($feature),*);
        const TARGETS: [&::core::primitive::str; BUILD.targets()] = BUILD.read_targets();
        const FAMILIES: [$crate::kernels::CompiledFamily; BUILD.families()] = BUILD.read_families(&TARGETS);
        BUILD.known(&FAMILIES)
    }};
}

/// The registry's entry of a backend. A macro of this crate names linkme, so that the attribute
/// needs no helper attribute of it, of which the compiler would complain too where it does not find
/// this crate.
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
