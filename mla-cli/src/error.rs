//! All errors of the command.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use mla_runtime::select::SelectionError;

/// The reason why there is no output. The message says what was wrong and what is accepted.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[cfg(feature = "build-report")]
    #[error(
        "--target-dir: {0}; accepted: the target folder of a build with --features sm90, sm80 or \
         sm100"
    )]
    Build(#[from] mla_build::Error),
    /// A name that is not a preset's.
    #[error("{0}; any other model by its config.json: --config FILE")]
    Preset(mla_runtime::Error),
    #[error(transparent)]
    Selection(#[from] SelectionError),
    #[error(transparent)]
    Runtime(#[from] mla_runtime::Error),
    /// An invalid batch spec, template or range.
    #[error("{0}")]
    BatchSpec(String),
    /// Arguments that are valid one by one, but not together.
    #[error("{argument}: given {given}, accepted {accepted}")]
    Argument {
        argument: &'static str,
        given: String,
        accepted: String,
    },
    /// A file that cannot be read or has unexpected content.
    #[error("{argument}: {path:?}: {message}")]
    File {
        argument: &'static str,
        path: PathBuf,
        message: String,
    },
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
    /// A file that could not be written at the end of a run. The result is shown nevertheless.
    #[error("{error}")]
    Unsaved { result: String, error: Box<Self> },
}

impl CliError {
    /// Makes the error about a batch spec.
    pub(crate) fn batch_spec(error: impl Display) -> Self {
        Self::BatchSpec(error.to_string())
    }

    /// Makes an error from an argument, the given value, and the accepted ones.
    pub fn argument(
        argument: &'static str,
        given: impl Into<String>,
        accepted: impl Into<String>,
    ) -> Self {
        Self::Argument {
            argument,
            given: given.into(),
            accepted: accepted.into(),
        }
    }

    /// Makes an error about a file that an argument names.
    pub fn file(argument: &'static str, path: &Path, message: impl ToString) -> Self {
        Self::File {
            argument,
            path: path.to_owned(),
            message: message.to_string(),
        }
    }

    /// Returns the same error, with the result that could not be saved.
    #[cfg(feature = "bench")]
    pub fn behind(self, result: String) -> Self {
        Self::Unsaved {
            result,
            error: Box::new(self),
        }
    }

    /// Returns 2 if the input is at fault, as for arguments that do not parse, and 1 for everything
    /// else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Unsaved { error, .. } => error.exit_code(),
            Self::Output(_) | Self::Runtime(mla_runtime::Error::Device { .. }) => 1,
            _ => 2,
        }
    }
}
