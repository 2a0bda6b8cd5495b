//! Presence of the libraries of CUDA.
//!
//! cudarc loads a library when one of its functions is first called, and panics if the library is
//! missing. This module therefore looks for it first. Another crate of the program may make cudarc
//! link the libraries instead, as candle does. There is then nothing to look for, since the program
//! would not have started without them.

// Fallback for cudarc's function of this name. If cudarc has that function, it hides this one in
// the functions below.
#[allow(dead_code)]
unsafe fn is_culib_present() -> bool {
    true
}

/// Returns true if the driver is there.
pub(crate) fn has_driver() -> bool {
    #[allow(unused_imports, clippy::wildcard_imports)]
    use cudarc::driver::sys::*;
    // SAFETY: this loads the library, whose initialisers are those that every user of it runs.
    unsafe { is_culib_present() }
}

/// Returns true if cuBLAS is there.
pub(crate) fn has_cublas() -> bool {
    #[allow(unused_imports, clippy::wildcard_imports)]
    use cudarc::cublas::sys::*;
    // SAFETY: this loads the library, whose initialisers are those that every user of it runs.
    unsafe { is_culib_present() }
}

/// Returns true if NCCL is there.
#[cfg(feature = "nccl")]
pub(crate) fn has_nccl() -> bool {
    #[allow(unused_imports, clippy::wildcard_imports)]
    use cudarc::nccl::sys::*;
    // SAFETY: this loads the library, whose initialisers are those that every user of it runs.
    unsafe { is_culib_present() }
}
