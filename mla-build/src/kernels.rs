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
/// All paths are relative to the package. An absolute glob of sources is accepted if it lies in the
/// package. A source below a folder with a [family](Family)'s name is compiled for that family's
/// targets if the family is turned on. Any other source (usually below `all`) is compiled into one
/// object for the targets of all families that are on. `common` is for headers, and a source there
/// is an error.
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

/// Writes setters of a field (`=`) and of an item that is added to a list (`+=`).
macro_rules! setters {
    (@ = $field:expr, $value:expr) => { $field = Some($value) };
    (@ += $field:expr, $value:expr) => { $field.push($value) };
    ($($(#[$doc:meta])* $method:ident $how:tt $field:ident: $type:ty;)*) => {$(
        $(#[$doc])*
        pub fn $method(mut self, value: impl Into<$type>) -> Self {
            setters!(@ $how self.$field, value.into());
            self
        }
    )*};
}

impl Kernels {
    /// Makes an empty description.
    pub fn new() -> Self {
        Self::default()
    }

    setters! {
        /// Adds the sources that a glob matches.
        ///
        /// `*` stays within a folder, `**` crosses folders. nvcc compiles `.cu`. The C++ compiler
        /// compiles `.cc`, `.cpp` and `.cxx`. C++ sources in no family's folder belong to every
        /// build, even to one without a family.
        sources += sources: String;
        /// Compiles only sources that this glob matches.
        ///
        /// Flags and similar settings for the others, as by [`flag_for`](Self::flag_for), have no
        /// effect. This is for tools that look at some of a package's kernels as its build script
        /// describes them.
        only_sources = only_sources: String;
        /// Sets the C header that declares the functions that Rust calls.
        ///
        /// bindgen wraps its declarations and those of the headers beside it. Its folder becomes an
        /// include root.
        header = header: PathBuf;
    }

    /// Adds a C header for a family, which bindgen wraps if the family is on.
    ///
    /// It is read after [`header`](Self::header), which therefore needs an include guard. A
    /// declaration in both is wrapped once. The folder of this header does not become an include
    /// root.
    pub fn family_header(mut self, family: impl Into<String>, header: impl Into<PathBuf>) -> Self {
        self.family_headers.push((family.into(), header.into()));
        self
    }

    setters! {
        /// Sets the checked-in Rust declarations of the header.
        ///
        /// The declarations of a family's header lie beside it, with the ending `.rs`. They replace
        /// bindgen if only bindings are asked for, so a check needs no libclang. A test of the
        /// package compares them with the headers. bindgen's output for each header begins with a
        /// line that names it, `// cuda/include/api.h`.
        declarations = declarations: PathBuf;
        /// Adds an include root.
        include += includes: PathBuf;
        /// Defines a macro: `NAME` or `NAME=value`.
        define += defines: String;
        /// Adds a flag of nvcc, with its value in the same text. Targets, include roots, macros and
        /// outputs have their own setters, and are refused here.
        flag += flags: String;
    }

    /// Adds a flag for the sources that a glob matches, behind the flags for all sources. It is a
    /// flag of nvcc, or of the C++ compiler for sources in C++. A glob that matches no source is an
    /// error.
    pub fn flag_for(self, glob: impl Into<String>, flag: impl Into<String>) -> Self {
        self.unit_setting(glob.into(), SettingValue::Flag(flag.into()))
    }

    /// Defines a macro, `NAME` or `NAME=value`, for the sources that a glob matches.
    pub fn define_for(self, glob: impl Into<String>, define: impl Into<String>) -> Self {
        self.unit_setting(glob.into(), SettingValue::Define(define.into()))
    }

    /// Compiles the sources that a glob matches from PTX of one architecture, such as `compute_80`,
    /// for every target that is no older.
    ///
    /// All these GPUs then run code that was compiled from the same PTX, so a test on one GPU also
    /// tells about the others. The first half of nvcc runs once instead of once per target. The
    /// code has no instruction that the architecture lacks. With several architectures for one
    /// source, each target takes the latest that it can use. Older targets, and those with `a` or
    /// `f`, keep their own PTX.
    pub fn ptx_for(self, glob: impl Into<String>, target: impl Into<String>) -> Self {
        self.unit_setting(glob.into(), SettingValue::Ptx(target.into()))
    }

    /// Says how many bytes of memory each compilation of the sources that a glob matches needs.
    ///
    /// This counts for a first build. Later builds know what the compilation needed. Without it 2
    /// GiB are assumed, or what sources of the same folder needed if that is more.
    pub fn memory_for(self, glob: impl Into<String>, bytes: u64) -> Self {
        self.unit_setting(glob.into(), SettingValue::Memory(bytes))
    }

    fn unit_setting(mut self, glob: String, value: SettingValue) -> Self {
        self.unit_settings.push(UnitSetting { glob, value });
        self
    }

    setters! {
        /// Adds the include roots of a pinned wheel, after the package's own and before CUTLASS.
        wheel += wheels: Wheel;
        /// Adds the include roots of a pinned checkout, after the roots of wheels and before
        /// CUTLASS.
        checkout += checkouts: Checkout;
    }

    /// Makes the CUTLASS and CuTe headers an include root, and requires them.
    pub fn cutlass(mut self) -> Self {
        self.cutlass = true;
        self
    }

    setters! {
        /// Declares a family of the package's own, or replaces the targets of a built-in one
        /// (`sm80`, `sm90`, `sm100`). The environment variable `MLA_BUILD_TARGETS_<FAMILY>` can
        /// change them again.
        family += families: Family;
        /// Turns a family on. Without any such call, the package's features with the families'
        /// names turn them on.
        enable += enabled: String;
        /// Writes the GPU code into a folder as cubins and PTX, with a [description](crate::code).
        /// The environment variable `MLA_BUILD_CODE` asks for the same. The folder is emptied
        /// first.
        code = code: PathBuf;
        /// Sets the file that describes how kernels are launched, for the [code](Self::code).
        ///
        /// It is a file of JSON, relative to the package, with a list of `{"kernel", "source",
        /// "parameters", "launch"}`. `kernel` is a glob of C++ names. `structures` names the files
        /// of structures that the bindings lack, `fields` gives expressions of fields, and `each`
        /// makes a row of every combination of values. `unused` names the tensor maps that the
        /// kernel does not read. A kernel without a row is described only by its parameters' sizes.
        launches = launches: PathBuf;
    }

    /// Lets the package be built with no family on.
    ///
    /// Bindings and constants are then empty, nothing is linked, and no toolkit is needed. A
    /// backend whose attribute has the key `feature` stays in the registry as absent.
    pub fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    setters! {
        /// Writes `compile_commands.json` to this path, for clangd. The environment variable
        /// `MLA_BUILD_COMPILE_COMMANDS` asks for the same, with the path as its value.
        compile_commands = compile_commands: PathBuf;
        /// Adds a folder of prebuilt objects, as `MLA_BUILD_EXPORT` writes them.
        ///
        /// The library is made of these objects if they come from the same sources, flags and
        /// targets, and no variable or setter asks for anything else. No part of the toolkit is
        /// then needed. A folder without objects is skipped. The environment variable
        /// `MLA_BUILD_PREBUILT` names other folders, or `none`.
        prebuilt += prebuilt: PathBuf;
        /// Sets the command that installs the toolkit, for the message that says it is missing. The
        /// default is a call of pip.
        install_command = install_command: String;
        /// Sets the package's folder. The default is `CARGO_MANIFEST_DIR`.
        root = root: PathBuf;
        /// Sets the folder for the library. The default is `OUT_DIR`. If this is set, nothing is
        /// printed for Cargo.
        out_dir = out_dir: PathBuf;
        /// Sets the cache's folder. The default is `MLA_BUILD_CACHE`, or `mla-build` in the user's
        /// cache folder.
        cache = cache: PathBuf;
        /// Sets the toolkit to use, in place of a search.
        cuda_home = cuda_home: PathBuf;
        /// Sets the C++ compiler that nvcc uses. The default is `NVCC_CCBIN`, or what the `cc`
        /// crate finds.
        host_compiler = host_compiler: PathBuf;
    }

    /// Sets the maximum number of compilers that run at once, in place of what Cargo's jobserver
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

    /// Returns the names of the families that are turned on.
    ///
    /// # Errors
    ///
    /// If a family, target or feature does not exist.
    pub fn enabled(&self) -> Result<Vec<String>, Error> {
        let families = self.resolve()?;
        let enabled = families.declared.into_iter().filter(|f| f.enabled);
        Ok(enabled.map(|family| family.name).collect())
    }

    /// Returns the flags of single sources, without macros.
    pub(crate) fn source_flags(&self) -> Vec<String> {
        let flag = |it: &UnitSetting| match &it.value {
            SettingValue::Flag(flag) => Some(flag.clone()),
            _ => None,
        };
        self.unit_settings.iter().filter_map(flag).collect()
    }

    /// Returns the macros of single sources.
    pub(crate) fn source_defines(&self) -> Vec<String> {
        let define = |it: &UnitSetting| match &it.value {
            SettingValue::Define(define) => Some(define.clone()),
            _ => None,
        };
        self.unit_settings.iter().filter_map(define).collect()
    }

    /// Returns the units to compile.
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

    /// Returns the headers that bindgen wraps, including those of the families that are turned on.
    pub(crate) fn headers(&self, families: &Families, root: &Path) -> Result<Headers, Error> {
        Headers::new(root, self.header.as_deref(), &self.family_headers, families)
    }

    pub(crate) fn resolve(&self) -> Result<Families, Error> {
        Families::new(&self.families, &self.enabled, |name| env::var(name).ok())
    }
}
