//! All errors, in words that say what was given and what is accepted.

use std::{ffi::OsStr, fmt, io, path::PathBuf};

use crate::diagnostic::FailedUnits;

/// The reason why a build stopped.
///
/// `Debug` prints the same as `Display`. A build script that ends with `fn main() -> Result<(),
/// mla_build::Error>` shows its error through `Debug`, and the message is written for a person.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting, a source, a symbol or an object is not accepted.
    #[error("{field}: given {given}, accepted {accepted}")]
    Refused {
        /// The environment variable, setter, file or symbol.
        field: String,
        /// The given value, in quotes if it is a text of the user's.
        given: String,
        /// The accepted values.
        accepted: String,
    },

    /// No family of kernels was turned on, neither by a feature nor by a call.
    #[error(
        "family: none is turned on; enable a feature of this package named one of {accepted} \
         (cargo build --features sm90), or call Kernels::enable. A package that is of use \
         without kernels calls Kernels::optional"
    )]
    NoFamily {
        /// Every family that the build knows.
        accepted: String,
    },

    /// A part of the toolkit is missing everywhere.
    #[error(transparent)]
    ToolkitNotFound(#[from] NotFound),

    /// Prebuilt objects do not fit the sources, and no toolkit is there to compile the kernels.
    #[error("{stale}\n\nTo compile them needs a toolkit: {toolkit}")]
    StaleWithoutToolkit {
        /// The reason why the objects are refused.
        stale: Box<Error>,
        /// The missing part of the toolkit.
        toolkit: NotFound,
    },

    /// At least one unit failed to compile. The others are in the cache.
    #[error("{0}")]
    Compile(FailedUnits),

    /// A tool that the build needs did not start or ended badly.
    #[error("{program}: {message}")]
    Tool {
        /// The program, or the file that it was to read.
        program: String,
        /// The problem.
        message: String,
    },

    /// A file or folder that the build itself needs could not be used. The cache never causes this
    /// error: the build goes on without a cache that it cannot use, and says so.
    #[error("cannot {action} {}: {source}{}", path.display(), full(source))]
    File {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The path of the attempted action.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// A toolkit that is too old, or sources that do not fit each other, in a sentence.
    #[error("{0}")]
    Sentence(String),
}

/// A part that was found nowhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{part} is nowhere to be found. Looked, in this order, at:\n  {}\nTo install it, run:\n  \
     {command}",
    looked.join("\n  ")
)]
pub struct NotFound {
    /// The name of the missing part.
    pub part: String,
    /// Every place that was searched, in order, and what was missing there.
    pub looked: Vec<String>,
    /// The one command that installs the part.
    pub command: String,
}

impl Error {
    /// Makes the error about a value of the user's that is not accepted.
    pub(crate) fn setting(
        field: impl ToString,
        given: impl AsRef<OsStr>,
        accepted: impl ToString,
    ) -> Self {
        let given = given.as_ref().to_string_lossy();
        Self::refused(field, format!("{given:?}"), accepted)
    }

    pub(crate) fn refused(
        field: impl ToString,
        given: impl ToString,
        accepted: impl ToString,
    ) -> Self {
        Self::Refused {
            field: field.to_string(),
            given: given.to_string(),
            accepted: accepted.to_string(),
        }
    }

    pub(crate) fn tool(program: impl ToString, message: impl ToString) -> Self {
        Self::Tool {
            program: program.to_string(),
            message: message.to_string(),
        }
    }

    pub(crate) fn file<E: Into<io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |source| Self::File {
            action,
            path,
            source: source.into(),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn full(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::StorageFull {
        "; free some space, or move the target folder with CARGO_TARGET_DIR"
    } else {
        ""
    }
}
