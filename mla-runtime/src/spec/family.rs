//! Families of kernels, and the targets that each is compiled for.

use crate::spec::{Capability, CapabilityMatch};
use crate::text::{Text, any};

/// Kernels that are compiled together, for the same targets.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CompiledFamily {
    /// The name of the family. It is the lower-case name of the Cargo feature that compiles the
    /// family. If no feature does, it is the upper-case name of the constant that lists its
    /// targets.
    pub name: &'static str,
    /// The targets that this build compiled the family for, under nvcc's names (`sm_90a`,
    /// `sm_100f`, `sm_80`, `compute_80`). Empty if the feature is off.
    pub targets: &'static [&'static str],
}

impl CompiledFamily {
    /// Returns true if one of its targets runs on this capability.
    ///
    /// # Panics
    ///
    /// If nvcc has no target of one of the names. In a constant this is a compile error.
    pub const fn runs_on(&self, capability: Capability) -> bool {
        any!(self.targets, |target| Code::read(target)
            .runs_on(capability))
    }

    /// The target whose machine code a driver loads on this capability, and the capability that the
    /// code was compiled for. If several targets run there, it is the latest. `None` if none runs
    /// there, so that the driver compiles PTX.
    ///
    /// # Panics
    ///
    /// Same as [`runs_on`](Self::runs_on).
    pub fn machine_code_on(&self, capability: Capability) -> Option<(&'static str, Capability)> {
        self.latest_on(capability, |target| target.starts_with("sm_"))
    }

    /// The target whose PTX a driver compiles on this capability if there is no machine code, and
    /// the capability that the PTX was made for.
    ///
    /// # Panics
    ///
    /// Same as [`runs_on`](Self::runs_on).
    pub fn ptx_on(&self, capability: Capability) -> Option<(&'static str, Capability)> {
        self.latest_on(capability, |target| target.starts_with("compute_"))
    }

    fn latest_on(
        &self,
        capability: Capability,
        wanted: fn(&str) -> bool,
    ) -> Option<(&'static str, Capability)> {
        let targets = self.targets.iter().filter(|target| wanted(target));
        targets
            .map(|target| (*target, Code::read(target)))
            .filter(|(_, code)| code.runs_on(capability))
            .max_by_key(|(_, code)| code.from)
            .map(|(target, code)| (target, code.from))
    }

    /// Returns true if the family is named after a constant, and not after a Cargo feature.
    const fn is_a_constant(&self) -> bool {
        any!(self.name.as_bytes(), |byte| byte.is_ascii_uppercase())
    }

    pub(super) const fn is_left_out(&self) -> bool {
        self.targets.is_empty()
    }
}

/// The target of this number, counted through all families in their order.
pub(super) const fn nth_target(families: &[CompiledFamily], number: usize) -> Option<&'static str> {
    let (mut left, mut f) = (number, 0);
    while f < families.len() {
        let targets = families[f].targets;
        if left < targets.len() {
            return Some(targets[left]);
        }
        left -= targets.len();
        f += 1;
    }
    None
}

/// Writes every target of every family, with commas between them.
pub(crate) const fn write_targets(families: &[CompiledFamily], text: &mut Text<'_>) {
    let mut n = 0;
    while let Some(target) = nth_target(families, n) {
        text.comma(n);
        text.push(target);
        n += 1;
    }
    if n == 0 {
        text.push("nothing");
    }
}

/// Writes the feature or setting that adds a family which this build left out. Returns false if no
/// family was left out. If several were, it names the last of the list: a backend prefers the first
/// families, but the last one runs on the largest number of GPUs.
pub(crate) const fn write_remedy(families: &[CompiledFamily], text: &mut Text<'_>) -> bool {
    let mut i = families.len();
    while i > 0 {
        i -= 1;
        if families[i].is_left_out() {
            let name = families[i].name;
            if families[i].is_a_constant() {
                let compiles = "turn on what compiles its kernels: the constant `";
                text.parts(&[compiles, name, "` is empty"]);
            } else {
                write_feature(name, text);
            }
            return true;
        }
    }
    false
}

/// Writes the option that turns a feature on.
pub(super) const fn write_feature(feature: &str, text: &mut Text<'_>) {
    text.parts(&["build with `--features ", feature, "`"]);
}

// The capabilities that a target's code runs on, beyond the one in its name.
#[derive(Clone, Copy)]
enum Reach {
    // None: `sm_90a` and its PTX.
    Only,
    // Later minor versions: `sm_80`, `sm_100f` and its PTX.
    Generation,
    // Every later capability: `compute_80`.
    Later,
}

#[derive(Clone, Copy)]
pub(super) struct Code {
    from: Capability,
    reach: Reach,
}

impl Code {
    pub(super) const fn read(target: &str) -> Self {
        match Self::parse(target) {
            Some(code) => code,
            None => {
                let mut bytes = [0; 256];
                let mut text = Text::new(&mut bytes);
                text.parts(&[
                    "compiled: given the target `",
                    target,
                    "`, accepted nvcc's names",
                ]);
                text.push(", such as sm_90a, sm_100f, sm_80, compute_80");
                panic!("{}", text.as_str())
            }
        }
    }

    pub(super) const fn parse(target: &str) -> Option<Self> {
        let (machine, digits) = match target.as_bytes() {
            [b's', b'm', b'_', digits @ ..] => (true, digits),
            [b'c', b'o', b'm', b'p', b'u', b't', b'e', b'_', digits @ ..] => (false, digits),
            _ => return None,
        };
        let (digits, reach) = match digits {
            [digits @ .., b'a'] => (digits, Reach::Only),
            [digits @ .., b'f'] => (digits, Reach::Generation),
            _ if machine => (digits, Reach::Generation),
            _ => (digits, Reach::Later),
        };
        let (major, minor) = match digits {
            [tens, units] => (digit(*tens), digit(*units)),
            [hundreds, tens, units] => match (digit(*hundreds), digit(*tens)) {
                (Some(hundreds), Some(tens)) => (Some(hundreds * 10 + tens), digit(*units)),
                _ => return None,
            },
            _ => return None,
        };
        match (major, minor) {
            (Some(major), Some(minor)) if major > 0 => Some(Self {
                from: Capability::new(major, minor),
                reach,
            }),
            _ => None,
        }
    }

    pub(super) const fn runs_on(self, capability: Capability) -> bool {
        self.set().accepts(capability)
    }

    pub(super) const fn set(self) -> CapabilityMatch {
        match self.reach {
            Reach::Only => CapabilityMatch::Exact(self.from),
            Reach::Generation if self.from.minor == 0 => CapabilityMatch::Family(self.from.major),
            Reach::Generation => CapabilityMatch::FamilyFrom(self.from),
            Reach::Later => CapabilityMatch::Floor(self.from),
        }
    }

    pub(super) const fn includes(self, other: Self) -> bool {
        self.runs_on(other.from)
            && match (self.reach, other.reach) {
                (Reach::Later, _) | (_, Reach::Only) => true,
                (Reach::Generation, Reach::Generation) => true,
                (Reach::Only, _) | (Reach::Generation, Reach::Later) => false,
            }
    }
}

const fn digit(byte: u8) -> Option<u8> {
    if byte.is_ascii_digit() {
        Some(byte - b'0')
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_names_a_feature_or_the_empty_constant() {
        use crate::spec::Cause;

        const fn of(name: &'static str, targets: &'static [&'static str]) -> CompiledFamily {
            CompiledFamily { name, targets }
        }
        const SM90: CompiledFamily = of("sm90", &["sm_90a"]);
        const SM100: CompiledFamily = of("sm100", &[]);
        const OFF: [CompiledFamily; 1] = [of("NONE", &[])];
        // The last one runs on the most GPUs.
        const ALL: [CompiledFamily; 2] = [SM100, of("ALL", &[])];
        for (families, wanted) in [
            (&[SM90][..], "choose a backend with kernels for this GPU"),
            (&[SM90, SM100], "build with `--features sm100`"),
            (
                &OFF,
                "turn on what compiles its kernels: the constant `NONE` is empty",
            ),
            (
                &ALL,
                "turn on what compiles its kernels: the constant `ALL` is empty",
            ),
        ] {
            assert_eq!(Cause::CompiledFor(families).remedy(), wanted);
        }
    }

    #[test]
    fn a_driver_takes_the_latest_machine_code_and_else_ptx() {
        let portable = CompiledFamily {
            name: "sm80",
            targets: &["sm_80", "sm_90", "sm_86", "sm_120", "compute_80"],
        };
        let hopper = CompiledFamily {
            name: "sm90",
            targets: &["sm_90a"],
        };
        let of = |family: &CompiledFamily, major, minor| {
            let capability = Capability::new(major, minor);
            let name = |found: Option<(&'static str, _)>| found.map(|(target, _)| target);
            [
                name(family.machine_code_on(capability)),
                name(family.ptx_on(capability)),
            ]
        };
        assert_eq!(of(&portable, 8, 0), [Some("sm_80"), Some("compute_80")]);
        assert_eq!(of(&portable, 8, 9), [Some("sm_86"), Some("compute_80")]);
        assert_eq!(of(&portable, 9, 0), [Some("sm_90"), Some("compute_80")]);
        assert_eq!(of(&portable, 12, 1), [Some("sm_120"), Some("compute_80")]);
        // The driver compiles PTX for GPUs without machine code.
        assert_eq!(of(&portable, 10, 3), [None, Some("compute_80")]);
        assert_eq!(of(&portable, 7, 5), [None, None]);
        assert_eq!(of(&hopper, 9, 0), [Some("sm_90a"), None]);
        assert_eq!(of(&hopper, 10, 0), [None, None]);
        let found = portable.ptx_on(Capability::new(11, 0));
        assert_eq!(found, Some(("compute_80", Capability::new(8, 0))));
    }
}
