//! What can go wrong, and what refuses a request.

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Of the layer or the device.
    #[error(transparent)]
    Layer(#[from] mla_runtime::Error),
    /// No backend fits.
    #[error(transparent)]
    Selection(#[from] mla_runtime::selection::SelectionError),
    /// The model's configuration.
    #[error(transparent)]
    Model(#[from] mla_runtime::model::ModelError),
    /// What the engine itself reads of the configuration.
    #[error("config: {0}")]
    Config(#[from] serde_json::Error),
    /// What is shown cannot be written.
    #[error("output: {0}")]
    Output(#[from] std::io::Error),
    /// A request or setting that cannot be served.
    #[error("{field}: given {given}, accepted {accepted}")]
    Refused {
        /// Which field.
        field: &'static str,
        /// Its value.
        given: String,
        /// What would be served.
        accepted: String,
    },
}

impl Error {
    /// An [`Error::Refused`].
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
