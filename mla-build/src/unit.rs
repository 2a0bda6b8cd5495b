//! Translation units: which sources there are, and for which targets each is compiled.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Component, Path, PathBuf},
};

use globset::GlobBuilder;

use crate::{
    Error,
    family::{self, Families},
    target::{self, Target},
};

/// A source and the targets that it is compiled for, into one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Relative to the package, with `/` between its parts.
    pub(crate) source: String,
    /// Not empty.
    pub(crate) targets: Vec<Target>,
}

impl Unit {
    /// A file name for what is made of it, of the name of its source and of its whole path.
    pub(crate) fn file_stem(&self) -> String {
        let stem = Path::new(&self.source)
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let hash = blake3::hash(self.source.as_bytes()).to_hex();
        format!("{stem}-{}", &hash[..8])
    }

    /// The names of its targets.
    pub(crate) fn targets(&self) -> Vec<String> {
        target::names(&self.targets)
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.source, self.targets().join(", "))
    }
}

/// The units of the globs, in the order of their paths.
pub(crate) fn discover(
    root: &Path,
    globs: &[String],
    families: &Families,
) -> Result<Vec<Unit>, Error> {
    let mut sources = BTreeMap::new();
    for glob in globs {
        let matcher = GlobBuilder::new(glob)
            .literal_separator(true)
            .build()
            .map_err(|error| Error::Setting {
                field: "sources".into(),
                given: glob.clone(),
                accepted: format!("a glob ({})", error.kind()),
            })?
            .compile_matcher();
        let base = root.join(fixed_part(glob));
        for entry in walkdir::WalkDir::new(&base).follow_links(true) {
            let entry = match entry {
                Ok(entry) => entry,
                // A folder that does not exist matches nothing, and that is an error of its own below.
                Err(error)
                    if error
                        .io_error()
                        .is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound) =>
                {
                    continue;
                }
                Err(error) => {
                    let path = error.path().unwrap_or(&base).to_owned();
                    return Err(Error::File {
                        action: "read",
                        path,
                        source: error.into(),
                    });
                }
            };
            let Ok(relative) = entry.path().strip_prefix(root) else {
                continue;
            };
            if entry.file_type().is_file() && matcher.is_match(relative) {
                let targets = of_path(relative, families)?;
                sources.insert(relative.to_string_lossy().replace('\\', "/"), targets);
            }
        }
    }
    let units: Vec<_> = sources
        .into_iter()
        .filter(|(_, targets)| !targets.is_empty())
        .map(|(source, targets)| Unit {
            source,
            targets: targets.to_vec(),
        })
        .collect();
    if units.is_empty() {
        return Err(Error::NoSources {
            families: families.enabled(),
            globs: globs.join(", "),
            root: root.to_owned(),
        });
    }
    Ok(units)
}

/// The folders of a glob before its first wildcard.
pub(crate) fn fixed_part(glob: &str) -> PathBuf {
    let path = Path::new(glob);
    let fixed: PathBuf = path
        .components()
        .take_while(|part| {
            !part
                .as_os_str()
                .to_string_lossy()
                .contains(['*', '?', '[', '{'])
        })
        .collect();
    if fixed == path {
        fixed.parent().map(Path::to_owned).unwrap_or_default()
    } else {
        fixed
    }
}

/// What the folders of a source say about it: a family's name means that family, `all` means everything
/// that any family is compiled for, and a source in neither means the same. `common` is for headers.
fn of_path<'a>(source: &Path, families: &'a Families) -> Result<&'a [Target], Error> {
    let place = |problem: String| Error::SourcePlace {
        source_file: source.to_owned(),
        problem,
    };
    for part in source.parent().into_iter().flat_map(Path::components) {
        let Component::Normal(name) = part else {
            continue;
        };
        let name = name.to_string_lossy();
        if name == "common" {
            return Err(place(
                "common/ holds headers; a source of every family goes into all/".into(),
            ));
        }
        if name == "all" {
            return Ok(&families.of_all);
        }
        if let Some(family) = families.declared.iter().find(|family| family.name == name) {
            return Ok(family.compiled());
        }
        if family::looks_like_one(&name) {
            return Err(place(format!(
                "given the family's folder {name:?}, accepted: {}, all",
                families.names()
            )));
        }
    }
    Ok(&families.of_all)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        folder
    }

    fn families(on: &[&str]) -> Families {
        let on: Vec<_> = on.iter().map(|&name| name.to_owned()).collect();
        Families::new(&[], &on, |_| None).unwrap()
    }

    fn found(root: &Path, on: &[&str]) -> Result<Vec<String>, Error> {
        discover(root, &["cuda/**/*.cu".into()], &families(on))
            .map(|units| units.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn folders_say_what_a_source_is_compiled_for() {
        let tree = tree(&[
            "cuda/sm90/decode/a.cu",
            "cuda/sm100/decode/a.cu",
            "cuda/all/merge.cu",
            "cuda/common/tile.cuh",
            "cuda/plain.cu",
        ]);
        assert_eq!(
            found(tree.path(), &["sm90"]).unwrap(),
            [
                "cuda/all/merge.cu (sm_90a)",
                "cuda/plain.cu (sm_90a)",
                "cuda/sm90/decode/a.cu (sm_90a)",
            ]
        );
        let both = found(tree.path(), &["sm90", "sm100"]).unwrap();
        assert_eq!(both.len(), 4);
        assert_eq!(both[0], "cuda/all/merge.cu (sm_90a, sm_100f)");
    }

    #[test]
    fn a_source_in_a_wrong_place_is_an_error_that_names_it() {
        let message = found(tree(&["cuda/sm91/a.cu"]).path(), &["sm90"])
            .unwrap_err()
            .to_string();
        assert_eq!(
            message,
            "cuda/sm91/a.cu: given the family's folder \"sm91\", accepted: sm80, sm90, sm100, all"
        );
        let message = found(tree(&["cuda/common/a.cu"]).path(), &["sm90"])
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("cuda/common/a.cu") && message.contains("all/"),
            "{message}"
        );
    }

    #[test]
    fn globs_that_match_nothing_are_an_error() {
        for files in [&["src/lib.rs"][..], &["cuda/sm100/a.cu"][..]] {
            let message = found(tree(files).path(), &["sm90"])
                .unwrap_err()
                .to_string();
            assert!(
                message.contains("no source for sm90 among cuda/**/*.cu"),
                "{message}"
            );
        }
        let bad = discover(Path::new("/"), &["cuda/[".into()], &families(&["sm90"]))
            .unwrap_err()
            .to_string();
        assert!(bad.starts_with("sources: given \"cuda/[\""), "{bad}");
    }

    #[test]
    fn the_walk_starts_below_the_wildcards() {
        assert_eq!(fixed_part("cuda/sm90/**/*.cu"), Path::new("cuda/sm90"));
        assert_eq!(fixed_part("cuda/a.cu"), Path::new("cuda"));
        assert_eq!(fixed_part("*.cu"), Path::new(""));
    }

    #[test]
    fn units_of_one_name_have_files_of_their_own() {
        let unit = |source: &str| Unit {
            source: source.into(),
            targets: vec!["sm_90a".parse().unwrap()],
        };
        assert_ne!(
            unit("cuda/sm90/decode/bf16.cu").file_stem(),
            unit("cuda/sm90/prefill/bf16.cu").file_stem()
        );
        assert_eq!(unit("cuda/a.cu").to_string(), "cuda/a.cu (sm_90a)");
    }
}
