//! The command lines of nvcc, and the same without paths for the cache's key.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    Error,
    toolkit::Cuda,
    unit::{Language, Unit},
};

/// The C++ compiler that nvcc works with.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    pub(crate) path: PathBuf,
    /// What it prints of its version, without its own name: `g++` and `c++` are often the same program.
    pub(crate) version_text: String,
}

/// Environment variables that change what the compilers do. They are part of every key.
pub(crate) const VARIABLES: &[&str] = &[
    "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "CXX",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
];

/// Of those, the ones whose text is in the key. The others name a host compiler, whose version is.
const KEYED: &[&str] = &[
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
];

impl Host {
    /// `NVCC_CCBIN`, then what the `cc` crate would take for C++ (`CXX` and its kin, the system's).
    pub(crate) fn find(given: Option<&Path>) -> Result<Self, Error> {
        let path = match given
            .map(Path::to_owned)
            .or_else(|| env::var_os("NVCC_CCBIN").map(PathBuf::from))
        {
            // nvcc takes a folder too.
            Some(path) if path.is_dir() => path.join("g++"),
            Some(path) => path,
            None => tools()
                .try_get_compiler()
                .map_err(|e| tool("C++ compiler", e))?
                .path()
                .to_owned(),
        };
        let program = path.display().to_string();
        let output = Command::new(&path)
            .arg("--version")
            .output()
            .map_err(|e| tool(&program, e))?;
        if !output.status.success() {
            return Err(tool(&program, format!("--version: {}", output.status)));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let version_text = text
            .split_once(' ')
            .map_or(text.as_ref(), |(_, rest)| rest)
            .to_owned();
        Ok(Self { path, version_text })
    }

    /// The first line of its version.
    pub(crate) fn version(&self) -> &str {
        self.version_text.lines().next().unwrap_or_default()
    }
}

/// The `cc` crate's knowledge of this machine's tools, also outside a build script.
pub(crate) fn tools() -> cc::Build {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .cargo_metadata(false)
        .cargo_warnings(false)
        .opt_level(3)
        .debug(false);
    if env::var_os("TARGET").is_none() {
        let triple = format!("{}-unknown-linux-gnu", env::consts::ARCH);
        build.target(&triple).host(&triple);
    }
    build
}

fn tool(program: &str, message: impl ToString) -> Error {
    Error::Tool {
        program: program.to_owned(),
        message: message.to_string(),
    }
}

/// What is the same for all units of a build.
#[derive(Debug)]
pub(crate) struct Compiler {
    pub(crate) cuda: Cuda,
    pub(crate) host: Host,
    /// The package; nvcc runs there, so that the names of sources in objects are relative.
    pub(crate) root: PathBuf,
    /// In the order in which they are given; the search takes those of `-I` first.
    pub(crate) includes: Vec<Include>,
    pub(crate) defines: Vec<String>,
    pub(crate) flags: Vec<String>,
}

/// An include root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Include {
    pub(crate) role: String,
    pub(crate) folder: PathBuf,
    /// Searched after all others, and warned about in nothing: `-isystem`.
    pub(crate) is_system: bool,
}

impl Include {
    fn flag(&self, language: Language) -> &'static str {
        match (self.is_system, language) {
            (false, _) => "-I",
            (true, Language::Cuda) => "-isystem=",
            (true, Language::Cpp) => "-isystem",
        }
    }
}

impl Compiler {
    fn fixed(&self, unit: &Unit) -> Vec<String> {
        let mut arguments: Vec<String> = match unit.language {
            Language::Cuda => [
                "-std=c++17",
                "-O3",
                "--expt-relaxed-constexpr",
                // Registers and spills of each kernel: the report is made of them.
                "-Xptxas=-v",
                "-Xcompiler=-fPIC",
            ]
            .map(str::to_owned)
            .into(),
            Language::Cpp => ["-std=c++17", "-O2", "-fPIC"].map(str::to_owned).into(),
        };
        arguments.extend(
            unit.targets
                .iter()
                .map(|target| format!("-gencode={}", target.gencode())),
        );
        arguments.extend(self.defines.iter().map(|define| format!("-D{define}")));
        if unit.language == Language::Cuda {
            arguments.extend(self.flags.iter().cloned());
        }
        arguments.extend(unit.flags.iter().cloned());
        arguments
    }

    /// The program that compiles a unit.
    pub(crate) fn program(&self, unit: &Unit) -> &Path {
        match unit.language {
            Language::Cuda => &self.cuda.nvcc,
            Language::Cpp => &self.host.path,
        }
    }

    /// The arguments with roles in place of paths: what of them may change the object.
    pub(crate) fn canonical(&self, unit: &Unit) -> Vec<String> {
        let mut arguments = self.fixed(unit);
        for include in &self.includes {
            arguments.push(format!("{}{}", include.flag(unit.language), include.role));
        }
        for name in KEYED {
            if let Ok(value) = env::var(name) {
                arguments.push(format!("{name}={value}"));
            }
        }
        arguments
    }

    pub(crate) fn arguments(&self, unit: &Unit) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = self.fixed(unit).into_iter().map(Into::into).collect();
        for include in &self.includes {
            // Relative where it can be, so that `__FILE__` does not tell where the checkout lies.
            let mut argument = OsString::from(include.flag(unit.language));
            argument.push(match include.folder.strip_prefix(&self.root) {
                Ok(inside) if inside.as_os_str().is_empty() => Path::new("."),
                Ok(inside) => inside,
                Err(_) => &include.folder,
            });
            arguments.push(argument);
        }
        if unit.language == Language::Cpp {
            arguments.extend(["-isystem".into(), self.cuda.include.clone().into()]);
        }
        for (from, to) in [(&self.root, "."), (&self.cuda.found.path, "cuda")] {
            let from = from.to_string_lossy();
            // nvcc splits the value at commas, and a path that would be torn is better left alone.
            if !from.contains([',', '=']) {
                let through = match unit.language {
                    Language::Cuda => "-Xcompiler=",
                    Language::Cpp => "",
                };
                arguments.push(format!("{through}-ffile-prefix-map={from}={to}").into());
            }
        }
        if unit.language == Language::Cuda {
            arguments.extend(["-ccbin".into(), self.host.path.clone().into()]);
        }
        arguments
    }

    /// Compiles a unit and writes its dependencies; `temporary` takes what the passes leave between
    /// them.
    pub(crate) fn command(
        &self,
        unit: &Unit,
        object: &Path,
        depfile: &Path,
        temporary: &Path,
    ) -> Command {
        let mut command = Command::new(self.program(unit));
        command
            .current_dir(&self.root)
            .env("TMPDIR", temporary)
            .args(self.arguments(unit))
            .args(["-MD", "-MF"])
            .arg(depfile)
            .arg("-c")
            .arg("-o")
            .arg(object)
            .arg(&unit.source);
        command
    }
}

/// Refuses a flag that the tool itself sets, with what to call in its place.
pub(crate) fn check_flag(flag: &str) -> Result<(), Error> {
    let name = flag.trim_start_matches('-');
    let in_place = if [
        "arch",
        "gencode",
        "gpu-architecture",
        "gpu-code",
        "generate-code",
        "code",
    ]
    .iter()
    .any(|own| name == *own || name.starts_with(&format!("{own}=")))
    {
        "Kernels::family, or a feature such as sm90"
    } else if flag.starts_with("-I")
        || ["isystem", "include-path", "system-include"]
            .iter()
            .any(|own| name.starts_with(own))
    {
        "Kernels::include"
    } else if flag.starts_with("-D") {
        "Kernels::define"
    } else if name.starts_with("ccbin") || name.starts_with("compiler-bindir") {
        "the environment variable NVCC_CCBIN"
    } else if matches!(
        flag,
        "-c" | "-o" | "-dc" | "-dlink" | "-lib" | "-run" | "-E" | "-ptx" | "-cubin"
    ) || flag.starts_with("-M")
    {
        "a flag that does not say what is made, or where"
    } else if !flag.starts_with('-') {
        "one flag with its value in one text, such as -maxrregcount=128"
    } else {
        return Ok(());
    };
    Err(Error::Setting {
        field: "flag".into(),
        given: flag.to_owned(),
        accepted: in_place.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_the_tool_sets_are_refused_with_what_to_call() {
        for (flag, word) in [
            ("-arch=sm_90a", "Kernels::family"),
            ("-gencode", "Kernels::family"),
            ("--gpu-architecture=sm_90", "Kernels::family"),
            ("-I/usr/include", "Kernels::include"),
            ("-DX=1", "Kernels::define"),
            ("-ccbin=g++-11", "NVCC_CCBIN"),
            ("-o", "what is made"),
            ("-MD", "what is made"),
            ("main.cu", "one flag"),
        ] {
            let message = check_flag(flag).unwrap_err().to_string();
            assert!(
                message.contains(word) && message.contains(flag),
                "{flag}: {message}"
            );
        }
        for flag in [
            "-lineinfo",
            "--use_fast_math",
            "-maxrregcount=128",
            "-Xptxas=-O2",
        ] {
            check_flag(flag).unwrap();
        }
    }
}
