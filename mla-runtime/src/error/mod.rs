//! What can go wrong while preparing or enqueuing work.

mod plan;

use std::fmt;

pub use plan::PlanError;

/// An error of a device, a backend or the layer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that does not fit. Nothing was enqueued, unless the function says otherwise.
    #[error("{field}: given {given}, accepted {accepted}")]
    Argument {
        /// Which argument, or which part of one.
        field: &'static str,
        /// What was passed.
        given: String,
        /// What would have been taken.
        accepted: String,
    },
    /// A step that no plan can be made for.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device has not as much memory left: what a cache or a workspace can be made smaller for.
    #[error(
        "memory: given a need of {bytes} bytes on {device}, accepted {}",
        accepted_bytes(*.free)
    )]
    OutOfMemory {
        /// The device's platform.
        device: &'static str,
        /// How many bytes were asked for.
        bytes: u64,
        /// How many were free, if the device says.
        free: Option<u64>,
    },
    /// The device refused an operation.
    #[error("{operation} failed on {device}: {message}")]
    Device {
        /// The device's platform.
        device: &'static str,
        /// What was attempted.
        operation: &'static str,
        /// The device's own words.
        message: String,
    },
}

fn accepted_bytes(free: Option<u64>) -> String {
    free.map_or("as many as are free".into(), |free| {
        format!("at most the {free} that are free")
    })
}

impl Error {
    /// An [`Error::Argument`] from displayable parts.
    pub fn argument(
        field: &'static str,
        given: impl fmt::Display,
        accepted: impl fmt::Display,
    ) -> Self {
        Self::Argument {
            field,
            given: given.to_string(),
            accepted: accepted.to_string(),
        }
    }
}

/// The result of most functions here.
pub type Result<T> = std::result::Result<T, Error>;
