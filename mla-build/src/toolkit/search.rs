//! The places where a toolkit may be, in order.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, OnceLock, PoisonError},
};

use crate::bounded;

use super::{Pins, root_of};

/// The places that the search may look at. A test gives its own, and a build takes those of the
/// process.
#[derive(Default)]
pub(crate) struct Search {
    pub(super) variables: BTreeMap<OsString, OsString>,
    /// The usual folders of a toolkit.
    pub(super) usual: Vec<PathBuf>,
    /// The usual folders of libclang.
    pub(super) usual_libclang: Vec<PathBuf>,
    /// The interpreter that is asked for its site-packages.
    pub(super) python: Option<PathBuf>,
    /// Its answer. Python is asked only once, since starting an interpreter is the slowest step of
    /// a build that has nothing to do.
    pub(super) python_folders: OnceLock<Result<Vec<PathBuf>, String>>,
    /// The folder of this crate's own toolkit.
    pub(super) own: Option<PathBuf>,
    /// Warnings about variables that were skipped.
    pub(super) warnings: Mutex<Vec<String>>,
}

impl Search {
    pub(crate) fn new() -> Self {
        let newest_first = |folder: &str, prefix| {
            let versions = children(Path::new(folder), prefix);
            versions.into_iter().rev()
        };
        let mut usual = vec![PathBuf::from("/usr/local/cuda")];
        usual.extend(newest_first("/usr/local", "cuda-"));
        let others = ["/opt/cuda", "/usr/lib/cuda", "/usr/lib/nvidia-cuda-toolkit"];
        usual.extend(others.map(PathBuf::from));
        let llvm = newest_first("/usr/lib", "llvm").map(|folder| folder.join("lib"));
        let libraries = [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
            "/usr/local/lib",
        ];
        let pythons = ["python3", "python"].into_iter();
        Self {
            variables: std::env::vars_os().collect(),
            usual,
            usual_libclang: llvm.chain(libraries.map(PathBuf::from)).collect(),
            python: pythons.filter_map(|name| which::which(name).ok()).next(),
            own: Pins::current().folder(),
            ..Self::default()
        }
    }

    /// Makes a search that knows these variables alone.
    #[cfg(test)]
    pub(super) fn for_test<V: AsRef<OsStr>>(variables: &[(&str, V)]) -> Self {
        let variables = variables.iter();
        let variables = variables.map(|(name, value)| (name.into(), value.as_ref().into()));
        Self {
            variables: variables.collect(),
            ..Self::default()
        }
    }

    /// Warns of places that were skipped, and says what was taken instead.
    pub(super) fn warn(&self, passed_over: Vec<String>, taken: &str) {
        // The list holds only whole warnings at every moment, so it is valid even after a panic
        // elsewhere.
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        for place in passed_over {
            let warning = format!("{place}; {taken}");
            if !warnings.contains(&warning) {
                warnings.push(warning);
            }
        }
    }

    /// Returns the warnings of all searches.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        warnings.clone()
    }

    /// Returns a variable that is set and not empty.
    pub(super) fn variable(&self, name: &str) -> Option<OsString> {
        let value = self.variables.get(OsStr::new(name));
        value.filter(|value| !value.is_empty()).cloned()
    }

    /// Returns toolkit roots, up to the usual folders. Variables that were not set are added to
    /// `looked`.
    pub(super) fn cuda_roots(&self, looked: &mut Vec<String>) -> Vec<(String, PathBuf)> {
        looked.push("NVCC, MLA_CUDA_HOME: not set".into());
        let mut roots = self.in_variables(&["CUDA_HOME", "CUDA_PATH"], looked);
        let path = self.variable("PATH");
        let nvcc = path.and_then(|path| which::which_in("nvcc", Some(path), "/").ok());
        match nvcc.and_then(|nvcc| root_of(&nvcc)) {
            Some(root) => roots.push(("PATH".into(), root)),
            None => looked.push("PATH: no nvcc".into()),
        }
        roots.extend(usual(&self.usual));
        roots
    }

    /// Returns the folders of `PATH`, up to the first that holds an nvcc.
    pub(super) fn path_folders(&self) -> Vec<PathBuf> {
        let path = self.variable("PATH").unwrap_or_default();
        let mut folders = Vec::new();
        for folder in std::env::split_paths(&path).filter(|folder| folder.is_absolute()) {
            let last = folder.join("nvcc").exists();
            folders.push(folder);
            if last {
                break;
            }
        }
        folders
    }

    /// Returns folders that may hold CUTLASS, up to the usual ones.
    pub(super) fn cutlass_roots(&self, looked: &mut Vec<String>) -> Vec<(String, PathBuf)> {
        looked.push("MLA_CUTLASS: not set".into());
        let names = ["CUTLASS_PATH", "CUTLASS_HOME", "CUDA_HOME", "CUDA_PATH"];
        let mut roots = self.in_variables(&names, looked);
        roots.extend(usual(&self.usual));
        roots.extend(usual(["/usr/local/cutlass", "/opt/cutlass", "/usr"]));
        roots
    }

    pub(super) fn libclang_folders(&self) -> Vec<(String, PathBuf)> {
        usual(&self.usual_libclang).collect()
    }

    /// Returns the site-packages folders of the active environment, of the user and of the system.
    /// The last one is this crate's toolkit folder, which pip fills with the same layout.
    pub(super) fn site_packages(&self, looked: &mut Vec<String>) -> Vec<(String, PathBuf)> {
        let mut folders: Vec<(String, PathBuf)> = Vec::new();
        let mut add = |place: &str, folder: PathBuf| {
            if !folders.iter().any(|(_, known)| *known == folder) {
                folders.push((place.to_owned(), folder));
            }
        };
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            let Some(root) = self.variable(name) else {
                continue;
            };
            for python in children(&Path::new(&root).join("lib"), "python3") {
                add(name, python.join("site-packages"));
            }
        }
        match (self.python_folders).get_or_init(|| ask(self.python.as_deref())) {
            Ok(answer) => {
                answer
                    .iter()
                    .for_each(|folder| add("Python site-packages", folder.clone()));
            }
            Err(message) => looked.push(format!("Python site-packages: {message}")),
        }
        match &self.own {
            Some(folder) => add("toolkit folder", folder.clone()),
            None => looked
                .push("toolkit folder: MLA_TOOLKIT, XDG_DATA_HOME and HOME are not set".into()),
        }
        folders
    }

    fn in_variables(&self, names: &[&str], looked: &mut Vec<String>) -> Vec<(String, PathBuf)> {
        let mut roots = Vec::new();
        for &name in names {
            match self.variable(name) {
                Some(root) => roots.push((name.to_owned(), root.into())),
                None => looked.push(format!("{name}: not set")),
            }
        }
        roots
    }
}

/// Pairs folders with the word for their place.
fn usual<P: Into<PathBuf>>(
    folders: impl IntoIterator<Item = P>,
) -> impl Iterator<Item = (String, PathBuf)> {
    let folders = folders.into_iter();
    folders.map(|folder| ("usual folder".to_owned(), folder.into()))
}

/// Returns the site-packages folders that a Python knows: the user's and the system's.
fn ask(python: Option<&Path>) -> Result<Vec<PathBuf>, String> {
    const QUESTION: &str =
        "import site\nprint(site.getusersitepackages())\nprint(*site.getsitepackages(), sep='\\n')";
    let python = python.ok_or("no python3 on PATH")?;
    let output = bounded::output(Command::new(python).args(["-c", QUESTION]))
        .map_err(|error| format!("{}: {error}", python.display()))?;
    if !output.status.success() {
        return Err(format!("{}: {}", python.display(), output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().map(PathBuf::from).collect())
}

/// Returns the entries of a folder whose name starts with `prefix`, in ascending order of the
/// numbers in them, so that `cuda-9.2` comes before `cuda-12.8`.
pub(super) fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let name = |path: &PathBuf| Some(path.file_name()?.to_str()?.to_owned());
    let entries = fs::read_dir(folder).into_iter().flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<_> = paths
        .filter(|path| name(path).is_some_and(|name| name.starts_with(prefix)))
        .collect();
    found.sort_by_cached_key(|path| {
        let name = name(path).unwrap_or_default();
        let numbers = name.split(|c: char| !c.is_ascii_digit());
        let numbers: Vec<u64> = numbers.filter_map(|number| number.parse().ok()).collect();
        (numbers, name)
    });
    found
}

/// Returns the libclang of a folder: `libclang.so`, or the newest `libclang-N.so` or
/// `libclang.so.N`.
pub(super) fn libclang_in_folder(folder: &Path) -> Option<PathBuf> {
    let plain = folder.join("libclang.so");
    if plain.is_file() {
        return Some(plain);
    }
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // libclang-cpp is another library.
        let version = name.strip_prefix("libclang-");
        let versioned = version.is_some_and(|it| it.starts_with(|c: char| c.is_ascii_digit()));
        (versioned && name.contains(".so")) || name.starts_with("libclang.so.")
    };
    children(folder, "libclang").into_iter().rfind(is_library)
}
