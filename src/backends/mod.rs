//! The built-in backends, in a folder for each family of kernels.
//!
//! A family is compiled together. It has a Cargo feature that turns on `gpu`, a list of targets for
//! nvcc, a folder here and a folder below `cuda`. If its feature is off, its backends stay in the
//! lists and in every registry, with the same constraints. The feature is then given as the reason
//! why they cannot run: `#[mla_backend(feature = "…")]` sees to that.

use mla_runtime::spec::CompiledFamily;

// Modules that the backends share.
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "which of it a build uses depends on its families")]
mod absorbed;
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "as above")]
mod expanded;
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "as above")]
#[allow(
    unreachable_pub,
    reason = "the types of backends are public, and name the state"
)]
mod kernel;
pub mod sm100;
pub mod sm80;
pub mod sm90;
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "as above")]
mod sparse;
mod template;

/// Defines the lists to which each family adds.
macro_rules! families {
    ($($family:ident $feature:literal $targets:ident,)+) => {
        /// The families that this build compiled, and their targets.
        pub const FAMILIES: &[CompiledFamily] = &[$(
            #[cfg(feature = $feature)]
            CompiledFamily { name: $feature, targets: crate::raw::compiled::$targets },
        )+];

        /// The Cargo features that compile one family each, whether they are on or off.
        pub const FAMILY_FEATURES: &[&str] = &[$($feature),+];

        /// The built-in prefill backends, to [choose from](mla_runtime::dispatch). A backend of a
        /// family that this build leaves out is listed as absent, so that a refusal names the
        /// feature.
        pub type PrefillBackends = families!(Prefill $($family)+);

        /// The built-in decode backends, to [choose from](mla_runtime::dispatch). A backend of a
        /// family that this build leaves out is listed as absent, so that a refusal names the
        /// feature.
        pub type DecodeBackends = families!(Decode $($family)+);
    };
    ($list:ident $family:ident $($rest:ident)*) => {
        $family::$list<families!($list $($rest)*)>
    };
    ($list:ident) => { () };
}

families! {
    sm80 "sm80" SM80,
    sm90 "sm90" SM90,
    sm100 "sm100" SM100,
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::FAMILY_FEATURES;

    #[test]
    fn a_family_is_a_feature_that_turns_on_gpu_and_a_folder() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
        let features = manifest
            .lines()
            .filter_map(|line| line.split_once(" = [\"gpu\""));
        let features: Vec<_> = features.map(|(name, _)| name).collect();
        assert_eq!(features, FAMILY_FEATURES);
        let entries = fs::read_dir(root.join("src/backends")).unwrap();
        let folders = entries
            .map(|it| it.unwrap().path())
            .filter(|it| it.is_dir());
        let mut folders: Vec<_> = folders
            .map(|it| it.file_name().unwrap().to_owned())
            .collect();
        let mut families = FAMILY_FEATURES.to_vec();
        families.sort_unstable();
        folders.sort_unstable();
        assert_eq!(folders, families);
    }
}
