//! A build that compiles nothing and makes only bindings and constants, to check the Rust code.
//!
//! Cargo runs a build script in the same way for `cargo check` and `cargo build`, and keeps one
//! result for both. A script therefore cannot know which one runs it. A variable tells it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use super::{Built, Library};
use crate::{
    Error, bounded,
    headers::Headers,
    report::Report,
    variables::{self, DOCUMENTATION, EXPORT, ONLY},
};

/// The value of [`ONLY`] that makes bindgen run even if the package has checked-in declarations.
const NEW: &str = "new-bindings";

/// Returns the name of the variable that asks for bindings alone, if one does.
pub(crate) fn asked() -> Result<Option<&'static str>, Error> {
    match env::var(ONLY).as_deref() {
        Ok("bindings" | NEW) => match variables::set(EXPORT) {
            Some(export) => Err(Error::setting(
                EXPORT,
                export,
                format!("nothing beside {ONLY}, with which no kernels are compiled"),
            )),
            None => Ok(Some(ONLY)),
        },
        Ok("") | Err(_) => Ok(env::var_os(DOCUMENTATION).map(|_| DOCUMENTATION)),
        Ok(given) => Err(Error::setting(
            ONLY,
            given,
            format!(
                "bindings, or {NEW} to have those made anew that are checked in; unset it to \
                 compile"
            ),
        )),
    }
}

/// Makes only the bindings and the constants, as `variable` asks.
pub(super) fn run(library: &Library, variable: &str) -> Result<Built, Error> {
    let started = Instant::now();
    let compiled = library.write_constants()?;
    let mut watched = Vec::new();
    let bindings = bindings(library, &mut watched)?;
    if library.for_cargo {
        for path in &watched {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        // Nothing looks for this library before something is linked. Then its name is the error
        // message.
        let name = &library.name;
        println!("cargo::rustc-link-lib=static={name}_is_not_compiled_because_{variable}_is_set");
    }
    let why = format!("{variable} is set: bindings were made, and nothing compiled");
    built(library, started, (compiled, bindings), why)
}

/// Makes bindings without declarations and constants without targets, since no family is on.
pub(super) fn nothing(library: &Library) -> Result<Built, Error> {
    let started = Instant::now();
    let compiled = library.write_constants()?;
    let bindings = library.headers()?.first().map(|_| library.file(".rs"));
    if let Some(bindings) = &bindings {
        fs::write(bindings, "").map_err(Error::file("write", bindings))?;
    }
    let why = "no family is on: nothing was compiled".to_owned();
    built(library, started, (compiled, bindings), why)
}

fn built(
    library: &Library,
    started: Instant,
    (compiled, bindings): (PathBuf, Option<PathBuf>),
    why: String,
) -> Result<Built, Error> {
    if library.for_cargo {
        // Without such a line, Cargo would run the script again after a change of any file of the
        // package.
        library.watch_variables();
        println!("cargo::{}", library.tag.prefix_variable(&library.name));
        library.tell_targets()?;
    }
    Ok(Built {
        library: library.archive(),
        bindings,
        compiled,
        report: Report {
            notes: vec![why],
            ..library.report(started)
        },
    })
}

/// Makes the bindings without a toolkit: they are the checked-in ones, or libclang makes them from
/// the headers.
pub(super) fn bindings(
    library: &Library,
    watched: &mut Vec<PathBuf>,
) -> Result<Option<PathBuf>, Error> {
    let (headers, output) = (library.headers()?, library.file(".rs"));
    let is_new = env::var_os(ONLY).is_some_and(|value| value == NEW);
    if let Some(declarations) = library.kernels.declarations.as_ref().filter(|_| !is_new) {
        let mut sources = vec![headers.root.join(declarations)];
        let of_families = headers.of_families.iter();
        sources.extend(of_families.map(|(_, header)| header.with_extension("rs")));
        let mut text = String::new();
        for source in sources {
            text += &bounded::read_to_string(&source)
                .map_err(Error::file("read the declarations", &source))?;
            watched.push(source);
        }
        fs::write(&output, text).map_err(Error::file("write", &output))?;
        return Ok(Some(output));
    }
    if headers.first().is_none() {
        return Ok(None);
    }
    let files = bind(library, &headers, &output)?;
    watched.extend(
        files
            .into_iter()
            .filter(|path| !path.starts_with(&library.out_dir)),
    );
    Ok(Some(output))
}

#[cfg(feature = "bindings")]
fn bind(library: &Library, headers: &Headers, output: &Path) -> Result<Vec<PathBuf>, Error> {
    use crate::{compiler::Host, toolkit};
    let (search, install) = (toolkit::Search::new(), library.install_command());
    let mut roots = library.own_includes()?;
    // A header may include CUDA's own headers if they are installed. Most headers do not.
    roots.extend(
        toolkit::cuda(&search, &install)
            .ok()
            .map(|cuda| cuda.include),
    );
    let libclang = toolkit::libclang(&search, &install)?;
    let host = Host::find(None).ok();
    let tag = &library.tag;
    let written = crate::bindings::write(headers, output, &roots, &libclang, host.as_ref(), tag)?;
    Ok(written.read)
}

#[cfg(not(feature = "bindings"))]
fn bind(_: &Library, headers: &Headers, _: &Path) -> Result<Vec<PathBuf>, Error> {
    Err(super::without_bindings(
        headers.first().unwrap_or(Path::new("")),
    ))
}
