//! The folders that a build reads and writes, and its names there.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::{Error, Kernels, shell, symbols::Tag};

/// The folders that a build reads and writes.
pub(super) struct Place {
    /// The package's folder.
    pub(super) root: PathBuf,
    pub(super) out_dir: PathBuf,
    /// True in a build script.
    pub(super) for_cargo: bool,
}

impl Place {
    pub(super) fn of(kernels: &Kernels) -> Result<Self, Error> {
        let root = package_folder(kernels)?;
        let out_dir = output_folder(kernels)?;
        shell::check_for_cargo("OUT_DIR", &out_dir)?;
        shell::check_for_cargo("the package's folder", &root)?;
        Ok(Self {
            root,
            out_dir,
            for_cargo: kernels.out_dir.is_none(),
        })
    }
}

/// The package's folder: as given, or Cargo's.
pub(super) fn package_folder(kernels: &Kernels) -> Result<PathBuf, Error> {
    let root = folder(kernels.root.as_deref(), "CARGO_MANIFEST_DIR")?;
    root.canonicalize()
        .map_err(Error::file("open the package's folder", &root))
}

/// A folder as given, or that of a variable of Cargo's.
fn folder(given: Option<&Path>, variable: &str) -> Result<PathBuf, Error> {
    given
        .map(Path::to_owned)
        .or_else(|| env::var_os(variable).map(PathBuf::from))
        .ok_or_else(|| Error::Setting {
            field: variable.to_owned(),
            given: "nothing".into(),
            accepted:
                "a folder: Cargo sets it for build scripts, elsewhere call the setter of Kernels"
                    .into(),
        })
}

/// The folder that a build writes to: as given, or Cargo's.
pub(super) fn output_folder(kernels: &Kernels) -> Result<PathBuf, Error> {
    let folder = folder(kernels.out_dir.as_deref(), "OUT_DIR")?;
    fs::create_dir_all(&folder).map_err(Error::file("make", &folder))?;
    folder.canonicalize().map_err(Error::file("open", &folder))
}

/// Cargo's target folder that holds `out_dir`, or `out_dir` where none does.
///
/// If there are several, it is the innermost: a target folder may lie in another's, as those of
/// tests do. Cargo marks the folders that it makes with CACHEDIR.TAG, but not one that was there
/// before its first build. Such a folder is found by the place of `out_dir` in it:
/// `<target>/[<triple>/]<profile>/build/<package>/out`.
pub(super) fn target_folder(out_dir: &Path) -> &Path {
    let marked = out_dir
        .ancestors()
        .find(|folder| folder.join("CACHEDIR.TAG").is_file());
    let placed = || {
        let build = out_dir
            .ancestors()
            .find(|folder| folder.ends_with("build"))?;
        let folder = build.parent()?.parent()?;
        let triple = env::var_os("TARGET");
        match triple.is_some_and(|triple| folder.ends_with(triple)) {
            true => folder.parent(),
            false => Some(folder),
        }
    };
    marked.or_else(placed).unwrap_or(out_dir)
}

/// The package's own include roots: the header's folder, and those that were added.
pub(super) fn own_includes(
    root: &Path,
    header: Option<&Path>,
    includes: &[PathBuf],
) -> Result<Vec<PathBuf>, Error> {
    let mut own: Vec<_> = header
        .and_then(Path::parent)
        .map(Path::to_owned)
        .into_iter()
        .collect();
    for include in includes {
        let folder = root.join(include);
        if !folder.is_dir() {
            return Err(Error::Setting {
                field: "include".into(),
                given: include.display().to_string(),
                accepted: "an existing folder, absolute or relative to the package".into(),
            });
        }
        if !own.contains(&folder) {
            own.push(folder);
        }
    }
    Ok(own)
}

/// The name of the package, and what is added to the names of a library of it.
pub(super) fn names(root: &Path, for_cargo: bool, library: &str) -> (String, Tag) {
    let of_cargo = |name| env::var(name).ok().filter(|_| for_cargo);
    let package = of_cargo("CARGO_PKG_NAME").unwrap_or_else(|| {
        let folder = root.file_name().unwrap_or_default();
        folder.to_string_lossy().into_owned()
    });
    let version = of_cargo("CARGO_PKG_VERSION");
    let tag = Tag::new(&package, version.as_deref(), library);
    (package, tag)
}
