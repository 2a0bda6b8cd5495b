//! The C headers of a build, whose functions Rust calls.

use std::path::{Path, PathBuf};

use crate::{Error, family::Families};

/// The headers that bindgen wraps. Their paths are absolute, or relative in the same way as the
/// path of the package's folder.
#[derive(Clone, Debug)]
pub(crate) struct Headers {
    /// The package's folder.
    pub(crate) root: PathBuf,
    /// The header that the families share.
    pub(crate) shared: Option<PathBuf>,
    /// The families that are turned on, each with its header, in the order in which the headers
    /// were named.
    pub(crate) of_families: Vec<(String, PathBuf)>,
}

impl Headers {
    /// Collects the headers of a package in `root`. A family's header counts if the family is
    /// turned on.
    pub(crate) fn new(
        root: &Path,
        shared: Option<&Path>,
        of_each: &[(String, PathBuf)],
        families: &Families,
    ) -> Result<Self, Error> {
        let mut of_families = Vec::new();
        for (family, path) in of_each {
            if families.declared(family)?.enabled {
                of_families.push((family.clone(), root.join(path)));
            }
        }
        Ok(Self {
            root: root.to_owned(),
            shared: shared.map(|header| root.join(header)),
            of_families,
        })
    }

    /// Returns all of them, beginning with the one that families share.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Path> {
        let of_families = self.of_families.iter().map(|(_, path)| path.as_path());
        self.shared.as_deref().into_iter().chain(of_families)
    }

    /// Returns the first of them, if there is any.
    pub(crate) fn first(&self) -> Option<&Path> {
        self.all().next()
    }

    /// Returns the line with which a header's declarations begin. It is the header's path in the
    /// package.
    #[cfg(feature = "bindings")]
    pub(crate) fn heading(&self, header: &Path) -> String {
        let inside = header.strip_prefix(&self.root).unwrap_or(header);
        format!("// {}\n", inside.display())
    }
}
