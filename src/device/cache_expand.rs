//! Keys and values of cached rows, computed by this crate's own kernel. A row's sums have one
//! order, whatever the other rows. For batch-invariant problems the kernel therefore expands any
//! number of rows, and those of a tensor, too.

use mla_runtime::Result;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::Capability;
use mla_runtime::tensor::{CacheLayout, TensorMut, TensorRef};

use super::Cuda;
use super::argument::{dtype_code, format_code, narrow, wide};
use crate::raw;

/// Number of rows from which on the kernel is faster than a gather followed by cuBLAS.
const MIN_ROWS: usize = 1024;

/// Returns true if the kernel takes these rows, and is the better choice. For a batch-invariant
/// problem any number of rows is taken.
pub(super) fn fits(
    device: &Cuda,
    cache: &CacheLayout,
    gather: &raw::MlaCacheGatherParams,
    weights: &TensorRef<'_, Cuda>,
    to: &TensorMut<'_, Cuda>,
) -> bool {
    let in_bytes = |stride: i64| stride % 16 == 0 && (0..1 << 40).contains(&stride);
    takes_product(device, weights, to)
        && cache.format == KvFormat::of(to.dtype())
        && (gather.latent_dim, gather.rope_dim) == (512, 64)
        && (device.batch_invariant || gather.rows as usize >= MIN_ROWS)
        && (1..=32).contains(&gather.segments)
        && gather.page_size % 64 == 0
        && gather.pages > 0
        && gather.max_pages > 0
        && [
            gather.cache_page_stride,
            gather.cache_slot_stride,
            gather.cache_rope_page_stride,
            gather.cache_rope_slot_stride,
            gather.rope_row_stride * 2,
        ]
        .into_iter()
        .all(in_bytes)
        && [
            gather.cache as usize,
            gather.cache_rope as usize,
            gather.rope as usize,
        ]
        .into_iter()
        .all(|address| address.is_multiple_of(16))
}

/// Returns true if the kernel takes these weights and this result.
fn takes_product(device: &Cuda, weights: &TensorRef<'_, Cuda>, to: &TensorMut<'_, Cuda>) -> bool {
    let (weights_layout, to_layout) = (weights.layout(), to.layout());
    device.gpu().capability == Capability::new(9, 0)
        && raw::compiled::ALL.contains(&"sm_90a")
        && to_layout.dtype != DType::F32
        && to_layout.shape[2].is_multiple_of(256)
        && to_layout.has_unit_columns()
        && weights_layout.strides[1] == 1
        && [weights_layout.strides[2], to_layout.strides[1]]
            .into_iter()
            .all(counted)
        && [weights.bytes(), to.as_ref().bytes()]
            .iter()
            .all(|bytes| bytes.address().is_multiple_of(16))
}

/// A stride of elements of two bytes.
fn counted(stride: usize) -> bool {
    stride.is_multiple_of(8) && stride < 1 << 32
}

/// Returns the rows of a tensor `[1, N, 512]`, if the kernel takes them with these weights and this
/// result.
pub(super) fn rows(
    device: &Cuda,
    latent: &TensorRef<'_, Cuda>,
    weights: &TensorRef<'_, Cuda>,
    to: &TensorMut<'_, Cuda>,
) -> Result<Option<raw::MlaCacheGatherParams>> {
    let layout = latent.layout();
    let [batch, rows, width] = layout.shape;
    // A lone row may have any stride, and has the bits that it has among others.
    let stride = match rows {
        1 => width,
        _ => layout.strides[1],
    };
    let fits = takes_product(device, weights, to)
        && (batch, width) == (1, 512)
        && layout.has_unit_columns()
        && stride >= width
        && counted(stride)
        && latent.bytes().address().is_multiple_of(16);
    if !fits {
        return Ok(None);
    }
    // Without tables, the rows are those of a tensor.
    Ok(Some(raw::MlaCacheGatherParams {
        cache: latent.bytes().address() as *const _,
        cache_slot_stride: wide("latent", stride * 2)?,
        rows: narrow("rows", rows)?,
        latent_dim: 512,
        rope_dim: 64,
        dtype: dtype_code(layout.dtype),
        cache_format: format_code(KvFormat::of(layout.dtype)),
        ..Default::default()
    }))
}

/// Returns the parameters of the kernel for rows that [`fits`] accepts or [`rows`] returns.
pub(super) fn params(
    gather: raw::MlaCacheGatherParams,
    weights: &TensorRef<'_, Cuda>,
    to: TensorMut<'_, Cuda>,
) -> Result<raw::MlaCacheExpandParams> {
    let layout = *to.layout();
    Ok(raw::MlaCacheExpandParams {
        rows: gather,
        weights: weights.bytes().address() as *const _,
        out: to.into_bytes().address() as *mut _,
        weights_stride: wide("weights", weights.layout().strides[2])?,
        out_row_stride: wide("expanded rows", layout.strides[1])?,
        columns: narrow("columns", layout.shape[2])?,
    })
}
