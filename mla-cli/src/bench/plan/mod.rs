//! The rows of settings: every combination, and every reason why one cannot run, before any does.
//!
//! `axes` reads the batches and models of a sweep, and `rows` collects what comes of them for each
//! backend that is compared, for a `sweep` or for a file of `cases`.

mod axes;
pub(crate) mod rows;
pub(super) mod sweep;
