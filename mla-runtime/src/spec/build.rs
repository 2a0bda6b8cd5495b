//! Reads the list of a package's kernels that its build script left, for an attribute without the
//! key `compiled`.
//!
//! mla-build sets the variable `MLA_BUILD_COMPILED` for the package's code. It lists the families
//! that have sources, each with its targets and `on` if it is compiled:
//! `sm90:on:sm_90a;sm100:off:sm_100f`.

use super::family::{Code, CompiledFamily};
use super::kernels::Fault;
use crate::text::{any, is_equal};

/// The families that a backend's kernels may belong to: those that its key `feature` names, or all
/// families if the key names none.
#[derive(Clone, Copy)]
pub struct Build {
    text: Option<&'static str>,
    features: &'static [&'static str],
}

impl Build {
    /// The build that the variable's value describes. `text` is `None` for a package without
    /// kernels of its own.
    pub const fn new(text: Option<&'static str>, features: &'static [&'static str]) -> Self {
        Self { text, features }
    }

    /// The number of families.
    pub const fn families(self) -> usize {
        let mut n = 0;
        while self.nth(n).is_some() {
            n += 1;
        }
        n
    }

    /// The number of targets of all families together.
    pub const fn targets(self) -> usize {
        let (mut count, mut n) = (0, 0);
        while let Some(group) = self.nth(n) {
            count += group.count();
            n += 1;
        }
        count
    }

    /// The targets, grouped by family. `N` must be [`targets`](Self::targets).
    pub const fn read_targets<const N: usize>(self) -> [&'static str; N] {
        let mut targets = [""; N];
        let (mut len, mut n) = (0, 0);
        while let Some(group) = self.nth(n) {
            let mut t = 0;
            while let Some(name) = nth(group.compiled, b',', t) {
                targets[len] = name;
                (len, t) = (len + 1, t + 1);
            }
            n += 1;
        }
        targets
    }

    /// The families, whose targets are parts of `targets`. `N` must be
    /// [`families`](Self::families).
    pub const fn read_families<const N: usize>(
        self,
        targets: &'static [&'static str],
    ) -> [CompiledFamily; N] {
        let mut families = [CompiledFamily {
            name: "",
            targets: &[],
        }; N];
        let (mut n, mut left) = (0, targets);
        while let Some(group) = self.nth(n) {
            let (targets, others) = left.split_at(group.count());
            left = others;
            // No feature has the name `all`: it stands for the constant with the kernels outside
            // of any folder.
            let of_none = is_equal(group.name, "all");
            families[n] = CompiledFamily {
                name: if of_none { "ALL" } else { group.name },
                targets,
            };
            n += 1;
        }
        families
    }

    /// The fault that two families have a GPU in common. On such a GPU nothing says whose kernels
    /// the backend launches.
    pub const fn fault(self) -> Option<Fault> {
        let mut n = 0;
        while let Some(group) = self.nth(n) {
            n += 1;
            let mut m = n;
            while let Some(other) = self.nth(m) {
                if group.overlaps(other) {
                    return Some(Fault::overlap(group.name, other.name));
                }
                m += 1;
            }
        }
        None
    }

    // The group of this number, among those that the backend may belong to.
    const fn nth(self, number: usize) -> Option<Group> {
        let all = !self.names_a_group();
        let (mut left, mut n) = (number, 0);
        while let Some(text) = nth(self.text, b';', n) {
            let group = Group::read(text);
            if all || is_among(group.name, self.features) {
                if left == 0 {
                    return Some(group);
                }
                left -= 1;
            }
            n += 1;
        }
        None
    }

    // Returns true if one of the features has the name of a family. Other features turn on several
    // families or something else.
    const fn names_a_group(self) -> bool {
        let mut n = 0;
        while let Some(text) = nth(self.text, b';', n) {
            if is_among(Group::read(text).name, self.features) {
                return true;
            }
            n += 1;
        }
        false
    }
}

// One family, as the variable describes it.
#[derive(Clone, Copy)]
struct Group {
    name: &'static str,
    targets: &'static str,
    // The targets, or `None` if the family is off.
    compiled: Option<&'static str>,
}

impl Group {
    const fn read(text: &'static str) -> Self {
        let (name, rest) = split(text, b':');
        if let Some(rest) = rest
            && let (state, Some(targets)) = split(rest, b':')
        {
            let on = is_equal(state, "on") && !targets.is_empty();
            return Self {
                name,
                targets,
                compiled: if on { Some(targets) } else { None },
            };
        }
        panic!("MLA_BUILD_COMPILED: accepted what mla-build sets: unset it elsewhere")
    }

    const fn count(self) -> usize {
        let mut n = 0;
        while nth(self.compiled, b',', n).is_some() {
            n += 1;
        }
        n
    }

    // Returns true if, with both families compiled, some GPU could run code of either.
    const fn overlaps(self, other: Self) -> bool {
        let mut n = 0;
        while let Some(mine) = nth(Some(self.targets), b',', n) {
            let mut m = 0;
            while let Some(theirs) = nth(Some(other.targets), b',', m) {
                if !mine.is_empty()
                    && !theirs.is_empty()
                    && Code::read(mine).set().overlaps(Code::read(theirs).set())
                {
                    return true;
                }
                m += 1;
            }
            n += 1;
        }
        false
    }
}

// The part of this number of a list, whose parts have the mark between them.
const fn nth(list: Option<&'static str>, mark: u8, number: usize) -> Option<&'static str> {
    let (mut rest, mut left) = (list, number);
    while let Some(text) = rest {
        let (part, next) = split(text, mark);
        if left == 0 {
            return Some(part);
        }
        (rest, left) = (next, left - 1);
    }
    None
}

// Splits the text at the first `mark`. Neither part contains the mark.
const fn split(text: &'static str, mark: u8) -> (&'static str, Option<&'static str>) {
    let mut i = 0;
    while i < text.len() {
        if text.as_bytes()[i] == mark {
            let (before, rest) = text.split_at(i);
            let (_, behind) = rest.split_at(1);
            return (before, Some(behind));
        }
        i += 1;
    }
    (text, None)
}

const fn is_among(name: &str, names: &[&str]) -> bool {
    any!(names, |other| is_equal(name, other))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Targets that live as long as the program, like those of a constant. This list keeps them
    /// reachable, so leak checkers do not report them.
    static CONSTANTS: Mutex<Vec<&[&str]>> = Mutex::new(Vec::new());

    fn read<const F: usize, const T: usize>(build: Build) -> [CompiledFamily; F] {
        assert_eq!((build.families(), build.targets()), (F, T));
        let targets = Box::leak(Box::new(build.read_targets::<T>()));
        CONSTANTS.lock().unwrap().push(&*targets);
        build.read_families(targets)
    }

    fn fault(text: &'static str, features: &'static [&'static str]) -> Option<String> {
        let fault = Build::new(Some(text), features).fault()?;
        Some(fault.as_str().to_owned())
    }

    const OWN: &str = "sm90:on:sm_90a;sm100:off:sm_100f";
    const THREE: &str = "sm80:on:sm_80,sm_90,compute_80;sm90:on:sm_90a;sm100:off:sm_100f";

    #[test]
    fn families_are_read_as_the_build_script_wrote_them() {
        let [sm90, sm100] = read::<2, 1>(Build::new(Some(OWN), &[]));
        assert_eq!((sm90.name, sm90.targets), ("sm90", &["sm_90a"][..]));
        assert_eq!((sm100.name, sm100.targets), ("sm100", &[][..]));
        let [all] = read::<1, 2>(Build::new(Some("all:on:sm_90a,sm_100f"), &["fast"]));
        assert_eq!((all.name, all.targets), ("ALL", &["sm_90a", "sm_100f"][..]));
        let [none] = read::<1, 0>(Build::new(Some("all:off:"), &[]));
        assert_eq!((none.name, none.targets), ("ALL", &[][..]));
        let none = Build::new(None, &["sm90"]);
        assert_eq!(read::<0, 0>(none), []);
    }

    #[test]
    fn the_key_feature_names_the_families() {
        let [sm90] = read::<1, 1>(Build::new(Some(THREE), &["sm90"]));
        assert_eq!(sm90.targets, ["sm_90a"]);
        let [portable, hopper] = read::<2, 4>(Build::new(Some(THREE), &["sm80", "sm90"]));
        assert_eq!(portable.targets, ["sm_80", "sm_90", "compute_80"]);
        assert_eq!(hopper.targets, ["sm_90a"]);
    }

    #[test]
    fn families_with_a_gpu_in_common_are_a_fault_unless_the_key_feature_names_one() {
        assert_eq!(fault(OWN, &[]), None);
        assert_eq!(fault(THREE, &["sm80"]), None);
        assert_eq!(fault(THREE, &["sm90", "sm100"]), None);
        let both = fault(THREE, &[]);
        assert_eq!(
            both.as_deref(),
            Some(
                "compiled: given nothing, accepted the constant of its family that mla-build \
                 wrote, such as `raw::SM90`: the package's families sm80 and sm90 have GPUs in \
                 common"
            )
        );
        // The result does not depend on a family being on.
        assert_eq!(both, fault("sm80:off:sm_80,sm_90;sm90:on:sm_90a", &[]));
        assert_eq!(both, fault(THREE, &["sm80", "sm90"]));
    }
}
