//! Parts that all calls of the C interface share: status and extents.

use std::ffi::{CStr, c_void};

use mla_kernels::Cuda;
use mla_runtime::{Error, Result};

use crate::ffi;

/// Returns the error of a call that FlashMLA or CUDA refused.
fn check(operation: &'static str, status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function has no parameters, and its text lives until this thread's next call.
    let text = unsafe { CStr::from_ptr(ffi::fm_last_error()) };
    Err(Error::Device {
        device: "cuda",
        operation,
        message: text.to_string_lossy().into_owned(),
    })
}

/// Enqueues a launch of the C interface.
///
/// # Safety
///
/// `function` is one of [`ffi`], and every address in `params` is as the header says.
pub(crate) unsafe fn launch<Params>(
    device: &Cuda,
    operation: &'static str,
    function: unsafe extern "C" fn(*const Params, *mut c_void) -> i32,
    params: &Params,
) -> Result<()> {
    device.bind()?;
    // SAFETY: this function's own contract covers the addresses in `params`. The stream's context
    // is current.
    check(operation, unsafe { function(params, device.raw_stream()) })
}

/// Converts an extent that FlashMLA stores as a signed 32-bit number.
pub(crate) fn int(field: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(field, value, "at most 2147483647"))
}
