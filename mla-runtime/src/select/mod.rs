//! The selection of two backends for a request, with every reason against the others.

mod error;
mod explain;
mod instantiate;
pub mod known;
mod registry;
mod selection;

pub use error::SelectionError;
pub use explain::{Candidate, Explanation};
pub(crate) use instantiate::selected;
pub use registry::Registry;
pub use selection::{Selection, SelectionRequest, tried_before};

/// The ways in which a program gets backends. Every error about missing backends contains this
/// text.
pub(crate) const HOW_TO_LINK: &str = "link a backend crate, such as `use mla_kernels as _;`, or \
     add a backend's ENTRY with `Registry::add`; a C program links a staticlib whole \
     (-Wl,--whole-archive)";
