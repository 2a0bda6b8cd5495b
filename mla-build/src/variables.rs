//! The environment variables by which a user changes a build. Those of the toolkit's search and of
//! the compilers are listed beside the code that reads them.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
};

use crate::{Error, diagnostic::KEEP_GOING};

/// Asks for bindings alone.
pub(crate) const ONLY: &str = "MLA_BUILD_ONLY";

/// Identifies docs.rs, which needs bindings alone.
pub(crate) const DOCUMENTATION: &str = "DOCS_RS";

/// Names folders of objects that were compiled before, or refuses those of the package.
pub(crate) const PREBUILT: &str = "MLA_BUILD_PREBUILT";

/// Names a folder that a build adds its objects to.
pub(crate) const EXPORT: &str = "MLA_BUILD_EXPORT";

/// Names a folder for GPU code as separate files.
pub(crate) const CODE: &str = "MLA_BUILD_CODE";

/// Asks for line numbers of sources in objects, for profilers.
pub(crate) const LINE_INFO: &str = "MLA_BUILD_LINE_INFO";

/// Names the file that clangd reads.
pub(crate) const COMPILE_COMMANDS: &str = "MLA_BUILD_COMPILE_COMMANDS";

/// Names the cache's folder.
pub(crate) const CACHE: &str = "MLA_BUILD_CACHE";

/// Sets the cache's maximum size.
pub(crate) const CACHE_SIZE: &str = "MLA_BUILD_CACHE_SIZE";

/// Names the file that events are written to.
pub(crate) const PROGRESS: &str = "MLA_BUILD_PROGRESS";

/// All variables. A changed one causes a new build.
pub(crate) const ALL: &[&str] = &[
    ONLY,
    DOCUMENTATION,
    PREBUILT,
    EXPORT,
    CODE,
    LINE_INFO,
    COMPILE_COMMANDS,
    CACHE,
    CACHE_SIZE,
    KEEP_GOING,
];

/// Variables that name a folder or file for all packages of a build.
const PATHS: &[&str] = &[CACHE, EXPORT, CODE, PROGRESS, "MLA_TOOLKIT", "MLA_WHEELS"];

/// The prefix of all variables of this crate.
const OWN: &str = "MLA_BUILD_";

/// Prefixes of names that are checked for misspellings.
const CHECKED: &[&str] = &["MLA_", "NVCC", "CUDA_", "CUTLASS_", "LIBCLANG_"];

/// Variables of other build systems, and the ones that this build reads instead.
const FOREIGN: &[(&str, &str)] = &[
    ("CUDACXX", "NVCC"),
    ("CUDAFLAGS", "NVCC_APPEND_FLAGS"),
    ("NVCCFLAGS", "NVCC_APPEND_FLAGS"),
    ("NVCC_FLAGS", "NVCC_APPEND_FLAGS"),
    ("CUDA_ROOT", "CUDA_HOME"),
    ("CUDA_TOOLKIT_ROOT_DIR", "CUDA_HOME"),
    ("CUDAToolkit_ROOT", "CUDA_HOME"),
];

/// Returns the value of a variable that is set and not empty.
pub(crate) fn set(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// Refuses a relative path. A build script runs in its package's folder, so the path would mean
/// another folder for each package.
pub(crate) fn check_absolute(name: &str, value: &OsStr) -> Result<(), Error> {
    if Path::new(value).is_absolute() {
        return Ok(());
    }
    Err(Error::setting(name, value, ABSOLUTE))
}

/// Description of the accepted values, if a path is relative.
pub(crate) const ABSOLUTE: &str =
    "an absolute path (a shell replaces ~ only at the start of a word, outside of quotes)";

/// Refuses relative paths in the variables that hold a path for all packages, and in `more`.
pub(crate) fn check_paths(more: &[String]) -> Result<(), Error> {
    let names = PATHS.iter().copied().chain(more.iter().map(String::as_str));
    for name in names {
        if let Some(value) = set(name) {
            check_absolute(name, &value)?;
        }
    }
    Ok(())
}

/// Reads a switch: 1 is true, and 0, empty and unset are false.
pub(crate) fn is_on(name: &str) -> Result<bool, Error> {
    let value = env::var(name).unwrap_or_default();
    match value.trim() {
        "" | "0" => Ok(false),
        "1" => Ok(true),
        other => Err(Error::setting(name, other, "1 or 0")),
    }
}

/// A variable that is set but not read, with a sentence for the user.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unread {
    pub(crate) name: String,
    pub(crate) sentence: String,
    /// True if no other build system reads it either.
    pub(crate) is_misspelt: bool,
}

/// Returns the names among `given` that this build does not read, although they look as if it did.
/// They nearly equal `known` ones, have this crate's prefix, or belong to other build systems.
pub(crate) fn unread(given: impl Iterator<Item = String>, known: &[String]) -> Vec<Unread> {
    // Variables that the build sets for the package's code.
    let is_told = |name: &str| {
        ["COMPILED", "PREFIX_"]
            .iter()
            .any(|it| name.starts_with(it))
    };
    let mut found = Vec::new();
    for name in given {
        let reads = FOREIGN.iter().find(|(foreign, _)| *foreign == name);
        let is_checked = CHECKED.iter().any(|start| name.starts_with(start));
        if reads.is_none() && (!is_checked || known.contains(&name)) {
            continue;
        }
        let own_name = name.strip_prefix(OWN);
        let hint = match (reads, nearest(&name, known), own_name) {
            (Some((_, read)), ..) => (*read).to_owned(),
            (None, _, Some(rest)) if is_told(rest) => continue,
            (None, Some(near), _) => near.to_owned(),
            (None, None, Some(_)) => own(known, &name),
            (None, None, None) => continue,
        };
        let sentence = format!("the environment variable {name} is not read here; accepted {hint}");
        found.push(Unread {
            name,
            sentence,
            is_misspelt: reads.is_none(),
        });
    }
    found
}

/// Lists this crate's own variables. Those with targets are included only if `name` resembles one.
fn own(known: &[String], name: &str) -> String {
    const TARGETS: &str = "MLA_BUILD_TARGETS_";
    let is_like = |known: &&String| {
        known.starts_with(OWN) && known.starts_with(TARGETS) == name.starts_with(TARGETS)
    };
    let names: Vec<_> = known.iter().filter(is_like).map(String::as_str).collect();
    names.join(", ")
}

/// Returns the known name that differs by at most two letters.
fn nearest<'a>(name: &str, known: &'a [String]) -> Option<&'a str> {
    let near = known
        .iter()
        .map(|known| (strsim::levenshtein(name, known), known.as_str()));
    let (_, near) = near
        .filter(|(distance, _)| *distance <= 2)
        .min_by_key(|it| it.0)?;
    Some(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_named_with_the_one_that_is_meant() {
        let known = [
            CACHE,
            KEEP_GOING,
            "MLA_BUILD_TARGETS_SM90",
            "MLA_CUDA_HOME",
            "NVCC",
            "NVCC_APPEND_FLAGS",
        ]
        .map(str::to_owned);
        let of = |names: &[&str]| {
            let names = names.iter().map(|&name| name.to_owned());
            let found = unread(names, &known).into_iter();
            found.map(|it| it.sentence).collect::<Vec<_>>()
        };
        for (given, meant) in [
            ("MLA_BUILD_TARGETS_SM9O", "accepted MLA_BUILD_TARGETS_SM90"),
            (
                "MLA_BUILD_TARGETS_GEFORCE",
                "accepted MLA_BUILD_TARGETS_SM90",
            ),
            ("MLA_BUILD_CASHE", "accepted MLA_BUILD_CACHE"),
            (
                "MLA_BUILD_VERBOSE",
                "accepted MLA_BUILD_CACHE, MLA_BUILD_KEEP_GOING",
            ),
            ("MLA_CUDA_HOM", "accepted MLA_CUDA_HOME"),
            ("NVCC_APPEND_FLAG", "accepted NVCC_APPEND_FLAGS"),
            ("NVCC_FLAGS", "accepted NVCC_APPEND_FLAGS"),
            ("CUDACXX", "accepted NVCC"),
        ] {
            let found = of(&[given]);
            assert_eq!(found.len(), 1, "{given}");
            let named = format!("the environment variable {given} is not read here; {meant}");
            assert_eq!(found[0], named);
        }
        let others = [
            "MLA_BUILD_CACHE",
            "MLA_BUILD_COMPILED",
            "MLA_BUILD_PREFIX_API",
            "CUDA_VISIBLE_DEVICES",
            "MLA_SEED",
            "HOME",
        ];
        assert_eq!(of(&others), [""; 0]);
    }
}
