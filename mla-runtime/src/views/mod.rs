//! Borrowed, checked views of a device's memory.

pub mod cache;
pub mod host;
pub mod lse;
pub(crate) mod memory;
pub mod rotary;
pub mod tensor;
