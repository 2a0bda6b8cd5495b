//! Families of kernels: a feature, a folder, and the targets that its sources are compiled for.

use std::{collections::BTreeSet, env};

use crate::{
    Error,
    target::{self, Target},
};

/// A group of kernels that are compiled together. A Cargo feature of the family's name turns it on,
/// and a source folder of its name holds its kernels. Each source is compiled for all of its
/// targets into one object.
///
/// ```
/// use mla_build::Family;
///
/// // For GeForce Blackwell alone, and its own instructions.
/// let own = Family::new("sm120", ["sm_120a"]);
/// // The portable kernels, with machine code for one GPU more.
/// let portable = Family::sm80().target("sm_89");
/// assert_eq!(own.name(), "sm120");
/// assert_eq!(portable.targets().last().unwrap(), "sm_89");
/// ```
///
/// Targets have nvcc's names:
///
/// - `sm_90` is machine code for 9.0 and later minor versions.
/// - `sm_90a` is machine code for 9.0 alone, with all of its instructions.
/// - `sm_100f` is machine code for 10.0 and later minor versions, with the instructions that they
///   share.
/// - `compute_80` is PTX, which the driver compiles for 8.0 and everything later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    name: String,
    targets: Vec<String>,
}

/// The families that every build knows.
const BUILT_IN: &[(&str, &[&str])] = &[
    (
        "sm80",
        &["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"],
    ),
    ("sm90", &["sm_90a"]),
    ("sm100", &["sm_100f"]),
];

impl Family {
    /// Makes a family of this name for these targets. Names and targets are checked when the build
    /// starts.
    pub fn new(
        name: impl Into<String>,
        targets: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        Self {
            name: name.into(),
            targets: targets.into_iter().map(Into::into).collect(),
        }
    }

    /// The portable family: machine code for 8.x, 9.0, 10.x and 12.x, and PTX for later GPUs.
    pub fn sm80() -> Self {
        Self::built_in(0)
    }

    /// Hopper (H100, H200, GH200), with `wgmma` and `setmaxnreg`.
    pub fn sm90() -> Self {
        Self::built_in(1)
    }

    /// Blackwell for data centres (B200, B300), with `tcgen05`.
    pub fn sm100() -> Self {
        Self::built_in(2)
    }

    fn built_in(index: usize) -> Self {
        let (name, targets) = BUILT_IN[index];
        Self::new(name, targets.iter().copied())
    }

    /// Adds a target.
    #[must_use]
    pub fn target(mut self, target: impl Into<String>) -> Self {
        self.targets.push(target.into());
        self
    }

    /// Returns the name of its feature and of its folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its targets, under nvcc's names.
    pub fn targets(&self) -> &[String] {
        &self.targets
    }
}

/// A family of a build: checked, and turned on or not.
#[derive(Clone, Debug)]
pub(crate) struct Declared {
    pub(crate) name: String,
    pub(crate) targets: Vec<Target>,
    pub(crate) enabled: bool,
}

impl Declared {
    /// Returns the targets that the family is compiled for: none if it is turned off.
    pub(crate) fn compiled(&self) -> &[Target] {
        if self.enabled { &self.targets } else { &[] }
    }

    /// Returns the environment variable that changes its targets.
    pub(crate) fn variable(&self) -> String {
        variable(&self.name)
    }

    /// Returns its name as a Rust constant.
    pub(crate) fn constant(&self) -> String {
        constant(&self.name)
    }
}

fn constant(name: &str) -> String {
    name.to_uppercase().replace('-', "_")
}

fn variable(name: &str) -> String {
    format!("MLA_BUILD_TARGETS_{}", constant(name))
}

/// The families of a build.
#[derive(Clone, Debug)]
pub(crate) struct Families {
    pub(crate) declared: Vec<Declared>,
    /// The targets of a source in no family's folder.
    pub(crate) of_all: Vec<Target>,
}

impl Families {
    /// Collects the built-in families and a package's own, which may replace them. `on` names those
    /// that the build script turns on. If it is empty, the package's features decide.
    pub(crate) fn new(
        own: &[Family],
        on: &[String],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Error> {
        let mut families: Vec<Family> = (0..BUILT_IN.len()).map(Family::built_in).collect();
        for family in own {
            match families.iter_mut().find(|known| known.name == family.name) {
                Some(known) => *known = family.clone(),
                None => families.push(family.clone()),
            }
        }
        let mut declared = Vec::new();
        for family in families {
            declared.push(Declared {
                targets: targets(&family, &variable)?,
                name: family.name,
                enabled: false,
            });
        }
        distinguishable(&declared)?;

        let on = match on.is_empty() {
            true => by_features(&declared)?,
            false => on.iter().cloned().collect(),
        };
        for name in &on {
            match declared.iter_mut().find(|family| family.name == *name) {
                Some(family) => family.enabled = true,
                None => return Err(unknown(name, &declared)),
            }
        }
        let of_all = target::distinct(declared.iter().flat_map(Declared::compiled).copied());
        Ok(Self { declared, of_all })
    }

    /// Returns the family of a name.
    pub(crate) fn declared(&self, name: &str) -> Result<&Declared, Error> {
        let found = self.declared.iter().find(|family| family.name == name);
        found.ok_or_else(|| unknown(name, &self.declared))
    }

    /// Returns all targets for which something is compiled.
    pub(crate) fn targets(&self) -> Vec<Target> {
        let families = self.declared.iter().flat_map(Declared::compiled);
        target::unique(families.chain(&self.of_all).copied())
    }

    /// Returns the names of those that are turned on, or a word that says there are none.
    pub(crate) fn enabled(&self) -> String {
        let enabled = self.declared.iter().filter(|family| family.enabled);
        let names: Vec<_> = enabled.map(|family| family.name.as_str()).collect();
        match names.is_empty() {
            true => "no family".to_owned(),
            false => names.join(", "),
        }
    }

    pub(crate) fn names(&self) -> String {
        names(&self.declared)
    }
}

fn names(declared: &[Declared]) -> String {
    let names: Vec<_> = declared.iter().map(|family| family.name.as_str()).collect();
    names.join(", ")
}

fn unknown(given: &str, declared: &[Declared]) -> Error {
    // A family of this name is probably for this target.
    let digits = given
        .strip_prefix("sm")
        .map(|rest| rest.trim_start_matches('_'));
    let number = digits.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let target = format!("sm_{}", number.unwrap_or("120"));
    let accepted = format!(
        "{}; another is declared with Kernels::family(Family::new({given:?}, [{target:?}]))",
        names(declared)
    );
    Error::setting("family", given, accepted)
}

/// Returns the targets of a family: its own, those that its variable adds, or those that replace
/// its own.
fn targets(
    family: &Family,
    variable_of: impl Fn(&str) -> Option<String>,
) -> Result<Vec<Target>, Error> {
    let mut targets = parse(&format!("family {}", family.name), &family.targets)?;
    let variable = variable(&family.name);
    let Some(given) = variable_of(&variable).filter(|value| !value.trim().is_empty()) else {
        return Ok(targets);
    };
    let words: Vec<_> = given
        .split(',')
        .map(|word| word.trim().to_owned())
        .collect();
    let added = words.iter().filter_map(|word| word.strip_prefix('+'));
    let added: Vec<_> = added.map(str::to_owned).collect();
    if added.is_empty() {
        return parse(&variable, &words);
    }
    if added.len() != words.len() {
        let accepted = "either targets in place of the family's (sm_89,compute_80), or targets \
                        beside them, each with a + (+sm_89)";
        return Err(Error::setting(&variable, &given, accepted));
    }
    targets.extend(parse(&variable, &added)?);
    Ok(target::unique(targets))
}

fn parse(field: &str, names: &[String]) -> Result<Vec<Target>, Error> {
    let refuse = |name| Error::setting(field, name, target::accepted());
    let targets = names
        .iter()
        .map(|name| name.parse().map_err(|()| refuse(name.as_str())));
    let targets = target::unique(targets.collect::<Result<Vec<_>, _>>()?);
    match targets.is_empty() {
        true => Err(refuse("no target")),
        false => Ok(targets),
    }
}

/// Refuses invalid names, names that mean something else in a source's path, and names that give
/// the same constant.
fn distinguishable(declared: &[Declared]) -> Result<(), Error> {
    let mut constants = BTreeSet::new();
    for family in declared {
        let starts = family.name.starts_with(|c: char| c.is_ascii_lowercase());
        let holds = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '-';
        if !starts || !family.name.chars().all(holds) {
            let accepted = "a small letter, then small letters, digits, _ and -";
            return Err(Error::setting("family", &family.name, accepted));
        }
        if ["all", "common"].contains(&family.name.as_str()) {
            let accepted = "another name: all/ is for sources of every family, common/ for headers";
            return Err(Error::setting("family", &family.name, accepted));
        }
        if !constants.insert(family.constant()) {
            let accepted = "a name that differs from every other by more than - and _";
            return Err(Error::setting("family", &family.name, accepted));
        }
    }
    Ok(())
}

/// Returns the families that the features of the package turn on. Cargo tells them the build script
/// in `CARGO_FEATURE_*`.
fn by_features(declared: &[Declared]) -> Result<BTreeSet<String>, Error> {
    let mut found = BTreeSet::new();
    for (key, _) in env::vars_os() {
        let feature = key
            .to_str()
            .and_then(|key| key.strip_prefix("CARGO_FEATURE_"));
        let Some(feature) = feature else { continue };
        if let Some(family) = declared.iter().find(|family| family.constant() == feature) {
            found.insert(family.name.clone());
        } else if looks_like_one(feature) {
            return Err(unknown(&feature.to_ascii_lowercase(), declared));
        }
    }
    Ok(found)
}

/// True if `name` is spelled like a built-in family (`sm90`, `sm_91`, `SM120`), known or not.
pub(crate) fn looks_like_one(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let number = lower
        .strip_prefix("sm")
        .map(|rest| rest.trim_start_matches(['_', '-']));
    number.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn families(
        own: &[Family],
        on: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Families, Error> {
        let on: Vec<_> = on.iter().map(|&name| name.to_owned()).collect();
        Families::new(own, &on, |name| {
            let of_name = variables.iter().find(|(known, _)| *known == name);
            of_name.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_source_of_all_is_compiled_for_what_any_family_is() {
        let families = families(&[], &["sm100", "sm80", "sm90"], &[]).unwrap();
        assert_eq!(
            target::names(&families.of_all).join(" "),
            "sm_80 sm_120 compute_80 sm_90a sm_100f"
        );
    }

    #[test]
    fn a_variable_replaces_targets_or_adds_some() {
        let of = |value| {
            let variables = [("MLA_BUILD_TARGETS_SM80", value)];
            let families = families(&[], &["sm80"], &variables);
            families.map(|it| target::names(it.declared[0].compiled()).join(" "))
        };
        assert_eq!(of("sm_89").unwrap(), "sm_89");
        assert_eq!(of(" ").unwrap(), of("+sm_80").unwrap());
        assert_eq!(
            of("+sm_86, +sm_89").unwrap(),
            "sm_80 sm_90 sm_100 sm_120 compute_80 sm_86 sm_89"
        );
        for (value, part) in [
            (
                "sm_91",
                "MLA_BUILD_TARGETS_SM80: given \"sm_91\", accepted sm_75",
            ),
            (
                "+sm_86,sm_89",
                "MLA_BUILD_TARGETS_SM80: given \"+sm_86,sm_89\"",
            ),
        ] {
            let message = of(value).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn names_and_targets_that_cannot_be_are_refused() {
        for (family, part) in [
            (Family::new("all", ["sm_80"]), "family: given \"all\""),
            (Family::new("Sm80", ["sm_80"]), "family: given \"Sm80\""),
            (Family::new("a/b", ["sm_80"]), "family: given \"a/b\""),
            (Family::new("x", ["sm_91"]), "family x: given \"sm_91\""),
            (Family::new("x", [""; 0]), "family x: given \"no target\""),
        ] {
            let message = families(&[family], &["sm80"], &[]).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
        let twins = [Family::new("a-b", ["sm_80"]), Family::new("a_b", ["sm_80"])];
        let message = families(&twins, &["sm80"], &[]).unwrap_err().to_string();
        assert!(message.contains("family: given \"a_b\""), "{message}");
        let message = families(&[], &["sm91"], &[]).unwrap_err().to_string();
        assert_eq!(
            message,
            "family: given \"sm91\", accepted sm80, sm90, sm100; another is declared with \
             Kernels::family(Family::new(\"sm91\", [\"sm_91\"]))"
        );
    }

    #[test]
    fn folders_that_look_like_families_are_told_from_others() {
        for name in ["sm90", "sm_90", "SM120", "sm90a", "sm-75"] {
            assert!(looks_like_one(name), "{name}");
        }
        for name in ["small", "smem", "all", "common", "sm", "decode"] {
            assert!(!looks_like_one(name), "{name}");
        }
    }
}
