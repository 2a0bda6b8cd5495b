//! An engine's attention before and after a port. The same layer has expanded attention of the
//! engine's own ([`before`]), or uses mla-candle ([`after`]).
//!
//! The engine pads a step's requests to the longest. It keeps latents and rotary keys in two paged
//! tensors, and writes them by a slot for each token. Both versions share the parts that a port
//! keeps: projections, rotation, pages and block tables ([`engine`]). `tests/port.rs` compares the
//! two over the steps that an engine makes.

pub mod after;
pub mod before;
pub mod engine;
