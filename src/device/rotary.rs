//! The rotary embedding in the parameters of a cache write.

use mla_runtime::model::{DType, KvFormat};
use mla_runtime::tensor::{Layout, Memory as _, TensorMut, TensorRef};
use mla_runtime::{Error, Result};

use super::Cuda;
use super::argument::{dtype_code, format_code, narrow, style_code, wide};
use crate::raw;

/// The runtime's rotation, on this device.
pub(super) type Rotary<'a> = mla_runtime::tensor::Rotary<'a, Cuda>;
/// Rotary parts of queries, and the destination of the rotated ones.
pub(super) type Query<'a, 'b> = (TensorRef<'a, Cuda>, TensorMut<'b, Cuda>);

/// The addresses and layouts of vectors before and after their rotation.
type Places = [(u64, Layout); 2];

/// Returns the places of `query`, whose memory this checks.
pub(super) fn places(device: &Cuda, (from, to): Query<'_, '_>) -> Result<Places> {
    device.check_memory([
        ("query", from.bytes()),
        ("rotated query", to.as_ref().bytes()),
    ])?;
    let (from, layout) = ((from.bytes().address(), *from.layout()), *to.layout());
    Ok([from, (to.into_bytes().address(), layout)])
}

/// Writes the rotation into the parameters of a cache write of `tokens` rotary keys of `dtype` and
/// `width`.
pub(super) fn fill(
    device: &Cuda,
    rotary: &Rotary<'_>,
    query: Option<Places>,
    tokens: usize,
    width: usize,
    dtype: DType,
    params: &mut raw::MlaCacheWriteParams,
) -> Result<()> {
    rotary.check(tokens, width)?;
    let positions = rotary.positions()?;
    device.check_memory([
        ("positions", positions.bytes()),
        ("cos", rotary.cos.bytes()),
        ("sin", rotary.sin.bytes()),
    ])?;
    let cos = rotary.cos.layout();
    params.positions = positions.bytes().address() as *const _;
    params.cos = rotary.cos.bytes().address() as *const _;
    params.sin = rotary.sin.bytes().address() as *const _;
    params.table_stride = wide("cos", cos.strides[1])?;
    params.positions_len = wide("positions", cos.shape[1])?;
    params.rotary_style = style_code(rotary.style);
    let Some([(from, from_layout), (to, to_layout)]) = query else {
        return Ok(());
    };
    let shape = [tokens, from_layout.shape[1], width];
    for (name, layout) in [("query", from_layout), ("rotated query", to_layout)] {
        if layout.dtype != dtype || layout.shape != shape || !layout.has_unit_columns() {
            return Err(Error::argument(
                name,
                layout,
                format!("{dtype} {shape:?} with unit columns"),
            ));
        }
    }
    params.query_rope = from as *const _;
    params.query_rope_out = to as *mut _;
    params.query_token_stride = wide("query", from_layout.strides[0])?;
    params.query_head_stride = wide("query", from_layout.strides[1])?;
    params.query_out_token_stride = wide("rotated query", to_layout.strides[0])?;
    params.query_out_head_stride = wide("rotated query", to_layout.strides[1])?;
    params.heads = narrow("heads", shape[1])?;
    Ok(())
}

/// Returns the parameters of a rotation in place, without a cache write, or `None` if there is
/// nothing to rotate.
///
/// They describe a write to a cache without pages, in which no slot lies. Rows and slots of the
/// write are read, but nothing is stored.
pub(super) fn params(
    device: &Cuda,
    rotary: &Rotary<'_>,
    vectors: TensorMut<'_, Cuda>,
) -> Result<Option<raw::MlaCacheWriteParams>> {
    let layout = *vectors.layout();
    let [tokens, heads, width] = layout.shape;
    if tokens * heads * width == 0 {
        return Ok(None);
    }
    device.check_bytes("query", vectors.as_ref().bytes())?;
    let address = vectors.into_bytes().address();
    let stride = wide("query", layout.strides[0])?;
    let mut params = raw::MlaCacheWriteParams {
        latent: address as *const _,
        rope: address as *const _,
        slots: rotary.positions()?.bytes().address() as *const _,
        latent_token_stride: stride,
        rope_token_stride: stride,
        tokens: narrow("tokens", tokens)?,
        page_size: 1,
        latent_dim: narrow("rope", width)?,
        rope_dim: narrow("rope", width)?,
        dtype: dtype_code(layout.dtype),
        cache_format: format_code(KvFormat::F32),
        cache_scale: 1.0,
        ..Default::default()
    };
    fill(
        device,
        rotary,
        Some([(address, layout); 2]),
        tokens,
        width,
        layout.dtype,
        &mut params,
    )?;
    Ok(Some(params))
}
