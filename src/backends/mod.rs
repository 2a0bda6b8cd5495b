//! The built-in backends, in a folder for each family of kernels.
//!
//! A family is what is compiled together: a Cargo feature, the targets that nvcc compiles its sources for, a folder
//! here and one below `cuda`. Another one is such a folder, a line in `Cargo.toml` and in `build.rs`, and a row in
//! the table of this file. With its feature off, its backends stay in the lists and in every registry, with the
//! same constraints and the feature as the reason why they cannot run: `#[mla_backend(feature = "…")]` sees to
//! that.

use mla_runtime::kernels::Family;

// What backends share; which of it a build uses depends on its families.
#[cfg(feature = "gpu")]
#[allow(dead_code, unreachable_pub)]
mod absorbed;
#[cfg(feature = "gpu")]
#[allow(dead_code)]
mod expanded;
pub mod sm80;
pub mod sm90;
#[cfg(feature = "gpu")]
#[allow(dead_code)]
mod sparse;
mod template;
#[cfg(feature = "gpu")]
#[allow(dead_code)]
mod workspace;

/// Writes what each family adds to.
macro_rules! families {
    ($(
        $feature:literal, $targets:ident, $family:ident {
            prefill: [$($prefill:ident),*], decode: [$($decode:ident),*]
        }
    )*) => {
        /// The families that this build compiled, and their targets.
        pub const FAMILIES: &[Family] = &[$(
            #[cfg(feature = $feature)]
            Family {
                name: $feature,
                targets: crate::raw::compiled::$targets,
            },
        )*];

        /// The built-in prefill backends, to [choose from](mla_runtime::dispatch). Those of a family that this
        /// build leaves out are absent ones, so that a refusal names the feature.
        pub type PrefillBackends = mla_runtime::backends![$($($family::$prefill,)*)*];

        /// The built-in decode backends, to [choose from](mla_runtime::dispatch). Those of a family that this
        /// build leaves out are absent ones, so that a refusal names the feature.
        pub type DecodeBackends = mla_runtime::backends![$($($family::$decode,)*)*];
    };
}

families! {
    "sm80", SM80, sm80 { prefill: [MmaAttn], decode: [MmaMla, MmaMlaDs, MmaMlaSparse] }
    "sm90", SM90, sm90 { prefill: [FlashAttn], decode: [FlashMla, FlashMlaSparse] }
    "sm100", SM100, sm100 { prefill: [], decode: [] }
}
