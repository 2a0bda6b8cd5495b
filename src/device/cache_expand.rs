//! Keys and values of cached rows, computed by this crate's own kernel.

use mla_runtime::Result;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::Capability;
use mla_runtime::tensor::{CacheLayout, TensorMut, TensorRef};

use super::Cuda;
use super::argument::{narrow, wide};
use crate::raw;

/// Number of rows from which on the kernel is faster than a gather followed by cuBLAS.
const MIN_ROWS: usize = 1024;

/// Returns true if the kernel takes these rows, and is the better choice.
pub(super) fn fits(
    device: &Cuda,
    cache: &CacheLayout,
    gather: &raw::MlaCacheGatherParams,
    weights: &TensorRef<'_, Cuda>,
    to: &TensorMut<'_, Cuda>,
) -> bool {
    let (weights_layout, to_layout) = (weights.layout(), to.layout());
    let dtype = to_layout.dtype;
    let aligned = |address: usize| address.is_multiple_of(16);
    // These strides count elements of two bytes.
    let counted = |stride: usize| stride.is_multiple_of(8) && stride < 1 << 32;
    let in_bytes = |stride: i64| stride % 16 == 0 && (0..1 << 40).contains(&stride);
    device.gpu().capability == Capability::new(9, 0)
        && raw::compiled::ALL.contains(&"sm_90a")
        && dtype != DType::F32
        && cache.format == KvFormat::of(dtype)
        && (gather.latent_dim, gather.rope_dim) == (512, 64)
        && gather.rows as usize >= MIN_ROWS
        && (1..=32).contains(&gather.segments)
        && gather.page_size % 64 == 0
        && gather.pages > 0
        && gather.max_pages > 0
        && to_layout.shape[2].is_multiple_of(256)
        && to_layout.has_unit_columns()
        && weights_layout.strides[1] == 1
        && [weights_layout.strides[2], to_layout.strides[1]]
            .into_iter()
            .all(counted)
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
            weights.bytes().address() as usize,
            to.as_ref().bytes().address() as usize,
        ]
        .into_iter()
        .all(aligned)
}

/// Returns the parameters of the kernel for rows that [`fits`] accepts.
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
