//! The build: from sources to a linked library.

mod code;
mod compile;
mod only;
mod output;
mod place;
mod prebuilt;
mod products;
mod roots;
mod settings;
mod sources;
mod tools;
mod watch;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

use crate::{
    Checkout, Error, Kernels, Wheel,
    cache::{self, Cache, Entry, Key},
    compiled, compiler,
    diagnostic::KEEP_GOING,
    diagnostic::{FailedUnit, FailedUnits},
    progress::{self, Event, Progress},
    report::{self, Outcome, Report},
    schedule::Limits,
    symbols::Tag,
    target::{self, Target},
    toolkit::{self, Version},
    unit, variables, workshop,
};

use place::{Place, names, output_folder, package_folder, target_folder};
use prebuilt::Export;
use products::Products;
use sources::Sources;
use tools::Tools;

/// The result of [`Kernels::compile`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Built {
    /// The static library. It is not there if only bindings were asked for.
    pub library: PathBuf,
    /// The Rust declarations of the headers, to be included with
    /// `include!(concat!(env!("OUT_DIR"), "/<library>.rs"))`.
    pub bindings: Option<PathBuf>,
    /// The compiled targets as Rust constants: one for each family, named like the family in
    /// capitals, and `ALL` for sources in no family's folder. To be included with
    /// `include!(concat!(env!("OUT_DIR"), "/<library>_compiled.rs"))`.
    pub compiled: PathBuf,
    /// The report of the build.
    pub report: Report,
}

impl Kernels {
    /// Writes the constants of [`Built::compiled`], for a build that compiles no kernels: they list
    /// what it would compile. Tells the package's `#[mla_backend]` the same, and does nothing else.
    /// Returns the file.
    ///
    /// # Errors
    ///
    /// As [`enabled`](Self::enabled), a source in a folder that says nothing, or a file that cannot
    /// be written.
    pub fn constants(&self, library: &str) -> Result<PathBuf, Error> {
        let families = self.resolve()?;
        let for_cargo = self.out_dir.is_none();
        let path = Products::begin(&output_folder(self)?, library, for_cargo)?.constants;
        compiled::write(&families, &path)?;
        if for_cargo {
            let root = package_folder(self)?;
            let kernels = self.clone().with_relative_globs(&root)?;
            compiled::tell(&families, &root, &kernels.sources)?;
        }
        Ok(path)
    }

    /// Compiles what the cache does not hold, makes a static library, wraps the header, writes the
    /// report, and tells Cargo what to link and what to watch.
    ///
    /// Every name that the library defines is made unique to it, so a function of the same name in
    /// another package is another function. The bindings know the names. Code that declares
    /// functions by hand finds the prefix of each, two underscores included, in the environment
    /// variable `MLA_BUILD_PREFIX_<LIBRARY>`: `#[link_name = concat!(env!("MLA_BUILD_PREFIX_API"),
    /// "decode")]`.
    ///
    /// With the environment variable `MLA_BUILD_ONLY=bindings`, and where docs.rs builds, nothing
    /// is compiled and CUDA is not needed: bindings and constants are made, which is enough for
    /// `cargo check`. A program that is linked all the same fails with a missing library whose name
    /// says why.
    ///
    /// It sets `LIBCLANG_PATH` for bindgen where it is not set, so no other thread of the build
    /// script may read or write the environment meanwhile.
    ///
    /// # Errors
    ///
    /// See [`Error`]. When a unit fails the others are stopped, and what was compiled is kept; with
    /// the environment variable `MLA_BUILD_KEEP_GOING=1` they are compiled first.
    pub fn compile(self, library: &str) -> Result<Built, Error> {
        let wheels = self.wheels.iter().map(Wheel::variable);
        let checkouts = self.checkouts.iter().map(Checkout::variable);
        let wheels: Vec<_> = wheels.chain(checkouts).collect();
        variables::check_paths(&wheels)?;
        let for_cargo = self.out_dir.is_none();
        settings::check_library(library)?;
        let products = Products::begin(&output_folder(&self)?, library, for_cargo)?;
        let made = self.make(library, wheels);
        made.inspect_err(|error| {
            products.remove();
            if for_cargo && let Error::Compile(failures) = error {
                // Cargo shows these above all that the script printed.
                for line in failures.first().lines() {
                    println!("cargo::warning={line}");
                }
            }
        })
    }

    fn make(self, library: &str, wheels: Vec<String>) -> Result<Built, Error> {
        let root = package_folder(&self)?;
        let kernels = self.with_relative_globs(&root)?;
        let unread = kernels.unread(wheels)?;
        if kernels.optional && kernels.is_off(&root)? {
            return only::nothing(kernels, library);
        }
        if let Some(variable) = only::asked()? {
            return only::run(kernels, library, variable);
        }
        let stale = match prebuilt::search(&kernels, library)? {
            prebuilt::Search::Found(found) => return found.run(kernels, library),
            prebuilt::Search::Nothing => None,
            prebuilt::Search::Stale(error) => {
                if kernels.out_dir.is_none() {
                    println!("cargo::warning=prebuilt kernels are not taken: {error}");
                }
                Some(error)
            }
        };
        let started = Instant::now();
        let limits = Limits::new(kernels.jobs).map_err(Error::file(
            "open the jobserver of",
            env::current_dir().unwrap_or_default(),
        ))?;
        let mut plan = Plan::new(&kernels, library).map_err(|error| match (stale, error) {
            (Some(stale), Error::ToolkitNotFound(toolkit)) => Error::StaleWithoutToolkit {
                stale: Box::new(stale),
                toolkit,
            },
            (_, error) => error,
        })?;
        plan.notes.splice(0..0, unread);
        plan.run(started, &limits)
    }

    /// Warns of variables that are set and that nothing reads, and returns the warnings.
    fn unread(&self, wheels: Vec<String>) -> Result<Vec<String>, Error> {
        let families = self.resolve()?;
        let known: Vec<_> = [progress::VARIABLE, "MLA_WHEELS"]
            .iter()
            .chain(variables::ALL)
            .chain(toolkit::VARIABLES)
            .map(|&name| name.to_owned())
            .chain(compiler::variables())
            .chain(families.declared.iter().map(|it| it.variable()))
            .chain(wheels)
            .collect();
        let given = env::vars_os().filter(|(_, value)| !value.is_empty());
        let given = given.filter_map(|(name, _)| name.into_string().ok());
        let unread = variables::unread(given, &known);
        if self.out_dir.is_none() {
            for variable in &unread {
                println!("cargo::rerun-if-env-changed={}", variable.name);
                if variable.is_misspelt {
                    println!("cargo::warning={}", variable.sentence);
                }
            }
        }
        Ok(unread
            .into_iter()
            .map(|variable| variable.sentence)
            .collect())
    }

    /// True if nothing can be compiled because no family is on.
    fn is_off(&self, root: &Path) -> Result<bool, Error> {
        match self.units(root, &self.resolve()?) {
            Err(Error::NoFamily { .. }) => Ok(true),
            Err(error) => Err(error),
            Ok(_) => Ok(false),
        }
    }
}

/// A build whose settings are all known.
pub(crate) struct Plan {
    library: String,
    package: String,
    tag: Tag,
    place: Place,
    /// Objects and logs.
    objects: PathBuf,
    target_dir: PathBuf,
    sources: Sources,
    tools: Tools,
    cache: Cache,
    cache_bound: u64,
    compile_commands: Option<PathBuf>,
    export: Option<Export>,
    /// The folder for GPU code as files of its own, if it is asked for.
    code: Option<PathBuf>,
    launches: Option<PathBuf>,
    /// Bindings that are checked in.
    declarations: Option<PathBuf>,
    /// Folders of objects that were not taken.
    prebuilt: Vec<PathBuf>,
    /// True if all units are compiled although one has failed.
    keep_going: bool,
    /// True if some of the sources alone are compiled.
    is_partial: bool,
    /// Families that have sources, and are off.
    off: Vec<String>,
    /// Notes for the user; Cargo is told the first of them, too.
    notes: Vec<String>,
    /// Functions and variables that the headers declare, and the header of each.
    declared: Vec<(String, PathBuf)>,
}

/// The result of one unit.
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
    /// True if its compiler had too little memory.
    is_starved: bool,
    /// The unit to compile once more because it had too little memory.
    again: Option<(usize, Key, String)>,
}

impl Plan {
    pub(crate) fn new(kernels: &Kernels, library: &str) -> Result<Self, Error> {
        settings::check(kernels, library)?;
        let export = Export::new(kernels, library)?;
        let families = kernels.resolve()?;
        let place = Place::of(kernels)?;
        let root = &place.root;
        let sources = Sources::of(kernels, families, root)?;
        let cache = Cache::open(cache_folder(kernels, &place.out_dir)?);
        let tools = Tools::find(kernels, library, &sources, &place, &cache)?;
        let (package, tag) = names(root, place.for_cargo, library);
        let keep_going = env::var(KEEP_GOING).ok();
        let warnings = tools.search.warnings().into_iter().chain(cache.warning());
        let mut notes: Vec<_> = warnings.collect();
        if place.for_cargo {
            for warning in &notes {
                println!("cargo::warning={warning}");
            }
        }
        let (globs, units) = (&kernels.sources, &sources.units);
        notes.extend(unit::unnamed_folders(globs, units, &sources.families));
        Ok(Self {
            keep_going: variables::is_on(KEEP_GOING, keep_going.as_deref())?,
            is_partial: kernels.only_sources.is_some(),
            off: unit::off(root, globs, &sources.families)?,
            notes,
            declared: Vec::new(),
            library: library.to_owned(),
            package,
            tag,
            objects: place.out_dir.join(format!("{library}-objects")),
            target_dir: target_folder(&place.out_dir).to_owned(),
            sources,
            tools,
            cache,
            cache_bound: cache::bound()?,
            compile_commands: compile_commands(kernels, root),
            export,
            code: kernels
                .code
                .clone()
                .or_else(|| variables::set(variables::CODE).map(Into::into)),
            launches: kernels.launches.as_ref().map(|file| root.join(file)),
            declarations: kernels.declarations.as_ref().map(|file| root.join(file)),
            prebuilt: kernels.prebuilt.iter().map(|it| root.join(it)).collect(),
            place,
        })
    }

    pub(crate) fn run(mut self, started: Instant, limits: &Limits) -> Result<Built, Error> {
        if self.place.for_cargo {
            workshop::end_with_parent();
            // Before anything can fail: a build that failed must run again when its cause is gone.
            self.watch_settings()?;
        }
        let constants = self.output_path(&format!("{}_compiled.rs", self.library));
        compiled::write(&self.sources.families, &constants)?;
        let mut watched = Vec::new();
        let bindings = self.bind(&mut watched)?;
        if let Some(path) = &self.compile_commands {
            self.write_compile_commands(path)?;
        }
        // Objects of units that are gone must not linger.
        empty(&self.objects)?;
        self.tools.compiler.check(&self.sources.units)?;
        let progress = Progress::new();
        for note in &self.notes {
            progress.tell(&Event::Noted { text: note.clone() });
        }
        let done = self.compile_units(limits, &progress)?;
        self.cache.shrink(self.cache_bound);

        let failures: Vec<_> = done
            .iter()
            .filter_map(|done| done.failure.clone())
            .collect();
        let compiled = done.iter().filter(|done| done.entry.is_some()).count();
        let library = self.output_path(&format!("lib{}.a", self.tag.as_str()));
        let library_bytes = match failures.is_empty() {
            true => self.make_library(&library, &done)?,
            false => 0,
        };
        if let (Some(folder), true) = (&self.code, failures.is_empty()) {
            self.write_code(folder, bindings.as_deref())?;
        }
        for note in self.cache.notes() {
            progress.tell(&Event::Noted { text: note });
        }
        watched.extend(done.iter().flat_map(|done| done.files.iter().cloned()));
        let report = self.report(done, started, library_bytes);
        self.cache.count(&report);
        self.save(&report)?;
        if !failures.is_empty() {
            let total = self.sources.units.len();
            return Err(Error::Compile(FailedUnits {
                stopped: total.saturating_sub(compiled + failures.len()),
                units: failures,
                total,
            }));
        }
        if self.place.for_cargo {
            self.watch_files(&watched);
            self.link();
            compiled::tell(
                &self.sources.families,
                &self.tools.compiler.root,
                &self.sources.globs,
            )?;
        }
        Ok(Built {
            library,
            bindings,
            compiled: constants,
            report,
        })
    }

    fn output_path(&self, name: &str) -> PathBuf {
        self.place.out_dir.join(name)
    }

    /// Makes the library, and the files of a release if any are asked for. Returns the library's
    /// bytes.
    fn make_library(&mut self, library: &Path, done: &[Done]) -> Result<u64, Error> {
        self.archive(library, done)?;
        if let Some(export) = &self.export {
            export.write(self, done)?;
        }
        let metadata = fs::metadata(library).map_err(Error::file("read", library))?;
        Ok(metadata.len())
    }

    /// Saves the report beside the library, and in the folder that `cargo mla build-report` reads.
    fn save(&self, report: &Report) -> Result<(), Error> {
        report.save(&self.output_path(&format!("{}.report.json", self.library)))?;
        if self.target_dir == self.place.out_dir {
            return Ok(());
        }
        let name = format!("{}-{}.json", self.package, self.library);
        report.save(&report::folder(&self.target_dir).join(name))
    }

    #[cfg(feature = "bindings")]
    fn bind(&mut self, watched: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        if self.sources.headers.first().is_none() {
            return Ok(None);
        }
        let libclang = crate::toolkit::libclang(&self.tools.search, &self.tools.install_command)?;
        let output = self.output_path(&format!("{}.rs", self.library));
        let files = crate::bindings::write(
            &self.sources.headers,
            &output,
            &self.tools.roots,
            &libclang,
            Some(&self.tools.compiler.host),
            &self.tag,
        )?;
        watched.extend(files.read);
        self.declared = files.declared;
        self.tools.found.push(libclang);
        Ok(Some(output))
    }

    #[cfg(not(feature = "bindings"))]
    fn bind(&mut self, _: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        match self.sources.headers.first() {
            None => Ok(None),
            Some(header) => Err(without_bindings(header)),
        }
    }
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

fn cache_folder(kernels: &Kernels, out_dir: &Path) -> Result<PathBuf, Error> {
    let given = match &kernels.cache {
        Some(folder) => Some(folder.clone()),
        None => cache::folder()?,
    };
    // Without a home there is still a build, whose cache lives and dies with its target folder.
    Ok(given.unwrap_or_else(|| out_dir.join("mla-build-cache")))
}

/// The path for `compile_commands.json`, if it is asked for.
fn compile_commands(kernels: &Kernels, root: &Path) -> Option<PathBuf> {
    let asked = || {
        let value = env::var_os(variables::COMPILE_COMMANDS);
        value.filter(|v| !v.is_empty()).map(PathBuf::from)
    };
    let path = kernels.compile_commands.clone().or_else(asked);
    path.map(|path| root.join(path))
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

/// Checks that a release is new enough for all of `targets`.
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
