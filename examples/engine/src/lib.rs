//! A small inference engine: a DeepSeek-like model of random weights, served as an engine serves
//! one.
//!
//! | module | what |
//! |---|---|
//! | [`config`] | the model's numbers, from a `config.json` |
//! | [`tensor`] | a matrix in a device's memory |
//! | [`memory`] | the library's layer and workspace, and what a step uses of memory beside them |
//! | [`operations`] | what a model does beside attention and products, for the CPU and for a GPU |
//! | [`attention`], [`mlp`], [`model`] | a layer's attention, its MLP or its experts, and all layers: what is enqueued for a step |
//! | [`graphs`] | how a device replays a step |
//! | [`runner`] | a step from token ids to token ids: caches, workspace, graphs |
//! | [`pages`] | the page allocator: shared prefixes, copy-on-write |
//! | [`request`], [`drafts`] | a request's state, and proposals for its next tokens |
//! | [`scheduler`] | which requests a step brings, with how many tokens each |
//! | [`engine`] | requests in, tokens out |
//! | [`metrics`], [`status`] | what is counted, and what a terminal shows meanwhile |
//!
//! The uses of the library in a step stand in [`attention`], [`runner`] and [`graphs`] between
//! comments that mark them: at most 25 lines for a step, which `tests/lines.rs` counts.

pub mod attention;
pub mod config;
pub mod drafts;
pub mod engine;
pub mod error;
pub mod graphs;
pub mod memory;
pub mod metrics;
pub mod mlp;
pub mod model;
pub mod operations;
pub mod pages;
pub mod request;
pub mod runner;
pub mod scheduler;
pub mod status;
pub mod tensor;

/// The device that the features choose.
#[cfg(not(feature = "gpu"))]
pub type Chosen = mla_cpu::Cpu;
/// The device that the features choose.
#[cfg(feature = "gpu")]
pub type Chosen = mla_kernels::Cuda;
