//! Finding nvcc, the CUDA headers and `libcudart_static`, CUTLASS and libclang, in a fixed order
//! and without a network:
//!
//! 1. the explicit environment: `MLA_CUDA_HOME` or `NVCC`, `MLA_CUTLASS`, `LIBCLANG_PATH`. If such
//!    a variable does not lead to what it should, that is an error, and the search ends;
//! 2. `CUDA_HOME`, `CUDA_PATH`;
//! 3. `PATH`;
//! 4. the usual folders;
//! 5. Python's site-packages (the active environment's, the user's, the system's), in the layout of
//!    NVIDIA's wheels (`nvidia/cu13`);
//! 6. the toolkit folder of this crate, which `cargo xtask toolkit` fills.
//!
//! nvcc, headers and runtime library are taken from one place together: mixing releases compiles,
//! and fails later.

mod checkout;
mod pinned;
mod pins;
mod programs;
mod search;
mod wheel;

use std::{
    env,
    ffi::OsStr,
    path::{Component, Path, PathBuf},
    process::Command,
};

use serde::{Deserialize, Serialize};

pub use checkout::Checkout;
pub use pins::Pins;
pub use wheel::Wheel;

pub(crate) use pinned::FoundHeaders;
pub(crate) use search::Search;

use crate::bounded;
use crate::{Error, variables};
pub use crate::{error::NotFound, version::Version};

/// One part of the toolkit: where it was found, its version, and which place of the order held it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The name of the part: `CUDA`, `CUTLASS`, `libclang`.
    pub part: String,
    /// Its folder.
    pub path: PathBuf,
    /// Its version, where it tells one.
    pub version: Option<String>,
    /// The place of the search order at which it was found.
    pub place: String,
}

/// nvcc with the headers and the runtime library of the same release.
#[derive(Clone, Debug)]
pub(crate) struct Cuda {
    pub(crate) found: Found,
    pub(crate) nvcc: PathBuf,
    pub(crate) include: PathBuf,
    pub(crate) library: PathBuf,
    pub(crate) version: Version,
    /// All that `nvcc --version` prints: part of every cache key.
    pub(crate) version_text: String,
}

impl Cuda {
    /// True if the toolkit, or the set that every program links, has a library of this name.
    pub(crate) fn has_library(&self, name: &str) -> bool {
        const ALWAYS: &[&str] = &[
            "c",
            "cuda",
            "cudart",
            "cudart_static",
            "dl",
            "m",
            "pthread",
            "rt",
        ];
        ALWAYS.contains(&name)
            || ["a", "so"]
                .iter()
                .any(|kind| self.library.join(format!("lib{name}.{kind}")).exists())
    }
}

/// The place of a toolkit that the caller names.
const CALLER: &str = "Kernels::cuda_home";

/// The CUDA of a folder that the caller names.
pub(crate) fn cuda_at(root: &Path) -> Result<Cuda, Error> {
    match layout(root) {
        Ok(_) => describe(root, None, CALLER),
        Err(lacks) => Err(unusable("cuda_home", root.as_os_str(), &lacks)),
    }
}

/// The CUDA that `NVCC` names.
fn cuda_of_nvcc(search: &Search, given: &OsStr) -> Result<Cuda, Error> {
    let refuse = |accepted: String| {
        Err(Error::Setting {
            field: "NVCC".to_owned(),
            given: given.to_string_lossy().into_owned(),
            accepted,
        })
    };
    let nvcc = PathBuf::from(given);
    if !nvcc.is_absolute() {
        return refuse(
            "the absolute path of bin/nvcc of a whole toolkit, such as /usr/local/cuda/bin/nvcc; \
             unset it to have nvcc looked for on PATH and elsewhere"
                .into(),
        );
    }
    let words: Vec<_> = nvcc
        .to_str()
        .into_iter()
        .flat_map(str::split_whitespace)
        .collect();
    if words.len() > 1 && !nvcc.exists() {
        return refuse(format!(
            "the path alone, {}; flags go into NVCC_APPEND_FLAGS",
            words[0]
        ));
    }
    let lacks = match root_of(&nvcc) {
        None => "no folder".to_owned(),
        Some(root) => match layout(&root) {
            Ok(_) => {
                agree(search, &root)?;
                return describe(&root, Some(nvcc), "NVCC");
            }
            Err(lacks) => format!("{}, which lacks {lacks}", root.display()),
        },
    };
    refuse(format!(
        "bin/nvcc in the folder of a whole toolkit (above this one is {lacks}); unset it to search \
         elsewhere"
    ))
}

/// Refuses an `NVCC` of another toolkit than that of `MLA_CUDA_HOME`.
fn agree(search: &Search, root: &Path) -> Result<(), Error> {
    let Some(home) = search.variable("MLA_CUDA_HOME") else {
        return Ok(());
    };
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if real(Path::new(&home)) == real(root) {
        return Ok(());
    }
    Err(Error::Setting {
        field: "MLA_CUDA_HOME".into(),
        given: home.to_string_lossy().into_owned(),
        accepted: format!(
            "the toolkit of NVCC, {}; unset one of the two",
            root.display()
        ),
    })
}

/// Finds CUDA.
pub(crate) fn cuda(search: &Search, install: &str) -> Result<Cuda, Error> {
    let mut looked = Vec::new();
    if let Some(given) = search.variable("NVCC") {
        return cuda_of_nvcc(search, &given);
    }
    if let Some(given) = search.variable("MLA_CUDA_HOME") {
        variables::check_absolute("MLA_CUDA_HOME", &given)?;
        let root = PathBuf::from(&given);
        return match layout(&root) {
            Ok(_) => describe(&root, None, "MLA_CUDA_HOME"),
            Err(lacks) => Err(unusable("MLA_CUDA_HOME", &given, &lacks)),
        };
    }
    let mut passed_over = Vec::new();
    let taken = |cuda: Cuda, passed_over: Vec<String>| {
        let (path, place) = (cuda.found.path.display(), &cuda.found.place);
        search.warn(passed_over, &format!("CUDA of {path} ({place}) compiles"));
        Ok(cuda)
    };
    for (place, root) in search.cuda_roots(&mut looked) {
        match layout(&root) {
            Ok(_) => return taken(describe(&root, None, &place)?, passed_over),
            Err(lacks) => {
                if is_variable(&place) {
                    let above = root.parent().filter(|above| layout(above).is_ok());
                    let meant = above.map(|it| format!("; {} is one", it.display()));
                    let meant = meant.unwrap_or_default();
                    passed_over.push(format!(
                        "{place}: given {root:?}, accepted the folder of a toolkit: it lacks \
                         {lacks}{meant}"
                    ));
                }
                looked.push(format!("{place}: {} lacks {lacks}", root.display()));
            }
        }
    }
    // The slow places are asked last: each question to Python starts an interpreter.
    for (place, folder) in search.site_packages(&mut looked) {
        let mut roots = search::children(&folder.join("nvidia"), "cu");
        roots.reverse();
        if roots.is_empty() {
            looked.push(format!("{place}: {} has no nvidia/cu*", folder.display()));
        }
        for root in roots {
            match layout(&root) {
                Ok(_) => return taken(describe(&root, None, &place)?, passed_over),
                Err(lacks) => looked.push(format!("{place}: {} lacks {lacks}", root.display())),
            }
        }
    }
    Err(NotFound {
        part: "CUDA (nvcc, its headers and libcudart_static.a)".into(),
        looked,
        command: install.to_owned(),
    }
    .into())
}

/// Finds the CUTLASS headers: the folder that holds `cutlass/cutlass.h`.
pub(crate) fn cutlass(search: &Search, install: &str) -> Result<Found, Error> {
    const HEADER: &str = "cutlass/cutlass.h";
    let found = |path: PathBuf, place: &str| Found {
        part: "CUTLASS".into(),
        version: cutlass_version(&path),
        path,
        place: place.to_owned(),
    };
    if let Some(given) = search.variable("MLA_CUTLASS") {
        variables::check_absolute("MLA_CUTLASS", &given)?;
        let root = PathBuf::from(&given);
        for folder in [root.clone(), root.join("include")] {
            if folder.join(HEADER).is_file() {
                return Ok(found(folder, "MLA_CUTLASS"));
            }
        }
        return Err(unusable("MLA_CUTLASS", &given, HEADER));
    }
    let mut looked = Vec::new();
    let mut passed_over = Vec::new();
    let taken = |cutlass: Found, passed_over: Vec<String>| {
        let (path, place) = (cutlass.path.display(), &cutlass.place);
        search.warn(
            passed_over,
            &format!("CUTLASS of {path} ({place}) is taken"),
        );
        Ok(cutlass)
    };
    for (place, root) in search.cutlass_roots(&mut looked) {
        for folder in [root.join("include"), root.clone()] {
            if folder.join(HEADER).is_file() {
                return taken(found(folder, &place), passed_over);
            }
        }
        // A toolkit may be without CUTLASS.
        if matches!(place.as_str(), "CUTLASS_PATH" | "CUTLASS_HOME") {
            passed_over.push(format!(
                "{place}: given {root:?}, accepted a folder of CUTLASS: it lacks include/{HEADER}"
            ));
        }
        looked.push(format!(
            "{place}: {} lacks include/{HEADER}",
            root.display()
        ));
    }
    for (place, folder) in search.site_packages(&mut looked) {
        let include = folder.join("cutlass_library/source/include");
        if include.join(HEADER).is_file() {
            return taken(found(include, &place), passed_over);
        }
        looked.push(format!(
            "{place}: {} lacks cutlass_library/source/include",
            folder.display()
        ));
    }
    Err(NotFound {
        part: "CUTLASS (its headers)".into(),
        looked,
        command: install.to_owned(),
    }
    .into())
}

/// Finds libclang: the folder that holds the shared library.
#[cfg_attr(not(feature = "bindings"), allow(dead_code))]
pub(crate) fn libclang(search: &Search, install: &str) -> Result<Found, Error> {
    let found = |library: &Path, place: &str| Found {
        part: "libclang".into(),
        path: library.to_owned(),
        version: libclang_version(library),
        place: place.to_owned(),
    };
    if let Some(given) = search.variable("LIBCLANG_PATH") {
        variables::check_absolute("LIBCLANG_PATH", &given)?;
        let path = PathBuf::from(&given);
        return if path.is_file() {
            Ok(found(&path, "LIBCLANG_PATH"))
        } else if let Some(library) = search::libclang_in_folder(&path) {
            Ok(found(&library, "LIBCLANG_PATH"))
        } else {
            Err(unusable("LIBCLANG_PATH", &given, "libclang.so"))
        };
    }
    let mut looked = Vec::new();
    for (place, folder) in search.libclang_folders() {
        if let Some(library) = search::libclang_in_folder(&folder) {
            return Ok(found(&library, &place));
        }
        looked.push(format!("{place}: {} lacks libclang.so", folder.display()));
    }
    for (place, folder) in search.site_packages(&mut looked) {
        if let Some(library) = search::libclang_in_folder(&folder.join("clang/native")) {
            return Ok(found(&library, &place));
        }
        looked.push(format!(
            "{place}: {} lacks clang/native/libclang.so",
            folder.display()
        ));
    }
    Err(NotFound {
        part: "libclang (for bindgen)".into(),
        looked,
        command: install.to_owned(),
    }
    .into())
}

/// The environment variables that the search reads: a change of one asks for another build.
pub(crate) const VARIABLES: &[&str] = &[
    "NVCC",
    "MLA_CUDA_HOME",
    "MLA_CUTLASS",
    "MLA_TOOLKIT",
    "LIBCLANG_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUTLASS_PATH",
    "CUTLASS_HOME",
    "XDG_DATA_HOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
];

/// The places that come before the toolkit's own in the search.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    /// True if folders of `PATH` are among the places.
    pub(crate) on_path: bool,
    /// Folders that exist, into which an nvcc may come.
    pub(crate) folders: Vec<PathBuf>,
    /// Paths that do not exist, and that would be or hold a part of a toolkit.
    pub(crate) absent: std::collections::BTreeSet<PathBuf>,
}

/// The places before that of `cuda`, in which a toolkit may yet appear.
pub(crate) fn earlier(search: &Search, cuda: &Cuda) -> Earlier {
    let mut earlier = Earlier::default();
    if matches!(cuda.found.place.as_str(), "NVCC" | "MLA_CUDA_HOME" | CALLER) {
        return earlier;
    }
    // Wheels are named by the release's first number: those of today, and of some years.
    let in_wheels =
        search
            .site_packages(&mut Vec::new())
            .into_iter()
            .flat_map(|(place, folder)| {
                let root = move |major| (place.clone(), folder.join(format!("nvidia/cu{major}")));
                (12..=16).rev().map(root)
            });
    let roots: Vec<_> = search
        .cuda_roots(&mut Vec::new())
        .into_iter()
        .chain(in_wheels)
        .take_while(|(place, root)| *root != cuda.found.path || *place != cuda.found.place)
        .map(|(_, root)| root)
        .filter(|root| root.is_absolute())
        .collect();
    if !is_variable(&cuda.found.place) {
        earlier.on_path = true;
        earlier.folders = search.path_folders();
    }
    for root in roots {
        // All layouts need these files; here they have the paths of a wheel, the first layout of
        // each.
        for part in [
            "bin/nvcc",
            "include/cuda_runtime.h",
            "lib64/libcudart_static.a",
        ] {
            earlier.absent.extend(first_absent(&root.join(part)));
        }
    }
    earlier
}

/// True for places of variables that other programs read, too.
fn is_variable(place: &str) -> bool {
    matches!(place, "CUDA_HOME" | "CUDA_PATH")
}

/// The first part of a path that does not exist.
fn first_absent(path: &Path) -> Option<PathBuf> {
    let absent = path.ancestors().take_while(|part| !part.exists());
    absent.last().map(Path::to_owned)
}

fn unusable(field: &str, given: &OsStr, lacks: &str) -> Error {
    Error::Setting {
        field: field.to_owned(),
        given: given.to_string_lossy().into_owned(),
        accepted: format!("a place that holds {lacks}; unset it to search elsewhere"),
    }
}

/// The root of the toolkit that an nvcc belongs to: the folder above `bin`, of the path as given
/// where that holds a toolkit, and otherwise of what its links lead to (`/usr/bin/nvcc` may be
/// one).
fn root_of(nvcc: &Path) -> Option<PathBuf> {
    let above = |path: &Path| Some(path.parent()?.parent()?.to_owned());
    let given = above(nvcc)?;
    if layout(&given).is_ok() {
        return Some(given);
    }
    above(&nvcc.canonicalize().ok()?).or(Some(given))
}

/// The folders of `targets` for a kind of machine, and Debian's name of its libraries' folder.
struct Machine {
    targets: &'static [&'static str],
    libraries: &'static str,
}

impl Machine {
    /// The kind of this machine, by its processor.
    fn of(arch: &str) -> Self {
        match arch {
            "aarch64" => Self {
                targets: &["sbsa-linux", "aarch64-linux"],
                libraries: "lib/aarch64-linux-gnu",
            },
            _ => Self {
                targets: &["x86_64-linux"],
                libraries: "lib/x86_64-linux-gnu",
            },
        }
    }

    /// The folders of `root` in which one of its kind looks: `usual`, and those of `targets`.
    fn folders(&self, usual: &[&str], inside: &str) -> Vec<String> {
        let usual = usual.iter().map(|&folder| folder.to_owned());
        let of_targets = self.targets.iter();
        let of_targets = of_targets.map(|target| format!("targets/{target}/{inside}"));
        usual.chain(of_targets).collect()
    }

    /// The folder of `root` that has `file`. The target of a link may be another machine's.
    fn find(&self, root: &Path, folders: &[String], file: &str) -> Result<PathBuf, String> {
        let lacks = || format!("{file} in {}", folders.join(", "));
        let has = |folder: &PathBuf| folder.join(file).is_file();
        let mut all = folders.iter().map(|folder| root.join(folder));
        let found = all.find(|folder| has(folder) && self.owns(folder));
        found.ok_or_else(|| match self.foreign(root) {
            None => lacks(),
            Some(other) => format!(
                "{} (targets/{other} is for another machine than this, {})",
                lacks(),
                self.targets[0]
            ),
        })
    }

    /// True if a folder, its links resolved, lies in no other machine's.
    fn owns(&self, folder: &Path) -> bool {
        let real = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let parts: Vec<_> = real.components().collect();
        !parts.windows(2).any(|pair| {
            pair[0] == Component::Normal("targets".as_ref())
                && !self.targets.iter().any(|it| pair[1].as_os_str() == *it)
        })
    }

    /// Another machine's folder of a toolkit.
    fn foreign(&self, root: &Path) -> Option<String> {
        let folders = search::children(&root.join("targets"), "");
        let names = folders.iter().filter_map(|path| path.file_name()?.to_str());
        let mut others = names.filter(|name| !self.targets.contains(name));
        others.next().map(str::to_owned)
    }
}

/// The parts of a toolkit root, or what it lacks.
fn layout(root: &Path) -> Result<(PathBuf, PathBuf, PathBuf), String> {
    layout_for(&Machine::of(env::consts::ARCH), root)
}

fn layout_for(machine: &Machine, root: &Path) -> Result<(PathBuf, PathBuf, PathBuf), String> {
    if !root.is_absolute() {
        return Err(
            "the / of an absolute path (a shell replaces ~ outside of quotes alone)".into(),
        );
    }
    let nvcc = root.join("bin/nvcc");
    if !nvcc.is_file() {
        return Err("bin/nvcc".into());
    }
    let headers = machine.folders(&["include"], "include");
    let include = machine.find(root, &headers, "cuda_runtime.h")?;
    let mut libraries = machine.folders(&["lib64", "lib"], "lib");
    libraries.push(machine.libraries.to_owned());
    let library = machine.find(root, &libraries, "libcudart_static.a")?;
    Ok((nvcc, include, library))
}

/// Asks nvcc for its version.
fn describe(root: &Path, nvcc: Option<PathBuf>, place: &str) -> Result<Cuda, Error> {
    let (of_root, include, library) = layout(root).map_err(|lacks| Error::Tool {
        program: root.display().to_string(),
        message: format!("the toolkit lacks {lacks}"),
    })?;
    let nvcc = nvcc.unwrap_or(of_root);
    let tool = |message| Error::Tool {
        program: nvcc.display().to_string(),
        message,
    };
    let output =
        bounded::output(Command::new(&nvcc).arg("--version")).map_err(|e| tool(e.to_string()))?;
    let version_text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        return Err(tool(format!(
            "--version: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )));
    }
    let version = Version::from_nvcc(&version_text)
        .ok_or_else(|| tool(format!("--version names no release: {version_text:?}")))?;
    let full = version_text
        .split(", V")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next());
    let found = Found {
        part: "CUDA".into(),
        path: root.to_owned(),
        version: Some(full.map_or_else(|| version.to_string(), str::to_owned)),
        place: place.to_owned(),
    };
    Ok(Cuda {
        found,
        nvcc,
        include,
        library,
        version,
        version_text,
    })
}

fn cutlass_version(include: &Path) -> Option<String> {
    let text = bounded::read_to_string(include.join("cutlass/version.h")).ok()?;
    let number = |name: &str| {
        text.lines().find_map(|line| {
            line.strip_prefix("#define ")?
                .strip_prefix(name)?
                .trim()
                .parse::<u32>()
                .ok()
        })
    };
    Some(format!(
        "{}.{}.{}",
        number("CUTLASS_MAJOR")?,
        number("CUTLASS_MINOR")?,
        number("CUTLASS_PATCH")?
    ))
}

/// The version in the library's own name (`libclang-18.so`), the folder's (`llvm-18`), or the
/// wheel's.
fn libclang_version(library: &Path) -> Option<String> {
    if let Some(site) = library.ancestors().nth(3) {
        let wheel = search::children(site, "libclang-").into_iter().next_back();
        if let Some(name) = wheel
            .as_deref()
            .and_then(Path::file_name)
            .and_then(|n| n.to_str())
        {
            return Some(
                name.trim_start_matches("libclang-")
                    .trim_end_matches(".dist-info")
                    .to_owned(),
            );
        }
    }
    library.iter().rev().find_map(|part| {
        let part = part.to_str()?;
        let rest = part
            .strip_prefix("llvm-")
            .or_else(|| part.strip_prefix("libclang-"))?;
        let digits: String = rest
            .chars()
            .take_while(|c| c.is_ascii_digit() || *c == '.')
            .collect();
        Some(digits.trim_matches('.').to_owned()).filter(|digits| !digits.is_empty())
    })
}

#[cfg(test)]
mod tests;
