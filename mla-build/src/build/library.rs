//! The library of a build: its package, its families, and the places of its files.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Instant,
};

use crate::{
    Checkout, Error, Kernels, Wheel, bounded, compiled, compiler,
    family::Families,
    headers::Headers,
    progress,
    report::{self, Report},
    shell,
    symbols::Tag,
    toolkit::{self, Pins},
    unit::Unit,
    variables,
};

/// The file in `OUT_DIR` that lists the libraries of the build script's last run.
const LIST: &str = "mla-build-products";

/// A library with everything that is known before tools are searched for.
#[derive(Debug)]
pub(crate) struct Library {
    pub(super) name: String,
    pub(super) package: String,
    /// The tag that is added to every name the library defines.
    pub(super) tag: Tag,
    /// The description, with globs relative to the package.
    pub(super) kernels: Kernels,
    pub(super) families: Families,
    /// The package's folder.
    pub(super) root: PathBuf,
    pub(super) out_dir: PathBuf,
    pub(super) target_dir: PathBuf,
    /// True in a build script.
    pub(super) for_cargo: bool,
}

impl Library {
    pub(super) fn new(kernels: Kernels, name: &str) -> Result<Self, Error> {
        let root = folder(kernels.root.as_deref(), "CARGO_MANIFEST_DIR")?;
        let root =
            (root.canonicalize()).map_err(Error::file("open the package's folder", &root))?;
        let out_dir = output_folder(&kernels)?;
        shell::check_for_cargo("OUT_DIR", &out_dir)?;
        shell::check_for_cargo("the package's folder", &root)?;
        let for_cargo = kernels.out_dir.is_none();
        let of_cargo = |name| env::var(name).ok().filter(|_| for_cargo);
        let package = of_cargo("CARGO_PKG_NAME").unwrap_or_else(|| {
            let folder = root.file_name().unwrap_or_default();
            folder.to_string_lossy().into_owned()
        });
        let kernels = kernels.with_relative_globs(&root)?;
        Ok(Self {
            name: name.to_owned(),
            tag: Tag::new(&package, of_cargo("CARGO_PKG_VERSION").as_deref(), name),
            package,
            families: kernels.resolve()?,
            kernels,
            target_dir: target_folder(&out_dir).to_owned(),
            root,
            out_dir,
            for_cargo,
        })
    }

    /// Returns the path of a file or folder of the output whose name begins with the library's.
    pub(super) fn file(&self, ending: &str) -> PathBuf {
        self.out_dir.join(format!("{}{ending}", self.name))
    }

    /// Returns the path of the static library.
    pub(super) fn archive(&self) -> PathBuf {
        self.out_dir.join(format!("lib{}.a", self.tag.as_str()))
    }

    /// Returns the path from which the archiver takes a unit's object.
    pub(super) fn object(&self, unit: &Unit) -> PathBuf {
        self.file("-objects").join(unit.file_stem() + ".o")
    }

    pub(super) fn units(&self) -> Result<Vec<Unit>, Error> {
        self.kernels.units(&self.root, &self.families)
    }

    pub(super) fn headers(&self) -> Result<Headers, Error> {
        self.kernels.headers(&self.families, &self.root)
    }

    /// Returns the command that installs the toolkit.
    pub(super) fn install_command(&self) -> String {
        let given = self.kernels.install_command.clone();
        given.unwrap_or_else(|| Pins::current().command())
    }

    /// Returns the package's own include roots: the header's folder, and those that were added.
    pub(super) fn own_includes(&self) -> Result<Vec<PathBuf>, Error> {
        let header = self.kernels.header.as_ref().map(|it| self.root.join(it));
        let mut own = Vec::from_iter(header.as_deref().and_then(Path::parent).map(Path::to_owned));
        for include in &self.kernels.includes {
            let folder = self.root.join(include);
            if !folder.is_dir() {
                let accepted = "an existing folder, absolute or relative to the package";
                return Err(Error::setting("include", include, accepted));
            }
            if !own.contains(&folder) {
                own.push(folder);
            }
        }
        Ok(own)
    }

    /// Returns the environment variables that change the build.
    pub(super) fn variables(&self) -> Vec<String> {
        let fixed = variables::ALL.iter().chain(toolkit::VARIABLES);
        let mut names: Vec<_> = fixed.map(|&name| name.to_owned()).collect();
        names.extend(compiler::variables());
        names.extend(self.families.declared.iter().map(|it| it.variable()));
        names.extend(pin_variables(&self.kernels));
        if !self.kernels.wheels.is_empty() {
            names.push("MLA_WHEELS".to_owned());
        }
        names
    }

    /// Warns of variables that are set but not read by anything, and returns the warnings.
    pub(super) fn unread(&self) -> Vec<String> {
        let mut known = self.variables();
        known.extend([progress::VARIABLE, "MLA_WHEELS"].map(str::to_owned));
        let given = env::vars_os().filter(|(_, value)| !value.is_empty());
        let given = given.filter_map(|(name, _)| name.into_string().ok());
        let unread = variables::unread(given, &known);
        for variable in unread.iter().filter(|_| self.for_cargo) {
            println!("cargo::rerun-if-env-changed={}", variable.name);
            if variable.is_misspelt {
                println!("cargo::warning={}", variable.sentence);
            }
        }
        unread.into_iter().map(|it| it.sentence).collect()
    }

    pub(super) fn watch_variables(&self) {
        for name in self.variables() {
            println!("cargo::rerun-if-env-changed={name}");
        }
    }

    pub(super) fn write_constants(&self) -> Result<PathBuf, Error> {
        let path = self.file("_compiled.rs");
        compiled::write(&self.families, &path)?;
        Ok(path)
    }

    /// Tells Cargo the compiled targets.
    pub(super) fn tell_targets(&self) -> Result<(), Error> {
        compiled::tell(&self.families, &self.root, &self.kernels.sources)
    }

    /// Makes a report without units.
    pub(super) fn report(&self, started: Instant) -> Report {
        Report {
            package: self.package.clone(),
            library: self.name.clone(),
            finished: report::now(),
            seconds: started.elapsed().as_secs_f64(),
            ..Report::default()
        }
    }

    /// Saves a report beside the library, and in the folder that `cargo mla build-report` reads.
    pub(super) fn save(&self, report: &Report) -> Result<(), Error> {
        report.save(&self.file(".report.json"))?;
        if self.target_dir == self.out_dir {
            return Ok(());
        }
        let name = format!("{}-{}.json", self.package, self.name);
        report.save(&report::folder(&self.target_dir).join(name))
    }
}

/// Returns the variables that say where pinned wheels and checkouts are.
pub(super) fn pin_variables(kernels: &Kernels) -> impl Iterator<Item = String> {
    let wheels = kernels.wheels.iter().map(Wheel::variable);
    wheels.chain(kernels.checkouts.iter().map(Checkout::variable))
}

/// Returns the given folder, or that of a variable that Cargo sets.
fn folder(given: Option<&Path>, variable: &str) -> Result<PathBuf, Error> {
    let given = given.map(Path::to_owned);
    let folder = given.or_else(|| env::var_os(variable).map(PathBuf::from));
    folder.ok_or_else(|| {
        let accepted =
            "a folder: Cargo sets it for build scripts, elsewhere call the setter of Kernels";
        Error::setting(variable, "nothing", accepted)
    })
}

/// Returns the folder that a build writes to: the given one, or Cargo's.
pub(super) fn output_folder(kernels: &Kernels) -> Result<PathBuf, Error> {
    let folder = folder(kernels.out_dir.as_deref(), "OUT_DIR")?;
    fs::create_dir_all(&folder).map_err(Error::file("make", &folder))?;
    folder.canonicalize().map_err(Error::file("open", &folder))
}

/// Returns Cargo's target folder that contains `out_dir`, or `out_dir` if there is none.
///
/// The innermost one counts: a target folder may lie in another one, as in tests. Cargo
/// marks the folders that it makes with CACHEDIR.TAG, but not a folder that existed before its
/// first build. Such a folder is found by the position of `out_dir` in it:
/// `<target>/[<triple>/]<profile>/build/<package>/out`.
fn target_folder(out_dir: &Path) -> &Path {
    let mut above = out_dir.ancestors();
    let marked = above.find(|folder| folder.join("CACHEDIR.TAG").is_file());
    let placed = || {
        let build = out_dir.ancestors().find(|it| it.ends_with("build"))?;
        let folder = build.parent()?.parent()?;
        let triple = env::var_os("TARGET");
        match triple.is_some_and(|triple| folder.ends_with(triple)) {
            true => folder.parent(),
            false => Some(folder),
        }
    };
    marked.or_else(placed).unwrap_or(out_dir)
}

/// Removes the files that the package's code includes by name. They must not outlive the build that
/// wrote them. With old declarations of functions that no longer exist, linking a program would
/// fail.
pub(super) fn remove_products(out_dir: &Path, library: &str) -> Result<(), Error> {
    for name in [format!("{library}.rs"), format!("{library}_compiled.rs")] {
        remove(&out_dir.join(name))?;
    }
    Ok(())
}

/// Removes a file if it exists.
pub(super) fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::file("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Refuses to compile a second library of the same name in a build script, since both would have
/// the same files.
pub(super) fn claim(library: &str) -> Result<(), Error> {
    static CLAIMED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    // The list holds only whole names at every moment, so it is valid even after a panic elsewhere.
    let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
    if claimed.iter().any(|claimed| claimed == library) {
        let accepted = "a name that no other library of this build script has";
        return Err(Error::setting("library", library, accepted));
    }
    claimed.push(library.to_owned());
    Ok(())
}

/// Adds a library to the list of the script's libraries. The first library of a run removes the
/// files of all libraries on the old list. The others write theirs again.
pub(super) fn remember(out_dir: &Path, library: &str) -> Result<(), Error> {
    static KNOWN: Mutex<Vec<String>> = Mutex::new(Vec::new());
    // The list holds only whole names at every moment, so it is valid even after a panic elsewhere.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let path = out_dir.join(LIST);
    if known.is_empty() {
        let last = bounded::read_to_string(&path).unwrap_or_default();
        for gone in last.lines().filter(|&last| last != library) {
            remove_products(out_dir, gone)?;
        }
    }
    if !known.iter().any(|known| known == library) {
        known.push(library.to_owned());
    }
    fs::write(&path, known.join("\n")).map_err(Error::file("write", &path))
}
