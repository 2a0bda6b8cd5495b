//! The build: from sources to a linked library.

mod compile;
pub(crate) mod only;
mod output;
pub(crate) mod prebuilt;
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
    compiler::{self, Compiler, Host, Include},
    diagnostic::{Failure, Failures},
    family::Families,
    flags::{self, Named},
    progress::{Event, Progress},
    report::{self, Outcome},
    roles::{ADDED, PACKAGE, Roles},
    schedule::Limits,
    shell,
    symbols::Tag,
    target::{self, Target},
    toolkit::{self, Cuda, Found, Pins, Search, Version},
    unit::{self, Unit},
    workshop,
};

use output::{archive, device_bytes};
use prebuilt::Export;

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
    header: Option<PathBuf>,
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
    failure: Option<Failure>,
    /// A problem that is not the unit's.
    error: Option<Error>,
    /// Whether its compiler had too little memory.
    is_starved: bool,
    /// What is to be compiled once more for that.
    again: Option<(usize, Key, String)>,
}

impl Plan {
    pub(crate) fn new(kernels: Kernels, library: &str) -> Result<Self, Error> {
        check_library(library)?;
        let export = Export::new(&kernels, library)?;
        check_target(
            env::var("TARGET").ok().as_deref(),
            env::var("HOST").ok().as_deref(),
        )?;
        let source_flags = kernels.source_flags();
        for flag in kernels.flags.iter().chain(&source_flags) {
            flags::check(flag)?;
        }
        kernels
            .defines
            .iter()
            .try_for_each(|define| flags::check_define(define))?;
        let families = kernels.resolve()?;
        let root = folder(kernels.root, "CARGO_MANIFEST_DIR")?;
        let root = root
            .canonicalize()
            .map_err(Error::file("open the package's folder", &root))?;
        let for_cargo = kernels.out_dir.is_none();
        if for_cargo {
            is_first(library)?;
        }
        let out_dir = output_folder(kernels.out_dir)?;
        shell::check_for_cargo("OUT_DIR", &out_dir)?;
        shell::check_for_cargo("the package's folder", &root)?;

        let units = unit::discover(&root, &kernels.sources, &families, &kernels.particulars)?;

        let line_info = compiler::wants_line_info(env::var("MLA_BUILD_LINE_INFO").ok().as_deref())?;
        let install_command = kernels
            .install_command
            .unwrap_or_else(|| Pins::current().command());
        let search = Search::new();
        let cuda = match &kernels.cuda_home {
            Some(home) => toolkit::cuda_at(home)?,
            None => toolkit::cuda(&search, &install_command)?,
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
        let mut found = vec![cuda.found.clone()];
        let host = Host::find(kernels.host_compiler.as_deref())?;

        // The order of the search, and the role of each folder.
        let header = kernels.header.map(|header| root.join(header));
        let own = own_includes(&root, header.as_deref(), &kernels.includes)?;
        let mut roles = vec![(PACKAGE.to_owned(), root.clone())];
        let own_includes = own.clone();
        let mut includes = Vec::new();
        for (number, folder) in own.into_iter().enumerate() {
            // A folder of the package is known by its place there; one elsewhere by its number.
            let role = match folder.strip_prefix(&root) {
                Ok(inside) => format!("{PACKAGE}/{}", inside.display()),
                Err(_) => {
                    let role = format!("{ADDED}{number}");
                    roles.push((role.clone(), folder.clone()));
                    role
                }
            };
            includes.push(Include {
                role,
                folder,
                is_system: false,
            });
        }
        let mut wheel_variables = Vec::new();
        for wheel in &kernels.wheels {
            wheel_variables.extend(["MLA_WHEELS".to_owned(), wheel.variable()]);
            let wheel = wheel.find(&search)?;
            roles.extend(
                wheel
                    .includes
                    .iter()
                    .map(|i| (i.role.clone(), i.folder.clone())),
            );
            roles.push(wheel.role);
            includes.extend(wheel.includes);
            found.push(wheel.found);
        }
        if kernels.cutlass {
            let cutlass = toolkit::cutlass(&search, &install_command)?;
            // Headers that do not tell their version are left to the compiler.
            if let Some(version) = cutlass.version.as_deref().and_then(Version::from_start) {
                let needs = Target::needs_cutlass;
                let targets = families.targets();
                new_enough(&targets, needs, "CUTLASS", version, &cutlass.path)?;
            }
            includes.push(Include {
                role: "cutlass".to_owned(),
                folder: cutlass.path.clone(),
                // A wheel's own CUTLASS comes first, also if it is searched after all of -I.
                is_system: includes.iter().any(|include| include.is_system),
            });
            roles.push(("cutlass".to_owned(), cutlass.path.clone()));
            found.push(cutlass);
        }
        roles.push(("cuda".to_owned(), cuda.include.clone()));
        // The order of the search: nvcc puts CUDA's own headers behind the roots of -I.
        let of = |is_system: bool| {
            let roots = includes.iter().filter(move |i| i.is_system == is_system);
            roots.map(|include| include.folder.clone())
        };
        let roots: Vec<_> = of(false)
            .chain([cuda.include.clone()])
            .chain(of(true))
            .collect();

        let cache = kernels
            .cache
            .or_else(cache::folder)
            // Without a home there is still a build, whose cache lives and dies with its target folder.
            .unwrap_or_else(|| out_dir.join("mla-build-cache"));
        let cache = Cache::open(cache);
        let named = Named::new(
            compiler::flags_of_environment()?
                .iter()
                .map(String::as_str)
                .chain(
                    kernels
                        .flags
                        .iter()
                        .chain(&source_flags)
                        .map(String::as_str),
                ),
            &root,
        );
        let programs = hash_programs(&cache, &cuda)?;
        let mut searched = roots.clone();
        searched.push(cuda.include.join("cccl"));
        searched.extend(host.include_folders()?);
        searched.extend(named.folders.iter().cloned());
        let target_dir = target_folder(&out_dir).to_owned();
        let compile_commands = kernels
            .compile_commands
            .or_else(|| {
                env::var_os("MLA_BUILD_COMPILE_COMMANDS")
                    .filter(|v| !v.is_empty())
                    .map(PathBuf::from)
            })
            .map(|path| root.join(path));
        let (package, tag) = names(&root, for_cargo, library);
        Ok(Self {
            library: library.to_owned(),
            tag,
            package,
            objects: out_dir.join(format!("{library}-objects")),
            out_dir,
            target_dir,
            for_cargo,
            globs: kernels.sources,
            header,
            families,
            units,
            own_includes,
            compiler: Compiler {
                cuda,
                host,
                root: root.clone(),
                includes,
                defines: kernels.defines,
                flags: kernels.flags,
                line_info,
            },
            found,
            named_contents: named.contents()?,
            named,
            programs,
            wheel_variables,
            roles: Roles::new(roles),
            lookup: Lookup::new(searched, root),
            #[cfg(feature = "bindings")]
            roots,
            cache,
            cache_bound: cache::bound()?,
            compile_commands,
            export,
            prebuilt: kernels.prebuilt,
            #[cfg(feature = "bindings")]
            install_command,
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

    #[cfg(feature = "bindings")]
    fn bind(&mut self, watched: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        let Some(header) = &self.header else {
            return Ok(None);
        };
        let libclang = toolkit::libclang(&self.search, &self.install_command)?;
        let output = self.out_dir.join(format!("{}.rs", self.library));
        let files = crate::bindings::write(
            header,
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
        match &self.header {
            None => Ok(None),
            Some(header) => Err(without_bindings(header)),
        }
    }
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
