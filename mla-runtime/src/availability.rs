//! Whether a backend can run here at all, and if not, why.

use std::fmt;

/// Why a backend cannot run, whatever the problem.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The backend is known by name, but this version has no implementation of it.
    NotBuilt,
    /// The name is kept for backends from elsewhere, and none was registered.
    NotRegistered,
    /// The Cargo feature that compiles it is off.
    FeatureOff(&'static str),
    /// The machine has no driver for its kind of device.
    NoDriver,
    /// There is a driver, but no device.
    NoDevice,
    /// A library that it loads at run time is missing.
    LibraryMissing(&'static str),
}

impl Cause {
    /// Whether it depends on the machine rather than on the build: then it does not speak against
    /// the backend in a dry run for another machine.
    pub const fn is_local(self) -> bool {
        matches!(
            self,
            Self::NoDriver | Self::NoDevice | Self::LibraryMissing(_)
        )
    }

    /// What would remove the cause.
    pub fn remedy(self) -> String {
        match self {
            Self::NotBuilt => "choose a backend that this version implements".to_owned(),
            Self::NotRegistered => {
                "link a backend crate (`use its_crate as _;`) or add its ENTRY to the registry"
                    .to_owned()
            }
            Self::FeatureOff(feature) => format!("build with `--features {feature}`"),
            Self::NoDriver => "install the driver".to_owned(),
            Self::NoDevice => "run on a machine with such a device".to_owned(),
            Self::LibraryMissing(library) => format!("install {library} where the loader finds it"),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => f.write_str("not built in this version"),
            Self::NotRegistered => f.write_str("no backend registered under this name"),
            Self::FeatureOff(feature) => write!(f, "feature `{feature}` is off"),
            Self::NoDriver => f.write_str("no driver on this machine"),
            Self::NoDevice => f.write_str("no device on this machine"),
            Self::LibraryMissing(library) => write!(f, "library {library} is missing"),
        }
    }
}

/// Whether a backend can run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Availability {
    /// It can.
    Available,
    /// It cannot.
    Unavailable(Cause),
}
