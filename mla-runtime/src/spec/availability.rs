//! The reasons for which a backend cannot run here at all.

use super::family::{self, CompiledFamily, write_feature};
use crate::spec::Target;
use crate::text::{self, Text};

/// The reason why a backend cannot run, whatever the problem.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The backend is known by name, but this version has no implementation of it.
    NotBuilt,
    /// The backend is known by name, but its kernels are to be had only with what no crate here
    /// brings along.
    Needs(&'static str),
    /// The backend is known by name, and backends of mla-kernels compute what it does.
    Instead(&'static str),
    /// A crate that has an implementation is not linked into the program.
    NotLinked(&'static str),
    /// The name is kept for backends from elsewhere, and none was registered.
    NotRegistered,
    /// The Cargo feature that compiles it is off.
    FeatureOff {
        /// The crate whose feature it is.
        package: &'static str,
        /// The feature.
        feature: &'static str,
    },
    /// No Cargo feature that compiles it, each for other devices, is on.
    FeaturesOff {
        /// The crate whose features they are.
        package: &'static str,
        /// The features, of which one is enough.
        features: &'static [&'static str],
    },
    /// The machine has no driver for its kind of device.
    NoDriver,
    /// There is a driver, but no device.
    NoDevice,
    /// A library that it loads at run time is missing.
    LibraryMissing(&'static str),
    /// A library that it loads at run time has a version that it does not take.
    LibraryVersion {
        /// The library.
        library: &'static str,
        /// Major, minor and patch of the one that was found.
        given: [u32; 3],
        /// The versions that it takes, such as `9.25 and up`.
        accepted: &'static str,
    },
    /// The driver is older than the CUDA that compiled the kernels.
    DriverVersion {
        /// Major and minor of the CUDA that the driver is of.
        given: [u32; 2],
        /// Major and minor of the first CUDA whose driver runs them.
        accepted: [u32; 2],
        /// Name of that driver, such as `R580`, if it is known.
        driver: Option<&'static str>,
    },
    /// None of the families of its kernels has code in this build that runs on the GPU.
    CompiledFor(&'static [CompiledFamily]),
    /// Neither its attribute nor a build script says what its kernels are compiled for, and it was
    /// not asked for by name.
    TargetsUnsaid,
    /// Its tests have passed on no GPU yet that takes the same code, and it was not asked for by
    /// name.
    NeverRun,
}

impl Cause {
    /// Returns true if it depends on the machine rather than on the build: then it does not speak
    /// against the backend in a dry run for another machine.
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

    /// Returns the step that would remove the cause.
    pub fn remedy(self) -> String {
        Remedy(self).to_string()
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::NotBuilt => text.push("not built in this version"),
            Self::Needs(what) => {
                text.push("not built: it needs ");
                text.push(what);
            }
            Self::Instead(backends) => {
                text.push("not built here: in its place mla-kernels has ");
                text.push(backends);
            }
            Self::NotLinked(package) => {
                text.push("not linked: the crate ");
                text.push(package);
                text.push(" has it");
            }
            Self::NotRegistered => text.push("no backend registered under this name"),
            Self::FeatureOff { package, feature } => {
                text.push("feature `");
                text.push(feature);
                text.push("` of ");
                text.push(package);
                text.push(" is off");
            }
            Self::FeaturesOff { package, features } => {
                text.push("none of the features ");
                write_list(features, "`", text);
                text.push(" of ");
                text.push(package);
                text.push(" is on");
            }
            Self::NoDriver => text.push("no driver on this machine"),
            Self::NoDevice => text.push("no device on this machine"),
            Self::LibraryMissing(library) => {
                text.push("library ");
                text.push(library);
                text.push(" is missing");
            }
            Self::LibraryVersion {
                library,
                given: [major, minor, patch],
                accepted,
            } => {
                text.push("library ");
                text.push(library);
                text.push(": given ");
                text.number(major);
                text.push(".");
                text.number(minor);
                text.push(".");
                text.number(patch);
                text.push(", accepted ");
                text.push(accepted);
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
                text.push("depend on ");
                text.push(package);
                text.push(", for a GPU with the feature of its family, and name it in the program");
            }
            Self::NotRegistered => text.push(
                "link a backend crate (`use its_crate as _;`) or add its ENTRY to the registry",
            ),
            Self::FeatureOff { feature, .. } => write_feature(feature, text),
            Self::FeaturesOff { features, .. } => {
                text.push("build with `--features` and one of these: ");
                write_list(features, "", text);
            }
            Self::NoDriver => text.push("install the driver"),
            Self::NoDevice => text.push("run on a machine with such a device"),
            Self::LibraryVersion {
                library, accepted, ..
            } => {
                text.push("install ");
                text.push(library);
                text.push(" ");
                text.push(accepted);
                text.push(" where the loader finds it first");
            }
            Self::DriverVersion {
                accepted, driver, ..
            } => {
                text.push("install a driver of ");
                write_driver(accepted, driver, text);
                text.push(", or compile the kernels with an older CUDA");
            }
            Self::LibraryMissing(library) => {
                text.push("install ");
                text.push(library);
                text.push(" where the loader finds it");
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

// The first driver that runs kernels of a release of CUDA.
const fn write_driver(release: [u32; 2], driver: Option<&str>, text: &mut Text<'_>) {
    text.push("CUDA ");
    write_release(release, text);
    text.push(" or later");
    if let Some(driver) = driver {
        text.push(" (");
        text.push(driver);
        text.push(" or later)");
    }
}

// Each between two marks, with commas.
const fn write_list(names: &[&str], mark: &str, text: &mut Text<'_>) {
    let mut i = 0;
    while i < names.len() {
        text.comma(i);
        text.push(mark);
        text.push(names[i]);
        text.push(mark);
        i += 1;
    }
}

// The remedy as something to show.
struct Remedy(Cause);

impl Remedy {
    const fn write(&self, text: &mut Text<'_>) {
        self.0.write_remedy(text);
    }
}

text::display!(Cause, Remedy);

/// The availability for `target`: a part that this machine lacks is a reason against a backend only
/// if the backend has to run here. Usable in constants.
pub(crate) const fn on(here: Result<(), Cause>, target: Target) -> Result<(), Cause> {
    match here {
        Err(cause) if !target.present && cause.is_local() => Ok(()),
        _ => here,
    }
}

/// The first of two causes, if there is one. Usable in constants.
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
