//! The compilers and the files that they read besides the sources: nvcc, the host's compiler,
//! include roots, and the files that flags name.

use std::path::PathBuf;

use super::Library;
use crate::{
    Error,
    cache::{Cache, Key, Lookup},
    compiler::{self, Compiler, Host},
    flags::{self, Named},
    include_root::IncludeRoot,
    roles::{ADDED, PACKAGE, Roles},
    target::{self, Target},
    toolkit::{self, Cuda, Found, Search, Version},
    variables,
};

pub(super) struct Tools {
    pub(super) compiler: Compiler,
    /// The parts outside the package, with the places where they were found.
    pub(super) found: Vec<Found>,
    /// The package's own include roots.
    pub(super) own_includes: Vec<PathBuf>,
    /// The files that flags name.
    pub(super) named: Named,
    /// The hash of the contents of the files in `named`.
    pub(super) named_contents: blake3::Hash,
    /// The hash of the contents of the toolkit's programs.
    pub(super) programs: blake3::Hash,
    pub(super) roles: Roles,
    pub(super) lookup: Lookup,
    pub(super) search: Search,
}

impl Tools {
    pub(super) fn find(library: &Library, cache: &Cache) -> Result<Self, Error> {
        let (kernels, root) = (&library.kernels, &library.root);
        let line_info = variables::is_on(variables::LINE_INFO)?;
        let (search, install) = (Search::new(), library.install_command());
        let cuda = find_cuda(library, &search, &install)?;
        let host = Host::find(kernels.host_compiler.as_deref())?;
        let own_includes = library.own_includes()?;
        let mut found = vec![cuda.found.clone()];
        let mut includes = Vec::new();
        // Folders with names for use in keys and reports. A header is named by its path in one of
        // them.
        let mut roles = vec![(PACKAGE.to_owned(), root.clone())];
        for (number, folder) in own_includes.iter().enumerate() {
            // A folder in the package is named by its path there, any other by its number.
            let role = match folder.strip_prefix(root) {
                Ok(inside) => format!("{PACKAGE}/{}", inside.display()),
                Err(_) => format!("{ADDED}{number}"),
            };
            if !folder.starts_with(root) {
                roles.push((role.clone(), folder.clone()));
            }
            includes.push(IncludeRoot {
                role,
                folder: folder.clone(),
                is_system: false,
            });
        }
        let wheels = kernels.wheels.iter().map(|wheel| wheel.find(&search));
        let checkouts = kernels.checkouts.iter().map(|it| it.find(&search));
        for pinned in wheels.chain(checkouts) {
            let pinned = pinned?;
            let roots = pinned.includes.iter();
            roles.extend(roots.map(|it| (it.role.clone(), it.folder.clone())));
            roles.push(pinned.role);
            includes.extend(pinned.includes);
            found.push(pinned.found);
        }
        if kernels.cutlass {
            let cutlass = toolkit::cutlass(&search, &install)?;
            // Headers that do not tell their version are not checked here. The compiler has to
            // refuse them.
            if let Some(version) = cutlass.version.as_deref().and_then(Version::from_start) {
                new_enough(library, Target::needs_cutlass, version, &cutlass)?;
            }
            let role = "cutlass".to_owned();
            roles.push((role.clone(), cutlass.path.clone()));
            includes.push(IncludeRoot {
                role,
                folder: cutlass.path.clone(),
                // A wheel's own CUTLASS has to come first. If the wheel's folder is searched after
                // all folders of -I, the toolkit's CUTLASS is, too.
                is_system: includes.iter().any(|include| include.is_system),
            });
            found.push(cutlass);
        }
        roles.push(("cuda".to_owned(), cuda.include.clone()));
        let named = named(library)?;
        let mut searched = roots(&includes, &cuda);
        searched.push(cuda.include.join("cccl"));
        searched.extend(host.includes.iter().chain(&named.folders).cloned());
        Ok(Self {
            programs: hash_programs(cache, &cuda)?,
            compiler: Compiler {
                cuda,
                host,
                root: root.clone(),
                includes,
                defines: kernels.defines.clone(),
                flags: kernels.flags.clone(),
                line_info,
            },
            found,
            own_includes,
            named_contents: named.contents()?,
            named,
            roles: Roles::new(roles),
            lookup: Lookup::new(searched, root.clone()),
            search,
        })
    }

    /// Returns the include roots in the order of the search.
    #[cfg(feature = "bindings")]
    pub(super) fn roots(&self) -> Vec<PathBuf> {
        roots(&self.compiler.includes, &self.compiler.cuda)
    }
}

/// Returns the folders in the order of the search. nvcc puts CUDA's own headers behind the roots of
/// -I.
fn roots(includes: &[IncludeRoot], cuda: &Cuda) -> Vec<PathBuf> {
    let of = |is_system: bool| {
        let roots = includes.iter().filter(move |it| it.is_system == is_system);
        roots.map(|include| include.folder.clone())
    };
    of(false)
        .chain([cuda.include.clone()])
        .chain(of(true))
        .collect()
}

/// Refuses a release that is too old for one of the targets.
fn new_enough(
    library: &Library,
    needs: impl Fn(Target) -> Version,
    release: Version,
    found: &Found,
) -> Result<(), Error> {
    let mut targets = library.families.targets();
    targets.retain(|&target| release < needs(target));
    let Some(needed) = targets.iter().map(|&target| needs(target)).max() else {
        return Ok(());
    };
    let (plural, verb) = match targets.len() {
        1 => ("", "needs"),
        _ => ("s", "together need"),
    };
    let (part, names) = (&found.part, target::names(&targets).join(" and "));
    Err(Error::Sentence(format!(
        "target{plural} {names} {verb} {part} {needed} or newer; given {part} {release}, {}",
        found.path.display()
    )))
}

/// Finds a toolkit that is new enough for every target, and that has no library of this one's name.
fn find_cuda(library: &Library, search: &Search, install: &str) -> Result<Cuda, Error> {
    let cuda = match &library.kernels.cuda_home {
        Some(home) => toolkit::cuda_at(home)?,
        None => toolkit::cuda(search, install)?,
    };
    let found = Found {
        path: cuda.nvcc.clone(),
        ..cuda.found.clone()
    };
    new_enough(library, Target::needs_toolkit, cuda.version, &found)?;
    if cuda.has_library(&library.name) {
        let accepted = "a name that no library of the toolkit or the system has";
        return Err(Error::setting("library", &library.name, accepted));
    }
    Ok(cuda)
}

/// Returns the files and folders that flags name: flags of the script, and of nvcc's own variables.
fn named(library: &Library) -> Result<Named, Error> {
    let mut all = compiler::flags_of_environment()?;
    all.extend(library.kernels.flags.iter().cloned());
    all.extend(library.kernels.source_flags());
    flags::check_option_files(all.iter().map(String::as_str), &library.root)?;
    Ok(Named::new(all.iter().map(String::as_str), &library.root))
}

/// Returns the hash of everything in the toolkit, except headers, that nvcc runs or reads.
fn hash_programs(cache: &Cache, cuda: &Cuda) -> Result<blake3::Hash, Error> {
    let mut parts = Vec::new();
    for (name, path) in cuda.programs() {
        let hash =
            (cache.content_of(&path)).map_err(Error::file("read the toolkit's program", &path))?;
        parts.extend([name.into_bytes(), hash.as_bytes().to_vec()]);
    }
    Ok(Key::new(parts.iter().map(Vec::as_slice)).hash())
}
