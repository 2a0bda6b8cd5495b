//! The command lines of nvcc, and the same without paths for the cache's key.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    Error, bounded, flags,
    include_root::IncludeRoot,
    shell::Place,
    toolkit::Cuda,
    unit::{Language, Unit},
    variables,
};

/// The C++ compiler that nvcc works with.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    pub(crate) path: PathBuf,
    /// The printed version without the program's own name, since `g++` and `c++` are often the same
    /// program.
    pub(crate) version_text: String,
    /// The folders that the compiler searches for headers after those of the command line: those of
    /// `CPATH` and similar variables, and the system's.
    pub(crate) includes: Vec<PathBuf>,
}

/// nvcc's own variable for the C++ compiler.
pub(crate) const CCBIN: &str = "NVCC_CCBIN";

/// CMake's variable for the C++ compiler.
pub(crate) const CUDAHOSTCXX: &str = "CUDAHOSTCXX";

/// Environment variables whose text is part of every key.
pub(crate) const KEYED: &[&str] = &[
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
];

/// Environment variables that list folders of headers.
pub(crate) const INCLUDE_VARIABLES: &[&str] = &["CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"];

/// The variable with flags for libclang. bindgen reads it.
const BINDGEN: &str = "BINDGEN_EXTRA_CLANG_ARGS";

/// Returns the environment variables that change what the compilers do. Those that are not keyed
/// name a program, and the program's version is part of the key.
pub(crate) fn variables() -> Vec<String> {
    let fixed = KEYED.iter().chain(&[CCBIN, CUDAHOSTCXX, BINDGEN]);
    let mut names: Vec<_> = fixed.map(|&name| name.to_owned()).collect();
    let target = env::var("TARGET").unwrap_or_default();
    let spelled = |by: &[char]| target.replace(by, "_");
    // The `cc` crate looks for these variables.
    for tool in ["CXX", "AR"] {
        names.extend([
            tool.to_owned(),
            format!("HOST_{tool}"),
            format!("TARGET_{tool}"),
        ]);
        if !target.is_empty() {
            names.push(format!("{tool}_{target}"));
            names.push(format!("{tool}_{}", spelled(&['-', '.'])));
        }
    }
    if !target.is_empty() {
        names.push(format!("{BINDGEN}_{target}"));
        names.push(format!("{BINDGEN}_{}", spelled(&['-'])));
    }
    names
}

/// The variables that add flags to every call of nvcc.
const FLAGS: &[&str] = &["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"];

/// Returns the flags that environment variables add to every call of nvcc.
pub(crate) fn flags_of_environment() -> Result<Vec<String>, Error> {
    let mut all = Vec::new();
    for name in FLAGS {
        if let Ok(value) = env::var(name) {
            flags::check_variable(name, &value)?;
            all.push(value);
        }
    }
    Ok(all)
}

/// Returns the host compiler, and the name of the setting that gives it.
///
/// The settings are tried in this order: the build script's setter, [`CCBIN`], `-ccbin` in nvcc's
/// variables for flags, and [`CUDAHOSTCXX`]. nvcc always obeys `-ccbin` in these variables. If the
/// setter or [`CCBIN`] gives another compiler, that is therefore an error.
fn named(given: Option<&Path>) -> Result<Option<(PathBuf, &str)>, Error> {
    let setter = given.map(|path| (path.to_owned(), "Kernels::host_compiler"));
    let variable = |name: &'static str| Some((PathBuf::from(variables::set(name)?), name));
    let first = setter.or_else(|| variable(CCBIN));
    let in_flags = FLAGS.iter().rev().find_map(|&name| {
        let value = env::var(name).ok()?;
        Some((PathBuf::from(flags::host_compiler(&value)?), name))
    });
    match (first, in_flags) {
        (Some((first, by)), Some((flag, name))) if first != flag => Err(Error::setting(
            name,
            format!("-ccbin {}", flag.display()),
            format!(
                "no other C++ compiler than that of {by}, {}",
                first.display()
            ),
        )),
        (Some(named), _) | (None, Some(named)) => Ok(Some(named)),
        (None, None) => Ok(variable(CUDAHOSTCXX)),
    }
}

impl Host {
    /// Finds the compiler that a setter or variable gives. Without one, it is the C++ compiler that
    /// the `cc` crate would take (from `CXX` and similar variables, or the system's).
    pub(crate) fn find(given: Option<&Path>) -> Result<Self, Error> {
        let (path, by) = match named(given)? {
            // nvcc also accepts a folder.
            Some((path, by)) if path.is_dir() => (path.join("g++"), by),
            Some(named) => named,
            None => {
                let compiler = tools().try_get_compiler();
                let compiler = compiler.map_err(|error| Error::tool("C++ compiler", error))?;
                (compiler.path().to_owned(), "CXX or the system")
            }
        };
        let failed = |what: String| {
            let way = format!(
                "{what}. nvcc works with a C++ compiler of this machine: install GCC's (apt-get \
                 install g++), or name one in {CCBIN}; this one is named by {by}"
            );
            Error::tool(path.display(), way)
        };
        let output = bounded::output(Command::new(&path).arg("--version"))
            .map_err(|error| failed(error.to_string()))?;
        if !output.status.success() {
            return Err(failed(format!("--version: {}", output.status)));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let version_text = text
            .split_once(' ')
            .map_or(&*text, |(_, rest)| rest)
            .to_owned();
        let includes = include_folders(&path).map_err(|error| failed(error.to_string()))?;
        // A program that is no compiler may have a version, too.
        let includes = includes.ok_or_else(|| {
            failed("it lists no folders of headers (-x c++ -E -v), as GCC and Clang do".to_owned())
        })?;
        Ok(Self {
            path,
            version_text,
            includes,
        })
    }

    /// Returns the first line of the version.
    pub(crate) fn version(&self) -> &str {
        self.version_text.lines().next().unwrap_or_default()
    }
}

/// Returns the folders that a C++ compiler searches for headers after those of the command line:
/// those of `CPATH` and similar variables, and the system's. Returns `None` if it prints no such
/// list.
fn include_folders(compiler: &Path) -> std::io::Result<Option<Vec<PathBuf>>> {
    let mut command = Command::new(compiler);
    command.args(["-x", "c++", "-E", "-v", "/dev/null"]);
    let output = bounded::output(command.env("LC_ALL", "C"))?;
    // GCC and Clang print the list between two lines, a folder per line.
    let text = String::from_utf8_lossy(&output.stderr);
    let mut lines = text.lines();
    if !lines.any(|line| line.ends_with("search starts here:")) {
        return Ok(None);
    }
    let folders = lines
        .take_while(|line| !line.starts_with("End of search list"))
        .filter_map(|line| line.strip_prefix(' '))
        .map(PathBuf::from);
    Ok(Some(folders.collect()))
}

/// Returns what the `cc` crate knows of this machine's tools, also outside a build script.
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

/// The settings that are the same for all units of a build.
#[derive(Debug)]
pub(crate) struct Compiler {
    pub(crate) cuda: Cuda,
    pub(crate) host: Host,
    /// The package's folder. nvcc runs there, so that objects hold relative names of sources.
    pub(crate) root: PathBuf,
    /// The include roots in the order in which they are given. Those of `-I` are searched first.
    pub(crate) includes: Vec<IncludeRoot>,
    pub(crate) defines: Vec<String>,
    pub(crate) flags: Vec<String>,
    /// True if objects hold the line numbers of their sources, for profilers.
    pub(crate) line_info: bool,
}

impl Compiler {
    pub(crate) fn fixed(&self, unit: &Unit) -> Vec<String> {
        let (flags, line_info) = match unit.language {
            // -v prints registers and spills of each kernel for the report.
            Language::Cuda => (
                "-std=c++17 -O3 --expt-relaxed-constexpr -Xptxas=-v -Xcompiler=-fPIC",
                "-lineinfo",
            ),
            Language::Cpp => ("-std=c++17 -O2 -fPIC", "-g1"),
        };
        let mut arguments: Vec<_> = flags.split(' ').map(str::to_owned).collect();
        arguments.extend(unit.gencodes().map(|gencode| format!("-gencode={gencode}")));
        arguments.extend(self.line_info.then(|| line_info.to_owned()));
        arguments.extend(self.defines.iter().map(|define| format!("-D{define}")));
        if unit.language == Language::Cuda {
            arguments.extend(self.flags.iter().cloned());
        }
        arguments.extend(unit.flags.iter().cloned());
        arguments
    }

    /// Returns the program that compiles a unit.
    pub(crate) fn program(&self, unit: &Unit) -> &Path {
        match unit.language {
            Language::Cuda => &self.cuda.nvcc,
            Language::Cpp => &self.host.path,
        }
    }

    /// Returns the arguments that may change the object, with roles in place of paths.
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
            // The path is relative if possible, so that `__FILE__` does not reveal where the
            // checkout lies.
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
        if unit.language == Language::Cuda {
            arguments.extend(["-ccbin".into(), self.host.path.clone().into()]);
        }
        arguments
    }

    /// Returns the command that compiles a unit and writes its object and its dependencies into
    /// `folder`. nvcc's intermediate files go there, too. `maps` is the file with the
    /// [`path_maps`](Self::path_maps).
    pub(crate) fn command(
        &self,
        unit: &Unit,
        folder: &Path,
        maps: &Path,
    ) -> Result<Command, Error> {
        let [object, dependencies] = [OBJECT, DEPENDENCIES].map(|file| folder.join(file).into());
        let [md, mf, c, o] = ["-MD", "-MF", "-c", "-o"].map(OsString::from);
        self.command_for(unit, folder, maps, &[md, mf, dependencies, c, o, object])
    }

    /// Returns the command that compiles a unit of one target into a cubin or PTX alone.
    pub(crate) fn code_command(
        &self,
        unit: &Unit,
        folder: &Path,
        maps: &Path,
        (kind, path): (&str, &Path),
    ) -> Result<Command, Error> {
        let product = [format!("-{kind}").into(), "-o".into(), path.into()];
        self.command_for(unit, folder, maps, &product)
    }

    fn command_for(
        &self,
        unit: &Unit,
        folder: &Path,
        maps: &Path,
        product: &[OsString],
    ) -> Result<Command, Error> {
        let mut command = Command::new(self.program(unit));
        let mut response = OsString::from(match unit.language {
            Language::Cuda => "-Xcompiler=@",
            Language::Cpp => "@",
        });
        response.push(maps);
        command
            .current_dir(&self.root)
            .env("TMPDIR", folder)
            .args(self.arguments(unit))
            .arg(response)
            .args(product);
        if unit.language == Language::Cpp || Place::Package.takes(&self.root) {
            command.arg(&unit.source);
            return Ok(command);
        }
        // nvcc passes the real path of its source to a shell. It is therefore given a wrapper file
        // in another folder. The wrapper includes the source from the folder where the compiler
        // runs, which is searched last of all.
        let name = Path::new(&unit.source).file_name().unwrap_or_default();
        let wrapper = folder.join(name);
        fs::write(&wrapper, format!("#include \"{}\"\n", unit.source))
            .map_err(Error::file("write", &wrapper))?;
        command.arg("-Xcompiler=-idirafter,.").arg(wrapper);
        Ok(command)
    }

    /// Returns flags of the host compiler that keep the paths of folders out of objects. They go
    /// into a file of options, since flags on nvcc's own command line would pass through a shell.
    pub(crate) fn path_maps(&self) -> String {
        let places = [(&self.root, "."), (&self.cuda.found.path, "cuda")];
        let includes = self.includes.iter().map(|i| (&i.folder, i.role.as_str()));
        let map = |(from, to): (&PathBuf, &str)| {
            // The compiler splits at the first `=`, so a path with one is left out.
            let from = from.to_str().filter(|from| !from.contains(['=', '\n']))?;
            let map = format!("-ffile-prefix-map={from}={to}");
            Some(format!(
                "\"{}\"\n",
                map.replace('\\', "\\\\").replace('"', "\\\"")
            ))
        };
        includes.chain(places).filter_map(map).collect()
    }

    /// Refuses paths and flags that nvcc cannot be given safely.
    pub(crate) fn check(&self, units: &[Unit]) -> Result<(), Error> {
        Place::Toolkit.check("CUDA", &self.cuda.found.path)?;
        Place::HostCompiler.check("host compiler", &self.host.path)?;
        for include in &self.includes {
            let folder = &include.folder;
            let spelled = folder.strip_prefix(&self.root).unwrap_or(folder);
            Place::Include.check("include", spelled)?;
        }
        for unit in units.iter().filter(|unit| unit.language == Language::Cuda) {
            let path = Path::new(&unit.source);
            Place::Source.check("sources", path)?;
            Place::SourceName.check("sources", path.file_name().unwrap_or_default().as_ref())?;
        }
        Ok(())
    }
}

/// The file in the folder of a compilation that holds its object.
pub(crate) const OBJECT: &str = "unit.o";

/// The file in the folder of a compilation that lists the files that it read.
pub(crate) const DEPENDENCIES: &str = "unit.d";
