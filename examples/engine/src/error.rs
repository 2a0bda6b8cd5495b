//! The engine's errors, and the refusals of requests.

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layer or the device failed, or the model's configuration was refused.
    #[error(transparent)]
    Layer(#[from] mla_runtime::Error),
    /// No backend fits.
    #[error(transparent)]
    Selection(#[from] mla_runtime::select::SelectionError),
    /// A field of the configuration that the engine itself reads is not accepted.
    #[error("config: {0}")]
    Config(#[from] serde_json::Error),
    /// The output cannot be written.
    #[error("output: {0}")]
    Output(#[from] std::io::Error),
    /// A request or setting that cannot be served.
    #[error("{field}: given {given}, accepted {accepted}")]
    Refused {
        /// The field.
        field: &'static str,
        /// Its value.
        given: String,
        /// The accepted values.
        accepted: String,
    },
}

impl Error {
    /// Makes an [`Error::Refused`].
    pub fn refused(field: &'static str, given: impl ToString, accepted: impl ToString) -> Self {
        Self::Refused {
            field,
            given: given.to_string(),
            accepted: accepted.to_string(),
        }
    }
}

/// The result of most functions here.
pub type Result<T> = std::result::Result<T, Error>;
