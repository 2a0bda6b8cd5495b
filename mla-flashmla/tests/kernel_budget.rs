//! The budget of FlashMLA's kernels.
#![cfg(feature = "sm90")]

#[path = "../../mla-flashinfer/tests/budget/mod.rs"]
mod budget;
