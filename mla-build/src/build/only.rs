//! A build that compiles nothing: the bindings and the constants alone, for a check of the Rust
//! code.
//!
//! Cargo runs a build script in the same way for `cargo check` and `cargo build`, and keeps one
//! result for both, so a script cannot know what it is run for. It is told by a variable.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Instant,
};

use super::{
    Built,
    place::{Place, names, own_includes},
    settings::check_library,
};
use crate::{
    Error, Kernels, bounded, compiled,
    family::Families,
    headers::Headers,
    report::Report,
    symbols::Tag,
    toolkit::{self, Pins, Search},
    variables::{self, DOCUMENTATION, EXPORT, ONLY},
};

/// The value of [`ONLY`] by which bindgen makes what the package has checked in, too.
const NEW: &str = "new-bindings";

/// The name of the variable that asks for bindings alone, if one does.
pub(crate) fn asked() -> Result<Option<&'static str>, Error> {
    match env::var(ONLY).as_deref() {
        Ok("bindings" | NEW) if variables::set(EXPORT).is_some() => Err(Error::Setting {
            field: EXPORT.into(),
            given: variables::set(EXPORT)
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            accepted: format!("nothing beside {ONLY}, with which no kernels are compiled"),
        }),
        Ok("bindings" | NEW) => Ok(Some(ONLY)),
        Ok("") | Err(_) => Ok(env::var_os(DOCUMENTATION).map(|_| DOCUMENTATION)),
        Ok(given) => Err(Error::Setting {
            field: ONLY.into(),
            given: given.to_owned(),
            accepted: format!(
                "bindings, or {NEW} to have those made anew that are checked in; unset it to \
                 compile"
            ),
        }),
    }
}

/// A build without compilers, whose constants are written.
struct Draft {
    started: Instant,
    families: Families,
    place: Place,
    package: String,
    tag: Tag,
    constants: PathBuf,
}

impl Draft {
    fn begin(kernels: &Kernels, library: &str) -> Result<Self, Error> {
        let started = Instant::now();
        check_library(library)?;
        let families = kernels.resolve()?;
        let place = Place::of(kernels)?;
        let (package, tag) = names(&place.root, place.for_cargo, library);
        let constants = place.out_dir.join(format!("{library}_compiled.rs"));
        compiled::write(&families, &constants)?;
        Ok(Self {
            started,
            families,
            place,
            package,
            tag,
            constants,
        })
    }

    /// Tells Cargo the prefix of names, and the targets.
    fn tell(&self, kernels: &Kernels, library: &str) -> Result<(), Error> {
        println!("cargo::{}", self.tag.prefix_variable(library));
        compiled::tell(&self.families, &self.place.root, &kernels.sources)
    }

    fn built(self, library: &str, bindings: Option<PathBuf>, why: String) -> Built {
        Built {
            library: (self.place.out_dir).join(format!("lib{}.a", self.tag.as_str())),
            bindings,
            compiled: self.constants,
            report: Report::of_nothing(self.package, library, self.started, why),
        }
    }
}

/// Makes the bindings and the constants, because `variable` asks for no more.
pub(crate) fn run(kernels: Kernels, library: &str, variable: &str) -> Result<Built, Error> {
    let draft = Draft::begin(&kernels, library)?;
    let (out_dir, tag) = (&draft.place.out_dir, &draft.tag);
    let mut watched = Vec::new();
    let headers = kernels.headers(&draft.families, &draft.place.root)?;
    let bindings = bindings(&kernels, &headers, library, out_dir, tag, &mut watched)?;
    if draft.place.for_cargo {
        let names = [ONLY, DOCUMENTATION].iter().chain(toolkit::VARIABLES);
        let compilers = crate::compiler::variables();
        for name in names.copied().chain(compilers.iter().map(String::as_str)) {
            println!("cargo::rerun-if-env-changed={name}");
        }
        for path in &watched {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        draft.tell(&kernels, library)?;
        // Nothing looks for it before something is linked, and then its name is the message.
        println!(
            "cargo::rustc-link-lib=static={library}_is_not_compiled_because_{variable}_is_set"
        );
    }
    let why = format!("{variable} is set: bindings were made, and nothing compiled");
    Ok(draft.built(library, bindings, why))
}

/// Makes bindings without a declaration, and constants without a target: no family is on.
pub(crate) fn nothing(kernels: Kernels, library: &str) -> Result<Built, Error> {
    let draft = Draft::begin(&kernels, library)?;
    let headers = kernels.headers(&draft.families, &draft.place.root)?;
    let bindings = headers
        .first()
        .map(|_| draft.place.out_dir.join(format!("{library}.rs")));
    if let Some(bindings) = &bindings {
        fs::write(bindings, "").map_err(Error::file("write", bindings))?;
    }
    if draft.place.for_cargo {
        // Without a line Cargo would start the script again for any file of the package.
        for name in [ONLY, DOCUMENTATION] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        draft.tell(&kernels, library)?;
    }
    let why = "no family is on: nothing was compiled".to_owned();
    Ok(draft.built(library, bindings, why))
}

/// The bindings without a toolkit: those that are checked in, or what libclang makes of the
/// headers.
pub(super) fn bindings(
    kernels: &Kernels,
    headers: &Headers,
    library: &str,
    out_dir: &Path,
    tag: &Tag,
    watched: &mut Vec<PathBuf>,
) -> Result<Option<PathBuf>, Error> {
    let output = out_dir.join(format!("{library}.rs"));
    let is_new = env::var_os(ONLY).is_some_and(|value| value == NEW);
    if let Some(declarations) = kernels.declarations.as_ref().filter(|_| !is_new) {
        let of_families = headers.of_families.iter();
        let of_families = of_families.map(|header| header.path.with_extension("rs"));
        let mut text = String::new();
        for source in [headers.root.join(declarations)]
            .into_iter()
            .chain(of_families)
        {
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
    let mut roots = own_includes(&headers.root, headers.shared.as_deref(), &kernels.includes)?;
    let install = kernels
        .install_command
        .clone()
        .unwrap_or_else(|| Pins::current().command());
    let search = Search::new();
    // A header may include CUDA's own where there are any; most include none.
    roots.extend(
        toolkit::cuda(&search, &install)
            .ok()
            .map(|cuda| cuda.include),
    );
    let files = bind(headers, &output, &roots, &search, &install, tag)?;
    watched.extend(files.into_iter().filter(|path| !path.starts_with(out_dir)));
    Ok(Some(output))
}

#[cfg(feature = "bindings")]
fn bind(
    headers: &Headers,
    output: &Path,
    roots: &[PathBuf],
    search: &Search,
    install: &str,
    tag: &Tag,
) -> Result<Vec<PathBuf>, Error> {
    let libclang = toolkit::libclang(search, install)?;
    let host = crate::compiler::Host::find(None).ok();
    let written = crate::bindings::write(headers, output, roots, &libclang, host.as_ref(), tag)?;
    Ok(written.read)
}

#[cfg(not(feature = "bindings"))]
fn bind(
    headers: &Headers,
    _: &Path,
    _: &[PathBuf],
    _: &Search,
    _: &str,
    _: &Tag,
) -> Result<Vec<PathBuf>, Error> {
    Err(super::without_bindings(
        headers.first().unwrap_or(Path::new("")),
    ))
}
