//! The problem that a state or metadata was made for.

use super::LayerConfig;
use crate::spec::Problem;
use crate::{Error, Result};

/// The problem that a state or metadata was made for. A call of a backend with another problem
/// refuses it, because its memory has another size.
///
/// A backend whose own safety depends on these sizes keeps one in its state.
///
/// ```
/// use mla_runtime::backend::{LayerConfig, MadeFor};
/// use mla_runtime::model::{DType, MlaDims};
/// use mla_runtime::spec::Problem;
///
/// let config = |heads| LayerConfig::new(Problem::new(MlaDims::R1, heads, DType::BF16), 0.1);
/// let made_for = MadeFor::new(&config(16));
/// made_for.check("state", &config(16))?;
/// assert_eq!(
///     made_for.check("state", &config(128)).unwrap_err().to_string(),
///     "state: given one for heads = 16, accepted one for heads = 128, as the layer has it"
/// );
/// # Ok::<(), mla_runtime::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MadeFor {
    problem: Problem,
}

impl MadeFor {
    /// Made by a backend of this configuration.
    pub const fn new(config: &LayerConfig) -> Self {
        Self {
            problem: config.problem,
        }
    }

    /// Refuses to be used by a backend of another problem; `field` is what was made.
    ///
    /// # Errors
    ///
    /// The first field of the problem that differs.
    pub fn check(&self, field: &'static str, config: &LayerConfig) -> Result<()> {
        self.check_problem(field, &config.problem)
    }

    pub(crate) fn check_problem(&self, field: &'static str, theirs: &Problem) -> Result<()> {
        match self.problem == *theirs {
            true => Ok(()),
            false => Err(self.refused(field, theirs)),
        }
    }

    #[cold]
    fn refused(&self, field: &'static str, theirs: &Problem) -> Error {
        let (name, values) = self.problem.difference(theirs).unwrap_or_default();
        let [given, accepted] = values.map(|value| format!("one for {name} = {value}"));
        Error::argument(field, given, accepted + ", as the layer has it")
    }
}
