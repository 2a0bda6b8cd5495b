//! From a request to two backends, and every reason against the others.

mod explain;
mod instantiate;
pub mod known;
mod registry;
mod selection;

pub use explain::{Candidate, Explanation, PhaseExplanation};
pub(crate) use instantiate::{decode_of, prefill_of};
pub(crate) use registry::HOW_TO_LINK;
pub use registry::{Registry, RegistryError};
pub(crate) use selection::Best;
pub use selection::{Selection, SelectionError, SelectionRequest, tried_before};
