//! Support of backends, problems of engines, and the reasons why a backend cannot serve one.

pub mod availability;
pub(crate) mod build;
mod family;
pub mod kernels;
pub mod problem;
pub mod reason;
pub mod spec;
mod support;
