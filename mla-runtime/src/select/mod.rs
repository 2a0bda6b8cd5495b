//! From a request to two backends, and every reason against the others.

pub mod explain;
mod instantiate;
pub mod known;
pub mod registry;
pub mod selection;
