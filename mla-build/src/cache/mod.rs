//! Objects that outlive a target folder, shared by checkouts, profiles and packages.
//!
//! Two steps lead to an object, as in ccache's direct mode. What is known before compiling (the
//! source's bytes and its place in the package, the flags, the compilers' versions) makes the *first
//! key*, which names a **manifest**: the sets of files that this source was found to depend on, with
//! the hash of each. A set whose every file still has that hash makes the *second key*, which names the
//! **object**. So a hit costs no preprocessing, and a header that changes back finds its old object.
//!
//! ```text
//! <cache>/manifests/ab/<first key>.json
//! <cache>/objects/cd/<second key>        hash of the rest, what is known of it, the object
//! <cache>/estimates/ef/<unit>.json       time and peak memory of the last compilation, for the schedule
//! <cache>/locks/<first three digits>     held with flock: the system lets go when a process dies
//! <cache>/staging/                       files on their way; renamed when whole
//! ```
//!
//! Everything is written into `staging`, synchronised and renamed, so a file in its place is a whole
//! file. What a disk does to it afterwards is found by its hash.

mod store;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

pub(crate) use store::{Cache, Estimate, Loaded};

use crate::{
    hasher::Hasher,
    roles::{RolePath, Roles},
};

/// Raised when what the files of the cache mean changes: entries of another format are never looked at.
const FORMAT: &str = "mla-build 1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(blake3::Hash);

impl Key {
    /// The first key. Each part is hashed with its length, so that no two lists of parts are the same
    /// stream of bytes.
    pub(crate) fn new<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in std::iter::once(FORMAT.as_bytes()).chain(parts) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(hasher.finalize())
    }

    /// The second key: the first, and the content of every dependency.
    pub(crate) fn with_dependencies(self, set: &DependencySet) -> Self {
        let mut parts: Vec<Vec<u8>> = vec![self.0.as_bytes().to_vec()];
        for dependency in &set.files {
            parts.push(dependency.file.role.clone().into_bytes());
            parts.push(dependency.file.path.clone().into_bytes());
            parts.push(dependency.hash.as_bytes().to_vec());
        }
        for file in &set.shadows {
            parts.push(file.role.clone().into_bytes());
            parts.push(file.path.clone().into_bytes());
        }
        Self::new(parts.iter().map(Vec::as_slice))
    }

    pub(crate) fn hex(self) -> String {
        self.0.to_hex().to_string()
    }
}

/// The sets of dependencies that a unit was compiled with, the latest first.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) sets: Vec<DependencySet>,
}

impl Manifest {
    /// A branch or two and their history; older sets are compiled again when they come back.
    const MOST_SETS: usize = 16;

    pub(crate) fn remember(&mut self, set: DependencySet) {
        self.sets.retain(|known| *known != set);
        self.sets.insert(0, set);
        self.sets.truncate(Self::MOST_SETS);
    }
}

/// Everything that one compilation read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DependencySet {
    pub(crate) files: Vec<Dependency>,
    /// Files that an include would have found in place of a dependency, had it been searched for in
    /// another order. A file that newly joins them may change what an include means, though no
    /// dependency has changed.
    pub(crate) shadows: BTreeSet<RolePath>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) file: RolePath,
    /// Of its content, in hexadecimal.
    pub(crate) hash: String,
}

impl DependencySet {
    /// Takes the files of a depfile; `Err` names one that cannot be read.
    pub(crate) fn new(
        files: &[PathBuf],
        roles: &Roles,
        roots: &[PathBuf],
        hasher: &Hasher,
    ) -> Result<Self, PathBuf> {
        let mut dependencies = Vec::new();
        for path in files {
            let hash = hasher
                .content(path)
                .ok_or_else(|| path.clone())?
                .to_hex()
                .to_string();
            dependencies.push(Dependency {
                file: roles.name(path),
                hash,
            });
        }
        dependencies.sort_by(|a, b| a.file.cmp(&b.file));
        dependencies.dedup();
        let located: Vec<_> = dependencies
            .iter()
            .filter_map(|d| roles.locate(&d.file))
            .collect();
        Ok(Self {
            shadows: shadows(&located, roles, roots, hasher),
            files: dependencies,
        })
    }

    /// The files as they lie in this build, or what has changed.
    pub(crate) fn check(
        &self,
        roles: &Roles,
        roots: &[PathBuf],
        hasher: &Hasher,
    ) -> Result<Vec<PathBuf>, String> {
        let mut paths = Vec::with_capacity(self.files.len());
        for dependency in &self.files {
            let path = roles.locate(&dependency.file);
            let hash = path.as_deref().and_then(|path| hasher.content(path));
            match (path, hash) {
                (Some(path), Some(hash)) if hash.to_hex().as_str() == dependency.hash => {
                    paths.push(path)
                }
                (_, Some(_)) => return Err(format!("{} changed", dependency.file.path)),
                _ => return Err(format!("{} is gone", dependency.file.path)),
            }
        }
        let now = shadows(&paths, roles, roots, hasher);
        match now.symmetric_difference(&self.shadows).next() {
            None => Ok(paths),
            Some(file) => Err(format!(
                "{} came or went, and an include may mean it",
                file.path
            )),
        }
    }
}

/// The files that exist and that an include of a dependency would mean if it were spelled relative to
/// an earlier include root, or to a folder of the package that holds a dependency (where quoted
/// includes look first).
fn shadows(
    files: &[PathBuf],
    roles: &Roles,
    roots: &[PathBuf],
    hasher: &Hasher,
) -> BTreeSet<RolePath> {
    let own: BTreeSet<&Path> = files
        .iter()
        .filter(|file| roles.name(file).role == PACKAGE)
        .filter_map(|file| file.parent())
        .collect();
    let mut found = BTreeSet::new();
    for file in files {
        let Some((at, spelled)) = roots
            .iter()
            .enumerate()
            .find_map(|(at, root)| Some((at, file.strip_prefix(root).ok()?)))
        else {
            continue;
        };
        for folder in roots[..at]
            .iter()
            .map(PathBuf::as_path)
            .chain(own.iter().copied())
        {
            let candidate = folder.join(spelled);
            if candidate != *file && hasher.exists(&candidate) {
                found.insert(roles.name(&candidate));
            }
        }
    }
    found
}

/// The role of the package's own folder.
pub(crate) const PACKAGE: &str = "package";

/// What is kept of a compilation beside its object.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Meta {
    pub(crate) seconds: f64,
    /// Bytes.
    pub(crate) peak: u64,
    /// All that the compiler printed.
    pub(crate) log: String,
}

/// An object and what is known of it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) meta: Meta,
    pub(crate) object: Vec<u8>,
}
