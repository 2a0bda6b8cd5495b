//! The description of a build: one chain in a build script.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::{
    Error, Family,
    family::Families,
    headers::Headers,
    toolkit::{Checkout, Wheel},
    unit::{self, SettingValue, Unit, UnitSetting},
};

/// A library of CUDA kernels, described in one chain and compiled at its end.
///
/// ```no_run
/// fn main() -> Result<(), mla_build::Error> {
///     mla_build::Kernels::new()
///         .sources("cuda/**/*.cu")
///         .header("cuda/include/mla.h")
///         .compile("mla")?;
///     Ok(())
/// }
/// ```
///
/// All paths are relative to the package; an absolute glob of sources is taken if it lies there. A
/// source below a folder with a [family](Family)'s name is compiled for its targets if the family
/// is turned on. Any other source (usually below `all`) is compiled into one object for the targets
/// of all families that are on. `common` is for headers, and a source there is an error.
#[derive(Clone, Debug, Default)]
#[must_use = "nothing is built before `compile`"]
pub struct Kernels {
    pub(crate) sources: Vec<String>,
    pub(crate) only_sources: Option<String>,
    pub(crate) header: Option<PathBuf>,
    pub(crate) family_headers: Vec<(String, PathBuf)>,
    pub(crate) declarations: Option<PathBuf>,
    pub(crate) includes: Vec<PathBuf>,
    pub(crate) defines: Vec<String>,
    pub(crate) flags: Vec<String>,
    pub(crate) unit_settings: Vec<UnitSetting>,
    pub(crate) wheels: Vec<Wheel>,
    pub(crate) checkouts: Vec<Checkout>,
    pub(crate) families: Vec<Family>,
    pub(crate) enabled: Vec<String>,
    pub(crate) cutlass: bool,
    pub(crate) compile_commands: Option<PathBuf>,
    pub(crate) prebuilt: Vec<PathBuf>,
    pub(crate) optional: bool,
    pub(crate) code: Option<PathBuf>,
    pub(crate) launches: Option<PathBuf>,
    pub(crate) install_command: Option<String>,
    pub(crate) root: Option<PathBuf>,
    pub(crate) out_dir: Option<PathBuf>,
    pub(crate) cache: Option<PathBuf>,
    pub(crate) cuda_home: Option<PathBuf>,
    pub(crate) host_compiler: Option<PathBuf>,
    pub(crate) jobs: Option<usize>,
}

impl Kernels {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the sources that a glob matches. `*` stays within a folder, `**` crosses them. nvcc
    /// compiles `.cu`; the C++ compiler compiles `.cc`, `.cpp` and `.cxx`, which belong to every
    /// build if they lie in no family's folder, also to one without a family.
    pub fn sources(mut self, glob: impl Into<String>) -> Self {
        self.sources.push(glob.into());
        self
    }

    /// Compiles only those of the sources that this glob matches. Flags and the like for the
    /// others, as by [`flag_for`](Self::flag_for), have no effect. For tools that look at some of a
    /// package's kernels as its build script describes them.
    pub fn only_sources(mut self, glob: impl Into<String>) -> Self {
        self.only_sources = Some(glob.into());
        self
    }

    /// The C header that declares the functions that Rust calls. bindgen wraps the declarations of
    /// it and of the headers beside it, and its folder becomes an include root.
    pub fn header(mut self, header: impl Into<PathBuf>) -> Self {
        self.header = Some(header.into());
        self
    }

    /// Adds a C header for a family, which bindgen wraps if the family is on. It is read after
    /// [`header`](Self::header), which then needs an include guard; a declaration in both is
    /// wrapped once. Its folder becomes no include root.
    pub fn family_header(mut self, family: impl Into<String>, header: impl Into<PathBuf>) -> Self {
        self.family_headers.push((family.into(), header.into()));
        self
    }

    /// The Rust declarations of the header, checked in; those of a family's header lie beside it,
    /// with the ending `.rs`. They stand for what bindgen makes where only bindings are asked for,
    /// so that a check needs no libclang. A test of the package compares them with the headers:
    /// what bindgen makes of each begins with a line that names it, `// cuda/include/api.h`.
    pub fn declarations(mut self, file: impl Into<PathBuf>) -> Self {
        self.declarations = Some(file.into());
        self
    }

    /// Adds an include root.
    pub fn include(mut self, folder: impl Into<PathBuf>) -> Self {
        self.includes.push(folder.into());
        self
    }

    /// Defines a macro: `NAME` or `NAME=value`.
    pub fn define(mut self, define: impl Into<String>) -> Self {
        self.defines.push(define.into());
        self
    }

    /// Adds a flag of nvcc, with its value in the same text. Targets, include roots, macros and
    /// outputs have their own setters, and are refused here.
    pub fn flag(mut self, flag: impl Into<String>) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Adds a flag for the sources that a glob matches, behind the flags for all sources: a flag of
    /// nvcc, or of the C++ compiler for sources in C++. A glob that matches no source is an error.
    pub fn flag_for(self, glob: impl Into<String>, flag: impl Into<String>) -> Self {
        self.unit_setting(glob.into(), SettingValue::Flag(flag.into()))
    }

    /// Defines a macro, `NAME` or `NAME=value`, for the sources that a glob matches.
    pub fn define_for(self, glob: impl Into<String>, define: impl Into<String>) -> Self {
        self.unit_setting(glob.into(), SettingValue::Define(define.into()))
    }

    /// Makes the code of the sources that a glob matches, for every target that is no older, from
    /// PTX of one architecture, `compute_80`: what a GPU that is there has run is then what others
    /// compile, and nvcc's first half runs once instead of once per target. This code gets no
    /// instruction that the architecture lacks. With several architectures for one source, each
    /// target takes the latest that serves it. Older targets, and those with `a` or `f`, keep PTX
    /// of their own.
    pub fn ptx_for(self, glob: impl Into<String>, target: impl Into<String>) -> Self {
        self.unit_setting(glob.into(), SettingValue::Ptx(target.into()))
    }

    /// Says how many bytes each compilation of the sources that a glob matches needs, for a first
    /// build: afterwards what it did need is known. Without it 2 GiB are assumed, or what sources
    /// of the same folder needed if that is more.
    pub fn memory_for(self, glob: impl Into<String>, bytes: u64) -> Self {
        self.unit_setting(glob.into(), SettingValue::Memory(bytes))
    }

    fn unit_setting(mut self, glob: String, value: SettingValue) -> Self {
        self.unit_settings.push(UnitSetting { glob, value });
        self
    }

    /// Adds the include roots of a pinned wheel, after the package's own and before CUTLASS.
    pub fn wheel(mut self, wheel: Wheel) -> Self {
        self.wheels.push(wheel);
        self
    }

    /// Adds the include roots of a pinned checkout, behind those of wheels and before CUTLASS.
    pub fn checkout(mut self, checkout: Checkout) -> Self {
        self.checkouts.push(checkout);
        self
    }

    /// Makes the CUTLASS and CuTe headers an include root, and requires them.
    pub fn cutlass(mut self) -> Self {
        self.cutlass = true;
        self
    }

    /// Declares a family of the package's own, or other targets for a built-in one (`sm80`, `sm90`,
    /// `sm100`). The environment variable `MLA_BUILD_TARGETS_<FAMILY>` changes them again.
    pub fn family(mut self, family: Family) -> Self {
        self.families.push(family);
        self
    }

    /// Turns a family on. Without a call, the package's features of the same name do.
    pub fn enable(mut self, family: impl Into<String>) -> Self {
        self.enabled.push(family.into());
        self
    }

    /// Writes the GPU code into a folder as cubins and PTX, with a [description](crate::code). The
    /// environment variable `MLA_BUILD_CODE` asks for the same. The folder is emptied first.
    pub fn code(mut self, folder: impl Into<PathBuf>) -> Self {
        self.code = Some(folder.into());
        self
    }

    /// Describes how kernels are launched, for the [code](Self::code): a file of JSON, relative to
    /// the package, with a list of `{"kernel", "source", "parameters", "launch"}`, in which
    /// `kernel` is a glob of C++ names. Kernels without a row are described by their parameters'
    /// sizes.
    pub fn launches(mut self, file: impl Into<PathBuf>) -> Self {
        self.launches = Some(file.into());
        self
    }

    /// Lets the package be built with no family on: the bindings and the constants are then empty,
    /// nothing is linked, and a toolkit is not needed. A backend whose attribute has the key
    /// `feature` stays in the registry as absent.
    pub fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    /// Writes `compile_commands.json` there, for clangd. The environment variable
    /// `MLA_BUILD_COMPILE_COMMANDS` asks for the same, with the path as its value.
    pub fn compile_commands(mut self, path: impl Into<PathBuf>) -> Self {
        self.compile_commands = Some(path.into());
        self
    }

    /// Adds a folder of objects that were compiled before, as `MLA_BUILD_EXPORT` writes them. If
    /// they are of these sources, flags and targets, and no variable or setter asks for anything
    /// else, they are the library, and no part of the toolkit is needed. A folder without any is
    /// passed over. The environment variable `MLA_BUILD_PREBUILT` names other folders, or `none`.
    pub fn prebuilt(mut self, folder: impl Into<PathBuf>) -> Self {
        self.prebuilt.push(folder.into());
        self
    }

    /// The command that installs the toolkit, for the message that says it is missing. The default
    /// is the call of pip.
    pub fn install_command(mut self, command: impl Into<String>) -> Self {
        self.install_command = Some(command.into());
        self
    }

    /// The package's folder, by default `CARGO_MANIFEST_DIR`.
    pub fn root(mut self, folder: impl Into<PathBuf>) -> Self {
        self.root = Some(folder.into());
        self
    }

    /// Sets the folder for the library; the default is `OUT_DIR`. With a folder given, nothing is
    /// printed for Cargo.
    pub fn out_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.out_dir = Some(folder.into());
        self
    }

    /// The cache's folder, by default `MLA_BUILD_CACHE`, or `mla-build` in the user's cache folder.
    pub fn cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = Some(folder.into());
        self
    }

    /// The toolkit to use, in place of a search.
    pub fn cuda_home(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cuda_home = Some(folder.into());
        self
    }

    /// The C++ compiler that nvcc uses, by default `NVCC_CCBIN`, or what the `cc` crate finds.
    pub fn host_compiler(mut self, path: impl Into<PathBuf>) -> Self {
        self.host_compiler = Some(path.into());
        self
    }

    /// Sets the maximal number of compilers that run at once, in place of what Cargo's jobserver
    /// allows.
    pub fn jobs(mut self, jobs: usize) -> Self {
        self.jobs = Some(jobs);
        self
    }

    /// Makes every glob relative to the package's folder.
    pub(crate) fn with_relative_globs(mut self, root: &Path) -> Result<Self, Error> {
        for glob in &mut self.sources {
            *glob = unit::relative_glob(root, "sources", glob)?;
        }
        if let Some(glob) = &mut self.only_sources {
            *glob = unit::relative_glob(root, "only_sources", glob)?;
        }
        for UnitSetting { glob, value } in &mut self.unit_settings {
            *glob = unit::relative_glob(root, value.setter(), glob)?;
        }
        Ok(self)
    }

    /// The names of the families that are turned on.
    ///
    /// # Errors
    ///
    /// A family, target or feature that does not exist.
    pub fn enabled(&self) -> Result<Vec<String>, Error> {
        let families = self.resolve()?;
        let enabled = families.declared.into_iter().filter(|f| f.enabled);
        Ok(enabled.map(|family| family.name).collect())
    }

    /// The flags of single sources, without macros.
    pub(crate) fn source_flags(&self) -> Vec<String> {
        let flag = |it: &UnitSetting| match &it.value {
            SettingValue::Flag(flag) => Some(flag.clone()),
            _ => None,
        };
        self.unit_settings.iter().filter_map(flag).collect()
    }

    /// The macros of single sources.
    pub(crate) fn source_defines(&self) -> Vec<String> {
        let define = |it: &UnitSetting| match &it.value {
            SettingValue::Define(define) => Some(define.clone()),
            _ => None,
        };
        self.unit_settings.iter().filter_map(define).collect()
    }

    /// The units to compile.
    pub(crate) fn units(&self, root: &Path, families: &Families) -> Result<Vec<Unit>, Error> {
        let mut units = unit::discover(root, &self.sources, families, &self.unit_settings)?;
        if let Some(glob) = &self.only_sources {
            let matcher = unit::matcher("only_sources", glob)?;
            units.retain(|unit| matcher.is_match(&unit.source));
            if units.is_empty() {
                let accepted = "a glob that matches a source of a family that is on";
                return Err(Error::setting("only_sources", glob, accepted));
            }
        }
        Ok(units)
    }

    /// The headers that bindgen wraps, of the families that are turned on.
    pub(crate) fn headers(&self, families: &Families, root: &Path) -> Result<Headers, Error> {
        Headers::new(root, self.header.as_deref(), &self.family_headers, families)
    }

    pub(crate) fn resolve(&self) -> Result<Families, Error> {
        Families::new(&self.families, &self.enabled, |name| env::var(name).ok())
    }
}
