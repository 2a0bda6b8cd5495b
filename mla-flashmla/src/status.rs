//! Parts that all calls of the C interface share: status and extents.

use std::ffi::CStr;

use mla_kernels::Cuda;
use mla_runtime::{Error, Result};

use crate::ffi;

/// Returns the error of a call that FlashMLA or CUDA refused.
pub(crate) fn check(operation: &'static str, status: i32) -> Result<()> {
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

/// Converts an extent that FlashMLA stores as a signed 32-bit number.
pub(crate) fn int(field: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(field, value, "at most 2147483647"))
}

/// Returns the number of SMs of the GPU. A schedule divides its work among them.
pub(crate) fn sms(device: &Cuda) -> Result<usize> {
    let mut sms = 0;
    device.bind()?;
    // SAFETY: the address is that of a value on this stack.
    check("count SMs", unsafe { ffi::fm_sms(&raw mut sms) })?;
    usize::try_from(sms).map_err(|_| Error::argument("SMs", sms, "a number above 0"))
}
