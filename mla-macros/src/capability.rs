//! Sets of compute capabilities, as the keys `sm` and `priority` name them.

use std::fmt;

use crate::errors::{Fault, quoted};
use crate::key;
use crate::list::{self, Element};
use crate::number;

/// A capability, written without the dot as `90` or `103`.
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
    // The minimum and the maximum of the numbers in the set.
    fn bounds(self) -> (u16, u16) {
        match self {
            Self::Any => (0, u16::MAX),
            Self::Exact(only) => (only.number(), only.number()),
            Self::Family(major) => (u16::from(major) * 10, u16::from(major) * 10 + 9),
            Self::Floor(min) => (min.number(), u16::MAX),
        }
    }

    /// Returns true if every capability of `other` is in this set.
    pub(crate) fn covers(self, other: Self) -> bool {
        let (min, max) = self.bounds();
        let (other_min, other_max) = other.bounds();
        min <= other_min && other_max <= max
    }

    /// Returns true if some capability is in both sets.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        let (min, max) = self.bounds();
        let (other_min, other_max) = other.bounds();
        min <= other_max && other_min <= max
    }
}

/// Writes the set in the attribute's notation.
impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Exact(only) => write!(f, "{}", only.number()),
            Self::Family(major) => write!(f, "{major}x"),
            Self::Floor(min) => write!(f, "{}+", min.number()),
        }
    }
}

/// Reads `any`, `90`, `10x` or `80+`, and also the forms with a dot: `9.0`, `10.x`, `8.0+`.
pub(crate) fn read(text: &str) -> Option<Capabilities> {
    if text == "any" {
        return Some(Capabilities::Any);
    }
    if let Some(major) = text.strip_suffix(".x").or_else(|| text.strip_suffix('x')) {
        let major = number::read(major).filter(|major| *major > 0)?;
        return Some(Capabilities::Family(major));
    }
    match text.strip_suffix('+') {
        Some(min) => exact(min).map(Capabilities::Floor),
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

/// Reads the set that a list element names.
pub(crate) fn parse(element: Element<'_>, accepted: &str) -> Result<Capabilities, Fault> {
    let Some(set) = read(element.text) else {
        return Err(element.fault(accepted));
    };
    match of_a_generation(set) {
        Some(meant) => Err(element
            .fault(accepted)
            .hint(format!("that is generation 1, did you mean `{meant}`?"))),
        None => Ok(set),
    }
}

// Corrects a set of 1.x: `10` would be 1.0, but the author meant 10.0.
fn of_a_generation(set: Capabilities) -> Option<Capabilities> {
    let ten = |capability: Capability| Capability {
        major: 10 + capability.minor,
        minor: 0,
    };
    match set {
        Capabilities::Exact(only) if only.major == 1 => Some(Capabilities::Exact(ten(only))),
        Capabilities::Floor(min) if min.major == 1 => Some(Capabilities::Floor(ten(min))),
        Capabilities::Family(1) => Some(Capabilities::Family(10)),
        _ => None,
    }
}

// The capabilities of a GPU, or of a generation of GPUs, by its name.
fn called(name: &str) -> Option<Capabilities> {
    let exact = |major, minor| Some(Capabilities::Exact(Capability { major, minor }));
    match name {
        "ampere" | "a100" => exact(8, 0),
        "ada" | "lovelace" | "l4" | "l40" | "l40s" | "rtx4090" | "4090" => exact(8, 9),
        "hopper" | "h100" | "h200" | "h800" | "h20" | "gh200" => exact(9, 0),
        "blackwell" => Some(Capabilities::Family(10)),
        "b200" | "gb200" => exact(10, 0),
        "b300" | "gb300" => exact(10, 3),
        "rtx5090" | "5090" => exact(12, 0),
        "spark" | "gb10" => exact(12, 1),
        _ => None,
    }
}

/// The set meant by `sm_90`, `compute_90a`, `sm90`, `>=80`, `9`, `10X`, `hopper` and the like.
pub(crate) fn meant(text: &str) -> Option<Capabilities> {
    let lower = text.to_ascii_lowercase();
    if matches!(lower.as_str(), "all" | "any" | "*" | "cpu" | "none") {
        return Some(Capabilities::Any);
    }
    if let Some(set) = called(&lower.replace([' ', '_', '-'], "")) {
        return Some(set);
    }
    let and_later = [
        "+",
        " and up",
        " and later",
        " and newer",
        " or later",
        " or newer",
    ];
    if let Some(min) = and_later.iter().find_map(|words| lower.strip_suffix(words)) {
        return match meant(min)? {
            Capabilities::Exact(min) => Some(Capabilities::Floor(min)),
            _ => None,
        };
    }
    let mut prefixes = ["sm_", "sm", "compute_", "compute"].iter();
    let bare = prefixes
        .find_map(|prefix| lower.strip_prefix(prefix))
        .unwrap_or(&lower);
    if let Some(min) = bare.strip_prefix(">=") {
        return exact(min.trim()).map(Capabilities::Floor);
    }
    let bare = bare.trim_end_matches(['a', 'f']);
    let letters = bare.replace('o', "0").replace('l', "1");
    read(bare)
        .or_else(|| read(&letters))
        .or_else(|| read(&bare.replace('*', "x")))
        .or_else(|| number::read(bare).map(Capabilities::Family))
        .filter(|set| *set != Capabilities::Family(0))
        .map(|set| of_a_generation(set).unwrap_or(set))
}

/// Returns true if the value of `sm` is the word `compiled`, which stands for the targets of the
/// kernels.
pub(crate) fn is_compiled(text: &str) -> bool {
    text.trim_matches(' ') == "compiled"
}

// The fault of a range such as `90-100`. Ranges are not accepted, because most numbers between the
// ends are no capabilities.
fn ends(element: Element<'_>, accepted: &str) -> Option<Fault> {
    let (first, last) = ["..=", "..", "-"]
        .iter()
        .find_map(|dash| element.text.split_once(dash))?;
    let (first, last) = (read(first.trim())?, read(last.trim())?);
    Some(element.fault(accepted).hint(format!(
        "a list names each: write `{first}|{last}`, or `{first}+` for every later one too"
    )))
}

/// Reads the value of `sm`; `None` for `compiled`.
pub(crate) fn sm(text: &str, faults: &mut Vec<Fault>) -> Option<Vec<Capabilities>> {
    if is_compiled(text) {
        return None;
    }
    let accepted = key::SM.accepted;
    let before = faults.len();
    let sets = list::distinct(text, accepted, faults, |element| {
        match ends(element, accepted) {
            Some(fault) => Err(fault),
            None if is_compiled(element.text) => {
                Err(element.fault(accepted).hint("`compiled` stands alone"))
            }
            None => parse(element, accepted),
        }
    });
    if faults.len() > before {
        return Some(sets);
    }
    for (index, set) in sets.iter().enumerate() {
        let mut others = sets.iter().enumerate().filter(|(other, _)| *other != index);
        if let Some((_, wider)) = others.find(|(_, wider)| wider.covers(*set)) {
            let given = format!("`{set}` beside `{wider}`, in {}", quoted(text));
            let hint = format!("`{wider}` already includes `{set}`");
            faults.push(Fault::new(given, "each capability once").hint(hint));
        }
    }
    Some(sets)
}
