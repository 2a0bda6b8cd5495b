//! Sets of compute capabilities, as `sm` and `priority` name them.

use std::fmt;

use crate::errors::Fault;
use crate::key;
use crate::list::{self, Element, quoted};
use crate::number;

/// `major.minor` as one number, as in `90` or `103`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Capability {
    pub(crate) major: u8,
    pub(crate) minor: u8,
}

impl Capability {
    fn number(self) -> u16 {
        u16::from(self.major) * 10 + u16::from(self.minor)
    }
}

/// A set of capabilities: the runtime's `CapabilityMatch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Capabilities {
    Any,
    Exact(Capability),
    Family(u8),
    Floor(Capability),
}

impl Capabilities {
    // The least and the greatest number in the set.
    fn bounds(self) -> (u16, u16) {
        match self {
            Self::Any => (0, u16::MAX),
            Self::Exact(only) => (only.number(), only.number()),
            Self::Family(major) => (u16::from(major) * 10, u16::from(major) * 10 + 9),
            Self::Floor(least) => (least.number(), u16::MAX),
        }
    }

    /// Whether every capability of `other` is in this set.
    pub(crate) fn covers(self, other: Self) -> bool {
        let (least, most) = self.bounds();
        let (other_least, other_most) = other.bounds();
        least <= other_least && other_most <= most
    }

    /// Whether some capability is in both sets.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        let (least, most) = self.bounds();
        let (other_least, other_most) = other.bounds();
        least <= other_most && other_least <= most
    }
}

/// As the attribute writes it.
impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Exact(only) => write!(f, "{}", only.number()),
            Self::Family(major) => write!(f, "{major}x"),
            Self::Floor(least) => write!(f, "{}+", least.number()),
        }
    }
}

/// Reads `any`, `90`, `10x` or `80+`, also with a dot: `9.0`, `10.x`, `8.0+`.
pub(crate) fn read(text: &str) -> Option<Capabilities> {
    if text == "any" {
        return Some(Capabilities::Any);
    }
    if let Some(major) = text.strip_suffix(".x").or_else(|| text.strip_suffix('x')) {
        let major = number::read(major).filter(|major| *major > 0)?;
        return Some(Capabilities::Family(major));
    }
    match text.strip_suffix('+') {
        Some(least) => exact(least).map(Capabilities::Floor),
        None => exact(text).map(Capabilities::Exact),
    }
}

fn exact(text: &str) -> Option<Capability> {
    if !text.is_ascii() || text.len() < 2 {
        return None;
    }
    let (major, minor) = text.split_at(text.len() - 1);
    let major = number::read(major.strip_suffix('.').unwrap_or(major)).filter(|it| *it > 0)?;
    Some(Capability {
        major,
        minor: number::read(minor)?,
    })
}

/// The set that an element is.
pub(crate) fn parse(element: Element<'_>, accepted: &str) -> Result<Capabilities, Fault> {
    read(element.text).ok_or_else(|| element.fault(accepted).meant(meant(element.text)))
}

// The set meant by `sm_90`, `compute_90a`, `sm90`, `>=80`, `9`, `10X` and the like.
fn meant(text: &str) -> Option<Capabilities> {
    let lower = text.to_ascii_lowercase();
    if matches!(lower.as_str(), "all" | "any" | "*" | "cpu" | "none") {
        return Some(Capabilities::Any);
    }
    let bare = ["sm_", "sm", "compute_", "compute"]
        .iter()
        .find_map(|prefix| lower.strip_prefix(prefix))
        .unwrap_or(&lower);
    if let Some(least) = bare.strip_prefix(">=") {
        return exact(least.trim()).map(Capabilities::Floor);
    }
    let bare = bare.trim_end_matches(['a', 'f']);
    let letters = bare.replace('o', "0").replace('l', "1");
    read(bare)
        .or_else(|| read(&letters))
        .or_else(|| read(&bare.replace('*', "x")))
        .or_else(|| number::read(bare).map(Capabilities::Family))
        .filter(|set| *set != Capabilities::Family(0))
}

/// The value of `sm`.
pub(crate) fn sm(text: &str, faults: &mut Vec<Fault>) -> Vec<Capabilities> {
    let accepted = key::SM.accepted;
    let before = faults.len();
    let sets = list::distinct(text, accepted, faults, |element| parse(element, accepted));
    if faults.len() > before {
        return sets;
    }
    for (index, set) in sets.iter().enumerate() {
        let wider = sets
            .iter()
            .enumerate()
            .find(|(other, wider)| *other != index && wider.covers(*set));
        if let Some((_, wider)) = wider {
            faults.push(
                Fault::new(
                    format!("`{set}` beside `{wider}`, in {}", quoted(text)),
                    "each capability once",
                )
                .hint(format!("`{wider}` already includes `{set}`")),
            );
        }
    }
    sets
}
