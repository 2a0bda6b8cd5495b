//! Borrowed, checked views of a device's memory.

pub mod cache;
pub mod host;
pub mod lse;
pub mod rotary;
pub mod tensor;
