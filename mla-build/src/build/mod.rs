//! The build: from sources to a linked library.

mod code;
mod compile;
mod library;
mod only;
mod output;
mod prebuilt;
mod settings;
mod tools;
mod watch;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

use crate::{
    Error, Kernels,
    cache::{self, Cache, Entry},
    compiled,
    diagnostic::{FailedUnit, FailedUnits, KEEP_GOING},
    headers::Headers,
    progress::{Event, Progress},
    report::{Outcome, Report},
    schedule::Limits,
    unit::{self, Unit},
    variables, work_folder,
};

pub(crate) use library::Library;
use prebuilt::Export;
use tools::Tools;

/// The result of [`Kernels::compile`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Built {
    /// The static library. It does not exist if only bindings were asked for.
    pub library: PathBuf,
    /// The Rust declarations of the headers. Include the file with
    /// `include!(concat!(env!("OUT_DIR"), "/<library>.rs"))`.
    pub bindings: Option<PathBuf>,
    /// The compiled targets as Rust constants. There is one for each family, named like the family
    /// in capitals, and `ALL` for sources in no family's folder. Include the file with
    /// `include!(concat!(env!("OUT_DIR"), "/<library>_compiled.rs"))`.
    pub compiled: PathBuf,
    /// The report of the build.
    pub report: Report,
}

impl Kernels {
    /// Writes the constants of [`Built::compiled`] for a build that compiles no kernels, and
    /// returns their file.
    ///
    /// The constants list what the build would compile. In a build script, an environment variable
    /// tells the package's `#[mla_backend]` the same. Nothing else is done.
    ///
    /// # Errors
    ///
    /// If [`enabled`](Self::enabled) fails, if a source lies in a folder that gives it no family,
    /// or if a file cannot be written.
    pub fn constants(&self, library: &str) -> Result<PathBuf, Error> {
        let for_cargo = self.out_dir.is_none();
        let out_dir = library::output_folder(self)?;
        let path = out_dir.join(format!("{library}_compiled.rs"));
        if !for_cargo {
            compiled::write(&self.resolve()?, &path)?;
            return Ok(path);
        }
        library::remember(&out_dir, library)?;
        let library = Library::new(self.clone(), library)?;
        library.write_constants()?;
        library.tell_targets()?;
        Ok(path)
    }

    /// Compiles what the cache does not hold, makes a static library, wraps the header, writes the
    /// report, and tells Cargo what to link and what to watch.
    ///
    /// Every name that the library defines gets a unique prefix, so a function of the same name in
    /// another package does not clash with it. The bindings know the prefixes. Code that declares
    /// functions by hand finds the prefix, including two underscores, in the environment variable
    /// `MLA_BUILD_PREFIX_<LIBRARY>`: `#[link_name = concat!(env!("MLA_BUILD_PREFIX_API"),
    /// "decode")]`.
    ///
    /// With the environment variable `MLA_BUILD_ONLY=bindings`, and on docs.rs, nothing is compiled
    /// and CUDA is not needed. Only bindings and constants are made, which suffices for `cargo
    /// check`. Linking a program then fails, and the linker misses a library whose name gives the
    /// reason.
    ///
    /// This function sets `LIBCLANG_PATH` for bindgen unless it is set. No other thread of the
    /// build script may read or write the environment meanwhile.
    ///
    /// # Errors
    ///
    /// See [`Error`]. When a unit fails, the others are stopped, and what was compiled is kept.
    /// With the environment variable `MLA_BUILD_KEEP_GOING=1`, the other units are compiled first.
    pub fn compile(self, library: &str) -> Result<Built, Error> {
        variables::check_paths(&Vec::from_iter(library::pin_variables(&self)))?;
        settings::check_library(library)?;
        let (out_dir, for_cargo) = (library::output_folder(&self)?, self.out_dir.is_none());
        if for_cargo {
            library::claim(library)?;
            library::remember(&out_dir, library)?;
        }
        let made = Library::new(self, library).and_then(Library::make);
        made.inspect_err(|error| {
            // An error of the build itself is more important than one of this removal.
            let _ = library::remove_products(&out_dir, library);
            if for_cargo && let Error::Compile(failures) = error {
                // Cargo shows these lines above everything else that the script printed.
                for line in failures.first().lines() {
                    println!("cargo::warning={line}");
                }
            }
        })
    }
}

impl Library {
    fn make(self) -> Result<Built, Error> {
        let mut notes = self.unread();
        if self.kernels.optional && matches!(self.units(), Err(Error::NoFamily { .. })) {
            return only::nothing(&self);
        }
        if let Some(variable) = only::asked()? {
            return only::run(&self, variable);
        }
        let stale = match prebuilt::search(&self)? {
            prebuilt::Search::Found(found) => return found.run(&self),
            prebuilt::Search::Nothing => None,
            prebuilt::Search::Stale(error) => {
                if self.for_cargo {
                    println!("cargo::warning=prebuilt kernels are not taken: {error}");
                }
                Some(error)
            }
        };
        let started = Instant::now();
        let limits = Limits::new(self.kernels.jobs).map_err(Error::file(
            "open the jobserver of",
            env::current_dir().unwrap_or_default(),
        ))?;
        let mut plan = Plan::new(self).map_err(|error| match (stale, error) {
            (Some(stale), Error::ToolkitNotFound(toolkit)) => Error::StaleWithoutToolkit {
                stale: Box::new(stale),
                toolkit,
            },
            (_, error) => error,
        })?;
        notes.append(&mut plan.notes);
        plan.notes = notes;
        plan.run(started, &limits)
    }
}

/// A build with all settings known.
struct Plan {
    library: Library,
    units: Vec<Unit>,
    headers: Headers,
    tools: Tools,
    cache: Cache,
    cache_bound: u64,
    export: Option<Export>,
    /// True if all units are compiled even after one has failed.
    keep_going: bool,
    /// Families that have sources, but are turned off.
    off: Vec<String>,
    /// Notes for the user. Cargo also shows the first of them.
    notes: Vec<String>,
    /// Functions and variables that the headers declare, each with its header.
    declared: Vec<(String, PathBuf)>,
}

/// The result of one unit.
struct Done {
    index: usize,
    outcome: Outcome,
    reason: String,
    entry: Option<Entry>,
    /// The files that the unit was made from.
    files: Vec<PathBuf>,
    failure: Option<FailedUnit>,
    /// A problem that the unit did not cause.
    error: Option<Error>,
    /// True if the unit's compiler had too little memory.
    is_starved: bool,
}

impl Plan {
    fn new(library: Library) -> Result<Self, Error> {
        settings::check(&library)?;
        let export = Export::new(&library)?;
        let (headers, units) = (library.headers()?, library.units()?);
        let cache = Cache::open(cache_folder(&library)?);
        let tools = Tools::find(&library, &cache)?;
        let warnings = tools.search.warnings().into_iter().chain(cache.warning());
        let mut notes: Vec<_> = warnings.collect();
        if library.for_cargo {
            for warning in &notes {
                println!("cargo::warning={warning}");
            }
        }
        let (globs, families) = (&library.kernels.sources, &library.families);
        notes.extend(unit::unnamed_folders(globs, &units, families));
        Ok(Self {
            keep_going: variables::is_on(KEEP_GOING)?,
            off: unit::off(&library.root, globs, families)?,
            notes,
            declared: Vec::new(),
            units,
            headers,
            tools,
            cache,
            cache_bound: cache::bound()?,
            export,
            library,
        })
    }

    fn run(mut self, started: Instant, limits: &Limits) -> Result<Built, Error> {
        if self.library.for_cargo {
            work_folder::end_with_parent();
            // This comes before anything can fail: a failed build must run again once the cause is
            // removed.
            self.watch_settings()?;
        }
        let compiled = self.library.write_constants()?;
        let mut watched = Vec::new();
        let bindings = self.bind(&mut watched)?;
        self.write_compile_commands()?;
        // Objects of units that no longer exist must not remain.
        empty(&self.library.file("-objects"))?;
        self.tools.compiler.check(&self.units)?;
        let progress = Progress::new();
        for note in &self.notes {
            progress.tell(&Event::Noted { text: note.clone() });
        }
        let done = self.compile_units(limits, &progress)?;
        self.cache.shrink(self.cache_bound);
        let failures: Vec<_> = done.iter().filter_map(|it| it.failure.clone()).collect();
        let made = done.iter().filter(|done| done.entry.is_some()).count();
        let mut library_bytes = 0;
        if failures.is_empty() {
            library_bytes = self.archive(&done)?;
            if let Some(export) = &self.export {
                export.write(&self, &done)?;
            }
            self.write_code(bindings.as_deref())?;
        }
        for note in self.cache.notes() {
            progress.tell(&Event::Noted { text: note });
        }
        watched.extend(done.iter().flat_map(|done| done.files.iter().cloned()));
        let report = self.report(done, started, library_bytes);
        self.library.save(&report)?;
        if !failures.is_empty() {
            let total = self.units.len();
            return Err(Error::Compile(FailedUnits {
                stopped: total.saturating_sub(made + failures.len()),
                units: failures,
                total,
            }));
        }
        if self.library.for_cargo {
            self.watch_files(&watched);
            let cuda = &self.tools.compiler.cuda.library;
            output::link(&self.library, &[&self.library.out_dir, cuda], "=stdc++");
            self.library.tell_targets()?;
        }
        Ok(Built {
            library: self.library.archive(),
            bindings,
            compiled,
            report,
        })
    }

    #[cfg(feature = "bindings")]
    fn bind(&mut self, watched: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        if self.headers.first().is_none() {
            return Ok(None);
        }
        let install = self.library.install_command();
        let libclang = crate::toolkit::libclang(&self.tools.search, &install)?;
        let output = self.library.file(".rs");
        let written = crate::bindings::write(
            &self.headers,
            &output,
            &self.tools.roots(),
            &libclang,
            Some(&self.tools.compiler.host),
            &self.library.tag,
        )?;
        watched.extend(written.read);
        self.declared = written.declared;
        self.tools.found.push(libclang);
        Ok(Some(output))
    }

    #[cfg(not(feature = "bindings"))]
    fn bind(&mut self, _: &mut Vec<PathBuf>) -> Result<Option<PathBuf>, Error> {
        (self.headers.first()).map_or(Ok(None), |header| Err(without_bindings(header)))
    }
}

/// Makes an empty folder, or empties the existing one.
fn empty(folder: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::file("empty", folder)(error))
        }
        _ => fs::create_dir_all(folder).map_err(Error::file("make", folder)),
    }
}

fn cache_folder(library: &Library) -> Result<PathBuf, Error> {
    let given = match &library.kernels.cache {
        Some(folder) => Some(folder.clone()),
        None => cache::folder()?,
    };
    // Without a home folder, the cache is in the target folder and is deleted with it.
    Ok(given.unwrap_or_else(|| library.out_dir.join("mla-build-cache")))
}

#[cfg(not(feature = "bindings"))]
fn without_bindings(header: &Path) -> Error {
    Error::tool(
        format!("bindings of {}", header.display()),
        "mla-build was built without its feature `bindings`; turn it on under \
         [build-dependencies], or name no header",
    )
}
