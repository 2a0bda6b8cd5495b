//! What a backend supports, what is asked of it, and why it cannot serve.

pub mod availability;
pub(crate) mod build;
mod family;
pub mod kernels;
pub mod problem;
pub mod reason;
pub mod spec;
mod support;
