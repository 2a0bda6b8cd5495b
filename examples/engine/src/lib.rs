//! A small inference engine. It serves a DeepSeek-like model of random weights.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | the model's configuration, from a `config.json` |
//! | [`tensor`] | a matrix in a device's memory |
//! | [`memory`] | the library's layer and workspace, and the other memory of a step |
//! | [`operations`] | a model's operations besides attention and GEMMs, for the CPU and for a GPU |
//! | [`attention`], [`mlp`], [`model`] | a layer's attention, its MLP or its experts, and all layers of a step |
//! | [`graphs`] | replays of a step on a device |
//! | [`runner`] | a step from token ids to token ids: caches, workspace, graphs |
//! | [`pages`] | the page allocator: shared prefixes, copy-on-write |
//! | [`request`], [`drafts`] | a request's state, and drafts of its next tokens |
//! | [`scheduler`] | the choice of a step's requests, and of their numbers of tokens |
//! | [`engine`] | requests in, tokens out |
//! | [`metrics`], [`status`] | counts, and their display in a terminal |
//!
//! Comments in [`attention`], [`runner`] and [`graphs`] mark the code that uses the library in a
//! step. It is at most 25 lines for a step, which `tests/lines.rs` counts.

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
