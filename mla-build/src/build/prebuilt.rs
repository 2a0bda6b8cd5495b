//! Prebuilt objects, which the publisher of a package compiled, for machines that have only Rust
//! and a driver. A file in their folder lists their sources, their targets, and the hash of each
//! object.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::{
    Built, Done, Library, Plan, only,
    output::{archive, described, link},
};
use crate::{
    Error, bounded,
    cache::{Key, Meta},
    compiler, exposure,
    report::{Outcome, Report},
    target,
    toolkit::{Found, Pins},
    unit::{self, SettingValue, Unit},
    variables::{self, EXPORT, PREBUILT},
};

/// The value of [`PREBUILT`] that makes everything be compiled.
const NONE: &str = "none";

/// Raised when the written format or the parts of [`key`] change.
const FORMAT: u32 = 1;

/// The library of CUDA's runtime. Programs with kernels link it.
const RUNTIME: &str = "libcudart_static.a";

/// The description of a folder of objects.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Contents {
    format: u32,
    package: String,
    /// The tag that is added to the library's names: package, version and library.
    tag: String,
    /// The platform of the objects' host code.
    platform: String,
    /// The hash of the sources, flags, targets and pinned wheels.
    key: String,
    /// The compilers: CUDA, CUTLASS and the C++ compiler, with versions.
    compilers: Vec<(String, String)>,
    runtime: Part,
    objects: Vec<Compiled>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Part {
    file: String,
    hash: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Compiled {
    source: String,
    targets: Vec<String>,
    part: Part,
    /// Data for the report.
    #[serde(flatten)]
    meta: Meta,
}

/// The folders of prebuilt objects that suffice for a build.
#[derive(Debug)]
pub(super) struct Prebuilt {
    units: Vec<Unit>,
    folders: Vec<(PathBuf, Contents)>,
}

/// The result of the search for prebuilt objects.
pub(super) enum Search {
    /// Objects for everything.
    Found(Prebuilt),
    /// No objects, or other ones than these are asked for.
    Nothing,
    /// Objects that were made from other sources of the package. The kernels are compiled if that
    /// is possible.
    Stale(Error),
}

/// Makes the error about an object, or about the description of a folder of objects.
fn refused(path: &Path, field: &str, given: &str, accepted: &str) -> Error {
    let accepted = format!("{accepted}; {PREBUILT}=none compiles the kernels instead");
    Error::refused(format!("{}: {field}", path.display()), given, accepted)
}

fn file_name(library: &Library) -> String {
    format!("{}.prebuilt.json", library.name)
}

fn platform() -> String {
    format!("{}-unknown-linux-gnu", env::consts::ARCH)
}

impl Contents {
    fn load(path: &Path) -> Result<Self, Error> {
        let bytes = bounded::read(path).map_err(Error::file("read", path))?;
        serde_json::from_slice(&bytes).map_err(Error::file("understand", &path))
    }

    fn find(&self, unit: &Unit) -> Option<&Compiled> {
        let targets = unit.targets();
        self.objects
            .iter()
            .find(|object| object.source == unit.source && object.targets == targets)
    }
}

impl Part {
    /// Returns the file's bytes, after checking that they are the released ones.
    fn read(&self, folder: &Path) -> Result<Vec<u8>, Error> {
        let path = folder.join(&self.file);
        let bytes = bounded::read(&path).map_err(Error::file("read", &path))?;
        let hash = blake3::hash(&bytes).to_hex();
        if hash.as_str() == self.hash {
            return Ok(bytes);
        }
        Err(refused(&path, "content", &hash, &self.hash))
    }
}

/// Returns the hash of everything in the package and in this crate that determines the objects.
fn key(library: &Library) -> Result<String, Error> {
    let kernels = &library.kernels;
    let mut parts: Vec<String> = vec![
        FORMAT.to_string(),
        library.tag.as_str().to_owned(),
        platform(),
        format!("{:?}", Pins::current()),
        format!("{:?} {:?}", kernels.sources, kernels.header),
        format!("{:?} {}", kernels.includes, kernels.cutlass),
        format!("{:?} {:?}", kernels.defines, kernels.flags),
    ];
    for family in &library.families.declared {
        let targets = target::names(&family.targets);
        parts.push(format!("{} {targets:?}", family.name));
    }
    for unit_setting in &kernels.unit_settings {
        if !matches!(unit_setting.value, SettingValue::Memory(_)) {
            parts.push(format!("{unit_setting:?}"));
        }
    }
    for path in files(library)? {
        let bytes = bounded::read(&path).map_err(Error::file("read", &path))?;
        let inside = path.strip_prefix(&library.root).unwrap_or(&path);
        parts.push(format!("{} {}", inside.display(), blake3::hash(&bytes)));
    }
    Ok(Key::new(parts.iter().map(String::as_bytes)).hex())
}

/// Returns the folders of the sources and of the package's own headers.
fn source_folders(library: &Library) -> Result<Vec<PathBuf>, Error> {
    let mut folders = library.own_includes()?;
    let globs = library.kernels.sources.iter();
    folders.extend(globs.map(|glob| library.root.join(unit::fixed_part(glob))));
    Ok(folders)
}

/// Returns all files of the package that a compiler may read, sorted by name.
fn files(library: &Library) -> Result<Vec<PathBuf>, Error> {
    const OTHERS: &[&str] = &["json", "lock", "md", "rs", "toml"];
    let mut files = Vec::new();
    for folder in source_folders(library)? {
        let walk = walkdir::WalkDir::new(&folder).into_iter();
        let walk = walk.filter_entry(|entry| {
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            entry.depth() == 0 || !(hidden || unit::is_target_folder(entry.path()))
        });
        for entry in walk {
            let entry = entry.map_err(Error::file("read", &folder))?;
            let extension = entry.path().extension().and_then(|it| it.to_str());
            if entry.file_type().is_file() && !extension.is_some_and(|it| OTHERS.contains(&it)) {
                files.push(entry.into_path());
            }
        }
    }
    files.sort();
    files.dedup();
    Ok(files)
}

/// The variables that name a toolkit. Whoever publishes a package may compile a release with any
/// toolkit.
const OF_TOOLKIT: [&str; 4] = ["NVCC", "MLA_CUDA_HOME", "MLA_CUTLASS", "NVCC_CCBIN"];

/// Returns a setting of the user or the script that prebuilt objects cannot follow, if there is
/// one. Of the toolkit's variables, only those in `of_toolkit` count.
fn asked(library: &Library, of_toolkit: &[&str]) -> Option<String> {
    let kernels = &library.kernels;
    let others = [variables::LINE_INFO, variables::COMPILE_COMMANDS];
    let fixed = of_toolkit.iter().chain(compiler::KEYED).chain(&others);
    let targets = library.families.declared.iter().map(|it| it.variable());
    let mut names = fixed.map(|&name| name.to_owned()).chain(targets);
    let setters = [
        ("cuda_home", kernels.cuda_home.is_some()),
        ("host_compiler", kernels.host_compiler.is_some()),
        ("compile_commands", kernels.compile_commands.is_some()),
        ("wheel", !kernels.wheels.is_empty()),
        ("checkout", !kernels.checkouts.is_empty()),
    ];
    let mut setters = setters.into_iter().filter(|(_, is_set)| *is_set);
    names
        .find(|name| variables::set(name).is_some())
        .or_else(|| setters.next().map(|(name, _)| format!("Kernels::{name}")))
}

/// Looks for objects for everything that a build needs.
pub(super) fn search(library: &Library) -> Result<Search, Error> {
    let kernels = &library.kernels;
    let given = variables::set(PREBUILT);
    let is_none = given.as_ref().is_some_and(|given| given == NONE);
    match variables::set(EXPORT) {
        Some(export) if given.is_some() && !is_none => {
            let accepted = format!("nothing beside {PREBUILT}: what is exported is compiled");
            return Err(Error::setting(EXPORT, export, accepted));
        }
        Some(_) => return Ok(Search::Nothing),
        None if is_none => return Ok(Search::Nothing),
        None => {}
    }
    let mut found = Vec::new();
    let folders: Vec<_> = match &given {
        Some(value) => env::split_paths(value).collect(),
        None => kernels
            .prebuilt
            .iter()
            .map(|it| library.root.join(it))
            .collect(),
    };
    if given.is_some() {
        for folder in &folders {
            variables::check_absolute(PREBUILT, folder.as_os_str())?;
        }
    }
    for folder in folders {
        let path = folder.join(file_name(library));
        if path.is_file() {
            found.push((folder, Contents::load(&path)?));
        } else if given.is_some() {
            let accepted = format!("folders with {}, or {NONE} to compile", file_name(library));
            return Err(Error::setting(PREBUILT, folder, accepted));
        }
    }
    if found.is_empty() {
        return Ok(Search::Nothing);
    }
    if let Some(asked) = asked(library, &OF_TOOLKIT) {
        let Some(given) = given else {
            return Ok(Search::Nothing);
        };
        let accepted = format!("nothing beside {asked}, which asks for kernels to be compiled");
        return Err(Error::setting(PREBUILT, given, accepted));
    }
    match fitting(library, found) {
        Ok(prebuilt) => Ok(Search::Found(prebuilt)),
        // Objects that the user named are used or refused, but never skipped.
        Err(error) if given.is_some() => Err(error),
        Err(error) => Ok(Search::Stale(error)),
    }
}

/// Returns the objects if all of them are there and were made from this package's present sources.
fn fitting(library: &Library, folders: Vec<(PathBuf, Contents)>) -> Result<Prebuilt, Error> {
    let key = key(library)?;
    let target = env::var("TARGET").unwrap_or_else(|_| platform());
    for (folder, contents) in &folders {
        let path = folder.join(file_name(library));
        refuse_exposed(folder, &path, library.for_cargo)?;
        let fields = [
            (
                "format",
                &*contents.format.to_string(),
                &*FORMAT.to_string(),
            ),
            ("library", &contents.tag, library.tag.as_str()),
            ("platform", &contents.platform, &target),
            ("sources", &contents.key, &key),
        ];
        if let Some((field, given, accepted)) = fields.iter().find(|(_, a, b)| a != b) {
            return Err(refused(&path, field, given, accepted));
        }
    }
    let units = library.units()?;
    let missing = |unit: &&Unit| !folders.iter().any(|(_, it)| it.find(unit).is_some());
    if let Some(unit) = units.iter().find(missing) {
        let path = folders.last().map_or(&library.root, |(folder, _)| folder);
        return Err(refused(path, "objects", "none", &unit.to_string()));
    }
    Ok(Prebuilt { units, folders })
}

/// Refuses objects that any user may have written, and warns of other users who may have.
fn refuse_exposed(folder: &Path, description: &Path, for_cargo: bool) -> Result<(), Error> {
    let Some(exposure) = exposure::of([folder, description]) else {
        return Ok(());
    };
    if exposure.is_to_all {
        let accepted = "a folder that others cannot write to";
        return Err(refused(folder, "owner", &exposure.sentence, accepted));
    }
    if for_cargo {
        println!("cargo::warning=prebuilt kernels: {}", exposure.sentence);
    }
    Ok(())
}

impl Prebuilt {
    /// Makes the library from the objects, and tells Cargo to link it.
    pub(super) fn run(self, library: &Library) -> Result<Built, Error> {
        let started = Instant::now();
        let compiled = library.write_constants()?;
        let mut watched = Vec::new();
        let bindings = only::bindings(library, &mut watched)?;

        let objects = library.file("-objects");
        fs::create_dir_all(&objects).map_err(Error::file("make", &objects))?;
        let mut made = Vec::new();
        let mut units = Vec::new();
        for unit in &self.units {
            let mut folders = self.folders.iter();
            let found = folders.find_map(|(folder, it)| Some((folder, it.find(unit)?)));
            let Some((folder, object)) = found else {
                continue;
            };
            let bytes = object.part.read(folder)?;
            let reason = String::new();
            units.push(described(
                unit,
                Outcome::Prebuilt,
                reason,
                &object.meta,
                &bytes,
            ));
            made.push((unit, bytes));
        }
        let made: Vec<_> = made.iter().map(|(unit, bytes)| (*unit, &**bytes)).collect();
        let library_bytes = archive(library, &made)?;
        // CUDA's runtime is copied beside the library, where a program links it.
        let Some((folder, contents)) = self.folders.first() else {
            return Err(refused(&library.out_dir, "objects", "none", "some"));
        };
        let runtime = library.out_dir.join(RUNTIME);
        fs::write(&runtime, contents.runtime.read(folder)?)
            .map_err(Error::file("write", &runtime))?;

        // The same compilers made the objects of every family.
        let toolkit = contents.compilers.iter().map(|(part, version)| Found {
            part: part.clone(),
            path: folder.clone(),
            version: Some(version.clone()),
            place: "the prebuilt objects".to_owned(),
        });
        let report = Report {
            targets: target::names(&library.families.targets()),
            toolkit: toolkit.collect(),
            host_compiler: (folder.clone(), "of the prebuilt objects".to_owned()),
            cache: folder.clone(),
            library_bytes,
            units,
            ..library.report(started)
        };
        library.save(&report)?;
        if library.for_cargo {
            watched.extend(self.watched(library)?);
            library.watch_variables();
            for path in watched {
                println!("cargo::rerun-if-changed={}", path.display());
            }
            // The C++ library also has this name on machines without a compiler.
            link(library, &[&library.out_dir], ":+verbatim=libstdc++.so.6");
            library.tell_targets()?;
        }
        Ok(Built {
            library: library.archive(),
            bindings,
            compiled,
            report,
        })
    }

    /// Returns the paths whose change may mean that these objects no longer fit.
    fn watched(&self, library: &Library) -> Result<Vec<PathBuf>, Error> {
        let mut paths = source_folders(library)?;
        if paths
            .iter()
            .any(|folder| library.out_dir.starts_with(folder))
        {
            // If builds write into a watched folder, Cargo would run the script each time. Files
            // are watched instead.
            paths = files(library)?;
        }
        paths.extend(self.folders.iter().map(|(folder, _)| folder.clone()));
        Ok(paths)
    }
}

/// The objects that a build adds to the folder named by [`EXPORT`].
pub(super) struct Export {
    folder: PathBuf,
    key: String,
}

impl Export {
    /// Returns `None` if nothing is exported.
    pub(super) fn new(library: &Library) -> Result<Option<Self>, Error> {
        let Some(folder) = variables::set(EXPORT) else {
            return Ok(None);
        };
        if let Some(asked) = asked(library, &[]) {
            let accepted = format!("nothing beside {asked}: objects of a release have no settings");
            return Err(Error::setting(EXPORT, folder, accepted));
        }
        Ok(Some(Self {
            folder: folder.into(),
            key: key(library)?,
        }))
    }

    pub(super) fn write(&self, plan: &Plan, done: &[Done]) -> Result<(), Error> {
        let folder = &self.folder;
        fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        let path = folder.join(file_name(&plan.library));
        let runtime_from = plan.tools.compiler.cuda.library.join(RUNTIME);
        let bytes = bounded::read(&runtime_from).map_err(Error::file("read", &runtime_from))?;
        let found = plan.tools.found.iter();
        let mut compilers: Vec<_> = found
            .map(|it| (it.part.clone(), it.version.clone().unwrap_or_default()))
            .collect();
        let host = plan.tools.compiler.host.version().to_owned();
        compilers.push(("host compiler".to_owned(), host));
        let mut contents = Contents {
            format: FORMAT,
            package: plan.library.package.clone(),
            tag: plan.library.tag.as_str().to_owned(),
            platform: platform(),
            key: self.key.clone(),
            compilers,
            runtime: write(folder, RUNTIME, &bytes)?,
            objects: Vec::new(),
        };
        // Another build may have exported other families of the same sources. This one adds to
        // them.
        if let Ok(known) = Contents::load(&path)
            && known.key == contents.key
        {
            contents.objects = known.objects;
        }
        for done in done {
            let (unit, Some(entry)) = (&plan.units[done.index], &done.entry) else {
                continue;
            };
            let name = format!("{}.o", &blake3::hash(&entry.object).to_hex()[..16]);
            let object = Compiled {
                source: unit.source.clone(),
                targets: unit.targets(),
                part: write(folder, &name, &entry.object)?,
                meta: entry.meta.clone(),
            };
            let is_same =
                |it: &Compiled| it.source == object.source && it.targets == object.targets;
            contents.objects.retain(|it| !is_same(it));
            contents.objects.push(object);
        }
        let text = serde_json::to_string_pretty(&contents).unwrap_or_default();
        fs::write(&path, text).map_err(Error::file("write", &path))
    }
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<Part, Error> {
    let path = folder.join(name);
    fs::write(&path, bytes).map_err(Error::file("write", &path))?;
    Ok(Part {
        file: name.to_owned(),
        hash: blake3::hash(bytes).to_hex().to_string(),
    })
}
