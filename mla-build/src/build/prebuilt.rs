//! Prebuilt objects, compiled by the package's releaser: for machines with Rust and a driver
//! alone. A file in their folder lists the sources that they were made of, the targets that they
//! are for, and the hash of each.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::{
    Built, Done, Plan, only,
    output::{archive, device_bytes, link},
    place::{Place, names, own_includes, package_folder, target_folder},
};
use crate::{
    Error, Kernels, bounded,
    cache::Key,
    compiled, compiler, exposure,
    family::Families,
    ptxas,
    report::{self, Outcome, Report},
    symbols::{self, Tag},
    target,
    toolkit::{self, Found, Pins},
    unit::{self, Unit, What},
    variables,
};

/// The value of [`variables::PREBUILT`] by which everything is compiled.
const NONE: &str = "none";

/// Another one for each change of what is written, or of what [`key`] is made of.
const FORMAT: u32 = 1;

/// The library of CUDA's runtime, which programs with kernels link.
const RUNTIME: &str = "libcudart_static.a";

/// The description of a folder of objects.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Contents {
    format: u32,
    package: String,
    /// The tag that is added to the library's names: package, version and library.
    tag: String,
    /// The platform of the host's code.
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
    seconds: f64,
    peak: u64,
    /// The compiler's output, for the report.
    log: String,
}

/// The folders of a build's objects, where they are all that it needs.
#[derive(Debug)]
pub(crate) struct Prebuilt {
    root: PathBuf,
    families: Families,
    units: Vec<Unit>,
    folders: Vec<(PathBuf, Contents)>,
}

/// The result of the search for prebuilt objects.
pub(crate) enum Search {
    /// Everything.
    Found(Prebuilt),
    /// Nothing, or something else is asked for.
    Nothing,
    /// Objects of the package that are not of these sources. They are compiled if that is possible.
    Stale(Error),
}

fn refused(path: &Path, field: &str, given: &str, accepted: &str) -> Error {
    Error::Prebuilt {
        path: path.to_owned(),
        field: field.to_owned(),
        given: given.to_owned(),
        accepted: accepted.to_owned(),
    }
}

fn file_name(library: &str) -> String {
    format!("{library}.prebuilt.json")
}

fn platform() -> String {
    format!("{}-unknown-linux-gnu", env::consts::ARCH)
}

impl Contents {
    fn load(path: &Path) -> Result<Self, Error> {
        let bytes = bounded::read(path).map_err(Error::file("read", path))?;
        serde_json::from_slice(&bytes).map_err(|error| Error::File {
            action: "understand",
            path: path.to_owned(),
            source: error.into(),
        })
    }

    fn find(&self, unit: &Unit) -> Option<&Compiled> {
        let targets = unit.targets();
        self.objects
            .iter()
            .find(|object| object.source == unit.source && object.targets == targets)
    }
}

impl Part {
    /// The file's bytes, which are those that were released.
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

/// The hash of everything that determines the objects and that the package or this crate decides.
fn key(kernels: &Kernels, root: &Path, families: &Families, tag: &Tag) -> Result<String, Error> {
    let mut parts: Vec<String> = vec![
        FORMAT.to_string(),
        tag.as_str().to_owned(),
        platform(),
        format!("{:?}", Pins::current()),
        format!("{:?} {:?}", kernels.sources, kernels.header),
        format!("{:?} {}", kernels.includes, kernels.cutlass),
        format!("{:?} {:?}", kernels.defines, kernels.flags),
    ];
    for family in &families.declared {
        parts.push(format!(
            "{} {:?}",
            family.name,
            target::names(&family.targets)
        ));
    }
    for particular in &kernels.particulars {
        if !matches!(particular.what, What::Memory(_)) {
            parts.push(format!("{particular:?}"));
        }
    }
    for path in files(kernels, root)? {
        let bytes = bounded::read(&path).map_err(Error::file("read", &path))?;
        let inside = path.strip_prefix(root).unwrap_or(&path);
        parts.push(format!("{} {}", inside.display(), blake3::hash(&bytes)));
    }
    Ok(Key::new(parts.iter().map(String::as_bytes)).hex())
}

/// The folders of the sources and of the package's own headers.
fn source_folders(kernels: &Kernels, root: &Path) -> Result<Vec<PathBuf>, Error> {
    let header = kernels.header.as_ref().map(|header| root.join(header));
    let mut folders = own_includes(root, header.as_deref(), &kernels.includes)?;
    let globs = kernels.sources.iter();
    folders.extend(globs.map(|glob| root.join(unit::fixed_part(glob))));
    Ok(folders)
}

/// All files that a compiler may read of the package, in the order of their names.
fn files(kernels: &Kernels, root: &Path) -> Result<Vec<PathBuf>, Error> {
    const OTHERS: &[&str] = &["json", "lock", "md", "rs", "toml"];
    let mut files = Vec::new();
    for folder in source_folders(kernels, root)? {
        let walk = walkdir::WalkDir::new(&folder)
            .into_iter()
            .filter_entry(|entry| {
                let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
                entry.depth() == 0 || !(hidden || unit::is_target_folder(entry.path()))
            });
        for entry in walk {
            let entry = entry.map_err(|error| Error::File {
                action: "read",
                path: folder.clone(),
                source: error.into(),
            })?;
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

/// The variables that name a toolkit. The owner of a package may compile a release with any.
const OF_TOOLKIT: [&str; 4] = ["NVCC", "MLA_CUDA_HOME", "MLA_CUTLASS", "NVCC_CCBIN"];

/// A setting of the user or the script that objects of a release cannot serve; of the toolkit's
/// variables one of `of_toolkit`.
fn asked(kernels: &Kernels, families: &Families, of_toolkit: &[&str]) -> Option<String> {
    let others = [variables::LINE_INFO, variables::COMPILE_COMMANDS];
    let targets: Vec<_> = families.declared.iter().map(|it| it.variable()).collect();
    let mut names = of_toolkit
        .iter()
        .chain(compiler::KEYED)
        .chain(&others)
        .copied()
        .chain(targets.iter().map(String::as_str));
    let is_set = |name: &&str| variables::set(name).is_some();
    if let Some(name) = names.find(is_set) {
        return Some(name.to_owned());
    }
    let setters = [
        ("cuda_home", kernels.cuda_home.is_some()),
        ("host_compiler", kernels.host_compiler.is_some()),
        ("compile_commands", kernels.compile_commands.is_some()),
        ("wheel", !kernels.wheels.is_empty()),
        ("checkout", !kernels.checkouts.is_empty()),
    ];
    let setter = setters.into_iter().find(|(_, is_set)| *is_set);
    setter.map(|(name, _)| format!("Kernels::{name}"))
}

/// Looks for objects of all that a build needs.
pub(crate) fn search(kernels: &Kernels, library: &str) -> Result<Search, Error> {
    let given = variables::set(variables::PREBUILT);
    if let Some(export) = variables::set(variables::EXPORT) {
        return match given {
            Some(given) if given != NONE => Err(Error::Setting {
                field: variables::EXPORT.into(),
                given: export.to_string_lossy().into_owned(),
                accepted: format!(
                    "nothing beside {}: what is exported is compiled",
                    variables::PREBUILT
                ),
            }),
            _ => Ok(Search::Nothing),
        };
    }
    let folders = match &given {
        Some(value) if value == NONE => return Ok(Search::Nothing),
        Some(value) => {
            let folders: Vec<_> = env::split_paths(value).collect();
            for folder in &folders {
                variables::check_absolute(variables::PREBUILT, folder.as_os_str())?;
            }
            folders
        }
        None if kernels.prebuilt.is_empty() => return Ok(Search::Nothing),
        None => {
            let root = package_folder(kernels)?;
            let folders = kernels.prebuilt.iter();
            folders.map(|folder| root.join(folder)).collect::<Vec<_>>()
        }
    };
    let mut found = Vec::new();
    for folder in folders {
        let path = folder.join(file_name(library));
        if path.is_file() {
            found.push((folder, Contents::load(&path)?));
        } else if given.is_some() {
            let accepted = format!("folders with {}, or {NONE} to compile", file_name(library));
            return Err(setting(&folder.display().to_string(), accepted));
        }
    }
    if found.is_empty() {
        return Ok(Search::Nothing);
    }
    let families = kernels.resolve()?;
    if let Some(asked) = asked(kernels, &families, &OF_TOOLKIT) {
        if given.is_none() {
            return Ok(Search::Nothing);
        }
        let accepted = format!("nothing beside {asked}, which asks for kernels to be compiled");
        return Err(setting(
            &given.unwrap_or_default().to_string_lossy(),
            accepted,
        ));
    }
    match fitting(kernels, library, families, found) {
        Ok(prebuilt) => Ok(Search::Found(prebuilt)),
        // Objects that the user named are used or refused, never passed over.
        Err(error) if given.is_some() => Err(error),
        Err(error) => Ok(Search::Stale(error)),
    }
}

fn setting(given: &str, accepted: String) -> Error {
    Error::Setting {
        field: variables::PREBUILT.into(),
        given: given.to_owned(),
        accepted,
    }
}

/// The objects, if they are of this package's sources as they are, and all of them.
fn fitting(
    kernels: &Kernels,
    library: &str,
    families: Families,
    folders: Vec<(PathBuf, Contents)>,
) -> Result<Prebuilt, Error> {
    let root = package_folder(kernels)?;
    let (_, tag) = names(&root, kernels.out_dir.is_none(), library);
    let key = key(kernels, &root, &families, &tag)?;
    let target = env::var("TARGET").unwrap_or_else(|_| platform());
    for (folder, contents) in &folders {
        let path = folder.join(file_name(library));
        refuse_exposed(folder, &path, kernels.out_dir.is_none())?;
        let fields = [
            ("format", contents.format.to_string(), FORMAT.to_string()),
            ("library", contents.tag.clone(), tag.as_str().to_owned()),
            ("platform", contents.platform.clone(), target.clone()),
            ("sources", contents.key.clone(), key.clone()),
        ];
        if let Some((field, given, accepted)) = fields.iter().find(|(_, a, b)| a != b) {
            return Err(refused(&path, field, given, accepted));
        }
    }
    let units = kernels.units(&root, &families)?;
    let missing = |unit: &&Unit| !folders.iter().any(|(_, it)| it.find(unit).is_some());
    if let Some(unit) = units.iter().find(missing) {
        let path = folders.last().map_or(root.as_path(), |(folder, _)| folder);
        return Err(refused(path, "objects", "none", &unit.to_string()));
    }
    Ok(Prebuilt {
        root,
        families,
        units,
        folders,
    })
}

/// Refuses objects that every user may have put there, and warns of those of other users.
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
    /// Makes the library of the objects, and tells Cargo to link it.
    pub(crate) fn run(self, kernels: Kernels, library: &str) -> Result<Built, Error> {
        let started = Instant::now();
        let Place {
            out_dir, for_cargo, ..
        } = Place::of(&kernels)?;
        let (package, tag) = names(&self.root, for_cargo, library);
        let constants = out_dir.join(format!("{library}_compiled.rs"));
        compiled::write(&self.families, &constants)?;
        let mut watched = Vec::new();
        let headers = kernels.headers(&self.families, &self.root)?;
        let bindings = only::bindings(&kernels, &headers, library, &out_dir, &tag, &mut watched)?;

        let made = out_dir.join(format!("lib{}.a", tag.as_str()));
        let units = self.make_library(&made, &out_dir.join(format!("{library}-objects")), &tag)?;
        // A program links it beside the library, wherever the objects were.
        let Some((folder, contents)) = self.folders.first() else {
            return Err(refused(&out_dir, "objects", "none", "some"));
        };
        let runtime = out_dir.join(RUNTIME);
        fs::write(&runtime, contents.runtime.read(folder)?)
            .map_err(Error::file("write", &runtime))?;

        let report = Report {
            package,
            library: library.to_owned(),
            finished: report::now(),
            targets: target::names(&self.families.targets()),
            toolkit: self.found(),
            host_compiler: (folder.clone(), "of the prebuilt objects".to_owned()),
            cache: folder.clone(),
            notes: Vec::new(),
            seconds: started.elapsed().as_secs_f64(),
            library_bytes: fs::metadata(&made)
                .map_err(Error::file("read", &made))?
                .len(),
            units,
        };
        report.save(&out_dir.join(format!("{library}.report.json")))?;
        let target_dir = target_folder(&out_dir);
        if target_dir != out_dir {
            let name = format!("{}-{library}.json", report.package);
            report.save(&report::folder(target_dir).join(name))?;
        }
        if for_cargo {
            self.watch(&kernels, &out_dir)?;
            for path in watched {
                println!("cargo::rerun-if-changed={}", path.display());
            }
            // This name of the C++ library also exists on machines without a compiler.
            link(&[&out_dir], &tag, library, ":+verbatim=libstdc++.so.6");
            compiled::tell(&self.families, &self.root, &kernels.sources)?;
        }
        Ok(Built {
            library: made,
            bindings,
            compiled: constants,
            report,
        })
    }

    /// Makes the library `made` of the objects. Each object is written to the folder `objects`
    /// under the library's own symbol names. Returns a description of each.
    fn make_library(
        &self,
        made: &Path,
        objects: &Path,
        tag: &Tag,
    ) -> Result<Vec<report::Unit>, Error> {
        fs::create_dir_all(objects).map_err(Error::file("make", objects))?;
        let mut units = Vec::new();
        let mut parts = Vec::new();
        for unit in &self.units {
            let of = |(folder, it): &'_ (PathBuf, Contents)| {
                Some((folder.clone(), it.find(unit)?.clone()))
            };
            let Some((folder, object)) = self.folders.iter().find_map(of) else {
                continue;
            };
            let bytes = object.part.read(&folder)?;
            units.push(report::Unit {
                source: unit.source.clone(),
                targets: object.targets,
                outcome: Outcome::Prebuilt,
                reason: String::new(),
                compile_seconds: object.seconds,
                peak: object.peak,
                object_bytes: bytes.len() as u64,
                device_bytes: device_bytes(&bytes, unit),
                kernels: ptxas::parse(&object.log),
            });
            parts.push((objects.join(format!("{}.o", unit.file_stem())), bytes));
        }
        let sources = units.iter().zip(&parts);
        let sources: Vec<_> = sources
            .map(|(unit, (path, bytes))| {
                let source = unit.source.as_str();
                (path.clone(), symbols::Object { source, bytes })
            })
            .collect();
        archive(made, sources, tag)?;
        Ok(units)
    }

    fn found(&self) -> Vec<Found> {
        // The same compilers made the objects of every family.
        let first = self.folders.iter().take(1);
        let found = first.flat_map(|(folder, contents)| {
            contents.compilers.iter().map(|(part, version)| Found {
                part: part.clone(),
                path: folder.clone(),
                version: Some(version.clone()),
                place: "the prebuilt objects".to_owned(),
            })
        });
        found.collect()
    }

    /// Tells Cargo when these objects may fit no longer.
    fn watch(&self, kernels: &Kernels, out_dir: &Path) -> Result<(), Error> {
        for name in variables::ALL.iter().chain(toolkit::VARIABLES) {
            println!("cargo::rerun-if-env-changed={name}");
        }
        for name in compiler::variables() {
            println!("cargo::rerun-if-env-changed={name}");
        }
        for family in &self.families.declared {
            println!("cargo::rerun-if-env-changed={}", family.variable());
        }
        let mut paths = source_folders(kernels, &self.root)?;
        if paths.iter().any(|folder| out_dir.starts_with(folder)) {
            // A folder with what builds write would start the script each time.
            paths = files(kernels, &self.root)?;
        }
        paths.extend(self.folders.iter().map(|(folder, _)| folder.clone()));
        for path in paths {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        Ok(())
    }
}

/// The objects that a build adds to the folder that [`variables::EXPORT`] names.
pub(crate) struct Export {
    folder: PathBuf,
    key: String,
}

impl Export {
    /// `None` if nothing is to be exported.
    pub(crate) fn new(kernels: &Kernels, library: &str) -> Result<Option<Self>, Error> {
        let Some(folder) = variables::set(variables::EXPORT) else {
            return Ok(None);
        };
        let families = kernels.resolve()?;
        if let Some(asked) = asked(kernels, &families, &[]) {
            return Err(Error::Setting {
                field: variables::EXPORT.into(),
                given: folder.to_string_lossy().into_owned(),
                accepted: format!("nothing beside {asked}: objects of a release have no settings"),
            });
        }
        let root = package_folder(kernels)?;
        let (_, tag) = names(&root, kernels.out_dir.is_none(), library);
        let key = key(kernels, &root, &families, &tag)?;
        let folder = PathBuf::from(folder);
        Ok(Some(Self { folder, key }))
    }

    pub(super) fn write(&self, plan: &Plan, done: &[Done]) -> Result<(), Error> {
        let folder = &self.folder;
        fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        let path = folder.join(file_name(&plan.library));
        let runtime_from = plan.tools.compiler.cuda.library.join(RUNTIME);
        let bytes = bounded::read(&runtime_from).map_err(Error::file("read", &runtime_from))?;
        let mut contents = Contents {
            format: FORMAT,
            package: plan.package.clone(),
            tag: plan.tag.as_str().to_owned(),
            platform: platform(),
            key: self.key.clone(),
            compilers: self.compilers(plan),
            runtime: write(folder, RUNTIME, &bytes)?,
            objects: Vec::new(),
        };
        // Other families of the same sources add to what there is.
        if let Ok(known) = Contents::load(&path)
            && known.key == contents.key
        {
            contents.objects = known.objects;
        }
        for done in done {
            let (unit, Some(entry)) = (&plan.sources.units[done.index], &done.entry) else {
                continue;
            };
            let name = format!("{}.o", &blake3::hash(&entry.object).to_hex()[..16]);
            let part = write(folder, &name, &entry.object)?;
            contents
                .objects
                .retain(|it| it.source != unit.source || it.targets != unit.targets());
            contents.objects.push(Compiled {
                source: unit.source.clone(),
                targets: unit.targets(),
                part,
                seconds: entry.meta.seconds,
                peak: entry.meta.peak,
                log: entry.meta.log.clone(),
            });
        }
        let text = serde_json::to_string_pretty(&contents).unwrap_or_default();
        fs::write(&path, text).map_err(Error::file("write", &path))
    }

    fn compilers(&self, plan: &Plan) -> Vec<(String, String)> {
        let version = |found: &Found| {
            let version = found.version.clone().unwrap_or_default();
            (found.part.clone(), version)
        };
        let mut all: Vec<_> = plan.tools.found.iter().map(version).collect();
        let host = plan.tools.compiler.host.version().to_owned();
        all.push(("host compiler".to_owned(), host));
        all
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
