//! The include roots of a build, and what each folder stands for in the cache's keys.

use std::path::{Path, PathBuf};

use super::new_enough;
use crate::{
    Error, Kernels,
    family::Families,
    include_root::IncludeRoot,
    roles::{ADDED, PACKAGE},
    target::Target,
    toolkit::{self, Cuda, Found, FoundHeaders, Search, Version},
};

/// Include roots, with their roles.
pub(super) struct Roots {
    /// The include roots, in the form in which the compiler is given them.
    pub(super) includes: Vec<IncludeRoot>,
    /// The folders that paths are told by.
    pub(super) roles: Vec<(String, PathBuf)>,
    /// The parts that are outside the package.
    pub(super) found: Vec<Found>,
    /// The environment variables that say where wheels and checkouts are.
    pub(super) wheel_variables: Vec<String>,
}

impl Roots {
    /// The package's own, then those of wheels and checkouts, then CUTLASS.
    pub(super) fn new(
        kernels: &Kernels,
        own: &[PathBuf],
        root: &Path,
        families: &Families,
        search: &Search,
        install_command: &str,
    ) -> Result<Self, Error> {
        let mut roots = Self {
            includes: Vec::new(),
            roles: vec![(PACKAGE.to_owned(), root.to_owned())],
            found: Vec::new(),
            wheel_variables: Vec::new(),
        };
        roots.add_own(own, root);
        roots.add_wheels(kernels, search)?;
        if kernels.cutlass {
            roots.add_cutlass(families, search, install_command)?;
        }
        Ok(roots)
    }

    /// The same with the toolkit's own headers, which the compiler finds without being told.
    pub(super) fn with_cuda(mut self, cuda: &Cuda) -> Self {
        self.roles.push(("cuda".to_owned(), cuda.include.clone()));
        self.found.insert(0, cuda.found.clone());
        self
    }

    fn add_own(&mut self, own: &[PathBuf], root: &Path) {
        for (number, folder) in own.iter().enumerate() {
            // A folder of the package is known by its place there; one elsewhere by its number.
            let role = match folder.strip_prefix(root) {
                Ok(inside) => format!("{PACKAGE}/{}", inside.display()),
                Err(_) => {
                    let role = format!("{ADDED}{number}");
                    self.roles.push((role.clone(), folder.clone()));
                    role
                }
            };
            self.includes.push(IncludeRoot {
                role,
                folder: folder.clone(),
                is_system: false,
            });
        }
    }

    fn add_wheels(&mut self, kernels: &Kernels, search: &Search) -> Result<(), Error> {
        for wheel in &kernels.wheels {
            let variables = ["MLA_WHEELS".to_owned(), wheel.variable()];
            self.wheel_variables.extend(variables);
            self.add_pinned(wheel.find(search)?);
        }
        for checkout in &kernels.checkouts {
            self.wheel_variables.push(checkout.variable());
            self.add_pinned(checkout.find(search)?);
        }
        Ok(())
    }

    fn add_pinned(&mut self, headers: FoundHeaders) {
        let roots = headers.includes.iter();
        let roots = roots.map(|root| (root.role.clone(), root.folder.clone()));
        self.roles.extend(roots);
        self.roles.push(headers.role);
        self.includes.extend(headers.includes);
        self.found.push(headers.found);
    }

    fn add_cutlass(
        &mut self,
        families: &Families,
        search: &Search,
        install_command: &str,
    ) -> Result<(), Error> {
        let cutlass = toolkit::cutlass(search, install_command)?;
        // Headers that do not tell their version are left to the compiler.
        if let Some(version) = cutlass.version.as_deref().and_then(Version::from_start) {
            let needs = Target::needs_cutlass;
            let targets = families.targets();
            new_enough(&targets, needs, "CUTLASS", version, &cutlass.path)?;
        }
        self.includes.push(IncludeRoot {
            role: "cutlass".to_owned(),
            folder: cutlass.path.clone(),
            // A wheel's own CUTLASS comes first, also if it is searched after all of -I.
            is_system: self.includes.iter().any(|include| include.is_system),
        });
        self.roles
            .push(("cutlass".to_owned(), cutlass.path.clone()));
        self.found.push(cutlass);
        Ok(())
    }

    /// The folders in the order of the search: nvcc puts CUDA's own headers behind the roots of -I.
    pub(super) fn in_order(&self, cuda: &Cuda) -> Vec<PathBuf> {
        let of = |is_system: bool| {
            let roots = self.includes.iter();
            let roots = roots.filter(move |include| include.is_system == is_system);
            roots.map(|include| include.folder.clone())
        };
        of(false)
            .chain([cuda.include.clone()])
            .chain(of(true))
            .collect()
    }
}
