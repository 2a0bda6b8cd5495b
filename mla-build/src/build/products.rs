//! Generated files that the package's code includes by name, such as bindings. They must not
//! outlive the build that wrote them: with old declarations of functions that are gone, a program
//! fails when it is linked.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::Error;
use crate::bounded;

/// The file in `OUT_DIR` that lists the products of the build script's last run.
const LIST: &str = "mla-build-products";

/// The files that a build of a library writes for the package's code.
#[derive(Clone, Debug)]
pub(super) struct Products {
    pub(super) bindings: PathBuf,
    pub(super) constants: PathBuf,
}

impl Products {
    /// The files of a library. In a build script's `OUT_DIR`, removes what its last run made for
    /// libraries that other names have now.
    pub(super) fn begin(out_dir: &Path, library: &str, for_cargo: bool) -> Result<Self, Error> {
        let products = Self {
            bindings: out_dir.join(bindings_name(library)),
            constants: out_dir.join(constants_name(library)),
        };
        if for_cargo {
            remember(out_dir, library)?;
        }
        Ok(products)
    }

    /// Removes them, because the build has failed.
    pub(super) fn remove(&self) {
        for path in [&self.bindings, &self.constants] {
            // The build's own error is the one that counts.
            let _ = fs::remove_file(path);
        }
    }
}

fn bindings_name(library: &str) -> String {
    format!("{library}.rs")
}

fn constants_name(library: &str) -> String {
    format!("{library}_compiled.rs")
}

/// Adds a library to the list. The first library of a build script removes the files that the list
/// had; the other libraries write theirs again.
fn remember(out_dir: &Path, library: &str) -> Result<(), Error> {
    static KNOWN: Mutex<Vec<String>> = Mutex::new(Vec::new());
    // A list holds whole names at every moment, so a panic elsewhere leaves it sound.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let path = out_dir.join(LIST);
    if known.is_empty() {
        let last = bounded::read_to_string(&path).unwrap_or_default();
        for gone in last.lines().filter(|&last| last != library) {
            for name in [bindings_name(gone), constants_name(gone)] {
                remove_old(&out_dir.join(name))?;
            }
        }
    }
    if !known.iter().any(|known| known == library) {
        known.push(library.to_owned());
    }
    fs::write(&path, known.join("\n")).map_err(Error::file("write", &path))
}

fn remove_old(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::file("remove", path)(error))
        }
        _ => Ok(()),
    }
}
