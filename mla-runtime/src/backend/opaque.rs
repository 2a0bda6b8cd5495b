//! State and metadata of a backend that was chosen at run time.

use std::any::Any;
use std::fmt;

use super::LayerConfig;
use crate::spec::Problem;
use crate::{Error, Result};

/// The state or metadata of one backend, without its type. It is an error to pass it to another
/// backend, or to the same backend with another problem.
pub struct Opaque {
    backend: &'static str,
    made_for: Problem,
    value: Box<dyn Any + Send>,
}

impl Opaque {
    pub(super) fn new<T: Send + 'static>(
        backend: &'static str,
        config: &LayerConfig,
        value: T,
    ) -> Self {
        Self {
            backend,
            made_for: config.problem,
            value: Box::new(value),
        }
    }

    pub(super) fn get<T: 'static>(
        &self,
        backend: &'static str,
        config: &LayerConfig,
    ) -> Result<&T> {
        let Some(value) = self.value.downcast_ref() else {
            return Err(foreign(self.backend, backend));
        };
        self.made_for.check_same(FIELD, &config.problem)?;
        Ok(value)
    }

    pub(super) fn get_mut<T: 'static>(
        &mut self,
        backend: &'static str,
        config: &LayerConfig,
    ) -> Result<&mut T> {
        let Some(value) = self.value.downcast_mut() else {
            return Err(foreign(self.backend, backend));
        };
        self.made_for.check_same(FIELD, &config.problem)?;
        Ok(value)
    }
}

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opaque({})", self.backend)
    }
}

const FIELD: &str = "state or metadata";

#[cold]
fn foreign(given: &str, accepted: &str) -> Error {
    Error::argument(
        FIELD,
        format!("that of {given}"),
        format!("that of {accepted}"),
    )
}
