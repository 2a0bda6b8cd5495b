//! The reasons why a backend cannot run here at all.

use super::family::{self, CompiledFamily, write_feature};
use crate::spec::Target;
use crate::text::{self, Text, list};

/// The reason why a backend cannot run, whatever the problem is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The backend is known by name, but this version has no implementation of it.
    NotBuilt,
    /// The backend is known by name, but its kernels need something that none of these crates
    /// contains.
    Needs(&'static str),
    /// The backend is known by name only. Backends of mla-kernels compute the same.
    Instead(&'static str),
    /// A crate has an implementation, but it is not linked into the program.
    NotLinked(&'static str),
    /// The name is reserved for third-party backends, and none was registered.
    NotRegistered,
    /// The Cargo feature that compiles the backend is off.
    FeatureOff {
        /// The crate whose feature it is.
        package: &'static str,
        /// The feature.
        feature: &'static str,
    },
    /// Several Cargo features compile the backend, each for other devices. All of them are off.
    FeaturesOff {
        /// The crate whose features they are.
        package: &'static str,
        /// The features. One of them is enough.
        features: &'static [&'static str],
    },
    /// The machine has no driver for the backend's kind of device.
    NoDriver,
    /// There is a driver, but no device.
    NoDevice,
    /// A library that the backend loads at run time is missing.
    LibraryMissing(&'static str),
    /// A library that the backend loads at run time has a version that the backend does not
    /// support.
    LibraryVersion {
        /// The library.
        library: &'static str,
        /// Major, minor and patch number of the library that was found.
        given: [u32; 3],
        /// The supported versions, such as `9.25 and up`.
        accepted: &'static str,
    },
    /// The driver is older than the CUDA version that compiled the kernels.
    DriverVersion {
        /// Major and minor number of the driver's CUDA version.
        given: [u32; 2],
        /// Major and minor number of the first CUDA version whose driver runs the kernels.
        accepted: [u32; 2],
        /// The name of that first driver, such as `R580`, if it is known.
        driver: Option<&'static str>,
    },
    /// No family of the backend's kernels has code in this build that runs on the GPU.
    CompiledFor(&'static [CompiledFamily]),
    /// Neither the backend's attribute nor a build script lists the targets of its kernels, and the
    /// backend was not asked for by name.
    TargetsUnsaid,
    /// The backend's tests have passed on no GPU that runs the same code, and the backend was not
    /// asked for by name.
    NeverRun,
}

impl Cause {
    /// Returns true if the cause depends on the machine and not on the build. In a dry run for
    /// another machine, such a cause is no reason against the backend.
    pub const fn is_local(self) -> bool {
        matches!(
            self,
            Self::NoDriver
                | Self::NoDevice
                | Self::LibraryMissing(_)
                | Self::LibraryVersion { .. }
                | Self::DriverVersion { .. }
        )
    }

    /// Returns a description of the step that would remove the cause.
    pub fn remedy(self) -> String {
        Remedy(self).to_string()
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::NotBuilt => text.push("not built in this version"),
            Self::Needs(what) => text.parts(&["not built: it needs ", what]),
            Self::Instead(backends) => {
                text.parts(&["not built here: in its place mla-kernels has ", backends]);
            }
            Self::NotLinked(package) => {
                text.parts(&["not linked: the crate ", package, " has it"]);
            }
            Self::NotRegistered => text.push("no backend registered under this name"),
            Self::FeatureOff { package, feature } => {
                text.parts(&["feature `", feature, "` of ", package, " is off"]);
            }
            Self::FeaturesOff { package, features } => {
                text.push("none of the features ");
                list!(features, text, |name| text.parts(&["`", name, "`"]));
                text.parts(&[" of ", package, " is on"]);
            }
            Self::NoDriver => text.push("no driver on this machine"),
            Self::NoDevice => text.push("no device on this machine"),
            Self::LibraryMissing(library) => text.parts(&["library ", library, " is missing"]),
            Self::LibraryVersion {
                library,
                given: [major, minor, patch],
                accepted,
            } => {
                text.parts(&["library ", library, ": given "]);
                write_release([major, minor], text);
                text.push(".");
                text.number(patch);
                text.parts(&[", accepted ", accepted]);
            }
            Self::DriverVersion {
                given,
                accepted,
                driver,
            } => {
                text.push("driver: given one of CUDA ");
                write_release(given, text);
                text.push(", accepted one of ");
                write_driver(accepted, driver, text);
            }
            Self::CompiledFor(families) => {
                text.push("compiled for: ");
                family::write_targets(families, text);
            }
            Self::TargetsUnsaid => text.push("nothing says what its kernels are compiled for"),
            Self::NeverRun => text.push("its code for this GPU has run on none yet"),
        }
    }

    pub(crate) const fn write_remedy(self, text: &mut Text<'_>) {
        match self {
            Self::NotBuilt | Self::Needs(_) => {
                text.push("choose a backend that this version implements");
            }
            Self::Instead(_) => text.push("ask for that by its name, or for none"),
            Self::NotLinked(package) => {
                text.parts(&[
                    "depend on ",
                    package,
                    ", for a GPU with the feature of its family",
                ]);
                text.push(", and name it in the program");
            }
            Self::NotRegistered => text.push(
                "link a backend crate (`use its_crate as _;`) or add its ENTRY to the registry",
            ),
            Self::FeatureOff { feature, .. } => write_feature(feature, text),
            Self::FeaturesOff { features, .. } => {
                text.push("build with `--features` and one of these: ");
                list!(features, text, |name| text.push(name));
            }
            Self::NoDriver => text.push("install the driver"),
            Self::NoDevice => text.push("run on a machine with such a device"),
            Self::LibraryVersion {
                library, accepted, ..
            } => {
                let place = " where the loader finds it first";
                text.parts(&["install ", library, " ", accepted, place]);
            }
            Self::DriverVersion {
                accepted, driver, ..
            } => {
                text.push("install a driver of ");
                write_driver(accepted, driver, text);
                text.push(", or compile the kernels with an older CUDA");
            }
            Self::LibraryMissing(library) => {
                text.parts(&["install ", library, " where the loader finds it"]);
            }
            Self::CompiledFor(families) => {
                if !family::write_remedy(families, text) {
                    text.push("choose a backend with kernels for this GPU");
                }
            }
            Self::TargetsUnsaid => {
                text.push("say it by the key `compiled`, or ask for the backend by name");
            }
            Self::NeverRun => text.push("ask for it by name, and compare its results"),
        }
    }
}

const fn write_release([major, minor]: [u32; 2], text: &mut Text<'_>) {
    text.number(major);
    text.push(".");
    text.number(minor);
}

// Writes the first driver that runs kernels of a CUDA release.
const fn write_driver(release: [u32; 2], driver: Option<&str>, text: &mut Text<'_>) {
    text.push("CUDA ");
    write_release(release, text);
    text.push(" or later");
    if let Some(driver) = driver {
        text.parts(&[" (", driver, " or later)"]);
    }
}

// The remedy of a cause, as a type with `Display`.
struct Remedy(Cause);

impl Remedy {
    const fn write(&self, text: &mut Text<'_>) {
        self.0.write_remedy(text);
    }
}

text::display!(Cause, Remedy);

/// The availability for `target`. A cause that depends on this machine counts only if `target` is
/// present here. Usable in constants.
pub(crate) const fn on(here: Result<(), Cause>, target: Target) -> Result<(), Cause> {
    match here {
        Err(cause) if !target.present && cause.is_local() => Ok(()),
        _ => here,
    }
}

/// The first error of the two, if there is one. Usable in constants.
pub(crate) const fn both(one: Result<(), Cause>, other: Result<(), Cause>) -> Result<(), Cause> {
    match one {
        Err(_) => one,
        Ok(()) => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_of_which_one_is_enough_are_all_named() {
        let cause = Cause::FeaturesOff {
            package: "some-kernels",
            features: &["sm80", "sm90"],
        };
        assert_eq!(
            cause.to_string(),
            "none of the features `sm80`, `sm90` of some-kernels is on"
        );
        assert_eq!(
            cause.remedy(),
            "build with `--features` and one of these: sm80, sm90"
        );
        assert!(!cause.is_local());
    }

    #[test]
    fn a_driver_that_is_too_old_is_told_with_the_one_that_is_needed() {
        let cause = |driver| Cause::DriverVersion {
            given: [12, 9],
            accepted: [13, 0],
            driver,
        };
        assert_eq!(
            cause(Some("R580")).to_string(),
            "driver: given one of CUDA 12.9, accepted one of CUDA 13.0 or later (R580 or later)"
        );
        assert_eq!(
            cause(None).remedy(),
            "install a driver of CUDA 13.0 or later, or compile the kernels with an older CUDA"
        );
        // Another machine's driver is not known.
        assert!(cause(None).is_local());
    }

    #[test]
    fn a_refused_version_is_named_with_its_number() {
        let cause = Cause::LibraryVersion {
            library: "cudnn",
            given: [9, 14, 0],
            accepted: "9.25 and up",
        };
        assert_eq!(
            cause.to_string(),
            "library cudnn: given 9.14.0, accepted 9.25 and up"
        );
        assert_eq!(
            cause.remedy(),
            "install cudnn 9.25 and up where the loader finds it first"
        );
        assert!(cause.is_local());
    }
}
