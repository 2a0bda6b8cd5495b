//! State and metadata of a backend that was chosen at run time.

use std::any::Any;
use std::fmt;

use crate::error::{Error, Result};

/// The state or metadata of one backend, without its type. Handing it to another backend is an
/// error, not undefined behaviour.
pub struct Opaque {
    backend: &'static str,
    value: Box<dyn Any + Send>,
}

impl Opaque {
    pub(super) fn new<T: Send + 'static>(backend: &'static str, value: T) -> Self {
        Self {
            backend,
            value: Box::new(value),
        }
    }

    pub(super) fn get<T: 'static>(&self, backend: &'static str) -> Result<&T> {
        self.value
            .downcast_ref()
            .ok_or_else(|| foreign(self.backend, backend))
    }

    pub(super) fn get_mut<T: 'static>(&mut self, backend: &'static str) -> Result<&mut T> {
        let given = self.backend;
        self.value
            .downcast_mut()
            .ok_or_else(|| foreign(given, backend))
    }
}

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opaque({})", self.backend)
    }
}

#[cold]
fn foreign(given: &str, accepted: &str) -> Error {
    Error::argument(
        "state or metadata",
        format!("that of {given}"),
        format!("that of {accepted}"),
    )
}
