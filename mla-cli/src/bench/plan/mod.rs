//! The rows of the settings: every combination, and every reason why a row cannot run, before any
//! does.
//!
//! `axes` reads the batches and models of a sweep. `rows` collects the resulting rows for each
//! backend of the comparison. They come from a `sweep` or from a file of `cases`.

mod axes;
pub(crate) mod rows;
pub(super) mod sweep;
