//! From a request to two backends, and every reason against the others.

pub mod explain;
pub(crate) mod instantiate;
pub mod known;
pub mod registry;
pub mod selection;
