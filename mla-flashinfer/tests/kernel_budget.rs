//! The budget of FlashInfer's kernels.
#![cfg(feature = "gpu")]

mod budget;
