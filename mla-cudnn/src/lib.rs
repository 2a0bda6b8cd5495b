//! cuDNN's attention as a prefill backend of `mla-runtime`: CUDNN.
//!
//! A program that depends on this crate with the feature `cudnn` and names it (`use mla_cudnn as
//! _;`) has the backend in every registry. The build compiles a shim over cuDNN's frontend, from
//! headers of pinned wheels.
//!
//! cuDNN itself comes from the machine. It is opened when the program first needs it. The
//! environment variable `MLA_CUDNN` names its file. By default the system looks for
//! `libcudnn.so.9`. [`library`] returns its version, or the reason why there is none. cuDNN's
//! frontend opens the CUDA runtime (`libcudart.so.12` or `.13`) in the same way.

mod lengths;
mod library;
#[cfg(feature = "cudnn")]
mod lists;
#[cfg(any(feature = "cudnn", test))]
mod plans;
mod prefill;
#[cfg(feature = "cudnn")]
mod session;

use mla_runtime::spec::{Capability, Run};

pub use lengths::{ExactLengths, set_exact_lengths};
pub use library::{Version, library};
pub use prefill::Cudnn;
#[cfg(feature = "cudnn")]
pub use prefill::CudnnState;

/// The C interface, as bindgen wraps it.
#[cfg(feature = "cudnn")]
#[allow(
    missing_docs,
    dead_code,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks
)]
mod ffi {
    include!(concat!(env!("OUT_DIR"), "/cudnn_shim.rs"));
}

/// GPUs on which all tests passed, with cuDNN 9.19.
const RUN_ON: &[Run] = &[
    Run {
        gpu: "H100",
        capability: Capability::new(9, 0),
        date: "2026-11-22",
        commit: "30f2c6e",
    },
    Run {
        gpu: "H200",
        capability: Capability::new(9, 0),
        date: "2026-11-23",
        commit: "755fc48",
    },
];
