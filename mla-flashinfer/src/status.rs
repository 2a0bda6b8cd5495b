//! What every call of the C interface has in common: its status, and the extents that it takes.

use std::ffi::CStr;

use mla_kernels::Cuda;
use mla_runtime::dtype::DType;
use mla_runtime::error::{Error, Result};

use crate::ffi;

/// The error of a call that FlashInfer or CUDA refused.
pub(crate) fn check(operation: &'static str, status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function takes nothing, and its text lives until this thread's next call.
    let text = unsafe { CStr::from_ptr(ffi::fi_last_error()) };
    Err(Error::Device {
        device: "cuda",
        operation,
        message: text.to_string_lossy().into_owned(),
    })
}

/// An extent that FlashInfer holds in 32 bits with a sign.
pub(crate) fn int(field: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(field, value, "at most 2147483647"))
}

/// A stride in elements, which FlashInfer multiplies by the number of a row in 32 bits.
pub(crate) fn stride(field: &'static str, stride: usize, rows: usize) -> Result<u32> {
    let end = stride.checked_mul(rows.max(1));
    match (u32::try_from(stride), end.map(u32::try_from)) {
        (Ok(stride), Some(Ok(_))) => Ok(stride),
        _ => Err(Error::argument(
            field,
            format!("{stride} elements, {rows} times"),
            "at most 4294967295 elements in all, which FlashInfer counts in 32 bits",
        )),
    }
}

/// The number of a dtype in the C interface.
pub(crate) fn dtype_code(dtype: DType) -> Result<i32> {
    match dtype {
        DType::F16 => Ok(0),
        DType::BF16 => Ok(1),
        DType::F32 => Err(Error::argument("dtype", dtype, "f16 and bf16")),
    }
}

/// The SMs of the GPU, among which a plan divides its work.
pub(crate) fn sms(device: &Cuda) -> Result<usize> {
    let mut sms = 0;
    device.bind()?;
    // SAFETY: the address is that of a value on this stack.
    check("count SMs", unsafe { ffi::fi_sms(&raw mut sms) })?;
    usize::try_from(sms).map_err(|_| Error::argument("SMs", sms, "a number above 0"))
}
