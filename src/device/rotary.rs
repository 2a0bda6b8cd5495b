//! The rotary embedding in the parameters of a cache write.

use mla_runtime::dtype::DType;
use mla_runtime::error::{Error, Result};
use mla_runtime::rotary::RotaryStyle;

use super::Cuda;
use super::argument::{narrow, wide};
use crate::raw;

/// The runtime's rotation, on this device.
pub type Rotary<'a> = mla_runtime::rotary::Rotary<'a, Cuda>;
/// The runtime's rotary parts of queries, on this device.
pub type RotaryQuery<'a> = mla_runtime::rotary::RotaryQuery<'a, Cuda>;

/// Writes the rotation into the parameters of a cache write of `tokens` rotary keys of `dtype` and
/// `width`.
pub(super) fn fill(
    rotary: &Rotary<'_>,
    query: Option<RotaryQuery<'_>>,
    tokens: usize,
    width: usize,
    dtype: DType,
    params: &mut raw::MlaCacheWriteParams,
) -> Result<()> {
    rotary.check(tokens, width)?;
    let cos = rotary.cos.layout();
    params.positions = rotary.positions.bytes().address() as *const _;
    params.cos = rotary.cos.bytes().address() as *const _;
    params.sin = rotary.sin.bytes().address() as *const _;
    params.table_stride = wide("cos", cos.strides[1])?;
    params.positions_len = wide("positions", cos.shape[1])?;
    params.rotary_style = match rotary.style {
        RotaryStyle::Interleaved => raw::MLA_ROTARY_INTERLEAVED as i32,
        RotaryStyle::Halves => raw::MLA_ROTARY_HALVES as i32,
    };
    let Some(query) = query else { return Ok(()) };
    let (from, from_layout, to) = match query {
        RotaryQuery::InPlace(tensor) => {
            let layout = *tensor.layout();
            let address = tensor.into_bytes().address();
            (address, layout, (address, layout))
        }
        RotaryQuery::Into { from, to } => {
            let layout = *to.layout();
            (
                from.bytes().address(),
                *from.layout(),
                (to.into_bytes().address(), layout),
            )
        }
    };
    let shape = [tokens, from_layout.shape[1], width];
    for (name, layout) in [("query", from_layout), ("rotated query", to.1)] {
        if layout.dtype != dtype || layout.shape != shape || !layout.has_unit_columns() {
            return Err(Error::argument(
                name,
                layout,
                format!("{dtype} {shape:?} with unit columns"),
            ));
        }
    }
    params.query_rope = from as *const _;
    params.query_rope_out = to.0 as *mut _;
    params.query_token_stride = wide("query", from_layout.strides[0])?;
    params.query_head_stride = wide("query", from_layout.strides[1])?;
    params.query_out_token_stride = wide("rotated query", to.1.strides[0])?;
    params.query_out_head_stride = wide("rotated query", to.1.strides[1])?;
    params.heads = narrow("heads", shape[1])?;
    Ok(())
}
