//! Common to every call of the C interface: its status, and the extents that it takes.

use std::ffi::CStr;

use mla_kernels::Cuda;
use mla_runtime::{Error, Result};

use crate::ffi;

/// The error of a call that FlashMLA or CUDA refused.
pub(crate) fn check(operation: &'static str, status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function takes nothing, and its text lives until this thread's next call.
    let text = unsafe { CStr::from_ptr(ffi::fm_last_error()) };
    Err(Error::Device {
        device: "cuda",
        operation,
        message: text.to_string_lossy().into_owned(),
    })
}

/// An extent that FlashMLA holds in 32 bits with a sign.
pub(crate) fn int(field: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(field, value, "at most 2147483647"))
}

/// The SMs of the GPU, among which a schedule divides the work.
pub(crate) fn sms(device: &Cuda) -> Result<usize> {
    let mut sms = 0;
    device.bind()?;
    // SAFETY: the address is that of a value on this stack.
    check("count SMs", unsafe { ffi::fm_sms(&raw mut sms) })?;
    usize::try_from(sms).map_err(|_| Error::argument("SMs", sms, "a number above 0"))
}
