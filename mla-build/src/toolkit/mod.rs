//! The search for nvcc, the CUDA headers and `libcudart_static`, CUTLASS and libclang. It has a
//! fixed order and needs no network:
//!
//! 1. the explicit environment: `MLA_CUDA_HOME` or `NVCC`, `MLA_CUTLASS`, `LIBCLANG_PATH`. If such
//!    a variable does not lead to the part, that is an error, and the search ends;
//! 2. `CUDA_HOME`, `CUDA_PATH`;
//! 3. `PATH`;
//! 4. the usual folders;
//! 5. Python's site-packages (the active environment's, the user's, the system's), in the layout of
//!    NVIDIA's wheels (`nvidia/cu13`);
//! 6. the toolkit folder of this crate, which `cargo xtask toolkit` fills.
//!
//! nvcc, headers and runtime library always come from the same place. A mix of releases compiles,
//! but fails later.

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

pub(crate) use search::Search;

use crate::bounded;
use crate::{Error, variables};
pub use crate::{error::NotFound, version::Version};

/// One part of the toolkit: its folder, its version, and the place in the search order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The name of the part: `CUDA`, `CUTLASS` or `libclang`.
    pub part: String,
    /// Its folder.
    pub path: PathBuf,
    /// Its version, if it tells one.
    pub version: Option<String>,
    /// The place in the search order at which it was found.
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
    /// The whole output of `nvcc --version`, which is part of every cache key.
    pub(crate) version_text: String,
}

impl Cuda {
    /// True if the toolkit, or the set of libraries that every program links, has a library of this
    /// name.
    pub(crate) fn has_library(&self, name: &str) -> bool {
        let always = [
            "c",
            "cuda",
            "cudart",
            "cudart_static",
            "dl",
            "m",
            "pthread",
            "rt",
        ];
        let exists = |kind| self.library.join(format!("lib{name}.{kind}")).exists();
        always.contains(&name) || exists("a") || exists("so")
    }
}

/// The name of the place if the caller names the toolkit.
const CALLER: &str = "Kernels::cuda_home";

/// Returns the CUDA toolkit in a folder that the caller names.
pub(crate) fn cuda_at(root: &Path) -> Result<Cuda, Error> {
    layout(root).map_err(|lacks| unusable("cuda_home", root.as_os_str(), &lacks))?;
    describe(root, None, CALLER)
}

/// Returns the CUDA toolkit of the program that `NVCC` names.
fn cuda_of_nvcc(search: &Search, given: &OsStr) -> Result<Cuda, Error> {
    let refuse = |accepted: String| Err(Error::setting("NVCC", given, accepted));
    let nvcc = PathBuf::from(given);
    if !nvcc.is_absolute() {
        return refuse(
            "the absolute path of bin/nvcc of a whole toolkit, such as /usr/local/cuda/bin/nvcc; \
             unset it to have nvcc looked for on PATH and elsewhere"
                .into(),
        );
    }
    let mut words = nvcc.to_str().unwrap_or_default().split_whitespace();
    if let (Some(path), Some(_), false) = (words.next(), words.next(), nvcc.exists()) {
        return refuse(format!(
            "the path alone, {path}; flags go into NVCC_APPEND_FLAGS"
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

/// Refuses an `NVCC` of another toolkit than the one in `MLA_CUDA_HOME`.
fn agree(search: &Search, root: &Path) -> Result<(), Error> {
    let Some(home) = search.variable("MLA_CUDA_HOME") else {
        return Ok(());
    };
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if real(Path::new(&home)) == real(root) {
        return Ok(());
    }
    let accepted = format!(
        "the toolkit of NVCC, {}; unset one of the two",
        root.display()
    );
    Err(Error::setting("MLA_CUDA_HOME", home, accepted))
}

/// A part of the toolkit, in words.
struct Part {
    name: &'static str,
    whole: &'static str,
    /// The variable that must lead to the part if it is set.
    explicit: &'static str,
    /// Variables that other programs read, too. If one is skipped, this is only a warning.
    variables: &'static [&'static str],
    wanted: &'static str,
    taken: &'static str,
}

/// Returns the path of a part in a folder or, as an error, a description of what the folder lacks.
type At<'a> = &'a dyn Fn(&Path) -> Result<PathBuf, String>;

/// Looks for a part of the toolkit in its variable, in the folders, and then in site-packages.
/// These come last, since each question to Python starts an interpreter.
///
/// The functions get the variable's path, a folder, and a folder of site-packages. The result is
/// the folder's place in the search order, such as a variable's name, and the path of the part.
fn find(
    (search, install): (&Search, &str),
    part: &Part,
    (folders, mut looked): (Vec<(String, PathBuf)>, Vec<String>),
    [at_given, at, in_site]: [At<'_>; 3],
) -> Result<(String, PathBuf), Error> {
    if let Some(given) = search.variable(part.explicit) {
        variables::check_absolute(part.explicit, &given)?;
        let found = at_given(Path::new(&given));
        let found = found.map_err(|lacks| unusable(part.explicit, &given, &lacks))?;
        return Ok((part.explicit.to_owned(), found));
    }
    let before = looked.len();
    let found = first(&folders, at, &mut looked);
    let passed_over: Vec<_> = (folders.iter().zip(&looked[before..]))
        .filter(|((place, _), _)| part.variables.contains(&place.as_str()))
        .filter_map(|((place, folder), looked)| {
            let (_, lacks) = looked.split_once(" lacks ")?;
            Some(format!(
                "{place}: given {folder:?}, accepted {}: it lacks {lacks}",
                part.wanted
            ))
        })
        .collect();
    let found = found.or_else(|| {
        let sites = search.site_packages(&mut looked);
        first(&sites, in_site, &mut looked)
    });
    let Some((place, path)) = found else {
        return Err(NotFound {
            part: part.whole.into(),
            looked,
            command: install.to_owned(),
        }
        .into());
    };
    let taken = format!(
        "{} of {} ({place}) {}",
        part.name,
        path.display(),
        part.taken
    );
    search.warn(passed_over, &taken);
    Ok((place, path))
}

/// Returns the first of the folders in which `at` finds a path. What the others lack is added to
/// `looked`.
fn first(
    folders: &[(String, PathBuf)],
    at: At<'_>,
    looked: &mut Vec<String>,
) -> Option<(String, PathBuf)> {
    for (place, folder) in folders {
        match at(folder) {
            Ok(path) => return Some((place.clone(), path)),
            Err(lacks) => looked.push(format!("{place}: {} lacks {lacks}", folder.display())),
        }
    }
    None
}

/// Finds CUDA.
pub(crate) fn cuda(search: &Search, install: &str) -> Result<Cuda, Error> {
    if let Some(given) = search.variable("NVCC") {
        return cuda_of_nvcc(search, &given);
    }
    let whole = |root: &Path| layout(root).map(|_| root.to_owned());
    let part = Part {
        name: "CUDA",
        whole: "CUDA (nvcc, its headers and libcudart_static.a)",
        explicit: "MLA_CUDA_HOME",
        variables: &["CUDA_HOME", "CUDA_PATH"],
        wanted: "the folder of a toolkit",
        taken: "compiles",
    };
    let at = |root: &Path| {
        let above = root.parent().filter(|above| layout(above).is_ok());
        whole(root).map_err(|lacks| match above {
            Some(above) => format!("{lacks}; {} is one", above.display()),
            None => lacks,
        })
    };
    let in_site = |site: &Path| {
        let roots = search::children(&site.join("nvidia"), "cu");
        let mut lacks = "nvidia/cu*".to_owned();
        for root in roots.iter().rev() {
            match whole(root) {
                Ok(root) => return Ok(root),
                Err(other) => lacks = format!("in {}: {other}", root.display()),
            }
        }
        Err(lacks)
    };
    let mut looked = Vec::new();
    let folders = (search.cuda_roots(&mut looked), looked);
    let at = [&whole as At<'_>, &at, &in_site];
    let (place, root) = find((search, install), &part, folders, at)?;
    describe(&root, None, &place)
}

/// Finds the CUTLASS headers: the folder that holds `cutlass/cutlass.h`.
pub(crate) fn cutlass(search: &Search, install: &str) -> Result<Found, Error> {
    const HEADER: &str = "cutlass/cutlass.h";
    let has = |folder: &PathBuf| folder.join(HEADER).is_file();
    let either = |folders: [PathBuf; 2]| folders.into_iter().find(has);
    let at_given = |root: &Path| {
        either([root.to_owned(), root.join("include")]).ok_or_else(|| HEADER.to_owned())
    };
    let part = Part {
        name: "CUTLASS",
        whole: "CUTLASS (its headers)",
        explicit: "MLA_CUTLASS",
        // A toolkit may be without CUTLASS.
        variables: &["CUTLASS_PATH", "CUTLASS_HOME"],
        wanted: "a folder of CUTLASS",
        taken: "is taken",
    };
    let at = |root: &Path| {
        let found = either([root.join("include"), root.to_owned()]);
        found.ok_or_else(|| format!("include/{HEADER}"))
    };
    let in_site = |site: &Path| {
        let inside = "cutlass_library/source/include";
        let found = Some(site.join(inside)).filter(has);
        found.ok_or_else(|| inside.to_owned())
    };
    let mut looked = Vec::new();
    let folders = (search.cutlass_roots(&mut looked), looked);
    let at = [&at_given as At<'_>, &at, &in_site];
    let (place, path) = find((search, install), &part, folders, at)?;
    Ok(Found {
        part: "CUTLASS".into(),
        version: cutlass_version(&path),
        path,
        place,
    })
}

/// Finds libclang: the folder that holds the shared library.
#[cfg_attr(not(feature = "bindings"), allow(dead_code))]
pub(crate) fn libclang(search: &Search, install: &str) -> Result<Found, Error> {
    let at = |folder: &Path| {
        let library = search::libclang_in_folder(folder);
        library.ok_or_else(|| "libclang.so".to_owned())
    };
    let at_given = |path: &Path| match path.is_file() {
        true => Ok(path.to_owned()),
        false => at(path),
    };
    let part = Part {
        name: "libclang",
        whole: "libclang (for bindgen)",
        explicit: "LIBCLANG_PATH",
        variables: &[],
        wanted: "",
        taken: "is taken",
    };
    let in_site = |site: &Path| {
        at(&site.join("clang/native")).map_err(|lacks| format!("clang/native/{lacks}"))
    };
    let folders = (search.libclang_folders(), Vec::new());
    let at = [&at_given as At<'_>, &at, &in_site];
    let (place, path) = find((search, install), &part, folders, at)?;
    Ok(Found {
        part: "libclang".into(),
        version: libclang_version(&path),
        path,
        place,
    })
}

/// The environment variables that the search reads. A changed one causes a new build.
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

/// The places that the search visits before it reaches the toolkit.
#[derive(Debug, Default)]
pub(crate) struct EarlierPlaces {
    /// True if folders of `PATH` are among the places.
    pub(crate) on_path: bool,
    /// Existing folders in which an nvcc may appear.
    pub(crate) folders: Vec<PathBuf>,
    /// Missing paths that would be a part of a toolkit, or contain one.
    pub(crate) absent: std::collections::BTreeSet<PathBuf>,
}

/// Returns the places before that of `cuda` in which a toolkit may yet appear.
pub(crate) fn earlier(search: &Search, cuda: &Cuda) -> EarlierPlaces {
    let mut earlier = EarlierPlaces::default();
    if matches!(cuda.found.place.as_str(), "NVCC" | "MLA_CUDA_HOME" | CALLER) {
        return earlier;
    }
    // Wheels are named by the release's major number. These are the present ones and those of some
    // years to come.
    let sites = search.site_packages(&mut Vec::new()).into_iter();
    let in_wheels = sites.flat_map(|(place, folder)| {
        let root = move |major| (place.clone(), folder.join(format!("nvidia/cu{major}")));
        (12..=16).rev().map(root)
    });
    let roots = search
        .cuda_roots(&mut Vec::new())
        .into_iter()
        .chain(in_wheels);
    let roots: Vec<_> = roots
        .take_while(|(place, root)| *root != cuda.found.path || *place != cuda.found.place)
        .map(|(_, root)| root)
        .filter(|root| root.is_absolute())
        .collect();
    if !matches!(cuda.found.place.as_str(), "CUDA_HOME" | "CUDA_PATH") {
        earlier.on_path = true;
        earlier.folders = search.path_folders();
    }
    for root in roots {
        // All layouts need these files. Here they have their paths in a wheel, which is the first
        // layout of each.
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

/// Returns the first part of a path that does not exist.
fn first_absent(path: &Path) -> Option<PathBuf> {
    let absent = path.ancestors().take_while(|part| !part.exists());
    absent.last().map(Path::to_owned)
}

fn unusable(field: &str, given: &OsStr, lacks: &str) -> Error {
    Error::setting(
        field,
        given,
        format!("a place that holds {lacks}; unset it to search elsewhere"),
    )
}

/// Returns the root of the toolkit that an nvcc belongs to, which is the folder above its `bin`. If
/// that folder holds no toolkit, the path may be a link, such as `/usr/bin/nvcc`. Links are then
/// followed, and the root is the folder above `bin` there.
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
    /// Returns the kind of this machine, by its processor.
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

    /// Returns the folders of `root` for a kind of machine: `usual`, and those of `targets`.
    fn folders(&self, usual: &[&str], inside: &str) -> Vec<String> {
        let usual = usual.iter().map(|&folder| folder.to_owned());
        let of_targets = self.targets.iter();
        let of_targets = of_targets.map(|target| format!("targets/{target}/{inside}"));
        usual.chain(of_targets).collect()
    }

    /// Returns the folder of `root` that has `file`. A link may lead to the files of another
    /// machine.
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

    /// True if a folder, with links resolved, does not lie in another machine's folder.
    fn owns(&self, folder: &Path) -> bool {
        let real = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let parts: Vec<_> = real.components().collect();
        !parts.windows(2).any(|pair| {
            pair[0] == Component::Normal("targets".as_ref())
                && !self.targets.iter().any(|it| pair[1].as_os_str() == *it)
        })
    }

    /// Returns another machine's folder in a toolkit.
    fn foreign(&self, root: &Path) -> Option<String> {
        let folders = search::children(&root.join("targets"), "");
        let names = folders.iter().filter_map(|path| path.file_name()?.to_str());
        let mut others = names.filter(|name| !self.targets.contains(name));
        others.next().map(str::to_owned)
    }
}

/// Returns the parts of a toolkit root, or what it lacks.
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
    let (of_root, include, library) = layout(root)
        .map_err(|lacks| Error::tool(root.display(), format!("the toolkit lacks {lacks}")))?;
    let nvcc = nvcc.unwrap_or(of_root);
    let tool = |message| Error::tool(nvcc.display(), message);
    let output = bounded::output(Command::new(&nvcc).arg("--version"));
    let output = output.map_err(|error| tool(error.to_string()))?;
    let version_text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(tool(format!("--version: {}: {errors}", output.status)));
    }
    let version = Version::from_nvcc(&version_text)
        .ok_or_else(|| tool(format!("--version names no release: {version_text:?}")))?;
    let full = version_text.split(", V").nth(1);
    let full = full.and_then(|rest| rest.split_whitespace().next());
    Ok(Cuda {
        found: Found {
            part: "CUDA".into(),
            path: root.to_owned(),
            version: Some(full.map_or_else(|| version.to_string(), str::to_owned)),
            place: place.to_owned(),
        },
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
        let define = format!("#define CUTLASS_{name}");
        let mut values = text.lines().filter_map(|line| line.strip_prefix(&define));
        values.find_map(|value| value.trim().parse::<u32>().ok())
    };
    Some(format!(
        "{}.{}.{}",
        number("MAJOR")?,
        number("MINOR")?,
        number("PATCH")?
    ))
}

/// Returns the version in the library's own name (`libclang-18.so`), in the folder's (`llvm-18`),
/// or in the wheel's.
fn libclang_version(library: &Path) -> Option<String> {
    if let Some(site) = library.ancestors().nth(3) {
        let wheel = search::children(site, "libclang-").pop();
        if let Some(name) = wheel
            .as_deref()
            .and_then(Path::file_name)
            .and_then(OsStr::to_str)
        {
            let version = name
                .trim_start_matches("libclang-")
                .trim_end_matches(".dist-info");
            return Some(version.to_owned());
        }
    }
    library.iter().rev().find_map(|part| {
        let part = part.to_str()?;
        let rest = part
            .strip_prefix("llvm-")
            .or_else(|| part.strip_prefix("libclang-"))?;
        let digits = rest
            .split(|c: char| !c.is_ascii_digit() && c != '.')
            .next()?;
        Some(digits.trim_matches('.').to_owned()).filter(|digits| !digits.is_empty())
    })
}

#[cfg(test)]
mod tests;
