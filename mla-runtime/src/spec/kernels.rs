//! Facts of the kernels behind a backend: the targets that this build compiled them for, and the
//! GPUs on which their tests passed.
//!
//! A [`BackendSpec`](crate::spec::BackendSpec) declares what a backend supports. A selection also
//! uses these facts: it skips kernels that this build left out, and it selects kernels that have
//! run nowhere only by name.

use crate::spec::{Capability, CapabilityMatch, Cause, Target};

use super::family::{Code, CompiledFamily, nth_target, write_targets};
use crate::text::{Text, any};

/// A GPU on which every test of a backend passed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Run {
    /// The GPU's name, such as `H100`.
    pub gpu: &'static str,
    /// Its compute capability.
    pub capability: Capability,
    /// The date, such as `2026-11-22`.
    pub date: &'static str,
    /// The commit, with at least seven hexadecimal digits.
    pub commit: &'static str,
}

/// The facts of a backend's kernels.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KernelFacts {
    /// The families of the kernels. On a GPU, the first family that runs there is used. The list is
    /// empty if neither the attribute nor a build script names a family. `None` if nothing is
    /// known.
    pub families: Option<&'static [CompiledFamily]>,
    /// The GPUs on which the backend's tests passed. `None` if there is no such table. An empty
    /// table says that they passed on none.
    pub run_on: Option<&'static [Run]>,
}

impl KernelFacts {
    /// Nothing is known, so a selection believes the spec.
    pub const UNKNOWN: Self = Self {
        families: None,
        run_on: None,
    };

    /// The families, if there are any.
    pub fn families_said(&self) -> Option<&'static [CompiledFamily]> {
        self.families.filter(|families| !families.is_empty())
    }

    /// The first family that runs on this capability, if one does.
    ///
    /// # Panics
    ///
    /// Same as [`CompiledFamily::runs_on`].
    pub const fn family_on(&self, capability: Capability) -> Option<&'static CompiledFamily> {
        match self.families {
            Some(families) => match first_on(families, capability) {
                Some(index) => Some(&families[index]),
                None => None,
            },
            None => None,
        }
    }

    /// Returns true if the code for this capability has passed its tests on some GPU, or if there
    /// is no table of runs. A run on one GPU counts for every GPU that uses the same family.
    ///
    /// # Panics
    ///
    /// Same as [`CompiledFamily::runs_on`].
    pub const fn has_run_for(&self, capability: Capability) -> bool {
        let Some(runs) = self.run_on else {
            return true;
        };
        let Some(families) = self.families else {
            return !runs.is_empty();
        };
        any!(runs, |run| match (
            first_on(families, run.capability),
            first_on(families, capability),
        ) {
            (Some(there), Some(here)) => there == here,
            // A family that is not compiled has no code, and another reason says so.
            (_, None) => true,
            (None, Some(_)) => false,
        })
    }

    /// Checks that the kernels can run on `target`. Unless the backend was `asked` for by name, it
    /// also checks that the kernels have run on such a GPU.
    ///
    /// # Panics
    ///
    /// Same as [`CompiledFamily::runs_on`].
    pub const fn availability(&self, target: Target, asked: bool) -> Result<(), Cause> {
        let Some(capability) = target.capability else {
            return Ok(());
        };
        if let Some(families) = self.families {
            if families.is_empty() {
                return match asked {
                    true => Ok(()),
                    false => Err(Cause::TargetsUnsaid),
                };
            }
            if first_on(families, capability).is_none() {
                return Err(Cause::CompiledFor(families));
            }
        }
        if !asked && !self.has_run_for(capability) {
            return Err(Cause::NeverRun);
        }
        Ok(())
    }

    /// Returns a fault if `declared` contains a set of capabilities on which no target of these
    /// families runs. Returns `None` as long as some family is left out, because that family might
    /// run there.
    ///
    /// # Panics
    ///
    /// Same as [`CompiledFamily::runs_on`].
    #[doc(hidden)]
    pub const fn fault(&self, declared: &[CapabilityMatch]) -> Option<Fault> {
        let Some(families) = self.families else {
            return None;
        };
        if families.is_empty() {
            return None;
        }
        if any!(families, |family| family.is_left_out()) {
            return None;
        }
        let mut i = 0;
        while i < declared.len() {
            if !overlaps(declared[i], families) {
                return Some(Fault::new(declared[i], families));
            }
            i += 1;
        }
        None
    }
}

/// The sets of capabilities that the targets of `families` run on, without repetition. They are
/// what `sm = "compiled"` declares. `N` must be the [`count`] of the same families.
///
/// # Panics
///
/// Same as [`CompiledFamily::runs_on`].
#[doc(hidden)]
pub const fn capabilities<const N: usize>(families: &[CompiledFamily]) -> [CapabilityMatch; N] {
    let mut sets = [CapabilityMatch::Any; N];
    let (mut len, mut n) = (0, 0);
    while let Some(target) = nth_target(families, n) {
        if is_first_of_its_set(families, n) {
            sets[len] = Code::read(target).set();
            len += 1;
        }
        n += 1;
    }
    sets
}

/// Counts the sets that [`capabilities`] gives. The count is at least one: if nothing is compiled,
/// the one set is [`Any`](CapabilityMatch::Any). Another reason then speaks against the backend.
///
/// # Panics
///
/// Same as [`CompiledFamily::runs_on`].
#[doc(hidden)]
pub const fn count(families: &[CompiledFamily]) -> usize {
    let (mut count, mut n) = (0, 0);
    while nth_target(families, n).is_some() {
        count += is_first_of_its_set(families, n) as usize;
        n += 1;
    }
    if count == 0 { 1 } else { count }
}

// Returns true if no other target's set includes the set of this target. If several sets are equal,
// only the first of them counts.
const fn is_first_of_its_set(families: &[CompiledFamily], number: usize) -> bool {
    let Some(target) = nth_target(families, number) else {
        return false;
    };
    let (code, mut n) = (Code::read(target), 0);
    while let Some(other) = nth_target(families, n) {
        let other = Code::read(other);
        if n != number && other.includes(code) && (n < number || !code.includes(other)) {
            return false;
        }
        n += 1;
    }
    true
}

const fn first_on(families: &[CompiledFamily], capability: Capability) -> Option<usize> {
    let mut i = 0;
    while i < families.len() {
        if families[i].runs_on(capability) {
            return Some(i);
        }
        i += 1;
    }
    None
}

// Returns true if a target runs on some capability of `declared`.
const fn overlaps(declared: CapabilityMatch, families: &[CompiledFamily]) -> bool {
    any!(families, |family| any!(family.targets, |target| {
        declared.overlaps(Code::read(target).set())
    }))
}

/// The sentence on a declaration that no build can fulfil.
#[doc(hidden)]
pub struct Fault {
    bytes: [u8; 512],
    len: usize,
}

impl Fault {
    /// The fault of an attribute that names no family although two families share a GPU.
    pub(super) const fn overlap(one: &str, other: &str) -> Self {
        let mut bytes = [0; 512];
        let mut text = Text::new(&mut bytes);
        text.push(
            "compiled: given nothing, accepted the constant of its family that mla-build \
             wrote, such as ",
        );
        text.parts(&["`raw::SM90`: the package's families ", one, " and ", other]);
        text.push(" have GPUs in common");
        let len = text.as_str().len();
        Self { bytes, len }
    }

    const fn new(declared: CapabilityMatch, families: &[CompiledFamily]) -> Self {
        let mut bytes = [0; 512];
        let mut text = Text::new(&mut bytes);
        text.push("sm: given ");
        declared.write(&mut text);
        text.push(", accepted what the kernels are compiled for: ");
        write_targets(families, &mut text);
        text.push("; none of it runs there");
        let len = text.as_str().len();
        Self { bytes, len }
    }

    /// The sentence.
    pub const fn as_str(&self) -> &str {
        let (held, _) = self.bytes.split_at(self.len);
        match std::str::from_utf8(held) {
            Ok(text) => text,
            Err(_) => "",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn sm(major: u8, minor: u8) -> Capability {
        Capability::new(major, minor)
    }

    const SM80: CompiledFamily = CompiledFamily {
        name: "sm80",
        targets: &["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"],
    };
    const SM90: CompiledFamily = CompiledFamily {
        name: "sm90",
        targets: &["sm_90a"],
    };
    const SM100: CompiledFamily = CompiledFamily {
        name: "sm100",
        targets: &["sm_100f"],
    };
    const NO_SM100: CompiledFamily = CompiledFamily {
        targets: &[],
        ..SM100
    };

    #[test]
    fn a_target_runs_where_nvidia_says() {
        for (target, runs, refuses) in [
            ("sm_90a", &[(9, 0)][..], &[(8, 0), (9, 1), (10, 0)][..]),
            ("sm_100f", &[(10, 0), (10, 3)], &[(9, 0), (11, 0), (12, 0)]),
            ("sm_103f", &[(10, 3), (10, 7)], &[(10, 0), (11, 0)]),
            ("sm_80", &[(8, 0), (8, 6), (8, 9)], &[(7, 5), (9, 0)]),
            ("sm_86", &[(8, 6), (8, 9)], &[(8, 0), (9, 0)]),
            ("compute_80", &[(8, 0), (9, 0), (12, 1)], &[(7, 5)]),
            ("compute_90a", &[(9, 0)], &[(9, 1), (10, 0)]),
            ("compute_100f", &[(10, 3)], &[(12, 0)]),
        ] {
            let code = Code::read(target);
            for (major, minor) in runs {
                assert!(code.runs_on(sm(*major, *minor)), "{target} {major}.{minor}");
            }
            for (major, minor) in refuses {
                assert!(
                    !code.runs_on(sm(*major, *minor)),
                    "{target} {major}.{minor}"
                );
            }
        }
        for target in [
            "", "sm_", "sm90", "sm_9", "sm_1000", "sm_9x", "compute_", "sm_05", "lto_90",
        ] {
            assert!(Code::parse(target).is_none(), "{target}");
        }
    }

    fn fault(declared: &[CapabilityMatch], families: &'static [CompiledFamily]) -> Option<String> {
        let kernels = KernelFacts {
            families: Some(families),
            run_on: None,
        };
        kernels
            .fault(declared)
            .map(|fault| fault.as_str().to_owned())
    }

    #[test]
    fn what_no_build_keeps_is_a_fault() {
        use CapabilityMatch::{Exact, Family, FamilyFrom, Floor};
        for (declared, families) in [
            (&[Exact(sm(9, 0))][..], &[SM90][..]),
            (&[Exact(sm(9, 0)), Family(10)], &[SM90, SM100]),
            (&[Floor(sm(8, 0))], &[SM80]),
            (&[FamilyFrom(sm(8, 6))], &[SM80]),
            // It is no fault if the set contains a GPU that no target runs on. A selection for that
            // GPU gets a reason instead.
            (&[Floor(sm(7, 5))], &[SM90]),
            (&[Floor(sm(9, 0))], &[SM90]),
            (&[Family(9)], &[SM90]),
            // The family that is left out might run there.
            (&[Exact(sm(9, 0)), Family(10)], &[SM90, NO_SM100]),
        ] {
            assert_eq!(fault(declared, families), None, "{declared:?}");
        }
        assert_eq!(
            fault(&[Exact(sm(9, 0)), Exact(sm(10, 0))], &[SM90]).as_deref(),
            Some(
                "sm: given 10.0, accepted what the kernels are compiled for: sm_90a; none of it \
                 runs there"
            )
        );
        for (declared, families) in [
            (Floor(sm(10, 0)), &[SM90][..]),
            (Exact(sm(7, 5)), &[SM80]),
            (Family(9), &[SM100]),
            (FamilyFrom(sm(10, 3)), &[SM90]),
        ] {
            assert!(fault(&[declared], families).is_some(), "{declared}");
        }
    }

    #[test]
    fn what_is_compiled_can_be_declared() {
        fn declared<const N: usize>(
            families: &'static [super::CompiledFamily],
        ) -> [CapabilityMatch; N] {
            assert_eq!(count(families), N);
            let sets = capabilities::<N>(families);
            assert_eq!(fault(&sets, families), None);
            sets
        }
        use CapabilityMatch::{Any, Exact, Family, Floor};
        assert_eq!(declared(&[SM90]), [Exact(sm(9, 0))]);
        assert_eq!(declared(&[SM80]), [Floor(sm(8, 0))]);
        assert_eq!(declared(&[SM90, SM80]), [Floor(sm(8, 0))]);
        assert_eq!(declared(&[SM90, SM90]), [Exact(sm(9, 0))]);
        assert_eq!(declared(&[SM90, SM100]), [Exact(sm(9, 0)), Family(10)]);
        assert_eq!((count(&[NO_SM100]), capabilities(&[NO_SM100])), (1, [Any]));
    }

    const ON_HOPPER: &[Run] = &[Run {
        gpu: "H100",
        capability: sm(9, 0),
        date: "2026-11-22",
        commit: "0123456",
    }];

    #[test]
    fn a_run_counts_for_every_gpu_that_takes_the_same_family() {
        let has_run = |families, run_on, on| KernelFacts { families, run_on }.has_run_for(on);
        let portable = Some(&[SM80][..]);
        assert!(has_run(portable, Some(ON_HOPPER), sm(10, 0)));
        assert!(has_run(portable, None, sm(10, 0)));
        assert!(!has_run(portable, Some(&[]), sm(9, 0)));
        let own = Some(&[SM90, SM100][..]);
        assert!(has_run(own, Some(ON_HOPPER), sm(9, 0)));
        assert!(!has_run(own, Some(ON_HOPPER), sm(10, 0)));
        let preferred = Some(&[SM90, SM80][..]);
        assert!(!has_run(preferred, Some(ON_HOPPER), sm(8, 0)));
        assert!(has_run(None, Some(ON_HOPPER), sm(10, 0)));
        assert!(!has_run(None, Some(&[]), sm(10, 0)));
    }

    #[test]
    fn what_is_left_out_or_has_run_nowhere_is_not_available() {
        let kernels = KernelFacts {
            families: Some(&[SM90, SM100]),
            run_on: Some(ON_HOPPER),
        };
        let on = |major, minor| Target::dry_run(sm(major, minor));
        assert_eq!(kernels.availability(on(9, 0), false), Ok(()));
        assert_eq!(kernels.availability(on(10, 3), true), Ok(()));
        assert_eq!(kernels.availability(on(10, 3), false), Err(Cause::NeverRun));
        let left_out = KernelFacts {
            families: Some(&[SM90, NO_SM100]),
            ..kernels
        };
        let Err(cause) = left_out.availability(on(10, 0), true) else {
            panic!("sm100 is left out");
        };
        assert_eq!(
            (cause.to_string(), cause.remedy()),
            (
                "compiled for: sm_90a".to_owned(),
                "build with `--features sm100`".to_owned()
            )
        );
        let Err(cause) = left_out.availability(on(12, 0), true) else {
            panic!("nothing is for 12.0");
        };
        assert_eq!(cause.to_string(), "compiled for: sm_90a");
        assert_eq!(kernels.availability(Target::CPU, false), Ok(()));
    }
}
