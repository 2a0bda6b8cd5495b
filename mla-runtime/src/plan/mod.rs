//! Planning of a step: pure functions of lengths and dimensions, without a device.
//!
//! An engine that schedules a step uses these modules in this order:
//!
//! 1. [`split`] decides which requests take the absorbed path and which the expanded path. It also
//!    orders the batch.
//! 2. [`slots`] finds the slots into which the new tokens' cache rows are written.
//! 3. [`context`] divides cached context into chunks for the expanded path, so that a workspace of
//!    a fixed number of rows suffices.
//!
//! Before the first step, [`workspace`] gives the number of rows for that workspace, and [`memory`]
//! the bytes of all buffers. [`crossover`] gives the number of query tokens up to which the
//! absorbed path is cheaper. If the cache is spread over several devices, [`parallel`] says which
//! rank holds which token.
//!
//! All arithmetic is checked. A quantity that does not fit is an [error](crate::Error), never a
//! panic or a wrapped number.

pub mod context;
pub mod crossover;
pub(crate) mod index;
pub mod limits;
pub mod memory;
pub mod parallel;
pub mod slots;
pub mod split;
pub mod workspace;
