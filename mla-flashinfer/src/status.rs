//! Parts that all calls of the C interface share: status and extents.

use std::ffi::{CStr, c_void};

use mla_kernels::Cuda;
use mla_runtime::model::DType;
use mla_runtime::tensor::Layout;
use mla_runtime::{Error, Result};

use crate::ffi;

/// Returns the error of a call that FlashInfer or CUDA refused.
pub(crate) fn check(operation: &'static str, status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function has no parameters, and its text lives until this thread's next call.
    let text = unsafe { CStr::from_ptr(ffi::fi_last_error()) };
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

/// Converts an extent that FlashInfer stores as a signed 32-bit number.
pub(crate) fn int(field: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(field, value, "at most 2147483647"))
}

/// Formats the maximum number of elements for an error.
fn at_most(elements: usize) -> String {
    format!("at most {elements} elements, which the kernels count in 32 bits")
}

/// Converts a stride in elements. FlashInfer multiplies it by the index of a row in 32 bits.
#[cfg(feature = "fa")]
pub(crate) fn stride(field: &'static str, stride: usize, rows: usize) -> Result<u32> {
    let end = stride.checked_mul(rows.max(1));
    match (u32::try_from(stride), end.map(u32::try_from)) {
        (Ok(stride), Some(Ok(_))) => Ok(stride),
        _ => {
            let given = format!("{stride} elements, {rows} times");
            Err(Error::argument(field, given, at_most(u32::MAX as usize)))
        }
    }
}

/// Returns the strides of a tensor's tokens and heads. FlashInfer adds multiples of both in 32
/// bits.
#[cfg(feature = "fa")]
pub(crate) fn strides(field: &'static str, layout: &Layout) -> Result<[u32; 2]> {
    within(field, layout, u32::MAX as usize)?;
    let [token, head, _] = layout.strides;
    Ok([stride(field, token, 1)?, stride(field, head, 1)?])
}

/// Refuses a tensor that spans more than `max` elements, including gaps.
pub(crate) fn within(field: &'static str, layout: &Layout, max: usize) -> Result<()> {
    let span = layout.span_bytes();
    let span = span.map_or(usize::MAX, |bytes| bytes / layout.dtype.bytes());
    if span <= max {
        return Ok(());
    }
    let given = format!("{span} elements from the first to the last");
    Err(Error::argument(field, given, at_most(max)))
}

/// Returns the number of a dtype in the C interface.
pub(crate) fn dtype_code(dtype: DType) -> Result<i32> {
    match dtype {
        DType::F16 => Ok(0),
        DType::BF16 => Ok(1),
        DType::F32 => Err(Error::argument("dtype", dtype, "f16 and bf16")),
    }
}

/// Returns the number of SMs of the GPU. A plan divides its work among them.
pub(crate) fn sms(device: &Cuda) -> Result<i32> {
    int("SMs", device.gpu().multiprocessors)
}

#[cfg(all(test, feature = "fa"))]
mod tests {
    use super::*;

    fn layout(shape: [usize; 3], strides: [usize; 3]) -> Layout {
        let mut layout = Layout::contiguous(DType::BF16, shape);
        layout.strides = strides;
        layout
    }

    #[test]
    fn elements_are_counted_over_all_axes() {
        // The orders are tokens first and heads first. Each axis is within 32 bits.
        let near = layout([4, 2, 512], [1024, 512, 1]);
        assert_eq!(strides("query", &near).unwrap(), [1024, 512]);
        let far = layout([3, 2, 512], [1 << 30, (1 << 31) + 512, 1]);
        let error = strides("query", &far).unwrap_err().to_string();
        assert_eq!(
            error,
            "query: given 4294968320 elements from the first to the last, accepted at most \
             4294967295 elements, which the kernels count in 32 bits"
        );
        assert!(strides("query", &layout([0, 2, 512], [1 << 31, 512, 1])).is_ok());
        assert!(
            within(
                "keys",
                &layout([2, 1, 1], [1 << 31, 1, 1]),
                i32::MAX as usize
            )
            .is_err()
        );
    }

    #[test]
    fn rows_are_counted_in_32_bits() {
        assert_eq!(stride("row stride", 576, 64).unwrap(), 576);
        assert_eq!(
            stride("row stride", u32::MAX as usize, 1).unwrap(),
            u32::MAX
        );
        for (elements, rows) in [(1 << 26, 64), (1 << 32, 1), (usize::MAX, 2)] {
            let error = stride("row stride", elements, rows)
                .unwrap_err()
                .to_string();
            assert!(error.starts_with("row stride: given "), "{error}");
        }
    }
}
