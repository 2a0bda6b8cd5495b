//! The outputs of a build: the library, the report, and the lines for Cargo.

use std::{collections::BTreeMap, fs, path::Path, path::PathBuf, time::Instant};

use super::{Done, Library, Plan, library::remove};
use crate::{
    Error, bounded,
    cache::Meta,
    compiler, fatbin, process, ptxas,
    report::{self, Outcome, Report},
    symbols::{self, Object},
    target,
    unit::Unit,
    variables,
};

impl Plan {
    /// Makes the library, and returns its bytes.
    pub(super) fn archive(&mut self, done: &[Done]) -> Result<u64, Error> {
        let made = done.iter().filter_map(|done| {
            let (unit, entry) = (&self.units[done.index], done.entry.as_ref()?);
            Some((unit, entry.object.as_slice()))
        });
        let made: Vec<_> = made.collect();
        let kernels = done.iter().filter_map(|done| {
            let log = &done.entry.as_ref()?.meta.log;
            Some((self.units[done.index].source.as_str(), ptxas::parse(log)))
        });
        symbols::refuse_different_kernels(kernels)?;
        let note = self.refuse_undefined(&made)?;
        let bytes = archive(&self.library, &made)?;
        self.notes.extend(note);
        Ok(bytes)
    }

    /// Refuses headers that declare a function without a definition in the sources. If a family
    /// with sources is off, its sources may define the function, so this is only a note.
    fn refuse_undefined(&self, made: &[(&Unit, &[u8])]) -> Result<Option<String>, Error> {
        if self.library.kernels.only_sources.is_some() {
            return Ok(None);
        }
        let names = self.declared.iter().map(|(name, _)| name.as_str());
        let mut undefined = symbols::undefined(&objects(made), names)?;
        let Some(first) = undefined.names.first() else {
            return Ok(None);
        };
        if !self.off.is_empty() && undefined.mangled.is_none() {
            return Ok(Some(format!(
                "declared and defined by no source of a family that is on (off: {}): {}",
                self.off.join(", "),
                undefined.names.join(", ")
            )));
        }
        // The likeliest cause is a C++ function of that name.
        let mangled = undefined.mangled.as_ref();
        let is_mangled =
            |name: &&String| mangled.is_some_and(|(it, _)| symbols::is_function(it, name));
        let first = undefined
            .names
            .iter()
            .find(is_mangled)
            .unwrap_or(first)
            .clone();
        undefined.names.sort_by_key(|name| *name != first);
        let header = self.declared.iter().find(|(name, _)| *name == first);
        let header = header.map_or(Path::new(""), |(_, header)| header);
        let hint = match mangled {
            Some((function, source)) => {
                format!(", with extern \"C\" (in {source} is the C++ function {function})")
            }
            None => " of a family that is on, with extern \"C\"".to_owned(),
        };
        Err(Error::Sentence(format!(
            "symbol {}: declared in {}, accepted a definition in a source{hint}; without one a \
             program fails when it is linked",
            undefined.names.join(", "),
            header
                .strip_prefix(&self.library.root)
                .unwrap_or(header)
                .display(),
        )))
    }

    pub(super) fn report(
        &self,
        mut done: Vec<Done>,
        started: Instant,
        library_bytes: u64,
    ) -> Report {
        done.sort_by_key(|done| done.index);
        let units = done.into_iter().map(|done| {
            let (meta, object) = match done.entry {
                Some(entry) => (entry.meta, entry.object),
                None => Default::default(),
            };
            let unit = &self.units[done.index];
            described(unit, done.outcome, done.reason, &meta, &object)
        });
        let host = &self.tools.compiler.host;
        Report {
            targets: target::names(&self.library.families.targets()),
            toolkit: self.tools.found.clone(),
            host_compiler: (host.path.clone(), host.version().to_owned()),
            cache: self.cache.folder().to_owned(),
            notes: self
                .notes
                .iter()
                .cloned()
                .chain(self.cache.notes())
                .collect(),
            library_bytes,
            units: units.collect(),
            ..self.library.report(started)
        }
    }

    /// Writes `compile_commands.json`, if it is asked for.
    pub(super) fn write_compile_commands(&self) -> Result<(), Error> {
        let asked = || variables::set(variables::COMPILE_COMMANDS).map(PathBuf::from);
        let path = self.library.kernels.compile_commands.clone().or_else(asked);
        let Some(path) = path.map(|path| self.library.root.join(path)) else {
            return Ok(());
        };
        let commands = self.units.iter().map(|unit| {
            serde_json::json!({
                "directory": self.library.root,
                "file": unit.source,
                "arguments": self.tools.compiler.for_clangd(unit),
            })
        });
        let commands: Vec<_> = commands.collect();
        let text = serde_json::to_string_pretty(&commands).unwrap_or_default();
        // If the text is the same, the file is not written and keeps its time, since it may lie in
        // a folder that Cargo watches.
        if bounded::read_to_string(&path).is_ok_and(|known| known == text) {
            return Ok(());
        }
        fs::write(&path, text).map_err(Error::file("write", path))
    }
}

/// Describes a unit for the report.
pub(super) fn described(
    unit: &Unit,
    outcome: Outcome,
    reason: String,
    meta: &Meta,
    object: &[u8],
) -> report::Unit {
    report::Unit {
        source: unit.source.clone(),
        targets: unit.targets(),
        outcome,
        reason,
        compile_seconds: meta.seconds,
        peak: meta.peak,
        object_bytes: object.len() as u64,
        device_bytes: device_bytes(object, unit),
        kernels: ptxas::parse(&meta.log),
    }
}

/// Tells Cargo to link the library, CUDA's runtime and the C++ library from these folders.
pub(super) fn link(library: &Library, folders: &[&PathBuf], cpp: &str) {
    for folder in folders {
        println!("cargo::rustc-link-search=native={}", folder.display());
    }
    println!("cargo::rustc-link-lib=static={}", library.tag.as_str());
    println!("cargo::{}", library.tag.prefix_variable(&library.name));
    // CUDA's runtime is linked statically, and looks for the driver only when it is first called.
    // A program with kernels therefore starts on a machine without a driver.
    println!("cargo::rustc-link-lib=static=cudart_static");
    for system in [cpp, "=dl", "=rt", "=pthread"] {
        println!("cargo::rustc-link-lib=dylib{system}");
    }
}

fn objects<'a>(made: &[(&'a Unit, &'a [u8])]) -> Vec<Object<'a>> {
    let object = |&(unit, bytes): &(&'a Unit, &'a [u8])| Object {
        source: &unit.source,
        bytes,
    };
    made.iter().map(object).collect()
}

/// Makes a library of objects, each in a file named after the library. Returns the library's bytes.
pub(super) fn archive(library: &Library, made: &[(&Unit, &[u8])]) -> Result<u64, Error> {
    let paths: Vec<_> = made.iter().map(|(unit, _)| library.object(unit)).collect();
    let own = symbols::make_own(&objects(made), &library.tag)?;
    for (path, object) in paths.iter().zip(own) {
        fs::write(path, object).map_err(Error::file("write", path))?;
    }
    // The archiver would add to an existing archive, which may hold units that no longer exist.
    let archive = library.archive();
    remove(&archive)?;
    let archiver = compiler::tools().try_get_archiver();
    let mut archiver = archiver.map_err(|error| Error::tool("ar", error))?;
    let program = archiver.get_program().to_string_lossy().into_owned();
    // D: without times and owners, equal objects make an equal library.
    archiver.arg("crsD").arg(&archive).args(&paths);
    let finished = process::run(&mut archiver).map_err(|error| Error::tool(&program, error))?;
    if !finished.status.success() {
        let message = format!("{}: {}", finished.status, finished.log.trim());
        return Err(Error::tool(program, message));
    }
    let metadata = fs::metadata(&archive).map_err(Error::file("read", &archive))?;
    Ok(metadata.len())
}

/// Returns the bytes of GPU code in an object, by target.
fn device_bytes(object: &[u8], unit: &Unit) -> BTreeMap<String, u64> {
    let mut bytes = BTreeMap::new();
    for (code, length) in fatbin::code_by_target(object) {
        let mut targets = unit.targets.iter();
        let named = targets.find(|it| it.number == code.number && it.is_ptx == code.is_ptx);
        let kind = if code.is_ptx { "compute" } else { "sm" };
        let name = named.map_or_else(|| format!("{kind}_{}", code.number), ToString::to_string);
        *bytes.entry(name).or_default() += length;
    }
    bytes
}
