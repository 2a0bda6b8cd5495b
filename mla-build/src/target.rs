//! The targets of nvcc: machine code of one compute capability, or PTX.

use std::{fmt, str::FromStr};

use crate::version::Version;

/// A target under nvcc's own name, such as `sm_90a`, `sm_100f` or `compute_80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    /// True for PTX, which the driver compiles for any later capability. Machine code runs on its
    /// own capability and on later minor versions.
    pub(crate) is_ptx: bool,
    /// The compute capability as nvcc writes it: 90 is 9.0 and 103 is 10.3.
    pub(crate) number: u32,
    variant: Variant,
}

/// The instructions that a target has beyond the common ones. They decide which other GPUs can run
/// its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Variant {
    Plain,
    /// `a`: all instructions of this capability. No other capability runs the code.
    Exact,
    /// `f`: the instructions that this capability shares with later minor versions.
    Family,
}

/// A capability, and the first CUDA release that supports it without suffix, with `a` and with `f`
/// (0.0 if none does).
type Known = (u32, [(u32, u32); 3]);

/// The known architectures, from the release notes of CUDA and `nvcc --list-gpu-code`.
const KNOWN: &[Known] = &[
    (75, [(10, 0), NONE, NONE]),
    (80, [(11, 0), NONE, NONE]),
    (86, [(11, 1), NONE, NONE]),
    (87, [(11, 4), NONE, NONE]),
    (88, [(13, 0), NONE, NONE]),
    (89, [(11, 8), NONE, NONE]),
    (90, [(11, 8), (12, 0), NONE]),
    (100, [(12, 8), (12, 8), (12, 9)]),
    (103, [(12, 9), (12, 9), (12, 9)]),
    (110, [(13, 0), (13, 0), (13, 0)]),
    (120, [(12, 8), (12, 8), (12, 9)]),
    (121, [(12, 9), (12, 9), (12, 9)]),
];

const NONE: (u32, u32) = (0, 0);

/// Returns the first CUDA release that supports a capability in a variant.
fn since(known: &Known, variant: Variant) -> Option<Version> {
    let (major, minor) = known.1[variant as usize];
    ((major, minor) != NONE).then_some(Version { major, minor })
}

impl Target {
    /// Returns the value of `-gencode` that adds only this target, from PTX of its own architecture
    /// or of the given target.
    pub(crate) fn gencode(self, ptx: Option<Self>) -> String {
        let Self {
            number, variant, ..
        } = ptx.unwrap_or(self);
        format!("arch=compute_{number}{},code={self}", variant.suffix())
    }

    /// True if PTX of this target can be compiled for `other`. PTX that uses instructions of one
    /// capability, or of a few, cannot be compiled for others.
    pub(crate) fn serves(self, other: Self) -> bool {
        let plain = |target: Self| target.variant == Variant::Plain;
        self.is_ptx && plain(self) && plain(other) && self.number <= other.number
    }

    /// Returns the first CUDA release whose nvcc has this target.
    pub(crate) fn needs_toolkit(self) -> Version {
        let known = KNOWN.iter().find(|known| known.0 == self.number);
        let since = known.and_then(|known| since(known, self.variant));
        since.unwrap_or(Version { major: 0, minor: 0 })
    }

    /// Returns the first release of CUTLASS whose headers know its instructions.
    pub(crate) fn needs_cutlass(self) -> Version {
        let (major, minor) = match self.number {
            120.. => (3, 9),
            100.. => (3, 8),
            _ => (3, 0),
        };
        Version { major, minor }
    }

    /// True if `other` is never chosen when both targets are in one object.
    fn makes_useless(self, other: Self) -> bool {
        // There is no 9.1 for which plain 9.0 would be needed beside 9.0a.
        self.number == other.number
            && !(self.is_ptx || other.is_ptx)
            && other.variant == Variant::Plain
            && (self.variant == Variant::Family
                || (self.variant == Variant::Exact && self.number == 90))
    }
}

/// Returns the targets without repetitions.
pub(crate) fn unique(targets: impl IntoIterator<Item = Target>) -> Vec<Target> {
    let mut all: Vec<Target> = Vec::new();
    for target in targets {
        if !all.contains(&target) {
            all.push(target);
        }
    }
    all
}

/// Returns the targets without repetitions, and without those that another makes useless.
pub(crate) fn distinct(targets: impl IntoIterator<Item = Target>) -> Vec<Target> {
    let all = unique(targets);
    let kept = |target: &Target| !all.iter().any(|other| other.makes_useless(*target));
    all.iter().copied().filter(kept).collect()
}

/// Returns the names of targets.
pub(crate) fn names(targets: &[Target]) -> Vec<String> {
    targets.iter().map(ToString::to_string).collect()
}

/// Returns all accepted names, for messages.
pub(crate) fn accepted() -> String {
    let variants = [Variant::Plain, Variant::Exact, Variant::Family];
    let names = KNOWN.iter().flat_map(|known| {
        let has = variants
            .into_iter()
            .filter(|it| since(known, *it).is_some());
        has.map(|variant| format!("sm_{}{}", known.0, variant.suffix()))
    });
    let names = names.collect::<Vec<_>>().join(", ");
    format!("{names}; for PTX the same with compute_ in place of sm_")
}

impl Variant {
    fn suffix(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Exact => "a",
            Self::Family => "f",
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = if self.is_ptx { "compute" } else { "sm" };
        write!(f, "{code}_{}{}", self.number, self.variant.suffix())
    }
}

impl FromStr for Target {
    type Err = ();

    /// Parses a target. [`accepted`] says which texts are targets.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (is_ptx, rest) = match text.split_once('_').ok_or(())? {
            ("sm", rest) => (false, rest),
            ("compute", rest) => (true, rest),
            _ => return Err(()),
        };
        let number = rest.trim_end_matches(|c: char| !c.is_ascii_digit());
        let variant = match &rest[number.len()..] {
            "" => Variant::Plain,
            "a" => Variant::Exact,
            "f" => Variant::Family,
            _ => return Err(()),
        };
        let mut known = KNOWN.iter();
        let known = known
            .find(|known| known.0.to_string() == number)
            .ok_or(())?;
        since(known, variant).ok_or(())?;
        Ok(Self {
            is_ptx,
            number: known.0,
            variant,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(names: &[&str]) -> Vec<Target> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    #[test]
    fn a_name_is_read_and_written_alike_and_a_typo_is_none() {
        for name in [
            "sm_80",
            "sm_89",
            "sm_90",
            "sm_90a",
            "sm_100a",
            "sm_100f",
            "sm_121",
            "compute_80",
            "compute_90a",
        ] {
            assert_eq!(name.parse::<Target>().unwrap().to_string(), name);
        }
        for typo in [
            "sm_91", "sm80", "sm_80a", "sm_90f", "SM_90", "sm_", "sm_090", "ptx_80", "compute_",
            "", "sm_90ä",
        ] {
            assert_eq!(typo.parse::<Target>(), Err(()), "{typo}");
        }
        assert!(accepted().contains("sm_90, sm_90a, sm_100, sm_100a, sm_100f, sm_103"));
    }

    #[test]
    fn each_needs_the_release_that_brought_it() {
        let needs = |name: &str| {
            let target: Target = name.parse().unwrap();
            format!("{} {}", target.needs_toolkit(), target.needs_cutlass())
        };
        assert_eq!(needs("sm_90"), "11.8 3.0");
        assert_eq!(needs("sm_90a"), "12.0 3.0");
        assert_eq!(needs("sm_100f"), "12.9 3.8");
        assert_eq!(needs("compute_120"), "12.8 3.9");
    }

    #[test]
    fn what_would_never_be_chosen_is_left_out() {
        let distinct = |names: &[&str]| super::names(&super::distinct(targets(names))).join(" ");
        assert_eq!(
            distinct(&[
                "sm_80",
                "sm_90",
                "sm_100",
                "compute_80",
                "sm_90a",
                "sm_100f"
            ]),
            "sm_80 compute_80 sm_90a sm_100f"
        );
        assert_eq!(
            distinct(&["sm_100", "sm_100a", "sm_100"]),
            "sm_100 sm_100a",
            "the plain one runs on 10.3 as well"
        );
        assert_eq!(
            distinct(&["sm_80", "sm_86", "compute_90"]),
            "sm_80 sm_86 compute_90"
        );
    }
}
