//! Objects that outlive a target folder, shared by checkouts, profiles and packages.
//!
//! Two steps lead to an object, as in ccache's direct mode. The *first key* hashes what is known
//! before compiling: the source's bytes and its path in the package, the flags, and the compilers'
//! versions and programs. It names a **manifest**, which lists the sets of files that this source
//! was found to depend on. With each file, a set has the hash of its content and the hash of what
//! its includes find (`includes`). If every file of a set still has both hashes, the set makes the
//! *second key*, which names the **object**. A hit therefore costs no preprocessing, and a header
//! that changes back finds its old object.
//!
//! ```text
//! <cache>/manifests/ab/<first key>.json
//! <cache>/objects/cd/<second key>        hash of the rest, what is known of it, the object
//! <cache>/estimates/ef/<unit>.json       time and peak memory of the last compilation
//! <cache>/files/0a/<path>.json           hash of a program of the toolkit, with its file's times
//! <cache>/locks/<first three digits>     held with flock: the system lets go when a process dies
//! <cache>/staging/                       files on their way; renamed when whole
//! ```
//!
//! Every file is written into `staging`, synchronised and renamed, so a file outside `staging` is
//! complete. Its hash reveals later damage by the disk.

mod hasher;
mod includes;
mod maintenance;
mod store;

use std::{
    fs::Metadata,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};

pub(crate) use hasher::{Hasher, content_now};
pub(crate) use includes::Lookup;
pub(crate) use maintenance::{bound, folder};
pub(crate) use store::{Cache, Estimate, Loaded};

use crate::roles::{RolePath, Roles};

/// Version of the cache's format. It is raised when the meaning of the files changes, and entries
/// of another version are never looked at.
const FORMAT: &str = "mla-build 2";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(blake3::Hash);

impl Key {
    /// Makes the first key.
    pub(crate) fn new<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Self(hash_parts([FORMAT.as_bytes()].into_iter().chain(parts)))
    }

    /// Makes the second key from the first and the content of every dependency.
    pub(crate) fn with_dependencies(self, set: &DependencySet) -> Self {
        let files = set.files.iter().flat_map(|it| {
            [&it.file.role, &it.file.path, &it.hash, &it.finds].map(|part| part.as_bytes())
        });
        Self::new([self.0.as_bytes().as_slice()].into_iter().chain(files))
    }

    pub(crate) fn hash(self) -> blake3::Hash {
        self.0
    }

    pub(crate) fn hex(self) -> String {
        self.0.to_hex().to_string()
    }
}

/// The sets of dependencies with which a unit was compiled, the latest first.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) sets: Vec<DependencySet>,
}

impl Manifest {
    /// Enough for a branch or two and their history. If an older set comes back, it is compiled
    /// again.
    const MAX_SETS: usize = 16;

    pub(crate) fn remember(&mut self, set: DependencySet) {
        self.sets.retain(|known| *known != set);
        self.sets.insert(0, set);
        self.sets.truncate(Self::MAX_SETS);
    }
}

/// Everything that one compilation read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DependencySet {
    pub(crate) files: Vec<Dependency>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) file: RolePath,
    /// The hash of the file's content, in hexadecimal.
    pub(crate) hash: String,
    /// The hash of the files that its includes find, in hexadecimal.
    pub(crate) finds: String,
}

impl DependencySet {
    /// Makes a set of a depfile's files. `Err` names a file that cannot be read, or a file to which
    /// an include may refer, but which changed at the time `trusted` (since 1970) or later. The
    /// compiler may not have seen it as it is now.
    pub(crate) fn new(
        files: &[PathBuf],
        roles: &Roles,
        lookup: &Lookup,
        hasher: &Hasher,
        trusted: Duration,
    ) -> Result<Self, PathBuf> {
        let mut dependencies = Vec::new();
        for path in files {
            let file = roles.name(path);
            // The path is resolved in the same way as by a later check.
            let path = roles.locate(&file).unwrap_or_else(|| path.clone());
            let content = hasher.content(&path).ok_or_else(|| path.clone())?;
            let meaning = lookup.meaning(&path, &content.includes, roles);
            if let Some(new) = meaning.newer_than(trusted)
                && hasher.known(new).is_none()
            {
                return Err(new.to_owned());
            }
            dependencies.push(Dependency {
                file,
                hash: content.hash.to_hex().to_string(),
                finds: meaning.hash.to_hex().to_string(),
            });
        }
        dependencies.sort_by(|a, b| a.file.cmp(&b.file));
        dependencies.dedup();
        Ok(Self {
            files: dependencies,
        })
    }

    /// Returns the set's files at their places in this build, or what has changed.
    pub(crate) fn check(
        &self,
        roles: &Roles,
        lookup: &Lookup,
        hasher: &Hasher,
    ) -> Result<Vec<PathBuf>, String> {
        let mut paths = Vec::with_capacity(self.files.len());
        for dependency in &self.files {
            let name = &dependency.file.path;
            let path = roles.locate(&dependency.file);
            let found = path.and_then(|path| Some((hasher.content(&path)?, path)));
            let Some((content, path)) = found else {
                return Err(format!("{name} is gone"));
            };
            if *content.hash.to_hex() != *dependency.hash {
                return Err(format!("{name} changed"));
            }
            let meaning = lookup.meaning(&path, &content.includes, roles);
            if *meaning.hash.to_hex() != *dependency.finds {
                return Err(format!(
                    "a header came or went that an include of {name} may mean"
                ));
            }
            paths.push(path);
        }
        Ok(paths)
    }
}

/// Data about a compilation, kept beside its object.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Meta {
    pub(crate) seconds: f64,
    /// Peak memory in bytes.
    pub(crate) peak: u64,
    /// The whole output of the compiler.
    pub(crate) log: String,
}

/// An object with the data about its compilation.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) meta: Meta,
    pub(crate) object: Vec<u8>,
}

/// Returns the time since 1970 at which a file's data or name last changed. Unlike the modification
/// time, it cannot be set.
pub(crate) fn last_change(data: &Metadata) -> Duration {
    Duration::new(data.ctime().max(0) as u64, data.ctime_nsec().max(0) as u32)
}

/// Hashes each part with its length, so that different lists of parts never make the same stream of
/// bytes.
fn hash_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded value is complete at every moment, so it is valid even after a panic elsewhere.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
