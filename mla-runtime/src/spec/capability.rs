//! The hardware that a backend runs on, and the hardware that a selection is made for.

use std::str::FromStr;

use crate::Error;
use crate::text::{self, Text, names};

names! {
    /// The kind of device whose memory a backend reads.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub enum Platform {
        /// The host's processor.
        Cpu = "cpu",
        /// An NVIDIA GPU.
        Cuda = "cuda",
        /// An AMD GPU.
        Rocm = "rocm",
    }
}

impl Platform {
    /// Returns true if both are equal. Usable in constants.
    pub const fn same(self, other: Self) -> bool {
        self as u8 == other as u8
    }
}

/// A compute capability, such as 9.0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Capability {
    /// The generation: 9 for Hopper, 10 for Blackwell.
    pub major: u8,
    /// The variant within the generation: 0 to 9.
    pub minor: u8,
}

impl Capability {
    /// `major.minor`.
    pub const fn new(major: u8, minor: u8) -> Self {
        Self { major, minor }
    }

    pub(crate) const fn number(self) -> u16 {
        self.major as u16 * 10 + self.minor as u16
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        text.number(self.major as u32);
        text.push(".");
        text.number(self.minor as u32);
    }
}

text::display!(Capability, CapabilityMatch, Target);

/// Reads `9.0`, or `90` as the attribute writes it.
impl FromStr for Capability {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || {
            let accepted = "a compute capability such as 9.0, 10.3 or 90";
            Error::argument("sm", format_args!("{text:?}"), accepted)
        };
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        let (major, minor) = match text.split_once('.') {
            Some(parts) => parts,
            None if text.is_ascii() && text.len() >= 2 => text.split_at(text.len() - 1),
            None => return Err(error()),
        };
        if !digits(major) || !digits(minor) || minor.len() != 1 || major.starts_with('0') {
            return Err(error());
        }
        match (major.parse(), minor.parse()) {
            (Ok(major), Ok(minor)) => Ok(Self { major, minor }),
            _ => Err(error()),
        }
    }
}

/// A set of capabilities, as an item of the attribute's key `sm` describes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CapabilityMatch {
    /// `any`: every capability, even an unknown one.
    Any,
    /// `90`: only this capability.
    Exact(Capability),
    /// `10x`: every capability of this generation.
    Family(u8),
    /// This capability and the later ones of its generation, such as 8.6 to 8.9. Machine code for
    /// 8.6 runs on these.
    FamilyFrom(Capability),
    /// `80+`: this one and every later one.
    Floor(Capability),
}

impl CapabilityMatch {
    /// Returns true if `capability` is in the set.
    pub const fn accepts(self, capability: Capability) -> bool {
        let (first, last) = self.bounds();
        first <= capability.number() && capability.number() <= last
    }

    /// The numbers of the first and the last capability in the set.
    pub(crate) const fn bounds(self) -> (u16, u16) {
        match self {
            Self::Any => (0, u16::MAX),
            Self::Exact(only) => (only.number(), only.number()),
            Self::Family(major) => (major as u16 * 10, major as u16 * 10 + 9),
            Self::FamilyFrom(min) => (min.number(), min.major as u16 * 10 + 9),
            Self::Floor(min) => (min.number(), u16::MAX),
        }
    }

    /// Returns true if some capability is in both sets.
    pub(crate) const fn overlaps(self, other: Self) -> bool {
        let ((first, last), (from, to)) = (self.bounds(), other.bounds());
        first <= to && from <= last
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        match self {
            Self::Any => text.push("any"),
            Self::Exact(capability) => capability.write(text),
            Self::Family(major) => {
                text.number(major as u32);
                text.push(".x");
            }
            Self::FamilyFrom(min) => {
                min.write(text);
                text.push(" to ");
                Capability::new(min.major, 9).write(text);
            }
            Self::Floor(capability) => {
                capability.write(text);
                text.push("+");
            }
        }
    }
}

/// The hardware a selection is made for. It need not be present: a selection for another GPU is a
/// dry run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Target {
    /// The kind of device.
    pub platform: Platform,
    /// Its compute capability; `None` on a processor, or if the driver did not say.
    pub capability: Option<Capability>,
    /// True if this machine has the hardware. A missing driver or device counts against a backend
    /// only if this is true.
    pub present: bool,
}

impl Target {
    /// The processor of this machine.
    pub const CPU: Self = Self {
        platform: Platform::Cpu,
        capability: None,
        present: true,
    };

    /// An NVIDIA GPU of this capability. This machine need not have one.
    pub const fn dry_run(capability: Capability) -> Self {
        Self {
            platform: Platform::Cuda,
            capability: Some(capability),
            present: false,
        }
    }

    /// The NVIDIA GPU of this machine.
    pub const fn present_gpu(capability: Capability) -> Self {
        Self {
            platform: Platform::Cuda,
            capability: Some(capability),
            present: true,
        }
    }

    pub(crate) const fn write(self, text: &mut Text<'_>) {
        match (self.platform, self.capability) {
            (Platform::Cuda, Some(capability)) => {
                text.push("sm ");
                capability.write(text);
            }
            (platform, _) => text.push(platform.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_strictly() {
        for (text, want) in [
            ("9.0", (9, 0)),
            ("90", (9, 0)),
            ("103", (10, 3)),
            ("12.0", (12, 0)),
        ] {
            let read: Capability = text.parse().unwrap();
            assert_eq!(read, Capability::new(want.0, want.1), "{text}");
        }
        for text in [
            "", "9", "9.", ".0", "9.00", "9.0\n", " 9.0", "+9.0", "9,0", "0.9", "٩.٠", "999.0",
            "sm90",
        ] {
            assert!(text.parse::<Capability>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn floors_and_families_follow_the_number() {
        let sm = Capability::new;
        assert!(CapabilityMatch::Floor(sm(8, 0)).accepts(sm(12, 0)));
        assert!(!CapabilityMatch::Floor(sm(9, 0)).accepts(sm(8, 9)));
        assert!(CapabilityMatch::Family(10).accepts(sm(10, 3)));
        assert!(!CapabilityMatch::Exact(sm(10, 0)).accepts(sm(10, 3)));
    }
}
