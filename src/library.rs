//! Presence of the libraries of CUDA.
//!
//! cudarc loads each when it is first called, and panics where it is missing, so it is asked
//! beforehand. Where another crate of the program has cudarc link them instead, as candle does,
//! there is no such question: without them the program would not have started.

// Stands behind the functions of this name below, which hide it where they exist.
#[allow(dead_code)]
unsafe fn is_culib_present() -> bool {
    true
}

/// The driver.
pub(crate) fn has_driver() -> bool {
    #[allow(unused_imports, clippy::wildcard_imports)]
    use cudarc::driver::sys::*;
    // SAFETY: this loads the library, whose initialisers are those that every user of it runs.
    unsafe { is_culib_present() }
}

/// cuBLAS.
pub(crate) fn has_cublas() -> bool {
    #[allow(unused_imports, clippy::wildcard_imports)]
    use cudarc::cublas::sys::*;
    // SAFETY: as above.
    unsafe { is_culib_present() }
}

/// NCCL.
#[cfg(feature = "nccl")]
pub(crate) fn has_nccl() -> bool {
    #[allow(unused_imports, clippy::wildcard_imports)]
    use cudarc::nccl::sys::*;
    // SAFETY: as above.
    unsafe { is_culib_present() }
}
