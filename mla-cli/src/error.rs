//! Everything that can make the command fail.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use mla_runtime::model::ModelError;
use mla_runtime::select::SelectionError;

/// The reason why there is no output. The message names the error and the accepted values.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[cfg(feature = "build-report")]
    #[error(
        "--target-dir: {0}; accepted: the target folder of a build with --features sm90, sm80 or \
         sm100"
    )]
    Build(#[from] mla_build::Error),
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A name that is no preset's.
    #[error("{0}; any other model by its config.json: --config FILE")]
    Preset(ModelError),
    #[error(transparent)]
    Selection(#[from] SelectionError),
    #[error(transparent)]
    Runtime(#[from] mla_runtime::Error),
    /// A batch spec that is none, also one with names in it, or a range.
    #[error("{0}")]
    BatchSpec(String),
    /// Arguments that are right one by one, but not together.
    #[error("{argument}: given {given}, accepted {accepted}")]
    Argument {
        argument: &'static str,
        given: String,
        accepted: String,
    },
    /// A file that cannot be read or does not say what it should.
    #[error("{argument}: {path:?}: {message}")]
    File {
        argument: &'static str,
        path: PathBuf,
        message: String,
    },
    /// A subcommand of `mla bench` that is a command of the laboratory.
    #[cfg(feature = "bench")]
    #[error(
        "peers, indexer and ceilings: given to mla bench, accepted as cargo lab peers, cargo lab \
         indexer and cargo lab ceilings, in a checkout of this project"
    )]
    Moved,
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
    /// A file that could not be written at the end of a run, whose result is shown all the same.
    #[error("{error}")]
    Unsaved { result: String, error: Box<Self> },
}

impl CliError {
    /// The refusal of a batch spec.
    pub(crate) fn batch_spec(error: impl Display) -> Self {
        Self::BatchSpec(error.to_string())
    }

    /// An argument, what was given, and what is accepted.
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

    /// A file that an argument names, and its fault.
    pub fn file(argument: &'static str, path: &Path, message: impl ToString) -> Self {
        Self::File {
            argument,
            path: path.to_owned(),
            message: message.to_string(),
        }
    }

    /// The same error, with the result that could not be saved.
    #[cfg(feature = "bench")]
    pub fn behind(self, result: String) -> Self {
        Self::Unsaved {
            result,
            error: Box::new(self),
        }
    }

    /// 2 where the input is at fault, as for arguments that do not parse; 1 for everything else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Unsaved { error, .. } => error.exit_code(),
            Self::Output(_) | Self::Runtime(mla_runtime::Error::Device { .. }) => 1,
            _ => 2,
        }
    }
}
