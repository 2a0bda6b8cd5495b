//! Tests that need a GPU. They are one program, since each program contains the code of all
//! kernels. There is a module per kernel, and modules for the conformance suite and the layer. A
//! filter runs one of them: `cargo test --release --features sm90 --test gpu -- --include-ignored
//! wgmma_mla`.

#![cfg(feature = "gpu")]

/// Defines a module with the conformance tests of each backend, and says why they are ignored.
#[cfg(any(feature = "sm80", feature = "sm90"))]
macro_rules! conformance {
    ($why:literal; $($test:ident: $conformance:ident of $backend:ty;)*) => {$(
        mod $test {
            use super::*;

            mla_conformance::$conformance!(#[ignore = $why] $backend, crate::common::gpu());
        }
    )*};
}

#[cfg(any(feature = "sm80", feature = "sm90"))]
#[path = "../calls/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod calls;
mod common;
mod cubins;
mod fence;
#[cfg(any(feature = "sm80", feature = "sm90"))]
#[macro_use]
mod forwarded;
mod handles;
mod helpers;
mod tensors;

#[cfg(feature = "sm90")]
mod conformance;
#[cfg(feature = "sm90")]
mod indexer;
#[cfg(feature = "sm80")]
mod invariance;
#[cfg(feature = "sm90")]
mod layer;
#[cfg(any(feature = "sm80", feature = "sm90"))]
mod loaded;
#[cfg(feature = "sm90")]
mod of_row;
#[cfg(feature = "sm80")]
mod portable;
#[cfg(feature = "sm90")]
mod refusals;
#[cfg(any(feature = "sm80", feature = "sm90"))]
mod stress;
#[cfg(feature = "sm90")]
mod wgmma_attn;
#[cfg(feature = "sm90")]
mod wgmma_mla;
#[cfg(feature = "sm90")]
mod wgmma_mla_sparse;
