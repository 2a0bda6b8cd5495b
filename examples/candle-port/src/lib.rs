//! An engine's attention, and what became of it: the same layer with expanded attention of the
//! engine's own ([`before`]) and through mla-candle ([`after`]).
//!
//! The engine is of the kind that pads a step's requests to the longest, keeps latents and rotary
//! keys in two paged tensors, and writes them by a slot for each token. Both share the parts that a
//! port keeps: projections, rotation, pages, block tables ([`engine`]). `tests/port.rs` compares
//! the two over the steps that an engine makes.

pub mod after;
pub mod before;
pub mod engine;
