//! The build: from sources to a linked library.

mod compile;
pub(crate) mod only;
mod output;
pub(crate) mod prebuilt;
mod roots;
mod watch;

use std::{
    collections::BTreeSet,
    env, fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Instant,
};

use crate::{
    Built, Error, Kernels,
    cache::{self, Cache, Entry, Key, Lookup},
    compiled,
    compiler::{self, Compiler, Host},
    diagnostic::{FailedUnit, FailedUnits},
    family::Families,
    flags::{self, Named},
    headers::Headers,
    progress::{Event, Progress},
    report::{self, Outcome, Report},
    roles::Roles,
    schedule::Limits,
    shell,
    symbols::Tag,
    target::{self, Target},
    toolkit::{self, Cuda, Found, Pins, Search, Version},
    unit::{self, Unit},
    workshop,
};

use output::{archive, device_bytes, link};
use prebuilt::Export;
use roots::Roots;

/// A build whose settings are all known.
pub(crate) struct Plan {
    library: String,
    package: String,
    tag: Tag,
    out_dir: PathBuf,
    /// Objects and logs.
    objects: PathBuf,
    target_dir: PathBuf,
    for_cargo: bool,
    globs: Vec<String>,
    headers: Headers,
    families: Families,
    units: Vec<Unit>,
    compiler: Compiler,
    found: Vec<Found>,
    /// The include roots of the package's own.
    own_includes: Vec<PathBuf>,
    /// What flags name.
    named: Named,
    /// Of the contents of the files among them.
    named_contents: blake3::Hash,
    /// Of the contents of the toolkit's programs.
    programs: blake3::Hash,
    /// The environment variables that say where wheels are.
    wheel_variables: Vec<String>,
    roles: Roles,
    lookup: Lookup,
    /// The include roots, in the order of the search, without their roles.
    #[cfg(feature = "bindings")]
    roots: Vec<PathBuf>,
    cache: Cache,
    cache_bound: u64,
    compile_commands: Option<PathBuf>,
    export: Option<Export>,
    /// Folders of objects that were not taken.
    prebuilt: Vec<PathBuf>,
    /// What libclang, which is looked for last, is installed with.
    #[cfg(feature = "bindings")]
    install_command: String,
    search: Search,
}

/// What became of a unit.
struct Done {
    index: usize,
    outcome: Outcome,
    reason: String,
    entry: Option<Entry>,
    /// The files that it was made of.
    files: Vec<PathBuf>,
    failure: Option<FailedUnit>,
    /// A problem that is not the unit's.
    error: Option<Error>,
    /// Whether its compiler had too little memory.
    is_starved: bool,
    /// What is to be compiled once more for that.
    again: Option<(usize, Key, String)>,
}

impl Plan {
    pub(crate) fn new(kernels: Kernels, library: &str) -> Result<Self, Error> {
        check_settings(&kernels, library)?;
        let export = Export::new(&kernels, library)?;
        let families = kernels.resolve()?;
        let Place {
            root,
            out_dir,
            for_cargo,
        } = Place::of(&kernels, library)?;
        let headers = Headers::new(&kernels, &families, &root)?;
        let units = unit::discover(&root, &kernels.sources, &families, &kernels.particulars)?;

        let line_info = compiler::wants_line_info(env::var("MLA_BUILD_LINE_INFO").ok().as_deref())?;
        let install = kernels.install_command.clone();
        let install = install.unwrap_or_else(|| Pins::current().command());
        let search = Search::new();
        let cuda = find_cuda(&kernels, library, &families, &search, &install)?;
        let host = Host::find(kernels.host_compiler.as_deref())?;
        let own = own_includes(&root, headers.shared.as_deref(), &kernels.includes)?;
        let roots = Roots::new(&kernels, &own, &root, &families, &search, &install)?;
        let roots = roots.with_cuda(&cuda);
        let in_order = roots.in_order(&cuda);

        let cache = Cache::open(cache_folder(&kernels, &out_dir));
        let named = named(&kernels, &root)?;
        let searched = searched(&in_order, &cuda, &host, &named)?;
        let (package, tag) = names(&root, for_cargo, library);
        Ok(Self {
            library: library.to_owned(),
            tag,
            package,
            objects: out_dir.join(format!("{library}-objects")),
            target_dir: target_folder(&out_dir).to_owned(),
            out_dir,
            for_cargo,
            headers,
            families,
            units,
            own_includes: own,
            programs: hash_programs(&cache, &cuda)?,
            compile_commands: compile_commands(&kernels, &root),
            globs: kernels.sources,
            compiler: Compiler {
                cuda,
                host,
                root: root.clone(),
                includes: roots.includes,
                defines: kernels.defines,
                flags: kernels.flags,
                line_info,
            },
            found: roots.found,
            named_contents: named.contents()?,
            named,
            wheel_variables: roots.wheel_variables,
            roles: Roles::new(roots.roles),
            lookup: Lookup::new(searched, root),
            #[cfg(feature = "bindings")]
            roots: in_order,
            cache,
            cache_bound: cache::bound()?,
            export,
            prebuilt: kernels.prebuilt,
            #[cfg(feature = "bindings")]
            install_command: install,
            search,
        })
    }

    pub(crate) fn run(mut self, started: Instant, limits: &Limits) -> Result<Built, Error> {
        if self.for_cargo {
            workshop::end_with_parent();
            // Before anything can fail: a build that failed must run again when its cause is gone.
            self.watch_settings()?;
        }
        let constants = self.out_dir.join(format!("{}_compiled.rs", self.library));
        compiled::write(&self.families, &constants)?;
        let mut watched = Vec::new();
        let bindings = self.bind(&mut watched)?;
        if let Some(path) = &self.compile_commands {
            self.write_compile_commands(path)?;
        }
        // Objects of units that are gone must not linger.
        empty(&self.objects)?;
        self.compiler.check(&self.units)?;
        let progress = Progress::new();
        let done = self.compile_units(limits, &progress)?;
        self.cache.shrink(self.cache_bound);

        let failures: Vec<_> = done
            .iter()
            .filter_map(|done| done.failure.clone())
            .collect();
        let mut library_bytes = 0;
        let library = self.out_dir.join(format!("lib{}.a", self.tag.as_str()));
        if failures.is_empty() {
            self.archive(&library, &done)?;
            if let Some(export) = &self.export {
                export.write(&self, &done)?;
            }
            library_bytes = fs::metadata(&library)
                .map_err(Error::file("read", &library))?
                .len();
        }
        for note in self.cache.notes() {
            progress.tell(&Event::Noted { text: note });
        }
        watched.extend(done.iter().flat_map(|done| done.files.iter().cloned()));
        let report = self.report(done, started, library_bytes);
        self.cache.count(&report);
        self.save(&report)?;
        if !failures.is_empty() {
            return Err(Error::Compile(FailedUnits {
                units: failures,
                total: self.units.len(),
            }));
        }
        if self.for_cargo {
            self.watch_files(&watched);
            self.link();
            compiled::tell(&self.families, &self.compiler.root, &self.globs)?;
        }
        Ok(Built {
            library,
            bindings,
            compiled: constants,
            report,
        })
    }

    /// Beside the library, and where `cargo mla build-report` looks for it.
    fn save(&self, report: &Report) -> Result<(), Error> {
        report.save(&self.out_dir.join(format!("{}.report.json", self.library)))?;
        if self.target_dir == self.out_dir {
            return Ok(());
        }
        let name = format!("{}-{}.json", self.package, self.library);
        report.save(&report::folder(&self.target_dir).join(name))
    }

    #[cfg(feature = "bindings")]
    fn bind(&mut self, watched: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        if self.headers.first().is_none() {
            return Ok(None);
        }
        let libclang = toolkit::libclang(&self.search, &self.install_command)?;
        let output = self.out_dir.join(format!("{}.rs", self.library));
        let files = crate::bindings::write(
            &self.headers,
            &output,
            &self.roots,
            &libclang,
            Some(&self.compiler.host),
            &self.tag,
        )?;
        watched.extend(files);
        self.found.push(libclang);
        Ok(Some(output))
    }

    #[cfg(not(feature = "bindings"))]
    fn bind(&mut self, _: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        match self.headers.first() {
            None => Ok(None),
            Some(header) => Err(without_bindings(header)),
        }
    }
}

/// Where a build reads and writes.
struct Place {
    /// The package's folder.
    root: PathBuf,
    out_dir: PathBuf,
    /// Whether it is a build script's build.
    for_cargo: bool,
}

impl Place {
    fn of(kernels: &Kernels, library: &str) -> Result<Self, Error> {
        let root = folder(kernels.root.clone(), "CARGO_MANIFEST_DIR")?;
        let root = root
            .canonicalize()
            .map_err(Error::file("open the package's folder", &root))?;
        let for_cargo = kernels.out_dir.is_none();
        if for_cargo {
            is_first(library)?;
        }
        let out_dir = output_folder(kernels.out_dir.clone())?;
        shell::check_for_cargo("OUT_DIR", &out_dir)?;
        shell::check_for_cargo("the package's folder", &root)?;
        Ok(Self {
            root,
            out_dir,
            for_cargo,
        })
    }
}

/// Every folder in which a header may be found, in the order of the search.
fn searched(
    roots: &[PathBuf],
    cuda: &Cuda,
    host: &Host,
    named: &Named,
) -> Result<Vec<PathBuf>, Error> {
    let mut folders = roots.to_vec();
    folders.push(cuda.include.join("cccl"));
    folders.extend(host.include_folders()?);
    folders.extend(named.folders.iter().cloned());
    Ok(folders)
}

/// Makes a folder that is there and holds nothing.
fn empty(folder: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::file("empty", folder)(error))
        }
        _ => fs::create_dir_all(folder).map_err(Error::file("make", folder)),
    }
}

/// What can be refused before anything is looked for.
fn check_settings(kernels: &Kernels, library: &str) -> Result<(), Error> {
    check_library(library)?;
    check_target(
        env::var("TARGET").ok().as_deref(),
        env::var("HOST").ok().as_deref(),
    )?;
    for flag in kernels.flags.iter().chain(&kernels.source_flags()) {
        flags::check(flag)?;
    }
    let mut defines = kernels.defines.iter();
    defines.try_for_each(|define| flags::check_define(define))
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

fn cache_folder(kernels: &Kernels, out_dir: &Path) -> PathBuf {
    let given = kernels.cache.clone().or_else(cache::folder);
    // Without a home there is still a build, whose cache lives and dies with its target folder.
    given.unwrap_or_else(|| out_dir.join("mla-build-cache"))
}

/// The files and folders that flags name: those of the script, and those of nvcc's own variables.
fn named(kernels: &Kernels, root: &Path) -> Result<Named, Error> {
    let mut all = compiler::flags_of_environment()?;
    all.extend(kernels.flags.iter().cloned());
    all.extend(kernels.source_flags());
    Ok(Named::new(all.iter().map(String::as_str), root))
}

/// Where `compile_commands.json` goes, if anybody asks for it.
fn compile_commands(kernels: &Kernels, root: &Path) -> Option<PathBuf> {
    let asked = || {
        let value = env::var_os("MLA_BUILD_COMPILE_COMMANDS");
        value.filter(|v| !v.is_empty()).map(PathBuf::from)
    };
    let path = kernels.compile_commands.clone().or_else(asked);
    path.map(|path| root.join(path))
}

/// The name of the package, and what is added to the names of a library of it.
fn names(root: &Path, for_cargo: bool, library: &str) -> (String, Tag) {
    let of_cargo = |name| env::var(name).ok().filter(|_| for_cargo);
    let package = of_cargo("CARGO_PKG_NAME").unwrap_or_else(|| {
        let folder = root.file_name().unwrap_or_default();
        folder.to_string_lossy().into_owned()
    });
    let version = of_cargo("CARGO_PKG_VERSION");
    let tag = Tag::new(&package, version.as_deref(), library);
    (package, tag)
}

#[cfg(not(feature = "bindings"))]
fn without_bindings(header: &Path) -> Error {
    Error::Bindings {
        header: header.to_owned(),
        message: "mla-build was built without its feature `bindings`; turn it on under \
                  [build-dependencies], or name no header"
            .to_owned(),
    }
}

fn check_library(library: &str) -> Result<(), Error> {
    let named = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !library.is_empty() && library.chars().all(named) {
        return Ok(());
    }
    Err(Error::Setting {
        field: "library".into(),
        given: library.to_owned(),
        accepted: "a name of letters, digits, _ and -".into(),
    })
}

/// Refuses to compile for another machine than this, and for a C library that the runtime of CUDA does not
/// work with. Outside a build script nothing is said of either.
fn check_target(target: Option<&str>, host: Option<&str>) -> Result<(), Error> {
    const SUPPORTED: &[&str] = &["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];
    let Some(target) = target else { return Ok(()) };
    if SUPPORTED.contains(&target) && host.is_none_or(|host| host == target) {
        return Ok(());
    }
    Err(Error::Setting {
        field: "TARGET".into(),
        given: target.to_owned(),
        accepted: format!(
            "{}, on a machine of the same: kernels are compiled with GCC and glibc, and not for \
             another machine than this ({}). {}=bindings checks the Rust code for any target",
            SUPPORTED.join(" or "),
            host.unwrap_or(target),
            only::VARIABLE
        ),
    })
}

/// The package's own include roots: the header's folder, and those that were added.
fn own_includes(
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

/// A folder as given, or that of a variable of Cargo's.
pub(crate) fn folder(given: Option<PathBuf>, variable: &str) -> Result<PathBuf, Error> {
    given
        .or_else(|| env::var_os(variable).map(PathBuf::from))
        .ok_or_else(|| Error::Setting {
            field: variable.to_owned(),
            given: "nothing".into(),
            accepted:
                "a folder: Cargo sets it for build scripts, elsewhere call the setter of Kernels"
                    .into(),
        })
}

/// Refuses a second library of one name in a build script: both would have the same files.
fn is_first(library: &str) -> Result<(), Error> {
    static KNOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // A set holds whole names at every moment, so a panic elsewhere leaves it sound.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if known.insert(library.to_owned()) {
        return Ok(());
    }
    Err(Error::Setting {
        field: "library".into(),
        given: library.to_owned(),
        accepted: "a name that no other library of this build script has".into(),
    })
}

/// Cargo's target folder that holds `out_dir`, or `out_dir` where none does.
///
/// The innermost: a target folder may lie in another's, as those of tests do. Cargo marks one that it
/// made with CACHEDIR.TAG, but leaves a folder unmarked that was there before its first build; then the
/// place of `out_dir`, `<target>/[<triple>/]<profile>/build/<package>/out`, tells.
fn target_folder(out_dir: &Path) -> &Path {
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

/// The folder that a build writes to: as given, or Cargo's.
pub(crate) fn output_folder(given: Option<PathBuf>) -> Result<PathBuf, Error> {
    let folder = folder(given, "OUT_DIR")?;
    fs::create_dir_all(&folder).map_err(Error::file("make", &folder))?;
    folder.canonicalize().map_err(Error::file("open", &folder))
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

/// Whether a release serves all of `targets`.
fn new_enough(
    targets: &[Target],
    needs: impl Fn(Target) -> Version,
    part: &'static str,
    found: Version,
    path: &Path,
) -> Result<(), Error> {
    let unserved: Vec<_> = targets
        .iter()
        .copied()
        .filter(|&target| found < needs(target))
        .collect();
    match unserved.iter().map(|&target| needs(target)).max() {
        None => Ok(()),
        Some(needed) => Err(Error::ToolkitTooOld {
            targets: target::names(&unserved),
            part,
            needed,
            found,
            path: path.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_other_than_this_machine_is_refused_with_what_is_supported() {
        const HERE: &str = "x86_64-unknown-linux-gnu";
        check_target(Some(HERE), Some(HERE)).unwrap();
        check_target(None, None).unwrap();
        for target in [
            "aarch64-unknown-linux-gnu",
            "x86_64-unknown-linux-musl",
            "x86_64-pc-windows-msvc",
        ] {
            let message = check_target(Some(target), Some(HERE))
                .unwrap_err()
                .to_string();
            assert!(message.starts_with(&format!("TARGET: given {target:?}, accepted: {HERE} or")));
            assert!(
                message.contains("GCC and glibc") && message.contains("MLA_BUILD_ONLY=bindings")
            );
        }
        let musl = "x86_64-unknown-linux-musl";
        assert!(check_target(Some(musl), Some(musl)).is_err());
    }
}
