//! Limits of the resources that kernels may use. The limits are in a file, and a report is checked
//! against them.
//!
//! ```toml
//! # Holds for every kernel that no rule below says more of. A resource without a key has no limit.
//! [default]
//! spill = 0
//! warnings = 0
//!
//! # `*` stands for any text, in names, sources and targets. A rule that fits no kernel is a
//! # violation of the budget.
//! [[kernel]]
//! name = "mla::decode::*"
//! target = "sm_90a"
//! max.registers = 168
//!
//! # A rule that allows more than before says why.
//! [[kernel]]
//! name = "flashinfer::*"
//! source = "cuda/sm80/**"
//! target = "sm_8*"
//! max.spill = 72
//! why = "upstream's tile of 128 queries; nothing of ours runs in its inner loop"
//! ```

use std::{collections::BTreeMap, path::Path};

use globset::Glob;
use serde::Deserialize;

use crate::{
    Error, bounded,
    report::{Kernel, Report, short},
};

/// Limits for the kernels of a package.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    #[serde(default)]
    default: Limits,
    #[serde(default)]
    kernel: Vec<Rule>,
}

/// The maximum amounts that a kernel may use. An absent one means no limit.
type Limits = BTreeMap<Resource, u32>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Resource {
    Registers,
    /// Bytes stored to and loaded from local memory because registers are short.
    Spill,
    /// Bytes per thread.
    Stack,
    /// Static shared memory, in bytes per block.
    Shared,
    Barriers,
    /// The number of warnings that ptxas gives.
    Warnings,
}

impl Resource {
    /// Returns its name, and the amount that a kernel uses.
    fn of(self, kernel: &Kernel) -> (&'static str, u32) {
        let spill = kernel.spill_stores.saturating_add(kernel.spill_loads);
        let warnings = u32::try_from(kernel.warnings.len()).unwrap_or(u32::MAX);
        match self {
            Self::Registers => ("registers", kernel.registers),
            Self::Spill => ("spill", spill),
            Self::Stack => ("stack", kernel.stack),
            Self::Shared => ("shared", kernel.shared),
            Self::Barriers => ("barriers", kernel.barriers),
            Self::Warnings => ("warnings", warnings),
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    /// A glob for names of kernels without their parameters.
    name: String,
    /// A glob for sources, relative to the package. Without it, the rule is for all sources.
    source: Option<String>,
    /// A glob for targets as the compiler spells them. Without it, the rule is for all targets.
    target: Option<String>,
    #[serde(default)]
    max: Limits,
    /// The reason, if the rule allows more than the limits that would hold otherwise.
    why: Option<String>,
}

impl Budget {
    /// Reads a budget.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is not a budget.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = bounded::read_to_string(path).map_err(Error::file("read", path))?;
        let understood = Self::parse(&text).map_err(std::io::Error::other);
        understood.map_err(Error::file("understand", path))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let budget: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        for rule in &budget.kernel {
            let globs = [Some(&rule.name), rule.source.as_ref(), rule.target.as_ref()];
            for glob in globs.into_iter().flatten() {
                Glob::new(glob).map_err(|error| format!("rule {:?}: {error}", rule.name))?;
            }
        }
        Ok(budget)
    }

    /// Returns a sentence for each violation of the budget.
    ///
    /// A violation is a kernel that uses more than the budget, a rule that fits no kernel of what
    /// was built, or a rule that allows more without a reason.
    pub fn check(&self, report: &Report) -> Vec<String> {
        let mut used = vec![false; self.kernel.len()];
        let mut violations = Vec::new();
        for unit in &report.units {
            for kernel in &unit.kernels {
                let mut limits = self.default.clone();
                for (rule, used) in self.kernel.iter().zip(&mut used) {
                    if rule.fits(&unit.source, kernel) {
                        *used = true;
                        rule.explain(kernel, &limits, &mut violations);
                        limits.extend(&rule.max);
                    }
                }
                let (name, target) = (short(&kernel.name), &kernel.target);
                for (resource, allowed) in limits {
                    let (field, used) = resource.of(kernel);
                    if used > allowed {
                        violations.push(format!(
                            "{name} ({target}): {field}: {used}, allowed: at most {allowed}"
                        ));
                    }
                }
            }
        }
        for (rule, used) in self.kernel.iter().zip(used) {
            if rule.is_about(report) && !used {
                violations.push(format!("rule {:?} fits no kernel", rule.name));
            }
        }
        violations
    }
}

/// True if the glob matches `text`, or if there is no glob.
fn matches(glob: Option<&String>, text: &str) -> bool {
    glob.is_none_or(|glob| Glob::new(glob).is_ok_and(|it| it.compile_matcher().is_match(text)))
}

impl Rule {
    fn fits(&self, source: &str, kernel: &Kernel) -> bool {
        matches(self.source.as_ref(), source)
            && matches(self.target.as_ref(), &kernel.target)
            && matches(Some(&self.name), short(&kernel.name))
    }

    /// True if the build has a target and a source that match the rule. If a feature leaves out the
    /// rule's source or target, the rule is not at fault.
    fn is_about(&self, report: &Report) -> bool {
        let built = |target: &String| matches(self.target.as_ref(), target);
        let units = &report.units;
        units.iter().any(|unit| {
            matches(self.source.as_ref(), &unit.source) && unit.targets.iter().any(built)
        })
    }

    /// Adds a violation if the rule allows more than `before` and gives no reason.
    fn explain(&self, kernel: &Kernel, before: &Limits, violations: &mut Vec<String>) {
        if self.why.as_ref().is_some_and(|why| !why.trim().is_empty()) {
            return;
        }
        for (resource, max) in &self.max {
            if before.get(resource).is_some_and(|before| max > before) {
                let (field, _) = resource.of(kernel);
                let unexplained = format!(
                    "rule {:?}: {field}: allows more than what holds without it; say so in `why`",
                    self.name
                );
                if !violations.contains(&unexplained) {
                    violations.push(unexplained);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(kernels: Vec<Kernel>) -> Report {
        let unit = serde_json::json!({
            "source": "a.cu", "targets": ["sm_90a"], "outcome": "compiled", "reason": "",
            "compile_seconds": 0.0, "peak": 0, "object_bytes": 0, "device_bytes": {},
            "kernels": kernels,
        });
        Report {
            units: vec![serde_json::from_value(unit).unwrap()],
            ..Report::default()
        }
    }

    fn kernel(name: &str, registers: u32, spill_stores: u32) -> Kernel {
        Kernel {
            name: name.into(),
            target: "sm_90a".into(),
            registers,
            spill_stores,
            ..Kernel::default()
        }
    }

    fn says(budget: &str, kernels: Vec<Kernel>) -> Vec<String> {
        Budget::parse(budget).unwrap().check(&report(kernels))
    }

    #[test]
    fn a_spill_and_an_excess_are_named() {
        let budget =
            "[default]\nspill = 0\n[[kernel]]\nname = \"mla::decode*\"\nmax.registers = 168\n";
        assert_eq!(
            says(budget, vec![kernel("void mla::decode<64>(P)", 168, 0)]),
            Vec::<String>::new()
        );
        assert_eq!(
            says(
                budget,
                vec![
                    kernel("void mla::decode<64>(P)", 170, 8),
                    kernel("mla::merge(P)", 255, 0)
                ]
            ),
            [
                "mla::decode<64> (sm_90a): registers: 170, allowed: at most 168",
                "mla::decode<64> (sm_90a): spill: 8, allowed: at most 0",
            ]
        );
    }

    #[test]
    fn a_later_rule_overrides_and_other_targets_are_left_alone() {
        let budget = "[default]\nregisters = 64\n\
                      [[kernel]]\nname = \"a*\"\nmax.registers = 128\nwhy = \"wide\"\n\
                      [[kernel]]\nname = \"ab\"\nmax.registers = 32\n\
                      [[kernel]]\nname = \"ab\"\ntarget = \"sm_100a\"\nmax.registers = 1\n";
        assert_eq!(
            says(
                budget,
                vec![kernel("a", 100, 0), kernel("ab", 33, 0), kernel("b", 64, 0)]
            ),
            ["ab (sm_90a): registers: 33, allowed: at most 32"]
        );
    }

    #[test]
    fn an_exception_names_its_kernels_and_says_why() {
        let rule = |why: &str| {
            format!(
                "[default]\nspill = 0\n[[kernel]]\nname = \"flash::*\"\nsource = \"*.cu\"\n\
                 target = \"sm_9*\"\nmax.spill = 72\n{why}"
            )
        };
        let spilling = || vec![kernel("flash::prefill(P)", 1, 64), kernel("own(P)", 1, 8)];
        let own = "own (sm_90a): spill: 8, allowed: at most 0";
        assert_eq!(says(&rule("why = \"upstream's\""), spilling()), [own]);
        assert_eq!(
            says(&rule(""), spilling()),
            [
                "rule \"flash::*\": spill: allows more than what holds without it; say so in `why`",
                own
            ]
        );
        let elsewhere = rule("why = \"x\"").replace("*.cu", "other/*.cu");
        assert_eq!(
            says(&elsewhere, spilling()).len(),
            2,
            "and it is about no source here"
        );
    }

    #[test]
    fn a_rule_about_nothing_and_a_misspelt_limit_are_mistakes() {
        assert_eq!(
            says("[[kernel]]\nname = \"gone\"\n", vec![kernel("a", 1, 0)]),
            ["rule \"gone\" fits no kernel"]
        );
        for (budget, misspelt) in [
            ("[default]\nregister = 3\n", "register"),
            ("[[kernel]]\nname = \"a\"\nmax.spil = 3\n", "spil"),
        ] {
            assert!(Budget::parse(budget).unwrap_err().contains(misspelt));
        }
        assert!(Budget::parse("[[kernel]]\nname = \"[\"\n").is_err());
    }
}
