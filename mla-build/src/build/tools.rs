//! The compilers and the files that they read beside the sources: nvcc, the host's compiler,
//! include roots, and the files that flags name.

use std::{
    env,
    path::{Path, PathBuf},
};

use super::{
    new_enough,
    place::{Place, own_includes},
    roots::Roots,
    sources::Sources,
};
use crate::{
    Error, Kernels,
    cache::{Cache, Key, Lookup},
    compiler::{self, Compiler, Host},
    family::Families,
    flags::{self, Named},
    roles::Roles,
    target::Target,
    toolkit::{self, Cuda, Found, Pins, Search},
    variables,
};

pub(super) struct Tools {
    pub(super) compiler: Compiler,
    /// The parts outside the package, and the places where they were found.
    pub(super) found: Vec<Found>,
    /// The include roots of the package's own.
    pub(super) own_includes: Vec<PathBuf>,
    /// The files that flags name.
    pub(super) named: Named,
    /// The hash of the contents of the files in `named`.
    pub(super) named_contents: blake3::Hash,
    /// The hash of the contents of the toolkit's programs.
    pub(super) programs: blake3::Hash,
    /// The environment variables that say where wheels and checkouts are.
    pub(super) wheel_variables: Vec<String>,
    pub(super) roles: Roles,
    pub(super) lookup: Lookup,
    /// The include roots, in the order of the search, without their roles.
    #[cfg(feature = "bindings")]
    pub(super) roots: Vec<PathBuf>,
    /// The command that installs libclang, which is looked for last.
    #[cfg(feature = "bindings")]
    pub(super) install_command: String,
    pub(super) search: Search,
}

impl Tools {
    pub(super) fn find(
        kernels: &Kernels,
        library: &str,
        sources: &Sources,
        place: &Place,
        cache: &Cache,
    ) -> Result<Self, Error> {
        let root = &place.root;
        let families = &sources.families;
        let line_info = env::var(variables::LINE_INFO).ok();
        let line_info = variables::is_on(variables::LINE_INFO, line_info.as_deref())?;
        let install = kernels.install_command.clone();
        let install = install.unwrap_or_else(|| Pins::current().command());
        let search = Search::new();
        let cuda = find_cuda(kernels, library, families, &search, &install)?;
        let host = Host::find(kernels.host_compiler.as_deref())?;
        let own = own_includes(root, sources.headers.shared.as_deref(), &kernels.includes)?;
        let roots = Roots::new(kernels, &own, root, families, &search, &install)?;
        let roots = roots.with_cuda(&cuda);
        let in_order = roots.in_order(&cuda);
        let named = named(kernels, root)?;
        let searched = searched(&in_order, &cuda, &host, &named);
        Ok(Self {
            programs: hash_programs(cache, &cuda)?,
            compiler: Compiler {
                cuda,
                host,
                root: root.clone(),
                includes: roots.includes,
                defines: kernels.defines.clone(),
                flags: kernels.flags.clone(),
                line_info,
            },
            found: roots.found,
            own_includes: own,
            named_contents: named.contents()?,
            named,
            wheel_variables: roots.wheel_variables,
            roles: Roles::new(roots.roles),
            lookup: Lookup::new(searched, root.clone()),
            #[cfg(feature = "bindings")]
            roots: in_order,
            #[cfg(feature = "bindings")]
            install_command: install,
            search,
        })
    }
}

/// Every folder in which a header may be found, in the order of the search.
fn searched(roots: &[PathBuf], cuda: &Cuda, host: &Host, named: &Named) -> Vec<PathBuf> {
    let mut folders = roots.to_vec();
    folders.push(cuda.include.join("cccl"));
    folders.extend(host.includes.iter().cloned());
    folders.extend(named.folders.iter().cloned());
    folders
}

/// A toolkit that is new enough for every target, and has no library of this one's name.
fn find_cuda(
    kernels: &Kernels,
    library: &str,
    families: &Families,
    search: &Search,
    install_command: &str,
) -> Result<Cuda, Error> {
    let cuda = match &kernels.cuda_home {
        Some(home) => toolkit::cuda_at(home)?,
        None => toolkit::cuda(search, install_command)?,
    };
    new_enough(
        &families.targets(),
        Target::needs_toolkit,
        "CUDA",
        cuda.version,
        &cuda.nvcc,
    )?;
    if cuda.has_library(library) {
        return Err(Error::Setting {
            field: "library".into(),
            given: library.to_owned(),
            accepted: "a name that no library of the toolkit or the system has".into(),
        });
    }
    Ok(cuda)
}

/// The files and folders that flags name: those of the script, and those of nvcc's own variables.
fn named(kernels: &Kernels, root: &Path) -> Result<Named, Error> {
    let mut all = compiler::flags_of_environment()?;
    all.extend(kernels.flags.iter().cloned());
    all.extend(kernels.source_flags());
    flags::check_option_files(all.iter().map(String::as_str), root)?;
    Ok(Named::new(all.iter().map(String::as_str), root))
}

/// The hash of all that nvcc runs or reads of its toolkit, headers aside.
fn hash_programs(cache: &Cache, cuda: &Cuda) -> Result<blake3::Hash, Error> {
    let mut parts = Vec::new();
    for (name, path) in cuda.programs() {
        let hash = cache
            .content_of(&path)
            .map_err(Error::file("read the toolkit's program", &path))?;
        parts.extend([name.into_bytes(), hash.as_bytes().to_vec()]);
    }
    Ok(Key::new(parts.iter().map(Vec::as_slice)).hash())
}
