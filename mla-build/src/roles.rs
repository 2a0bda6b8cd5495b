//! Names for folders that do not depend on their paths.
//!
//! The cache is shared by checkouts and machines, so nothing in it may depend on an absolute path.
//! A dependency is named by the role of its folder (the package, the CUDA headers, CUTLASS, the
//! second include root) and its path in that folder. Only files in none of these folders, the
//! system's own headers, keep their absolute paths. Content is always hashed: a role says only
//! where a file lies.

use std::{
    collections::HashMap,
    path::{Component, Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

/// The role of the package's own folder.
pub(crate) const PACKAGE: &str = "package";

/// The prefix of the roles of include roots outside the package. A number follows.
pub(crate) const ADDED: &str = "include ";

/// A file named by the role of its folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct RolePath {
    /// The role, or an empty text for a file in none of the folders. `path` is then absolute.
    pub(crate) role: String,
    pub(crate) path: String,
}

impl RolePath {
    /// True if the file lies in the package or in an include root that the build script adds.
    pub(crate) fn is_of_the_script(&self) -> bool {
        self.role == PACKAGE || self.role.starts_with(ADDED)
    }
}

/// The folders of one build.
#[derive(Debug)]
pub(crate) struct Roles {
    /// For each folder: its role, the given path, and the path without links.
    folders: Vec<(String, PathBuf, PathBuf)>,
    parents: Mutex<HashMap<PathBuf, PathBuf>>,
}

impl Roles {
    /// Makes the roles of absolute folders. If one lies within another, the more deeply nested
    /// comes first.
    pub(crate) fn new(folders: impl IntoIterator<Item = (String, PathBuf)>) -> Self {
        let mut folders: Vec<_> = folders
            .into_iter()
            .map(|(role, folder)| {
                let real = folder.canonicalize().unwrap_or_else(|_| folder.clone());
                (role, folder, real)
            })
            .collect();
        folders.sort_by_key(|(_, folder, _)| std::cmp::Reverse(folder.components().count()));
        Self {
            folders,
            parents: Mutex::default(),
        }
    }

    /// Names an absolute path.
    pub(crate) fn name(&self, path: &Path) -> RolePath {
        let real = self.without_links(path);
        for path in [path, &real] {
            // A path with `..` may only seem to lie in a folder.
            if path.components().any(|part| part == Component::ParentDir) {
                continue;
            }
            for (role, folder, real_folder) in &self.folders {
                let inside = path
                    .strip_prefix(folder)
                    .or_else(|_| path.strip_prefix(real_folder));
                if let Ok(rest) = inside {
                    return RolePath {
                        role: role.clone(),
                        path: rest.to_string_lossy().into_owned(),
                    };
                }
            }
        }
        RolePath {
            role: String::new(),
            path: real.to_string_lossy().into_owned(),
        }
    }

    /// Returns the absolute path of a named file, or `None` for a role that this build does not
    /// have.
    pub(crate) fn locate(&self, name: &RolePath) -> Option<PathBuf> {
        if name.role.is_empty() {
            return Some(name.path.clone().into());
        }
        self.folders
            .iter()
            .find(|(role, ..)| *role == name.role)
            .map(|(_, folder, _)| folder.join(&name.path))
    }

    /// Resolves links and `..` in the path of a file's folder. The file itself may be a link, and
    /// keeps its name.
    fn without_links(&self, path: &Path) -> PathBuf {
        let (Some(parent), Some(file)) = (path.parent(), path.file_name()) else {
            return path.to_owned();
        };
        let mut parents = self.parents.lock().unwrap_or_else(PoisonError::into_inner);
        parents
            .entry(parent.to_owned())
            .or_insert_with(|| parent.canonicalize().unwrap_or_else(|_| parent.to_owned()))
            .join(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_the_innermost_role_whichever_way_it_is_spelled() {
        let folder = tempfile::tempdir().unwrap();
        let at = |p: &str| folder.path().join(p);
        for f in ["real/bin", "real/include/cute", "package/cuda"] {
            std::fs::create_dir_all(at(f)).unwrap();
        }
        std::os::unix::fs::symlink(at("real"), at("link")).unwrap();
        let roles = Roles::new([
            ("package".to_owned(), at("package")),
            ("cuda".to_owned(), at("link/include")),
            ("home".to_owned(), at("link")),
        ]);
        let expected = RolePath {
            role: "cuda".into(),
            path: "cute/tensor.hpp".into(),
        };
        for spelling in [
            "link/include/cute/tensor.hpp",
            "real/include/cute/tensor.hpp",
            "link/bin/..//include/cute/tensor.hpp",
            "package/cuda/../../real/include/cute/tensor.hpp",
        ] {
            assert_eq!(roles.name(&at(spelling)), expected, "{spelling}");
        }
        assert_eq!(
            roles.locate(&expected),
            Some(at("link/include/cute/tensor.hpp"))
        );
        assert_eq!(roles.name(Path::new("/usr/include/stdio.h")).role, "");
        assert_eq!(
            roles.locate(&RolePath {
                role: "gone".into(),
                path: "x".into()
            }),
            None
        );
    }
}
