//! Checks of a tensor's view before its address goes to a kernel.

use mla_runtime::model::{DType, KvFormat, RotaryStyle};
use mla_runtime::tensor::Layout;
use mla_runtime::{Error, Result};

use crate::raw;

/// Refuses a tensor whose rows are not contiguous.
pub(crate) fn unit_columns(name: &'static str, layout: &Layout) -> Result<()> {
    if layout.has_unit_columns() {
        Ok(())
    } else {
        Err(Error::argument(name, layout, "a last axis of stride 1"))
    }
}

/// Converts an extent to the type of the C interface.
pub(crate) fn narrow(name: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(name, value, "at most 2147483647"))
}

/// Converts a stride to the type of the C interface.
pub(crate) fn wide(name: &'static str, value: usize) -> Result<i64> {
    i64::try_from(value).map_err(|_| Error::argument(name, value, "at most 2^63 - 1"))
}

/// Returns the C interface's number of a dtype.
pub(crate) fn dtype_code(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => raw::MLA_DTYPE_F32 as i32,
        DType::F16 => raw::MLA_DTYPE_F16 as i32,
        DType::BF16 => raw::MLA_DTYPE_BF16 as i32,
    }
}

/// Returns the C interface's number of a cache format.
pub(crate) fn format_code(format: KvFormat) -> i32 {
    match format {
        KvFormat::F32 => raw::MLA_CACHE_F32 as i32,
        KvFormat::F16 => raw::MLA_CACHE_F16 as i32,
        KvFormat::BF16 => raw::MLA_CACHE_BF16 as i32,
        KvFormat::Fp8 => raw::MLA_CACHE_FP8 as i32,
        KvFormat::Fp8DsMla => raw::MLA_CACHE_FP8_DS_MLA as i32,
        KvFormat::Fp8PerToken => raw::MLA_CACHE_FP8_PER_TOKEN as i32,
    }
}

/// Returns the C interface's number of a rotary style.
pub(crate) fn style_code(style: RotaryStyle) -> i32 {
    match style {
        RotaryStyle::Interleaved => raw::MLA_ROTARY_INTERLEAVED as i32,
        RotaryStyle::Halves => raw::MLA_ROTARY_HALVES as i32,
    }
}
