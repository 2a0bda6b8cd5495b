//! The outputs of a build: the library, the report, and the lines for Cargo.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

use super::{Done, Plan};
use crate::{
    Error, bounded,
    cache::{Entry, Meta},
    compiler, fatbin, process, ptxas,
    report::{self, Report},
    symbols::{self, Tag},
    target::{self, Target},
    unit::Unit,
};

impl Plan {
    /// Gives the objects names of their own and puts them into the library.
    pub(super) fn archive(&mut self, library: &Path, done: &[Done]) -> Result<(), Error> {
        let objects: Vec<_> = done
            .iter()
            .filter_map(|done| Some((&self.sources.units[done.index], done.entry.as_ref()?)))
            .map(|(unit, entry)| {
                let (source, bytes) = (unit.source.as_str(), entry.object.as_slice());
                (self.object(unit), symbols::Object { source, bytes })
            })
            .collect();
        let kernels = done.iter().filter_map(|done| {
            let log = &done.entry.as_ref()?.meta.log;
            Some((
                self.sources.units[done.index].source.as_str(),
                ptxas::parse(log),
            ))
        });
        symbols::refuse_different_kernels(kernels)?;
        let note = self.refuse_undefined(objects.iter().map(|(_, object)| object))?;
        archive(library, objects, &self.tag)?;
        self.notes.extend(note);
        Ok(())
    }

    /// Refuses a header that declares a function which no source defines. If a family with sources
    /// is off, the function may be that family's, so this is only a note.
    fn refuse_undefined<'a>(
        &self,
        objects: impl Iterator<Item = &'a symbols::Object<'a>>,
    ) -> Result<Option<String>, Error> {
        if self.is_partial {
            return Ok(None);
        }
        let names = self.declared.iter().map(|(name, _)| name.as_str());
        let mut undefined = symbols::undefined(objects, names)?;
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
        // A C++ function of that name is the likeliest cause.
        let is_mangled = |name: &String| {
            let function = undefined.mangled.as_ref().map(|(function, _)| function);
            function.is_some_and(|function| symbols::is_function(function, name))
        };
        let first = undefined
            .names
            .iter()
            .find(|name| is_mangled(name))
            .unwrap_or(first)
            .clone();
        undefined.names.sort_by_key(|name| *name != first);
        let header = self.declared.iter().find(|(name, _)| *name == first);
        let header = header.map_or(Path::new(""), |(_, header)| header);
        Err(Error::UndefinedSymbols {
            symbols: undefined.names,
            header: header
                .strip_prefix(&self.place.root)
                .unwrap_or(header)
                .to_owned(),
            mangled: undefined.mangled,
        })
    }

    pub(super) fn report(
        &self,
        mut done: Vec<Done>,
        started: Instant,
        library_bytes: u64,
    ) -> Report {
        done.sort_by_key(|done| done.index);
        let units = done
            .into_iter()
            .map(|done| {
                let unit = &self.sources.units[done.index];
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
            finished: report::now(),
            targets: target::names(&self.sources.families.targets()),
            toolkit: self.tools.found.clone(),
            host_compiler: (
                self.tools.compiler.host.path.clone(),
                self.tools.compiler.host.version().to_owned(),
            ),
            cache: self.cache.folder().to_owned(),
            notes: self
                .notes
                .iter()
                .cloned()
                .chain(self.cache.notes())
                .collect(),
            seconds: started.elapsed().as_secs_f64(),
            library_bytes,
            units,
        }
    }

    pub(super) fn write_compile_commands(&self, path: &Path) -> Result<(), Error> {
        let commands: Vec<_> = self
            .sources
            .units
            .iter()
            .map(|unit| {
                serde_json::json!({
                    "directory": self.tools.compiler.root,
                    "file": unit.source,
                    "arguments": self.tools.compiler.for_clangd(unit),
                })
            })
            .collect();
        let text = serde_json::to_string_pretty(&commands).unwrap_or_default();
        // An equal file keeps its time: it may lie in a folder that Cargo watches.
        if bounded::read_to_string(path).is_ok_and(|known| known == text) {
            return Ok(());
        }
        fs::write(path, text).map_err(Error::file("write", path))
    }

    pub(super) fn link(&self) {
        let folders = [&self.place.out_dir, &self.tools.compiler.cuda.library];
        link(&folders, &self.tag, &self.library, "=stdc++");
    }
}

/// Tells Cargo to link the library, and CUDA's runtime and the C++ library beside it, from these
/// folders.
pub(super) fn link(folders: &[&PathBuf], tag: &Tag, library: &str, cpp: &str) {
    for folder in folders {
        println!("cargo::rustc-link-search=native={}", folder.display());
    }
    println!("cargo::rustc-link-lib=static={}", tag.as_str());
    println!("cargo::{}", tag.prefix_variable(library));
    // CUDA's runtime is linked statically, and looks for the driver only when it is first called.
    // So a program with kernels starts on a machine without a driver.
    println!("cargo::rustc-link-lib=static=cudart_static");
    for system in [cpp, "=dl", "=rt", "=pthread"] {
        println!("cargo::rustc-link-lib=dylib{system}");
    }
}

/// Makes a library of objects, each written to a file of its own under the library's own names.
pub(super) fn archive(
    library: &Path,
    objects: Vec<(PathBuf, symbols::Object<'_>)>,
    tag: &Tag,
) -> Result<(), Error> {
    let (units, objects): (Vec<_>, Vec<_>) = objects.into_iter().unzip();
    let own = symbols::make_own(&objects, tag)?;
    for (path, object) in units.iter().zip(own) {
        fs::write(path, object).map_err(Error::file("write", path))?;
    }
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
    archiver.arg("crsD").arg(library).args(&units);
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

/// The bytes of GPU code in an object, by target.
pub(super) fn device_bytes(object: &[u8], unit: &Unit) -> BTreeMap<String, u64> {
    let target = |code: fatbin::Code| {
        let names =
            |target: &&Target| target.number() == code.number && target.is_ptx() == code.is_ptx;
        unit.targets.iter().find(names).map_or_else(
            || {
                format!(
                    "{}_{}",
                    if code.is_ptx { "compute" } else { "sm" },
                    code.number
                )
            },
            ToString::to_string,
        )
    };
    let mut bytes = BTreeMap::new();
    for (code, length) in fatbin::code_by_target(object) {
        *bytes.entry(target(code)).or_default() += length;
    }
    bytes
}
