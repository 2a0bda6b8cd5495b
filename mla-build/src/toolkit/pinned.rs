//! Include roots below one folder, whose contents a package pins.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::Found;
use crate::{Error, bounded, include_root::IncludeRoot};

/// Include roots of a folder, and the hash of their contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pinned {
    roots: Vec<Root>,
    /// Folders within the roots that are excluded.
    pub(super) left_out: Vec<String>,
    pub(super) contents: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Root {
    folder: String,
    is_system: bool,
}

impl Pinned {
    pub(super) fn add(&mut self, folder: String, is_system: bool) {
        self.roots.push(Root { folder, is_system });
    }

    /// Returns the first root without a folder in `base`.
    pub(super) fn missing(&self, base: &Path) -> Option<&str> {
        let mut roots = self.roots.iter();
        let missing = roots.find(|root| !base.join(&root.folder).is_dir());
        missing.map(|root| root.folder.as_str())
    }

    /// Returns the include roots below the found folder if they hold the pinned contents. `name` is
    /// the field of an error, and `remedy` its advice if the contents differ.
    pub(super) fn found(
        &self,
        (role, name, remedy): (String, String, &str),
        found: Found,
    ) -> Result<FoundHeaders, Error> {
        let base = &found.path;
        if let Some(pinned) = &self.contents {
            let given = self.hash(base)?;
            if given != *pinned {
                return Err(Error::setting(
                    format!("the contents of {name}"),
                    format!("{given} in {}", base.display()),
                    format!("{pinned}: {remedy}, or pin another"),
                ));
            }
        }
        let includes = self.roots.iter().map(|root| IncludeRoot {
            role: format!("{role}/{}", root.folder),
            folder: base.join(&root.folder),
            is_system: root.is_system,
        });
        Ok(FoundHeaders {
            includes: includes.collect(),
            role: (role, base.clone()),
            found,
        })
    }

    /// Returns the hash of the paths and contents of all files in the include roots. The bytecode
    /// that pip and Python write beside Python's sources is left out.
    fn hash(&self, base: &Path) -> Result<String, Error> {
        let left_out: Vec<_> = self.left_out.iter().map(|it| base.join(it)).collect();
        let mut files = BTreeMap::new();
        for root in &self.roots {
            let walk = walkdir::WalkDir::new(base.join(&root.folder)).into_iter();
            let counts = |entry: &walkdir::DirEntry| {
                entry.file_name() != "__pycache__" && !left_out.iter().any(|it| it == entry.path())
            };
            for entry in walk.filter_entry(counts) {
                let entry = entry.map_err(|error| {
                    let path = error.path().unwrap_or(base).to_owned();
                    Error::file("read", path)(error)
                })?;
                let Ok(relative) = entry.path().strip_prefix(base) else {
                    continue;
                };
                if !entry.file_type().is_dir() && !files.contains_key(relative) {
                    let bytes =
                        bounded::read(entry.path()).map_err(Error::file("read", entry.path()))?;
                    files.insert(relative.to_owned(), blake3::hash(&bytes));
                }
            }
        }
        let mut all = blake3::Hasher::new();
        for (path, hash) in files {
            let path = path.to_string_lossy();
            all.update(&(path.len() as u64).to_le_bytes());
            all.update(path.as_bytes()).update(hash.as_bytes());
        }
        Ok(all.finalize().to_hex().to_string())
    }
}

/// Pinned headers that were found.
#[derive(Debug)]
pub(crate) struct FoundHeaders {
    pub(crate) includes: Vec<IncludeRoot>,
    /// The role of all of its files, and the folder for this role.
    pub(crate) role: (String, PathBuf),
    pub(crate) found: Found,
}
