//! The compiled targets. They are constants that the package's own code is checked against, and a
//! variable for attributes that do not name a target.

use std::{
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
};

use crate::{
    Error, bounded,
    family::Families,
    target::{self, Target},
    unit,
};

/// The variable in which the package's code finds what was compiled:
/// `sm90:on:sm_90a;sm100:off:sm_100f`.
const VARIABLE: &str = "MLA_BUILD_COMPILED";

/// Writes a constant for each family, and one for the sources in no family's folder.
pub(crate) fn write(families: &Families, output: &Path) -> Result<(), Error> {
    let text = text(families);
    // If the text is the same, the file is not written: a new time would make Cargo compile its
    // users again.
    if bounded::read_to_string(output).is_ok_and(|known| known == text) {
        return Ok(());
    }
    fs::write(output, text).map_err(Error::file("write", output))
}

/// Tells Cargo, in a variable for the package's code, which families have CUDA sources in these
/// globs. For each, the variable says whether it is turned on, and its targets. If no folder is a
/// family's, `all` stands for the sources.
pub(crate) fn tell(families: &Families, root: &Path, globs: &[String]) -> Result<(), Error> {
    static KNOWN: Mutex<Vec<Group>> = Mutex::new(Vec::new());
    // The list holds only whole groups at every moment, so it is valid even after a panic
    // elsewhere.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    for group in groups(families, root, globs)? {
        add(&mut known, group);
    }
    for family in &families.declared {
        println!("cargo::rerun-if-env-changed={}", family.variable());
    }
    // Cargo keeps the last value, so a package's later library also tells the targets of all
    // earlier ones.
    if let Some(value) = value(&known) {
        println!("cargo::rustc-env={VARIABLE}={value}");
    }
    Ok(())
}

/// Sources that are compiled for the same targets.
struct Group {
    /// The family, or `None` for sources in no family's folder.
    family: Option<String>,
    enabled: bool,
    targets: Vec<String>,
}

fn groups(families: &Families, root: &Path, globs: &[String]) -> Result<Vec<Group>, Error> {
    let folders = unit::folders(root, globs, families)?;
    let declared = families.declared.iter();
    let each = declared.map(|it| (Some(&it.name), it.enabled, &it.targets));
    let of_all = (None, !families.of_all.is_empty(), &families.of_all);
    let groups = each.chain([of_all]);
    let groups = groups.filter(|(name, ..)| folders.contains(&name.map(String::as_str)));
    let groups = groups.map(|(name, enabled, targets)| Group {
        family: name.cloned(),
        enabled,
        targets: target::names(targets),
    });
    Ok(groups.collect())
}

/// Adds the targets of one more library. If libraries compile a family for different targets, only
/// the targets that all of them have count. The reason is that an attribute does not say which
/// library's kernels it means.
fn add(known: &mut Vec<Group>, group: Group) {
    match known.iter_mut().find(|it| it.family == group.family) {
        None => known.push(group),
        Some(same) => {
            same.enabled &= group.enabled;
            same.targets.retain(|it| group.targets.contains(it));
        }
    }
}

/// Returns the value of the variable, or `None` without a CUDA source. Sources in no family's
/// folder are compiled at least for the targets of each family, so they are left out if there are
/// families' folders.
fn value(known: &[Group]) -> Option<String> {
    let by_family = known.iter().any(|group| group.family.is_some());
    let groups = known
        .iter()
        .filter(|group| group.family.is_some() == by_family);
    let groups = groups.map(|group| {
        let name = group.family.as_deref().unwrap_or("all");
        let state = if group.enabled { "on" } else { "off" };
        format!("{name}:{state}:{}", group.targets.join(","))
    });
    let groups: Vec<_> = groups.collect();
    (!groups.is_empty()).then(|| groups.join(";"))
}

fn text(families: &Families) -> String {
    let constant = |what: &str, name: &str, targets: &[Target]| {
        let names = target::names(targets);
        format!(
            "/// Targets that {what}, under nvcc's names.\n\
             pub const {name}: &[&str] = &{names:?};\n"
        )
    };
    let of_families = families.declared.iter().map(|family| {
        let what = format!("the family `{}` was compiled for", family.name);
        constant(&what, &family.constant(), family.compiled())
    });
    let all = "sources in no family's folder were compiled for";
    of_families
        .chain([constant(all, "ALL", &families.of_all)])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(libraries: &[(&[&str], &[&str])]) -> Option<String> {
        let mut known = Vec::new();
        for (on, files) in libraries {
            let folder = tempfile::tempdir().unwrap();
            for file in *files {
                let path = folder.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            let on: Vec<_> = on.iter().map(|&name| name.to_owned()).collect();
            let families = Families::new(&[], &on, |_| None).unwrap();
            for group in groups(&families, folder.path(), &["**/*.c[uc]".to_owned()]).unwrap() {
                add(&mut known, group);
            }
        }
        value(&known)
    }

    #[test]
    fn the_packages_code_is_told_of_families_with_sources() {
        let both = ["sm90/a.cu", "sm100/a.cu", "all/helper.cu", "sm80/shim.cc"];
        assert_eq!(
            told(&[(&["sm90"], &both)]).as_deref(),
            Some("sm90:on:sm_90a;sm100:off:sm_100f")
        );
        assert_eq!(
            told(&[(&["sm90", "sm100"], &["all/a.cu"])]).as_deref(),
            Some("all:on:sm_90a,sm_100f")
        );
        // C++ sources alone tell nothing, since their kernels come from elsewhere.
        assert_eq!(told(&[(&["sm90"], &["all/shim.cc"])]), None);
        // Each library says more, and `all` says less than any family's folder.
        assert_eq!(
            told(&[(&["sm90"], &["all/a.cu"]), (&["sm90"], &["sm90/b.cu"])]).as_deref(),
            Some("sm90:on:sm_90a")
        );
        assert_eq!(
            told(&[(&["sm90", "sm100"], &["all/a.cu"]), (&["sm90"], &["b.cu"])]).as_deref(),
            Some("all:on:sm_90a")
        );
    }
}
