//! Kernels for Hopper, by its own instructions.

mod flash_attn;
mod flash_mla;

pub use flash_attn::{FlashAttn, FlashAttnState};
pub use flash_mla::{FlashMla, FlashMlaState};
