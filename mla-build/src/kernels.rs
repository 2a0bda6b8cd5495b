//! The build: from sources to a linked library.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    Architecture, Error,
    cache::{Cache, DependencySet, Entry, Estimate, Key, Loaded, Meta, PACKAGE},
    compiler::{self, Compiler, Host},
    depfile,
    diagnostic::{self, Failure, Failures},
    fatbin,
    hasher::{Hasher, content_now},
    process,
    progress::{Event, Progress},
    ptxas,
    report::{self, Outcome, Report},
    roles::Roles,
    schedule::{self, Job, Limits},
    toolkit::{self, Found, Pins},
    unit::{self, Unit},
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
/// All paths are relative to the package. A source below a folder `sm90` or `sm100` is compiled for that
/// architecture when it is turned on; any other (by habit below `all`) for every one that is, into one
/// object. `common` is for headers, and a source there is an error.
#[derive(Clone, Debug, Default)]
#[must_use = "nothing is built before `compile`"]
pub struct Kernels {
    sources: Vec<String>,
    header: Option<PathBuf>,
    includes: Vec<PathBuf>,
    defines: Vec<String>,
    flags: Vec<String>,
    architectures: BTreeSet<Architecture>,
    cutlass: bool,
    compile_commands: Option<PathBuf>,
    install_command: Option<String>,
    root: Option<PathBuf>,
    out_dir: Option<PathBuf>,
    cache: Option<PathBuf>,
    cuda_home: Option<PathBuf>,
    host_compiler: Option<PathBuf>,
    jobs: Option<usize>,
}

/// What [`Kernels::compile`] made.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Built {
    /// The static library.
    pub library: PathBuf,
    /// The Rust declarations of the header, to be included with
    /// `include!(concat!(env!("OUT_DIR"), "/<library>.rs"))`.
    pub bindings: Option<PathBuf>,
    /// What was done.
    pub report: Report,
}

impl Kernels {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the sources that a glob matches. `*` stays within a folder, `**` crosses them.
    pub fn sources(mut self, glob: impl Into<String>) -> Self {
        self.sources.push(glob.into());
        self
    }

    /// The C header that declares what Rust calls. bindgen wraps what it and the headers beside it
    /// declare, and its folder becomes an include root.
    pub fn header(mut self, header: impl Into<PathBuf>) -> Self {
        self.header = Some(header.into());
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

    /// Adds a flag of nvcc, with its value in the same text. Architectures, include roots, macros and
    /// outputs have their own setters, and are refused here.
    pub fn flag(mut self, flag: impl Into<String>) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Makes the CUTLASS and CuTe headers an include root, and requires them.
    pub fn cutlass(mut self) -> Self {
        self.cutlass = true;
        self
    }

    /// Turns an architecture on. Without a call, the package's features of the same name do.
    pub fn architecture(mut self, architecture: Architecture) -> Self {
        self.architectures.insert(architecture);
        self
    }

    /// Writes `compile_commands.json` there, for clangd. The environment variable
    /// `MLA_BUILD_COMPILE_COMMANDS` asks for the same, with the path as its value.
    pub fn compile_commands(mut self, path: impl Into<PathBuf>) -> Self {
        self.compile_commands = Some(path.into());
        self
    }

    /// The command that installs the toolkit, for the message that says it is missing. By default that
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

    /// Where the library goes, by default `OUT_DIR`. With a folder given, nothing is printed for Cargo.
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

    /// How many compilers run at once, in place of what Cargo's jobserver allows.
    pub fn jobs(mut self, jobs: usize) -> Self {
        self.jobs = Some(jobs);
        self
    }

    /// Compiles what the cache does not hold, makes `lib<library>.a`, wraps the header, writes the
    /// report, and tells Cargo what to link and what to watch.
    ///
    /// It sets `LIBCLANG_PATH` for bindgen where it is not set, so no other thread of the build script
    /// may read or write the environment meanwhile.
    ///
    /// # Errors
    ///
    /// See [`Error`]. When a unit fails, all others are compiled and kept first.
    pub fn compile(self, library: &str) -> Result<Built, Error> {
        let started = Instant::now();
        let limits = Limits::new(self.jobs).map_err(Error::file(
            "open the jobserver of",
            env::current_dir().unwrap_or_default(),
        ))?;
        let plan = Plan::new(self, library)?;
        plan.run(started, &limits)
    }
}

/// A build whose settings are all known.
struct Plan {
    library: String,
    package: String,
    out_dir: PathBuf,
    /// Objects and logs.
    objects: PathBuf,
    target_dir: PathBuf,
    for_cargo: bool,
    globs: Vec<String>,
    header: Option<PathBuf>,
    architectures: BTreeSet<Architecture>,
    units: Vec<Unit>,
    compiler: Compiler,
    found: Vec<Found>,
    roles: Roles,
    /// The include roots, in the order of the search, without their roles.
    roots: Vec<PathBuf>,
    cache: Cache,
    cache_bound: u64,
    compile_commands: Option<PathBuf>,
    install_command: String,
}

/// What became of a unit.
struct Done {
    index: usize,
    outcome: Outcome,
    reason: String,
    entry: Option<Entry>,
    /// The files that it was made of.
    files: Vec<PathBuf>,
    failure: Option<Failure>,
    /// A problem that is not the unit's.
    error: Option<Error>,
}

impl Plan {
    fn new(kernels: Kernels, library: &str) -> Result<Self, Error> {
        if library.is_empty()
            || !library
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
        {
            return Err(Error::Setting {
                field: "library".into(),
                given: library.to_owned(),
                accepted: "a name of letters, digits, _ and -".into(),
            });
        }
        for flag in &kernels.flags {
            compiler::check_flag(flag)?;
        }
        let folder = |given: Option<PathBuf>, variable: &str| {
            given.or_else(|| env::var_os(variable).map(PathBuf::from)).ok_or_else(|| Error::Setting {
                field: variable.to_owned(),
                given: "nothing".into(),
                accepted: "a folder: Cargo sets it for build scripts, elsewhere call the setter of Kernels".into(),
            })
        };
        let root = folder(kernels.root, "CARGO_MANIFEST_DIR")?;
        let root = root
            .canonicalize()
            .map_err(Error::file("open the package's folder", &root))?;
        let for_cargo = kernels.out_dir.is_none();
        let out_dir = folder(kernels.out_dir, "OUT_DIR")?;
        fs::create_dir_all(&out_dir).map_err(Error::file("make", &out_dir))?;
        let out_dir = out_dir
            .canonicalize()
            .map_err(Error::file("open", &out_dir))?;

        let architectures = if kernels.architectures.is_empty() {
            Architecture::from_features()?
        } else {
            kernels.architectures
        };
        if architectures.is_empty() {
            return Err(Error::NoArchitecture);
        }
        let units = unit::discover(&root, &kernels.sources, &architectures)?;

        let install_command = kernels
            .install_command
            .unwrap_or_else(|| Pins::current().command());
        let cuda = match &kernels.cuda_home {
            Some(home) => toolkit::cuda_at(home)?,
            None => toolkit::cuda(&install_command)?,
        };
        for &architecture in &architectures {
            if cuda.version < architecture.needs_toolkit() {
                return Err(Error::ToolkitTooOld {
                    architecture,
                    needed: architecture.needs_toolkit(),
                    found: cuda.version,
                    nvcc: cuda.nvcc,
                });
            }
        }
        let mut found = vec![cuda.found.clone()];
        let host = Host::find(kernels.host_compiler.as_deref())?;

        // The order of the search, and the role of each folder.
        let header = kernels.header.map(|header| root.join(header));
        let mut own: Vec<PathBuf> = header
            .iter()
            .filter_map(|h| h.parent())
            .map(Path::to_owned)
            .collect();
        for include in kernels.includes {
            let folder = root.join(&include);
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
        let mut roles = vec![(PACKAGE.to_owned(), root.clone())];
        let mut includes = Vec::new();
        for (number, folder) in own.into_iter().enumerate() {
            // A folder of the package is known by its place there; one elsewhere by its number.
            let role = match folder.strip_prefix(&root) {
                Ok(inside) => format!("{PACKAGE}/{}", inside.display()),
                Err(_) => {
                    let role = format!("include {number}");
                    roles.push((role.clone(), folder.clone()));
                    role
                }
            };
            includes.push((role, folder));
        }
        if kernels.cutlass {
            let cutlass = toolkit::cutlass(&install_command)?;
            includes.push(("cutlass".to_owned(), cutlass.path.clone()));
            roles.push(("cutlass".to_owned(), cutlass.path.clone()));
            found.push(cutlass);
        }
        roles.push(("cuda".to_owned(), cuda.include.clone()));
        let roots: Vec<_> = includes
            .iter()
            .map(|(_, folder)| folder.clone())
            .chain([cuda.include.clone()])
            .collect();

        let cache = kernels
            .cache
            .or_else(|| {
                env::var_os("MLA_BUILD_CACHE")
                    .filter(|v| !v.is_empty())
                    .map(PathBuf::from)
            })
            .or_else(|| Some(dirs::cache_dir()?.join("mla-build")))
            // Without a home there is still a build, whose cache lives and dies with its target folder.
            .unwrap_or_else(|| out_dir.join("mla-build-cache"));
        let target_dir = out_dir
            .ancestors()
            .filter(|folder| folder.join("CACHEDIR.TAG").is_file())
            .last()
            .unwrap_or(&out_dir)
            .to_owned();
        let compile_commands = kernels
            .compile_commands
            .or_else(|| {
                env::var_os("MLA_BUILD_COMPILE_COMMANDS")
                    .filter(|v| !v.is_empty())
                    .map(PathBuf::from)
            })
            .map(|path| root.join(path));
        Ok(Self {
            library: library.to_owned(),
            package: env::var("CARGO_PKG_NAME")
                .ok()
                .filter(|_| for_cargo)
                .unwrap_or_else(|| {
                    root.file_name()
                        .unwrap_or_default()
                        .to_string_lossy()
                        .into_owned()
                }),
            objects: out_dir.join(format!("{library}-objects")),
            out_dir,
            target_dir,
            for_cargo,
            globs: kernels.sources,
            header,
            architectures,
            units,
            compiler: Compiler {
                cuda,
                host,
                root,
                includes,
                defines: kernels.defines,
                flags: kernels.flags,
            },
            found,
            roles: Roles::new(roles),
            roots,
            cache: Cache::open(cache),
            cache_bound: cache_bound()?,
            compile_commands,
            install_command,
        })
    }

    fn run(mut self, started: Instant, limits: &Limits) -> Result<Built, Error> {
        if self.for_cargo {
            // Before anything can fail: a build that failed must run again when its cause is gone.
            self.watch_settings();
        }
        let mut watched = Vec::new();
        let bindings = self.bind(&mut watched)?;
        if let Some(path) = &self.compile_commands {
            self.write_compile_commands(path)?;
        }
        // Objects of units that are gone must not linger.
        match fs::remove_dir_all(&self.objects) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::File {
                    action: "empty",
                    path: self.objects,
                    source: error,
                });
            }
            _ => fs::create_dir_all(&self.objects).map_err(Error::file("make", &self.objects))?,
        }

        let progress = Progress::new();
        let done = self.compile_units(limits, &progress)?;
        self.cache.shrink(self.cache_bound);

        let failures: Vec<_> = done
            .iter()
            .filter_map(|done| done.failure.clone())
            .collect();
        let mut library_bytes = 0;
        let library = self.out_dir.join(format!("lib{}.a", self.library));
        if failures.is_empty() {
            self.archive(&library)?;
            library_bytes = fs::metadata(&library)
                .map_err(Error::file("read", &library))?
                .len();
        }
        for note in self.cache.notes() {
            progress.tell(&Event::Noted { text: note });
        }
        watched.extend(done.iter().flat_map(|done| done.files.iter().cloned()));
        let report = self.report(done, started, library_bytes);
        report.save(&self.out_dir.join(format!("{}.report.json", self.library)))?;
        if self.target_dir != self.out_dir {
            report.save(
                &report::folder(&self.target_dir)
                    .join(format!("{}-{}.json", self.package, self.library)),
            )?;
        }
        if !failures.is_empty() {
            return Err(Error::Compile(Failures {
                units: failures,
                total: self.units.len(),
            }));
        }
        if self.for_cargo {
            self.tell_cargo(watched);
        }
        Ok(Built {
            library,
            bindings,
            report,
        })
    }

    #[cfg(feature = "bindings")]
    fn bind(&mut self, watched: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        let Some(header) = &self.header else {
            return Ok(None);
        };
        let libclang = toolkit::libclang(&self.install_command)?;
        let output = self.out_dir.join(format!("{}.rs", self.library));
        let files =
            crate::bindings::write(header, &output, &self.roots, &libclang, &self.compiler.host)?;
        watched.extend(files);
        self.found.push(libclang);
        Ok(Some(output))
    }

    #[cfg(not(feature = "bindings"))]
    fn bind(&mut self, _: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        match &self.header {
            None => Ok(None),
            Some(header) => Err(Error::Bindings {
                header: header.clone(),
                message: format!(
                    "mla-build was built without its feature `bindings` ({})",
                    self.install_command
                ),
            }),
        }
    }

    fn compile_units(&self, limits: &Limits, progress: &Progress) -> Result<Vec<Done>, Error> {
        // Files that change from here on are not trusted, and the clock of a file system may be late by
        // one tick of the kernel.
        let trusted = SystemTime::now();
        thread::sleep(Duration::from_millis(10));
        let hasher = Hasher::default();

        let mut done = Vec::new();
        let mut jobs = Vec::new();
        for (index, unit) in self.units.iter().enumerate() {
            let first = self.first_key(unit, &hasher)?;
            match self.look_up(first, &hasher) {
                Ok((entry, files)) => {
                    done.push(self.take(index, entry, files, Outcome::Cached, String::new()));
                }
                Err(reason) => {
                    let estimate = self
                        .cache
                        .estimate(self.unit_key(unit))
                        .unwrap_or(Estimate {
                            seconds: 30.0,
                            // A unit that includes CUTLASS needs a few, a small one half of one.
                            peak: 2 << 30,
                        });
                    jobs.push(Job {
                        work: (index, first, reason),
                        memory: estimate.peak,
                        seconds: estimate.seconds,
                    });
                }
            }
        }
        progress.tell(&Event::Planned {
            package: self.package.clone(),
            units: self.units.len(),
            cached: done.len(),
        });
        let compiled = schedule::run(jobs, limits, |(index, first, reason)| {
            let started = Instant::now();
            let done = self.compile_unit(index, first, reason, trusted, &hasher, progress);
            progress.tell(&Event::Finished {
                unit: self.units[index].to_string(),
                outcome: done.outcome,
                seconds: started.elapsed().as_secs_f64(),
                peak: done.entry.as_ref().map_or(0, |entry| entry.meta.peak),
                error: done
                    .failure
                    .as_ref()
                    .map(|failure| failure.first_error.clone())
                    .or_else(|| done.error.as_ref().map(ToString::to_string)),
            });
            done
        })
        .map_err(Error::file(
            "take a token of the jobserver for",
            &self.out_dir,
        ))?;
        done.extend(compiled);
        done.sort_by_key(|done| done.index);
        match done.iter_mut().find_map(|done| done.error.take()) {
            Some(error) => Err(error),
            None => Ok(done),
        }
    }

    fn first_key(&self, unit: &Unit, hasher: &Hasher) -> Result<Key, Error> {
        let source = self.compiler.root.join(&unit.source);
        let content = hasher
            .content(&source)
            .ok_or(io::ErrorKind::NotFound)
            .map_err(|kind| Error::File {
                action: "read",
                path: source,
                source: kind.into(),
            })?;
        let canonical = self.compiler.canonical(unit);
        // The place within the package is part of it: a quoted include starts from there.
        let mut parts: Vec<&[u8]> = vec![
            unit.source.as_bytes(),
            content.as_bytes(),
            self.compiler.cuda.version_text.as_bytes(),
            self.compiler.host.version_text.as_bytes(),
        ];
        parts.extend(canonical.iter().map(|argument| argument.as_bytes()));
        Ok(Key::new(parts))
    }

    /// Of the unit whatever its content: what its last compilation needed is kept under it.
    fn unit_key(&self, unit: &Unit) -> Key {
        let targets = unit.targets().join(" ");
        Key::new([
            self.package.as_bytes(),
            unit.source.as_bytes(),
            targets.as_bytes(),
        ])
    }

    /// The object and the files that it was made of, or why it has to be compiled.
    fn look_up(&self, first: Key, hasher: &Hasher) -> Result<(Entry, Vec<PathBuf>), String> {
        let mut reason = None;
        for set in &self.cache.manifest(first).sets {
            match set.check(&self.roles, &self.roots, hasher) {
                Ok(files) => match self.cache.load(first.with_dependencies(set)) {
                    Loaded::Whole(entry) => return Ok((entry, files)),
                    Loaded::Missing => {
                        reason = reason.or(Some("its object is gone from the cache".to_owned()))
                    }
                    Loaded::Corrupted => {
                        reason = reason.or(Some("its object in the cache is corrupted".to_owned()))
                    }
                },
                // The latest set comes first, and what changed against it is what the user wants to know.
                Err(changed) => reason = reason.or(Some(changed)),
            }
        }
        Err(reason.unwrap_or_else(|| "its source, flags and compilers are new together".to_owned()))
    }

    fn compile_unit(
        &self,
        index: usize,
        first: Key,
        reason: String,
        trusted: SystemTime,
        hasher: &Hasher,
        progress: &Progress,
    ) -> Done {
        let unit = &self.units[index];
        let _guard = self.cache.lock(first);
        // Another build may have compiled it while this one waited for the lock.
        if let Ok((entry, files)) = self.look_up(first, hasher) {
            return self.take(index, entry, files, Outcome::Cached, String::new());
        }
        progress.tell(&Event::Started {
            unit: unit.to_string(),
            reason: reason.clone(),
        });
        let failed = |failure, error| Done {
            index,
            outcome: Outcome::Failed,
            reason: reason.clone(),
            entry: None,
            files: vec![self.compiler.root.join(&unit.source)],
            failure,
            error,
        };
        let temporary = match tempfile::Builder::new()
            .prefix("nvcc-")
            .tempdir_in(&self.out_dir)
        {
            Ok(folder) => folder,
            Err(error) => {
                return failed(
                    None,
                    Some(Error::file("make a folder in", &self.out_dir)(error)),
                );
            }
        };
        let object = temporary.path().join("unit.o");
        let rule = temporary.path().join("unit.d");
        let mut command = self
            .compiler
            .command(unit, &object, &rule, temporary.path());
        let finished = match process::run(&mut command) {
            Ok(finished) => finished,
            Err(error) => {
                return failed(
                    None,
                    Some(Error::file("run", &self.compiler.cuda.nvcc)(error)),
                );
            }
        };
        let log = self.objects.join(format!("{}.log", unit.file_stem()));
        // Said to the user as the place of the whole output; without it the first error is still shown.
        let _ = fs::write(&log, format!("{command:?}\n{}", finished.log));
        if !finished.status.success() {
            let failure = Failure {
                unit: unit.to_string(),
                first_error: diagnostic::first_error(&finished.log, &finished.status.to_string()),
                hint: diagnostic::hint(&finished.log, finished.signal()),
                log,
            };
            return failed(Some(failure), None);
        }
        let read =
            |path: &Path| fs::read(path).map_err(Error::file("read what nvcc was to write,", path));
        let (bytes, rule) = match read(&object).and_then(|bytes| Ok((bytes, read(&rule)?))) {
            Ok(both) => both,
            Err(error) => return failed(None, Some(error)),
        };
        let files: Vec<_> = depfile::parse(&String::from_utf8_lossy(&rule))
            .into_iter()
            .map(|path| self.compiler.root.join(path))
            .collect();
        let estimate = Estimate {
            seconds: finished.elapsed.as_secs_f64(),
            peak: finished.peak,
        };
        let entry = Entry {
            meta: Meta {
                seconds: estimate.seconds,
                peak: estimate.peak,
                log: finished.log,
            },
            object: bytes,
        };
        self.cache.keep_estimate(self.unit_key(unit), estimate);
        match self.dependencies(unit, &files, trusted, hasher) {
            Ok(set) => self.cache.keep(first, set, &entry),
            Err(path) => progress.tell(&Event::Noted {
                text: format!(
                    "{unit} is not kept: {} changed while it was compiled",
                    path.display()
                ),
            }),
        }
        self.take(index, entry, files, Outcome::Compiled, reason)
    }

    /// What the compilation depended on, or a file that may have been read in another state than it is
    /// in now.
    fn dependencies(
        &self,
        unit: &Unit,
        files: &[PathBuf],
        trusted: SystemTime,
        hasher: &Hasher,
    ) -> Result<DependencySet, PathBuf> {
        // The source itself is always one, whatever the compiler says.
        let source = self.compiler.root.join(&unit.source);
        let mut all = vec![source];
        all.extend_from_slice(files);
        let trusted = trusted
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        for path in &all {
            // The time of the last change of the file's data or name, which, unlike the time of
            // modification, nobody can set.
            let Ok(data) = fs::metadata(path) else {
                return Err(path.clone());
            };
            let changed =
                Duration::new(data.ctime().max(0) as u64, data.ctime_nsec().max(0) as u32);
            if changed >= trusted && content_now(path).ok() != hasher.known(path) {
                return Err(path.clone());
            }
        }
        DependencySet::new(&all, &self.roles, &self.roots, hasher)
    }

    /// Puts an object where the archiver takes it.
    fn take(
        &self,
        index: usize,
        entry: Entry,
        files: Vec<PathBuf>,
        outcome: Outcome,
        reason: String,
    ) -> Done {
        let path = self.object(&self.units[index]);
        let error = fs::write(&path, &entry.object)
            .map_err(Error::file("write", &path))
            .err();
        Done {
            index,
            outcome,
            reason,
            entry: Some(entry),
            files,
            failure: None,
            error,
        }
    }

    fn object(&self, unit: &Unit) -> PathBuf {
        self.objects.join(format!("{}.o", unit.file_stem()))
    }

    fn archive(&self, library: &Path) -> Result<(), Error> {
        // The archiver adds to what there is, and what there is may hold units that are gone.
        match fs::remove_file(library) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::File {
                    action: "replace",
                    path: library.to_owned(),
                    source: error,
                });
            }
            _ => {}
        }
        let mut archiver = compiler::tools()
            .try_get_archiver()
            .map_err(|error| Error::Tool {
                program: "ar".into(),
                message: error.to_string(),
            })?;
        let program = archiver.get_program().to_string_lossy().into_owned();
        // D: no times and owners, so that equal objects make an equal library.
        archiver
            .arg("crsD")
            .arg(library)
            .args(self.units.iter().map(|unit| self.object(unit)));
        let finished = process::run(&mut archiver).map_err(|error| Error::Tool {
            program: program.clone(),
            message: error.to_string(),
        })?;
        if finished.status.success() {
            Ok(())
        } else {
            Err(Error::Tool {
                program,
                message: format!("{}: {}", finished.status, finished.log.trim()),
            })
        }
    }

    fn report(&self, done: Vec<Done>, started: Instant, library_bytes: u64) -> Report {
        let units = done
            .into_iter()
            .map(|done| {
                let unit = &self.units[done.index];
                let entry = done.entry.unwrap_or(Entry {
                    meta: Meta::default(),
                    object: Vec::new(),
                });
                report::Unit {
                    source: unit.source.clone(),
                    targets: unit.targets(),
                    outcome: done.outcome,
                    reason: done.reason,
                    compile_seconds: entry.meta.seconds,
                    peak: entry.meta.peak,
                    object_bytes: entry.object.len() as u64,
                    device_bytes: device_bytes(&entry.object, unit),
                    kernels: ptxas::parse(&entry.meta.log),
                }
            })
            .collect();
        Report {
            package: self.package.clone(),
            library: self.library.clone(),
            finished: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs_f64(),
            targets: self
                .architectures
                .iter()
                .map(|a| a.target().to_owned())
                .collect(),
            toolkit: self.found.clone(),
            host_compiler: (
                self.compiler.host.path.clone(),
                self.compiler.host.version().to_owned(),
            ),
            cache: self.cache.folder().to_owned(),
            notes: self.cache.notes(),
            seconds: started.elapsed().as_secs_f64(),
            library_bytes,
            units,
        }
    }

    fn write_compile_commands(&self, path: &Path) -> Result<(), Error> {
        let commands: Vec<_> = self
            .units
            .iter()
            .map(|unit| {
                // clangd speaks clang's dialect of CUDA, not nvcc's.
                let mut arguments: Vec<String> = [
                    "clang++",
                    "-x",
                    "cuda",
                    "-std=c++17",
                    "-nocudalib",
                    "-Wno-unknown-cuda-version",
                ]
                .map(str::to_owned)
                .into();
                let architecture = unit
                    .architectures
                    .iter()
                    .next_back()
                    .map(|a| a.target())
                    .unwrap_or_default();
                arguments.push(format!("--cuda-gpu-arch={architecture}"));
                arguments.push(format!(
                    "--cuda-path={}",
                    self.compiler.cuda.found.path.display()
                ));
                arguments.extend(
                    self.roots
                        .iter()
                        .map(|folder| format!("-I{}", folder.display())),
                );
                arguments.extend(
                    self.compiler
                        .defines
                        .iter()
                        .map(|define| format!("-D{define}")),
                );
                arguments.extend(["-c".to_owned(), unit.source.clone()]);
                serde_json::json!({
                    "directory": self.compiler.root,
                    "file": unit.source,
                    "arguments": arguments,
                })
            })
            .collect();
        let text = serde_json::to_string_pretty(&commands).unwrap_or_default();
        fs::write(path, text).map_err(Error::file("write", path))
    }

    fn watch_settings(&self) {
        let build = [
            "MLA_BUILD_CACHE",
            "MLA_BUILD_CACHE_SIZE",
            "MLA_BUILD_COMPILE_COMMANDS",
        ];
        for name in toolkit::VARIABLES
            .iter()
            .chain(compiler::VARIABLES)
            .chain(&build)
        {
            println!("cargo::rerun-if-env-changed={name}");
        }
        if self.found.iter().any(|found| found.place == "PATH") {
            println!("cargo::rerun-if-env-changed=PATH");
        }
        for glob in &self.globs {
            // A folder stands for all that is in it, so a new source is noticed.
            println!(
                "cargo::rerun-if-changed={}",
                unit::fixed_part(glob).display()
            );
        }
        println!(
            "cargo::rerun-if-changed={}",
            self.compiler.cuda.nvcc.display()
        );
        if self.compiler.host.path.is_absolute() {
            println!(
                "cargo::rerun-if-changed={}",
                self.compiler.host.path.display()
            );
        } else if let Ok(path) = which::which(&self.compiler.host.path) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }

    fn tell_cargo(&self, watched: Vec<PathBuf>) {
        let watched: BTreeSet<_> = watched
            .iter()
            // One spelling for each file, and none of Cargo's checks twice.
            .filter_map(|path| self.roles.locate(&self.roles.name(path)))
            .collect();
        for path in watched {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        println!("cargo::rustc-link-search=native={}", self.out_dir.display());
        println!(
            "cargo::rustc-link-search=native={}",
            self.compiler.cuda.library.display()
        );
        println!("cargo::rustc-link-lib=static={}", self.library);
        // The runtime is linked in whole, and itself looks for the driver when it is first called: a
        // program with kernels starts on a machine without one.
        println!("cargo::rustc-link-lib=static=cudart_static");
        for system in ["stdc++", "dl", "rt", "pthread"] {
            println!("cargo::rustc-link-lib=dylib={system}");
        }
    }
}

/// The bound of the cache in bytes: `MLA_BUILD_CACHE_SIZE`, or 10 GiB.
fn cache_bound() -> Result<u64, Error> {
    let Some(given) = env::var("MLA_BUILD_CACHE_SIZE")
        .ok()
        .filter(|v| !v.is_empty())
    else {
        return Ok(10 << 30);
    };
    parse_size(&given).ok_or_else(|| Error::Setting {
        field: "MLA_BUILD_CACHE_SIZE".into(),
        given,
        accepted: "a number of bytes, or one with MiB or GiB after it".into(),
    })
}

fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, shift) = if let Some(number) = text.strip_suffix("GiB") {
        (number, 30)
    } else if let Some(number) = text.strip_suffix("MiB") {
        (number, 20)
    } else {
        (text, 0)
    };
    number.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The bytes of GPU code in an object, by target.
fn device_bytes(object: &[u8], unit: &Unit) -> BTreeMap<String, u64> {
    let by_number = fatbin::code_by_architecture(object);
    let target = |number: u32| {
        let names = |a: &&Architecture| {
            a.target().trim_matches(|c: char| !c.is_ascii_digit()) == number.to_string()
        };
        unit.architectures
            .iter()
            .find(names)
            .map_or_else(|| format!("sm_{number}"), |a| a.target().to_owned())
    };
    by_number
        .into_iter()
        .map(|(number, bytes)| (target(number), bytes))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("3 MiB"), Some(3 << 20));
        assert_eq!(parse_size("2GiB"), Some(2 << 30));
        assert_eq!(parse_size("much"), None);
        assert_eq!(parse_size("99999999999999GiB"), None);
    }
}
