//! Calls of sparse absorbed attention through the kernels' C interface, for the kernels of all
//! families.

use mla_runtime::backend::{DecodeBatch, DecodeCall, LayerConfig, Output, StepLimits};
use mla_runtime::spec::BackendSpec;
use mla_runtime::tensor::{ArrayRef, CacheRef};
use mla_runtime::{Error, Result};

use super::kernel::State;
use crate::device::Cuda;
use crate::device::argument::{dtype_code, format_code, narrow, wide};
use crate::raw;

/// Returns the parameters that do not depend on a tensor. They suffice for the size of a kernel's
/// workspace.
pub(super) fn shape(config: &LayerConfig) -> Result<raw::MlaSparseParams> {
    let problem = &config.problem;
    // The launch refuses null pointers, or takes them for absent tensors.
    Ok(raw::MlaSparseParams {
        heads: narrow("heads", problem.heads as usize)?,
        latent_dim: narrow("latent", problem.dims.latent as usize)?,
        rope_dim: narrow("rope", problem.dims.head.rope as usize)?,
        q_dtype: dtype_code(problem.dtype),
        cache_format: format_code(problem.kv_format),
        softmax_scale: config.softmax_scale,
        ..Default::default()
    })
}

/// Returns the parameters of the largest step. The kernels' workspaces do not depend on its size.
pub(super) fn largest(config: &LayerConfig, _: &StepLimits) -> Result<raw::MlaSparseParams> {
    shape(config)
}

/// Returns the checked parameters of a call, or `None` if there is nothing to do. The workspace is
/// not among them.
pub(super) fn params(
    config: &LayerConfig,
    spec: &BackendSpec,
    call: DecodeCall<'_, Cuda>,
    state: &State,
) -> Result<Option<raw::MlaSparseParams>> {
    call.check(config, spec)?;
    state.workspace(config)?;
    let problem = &config.problem;
    let [latent, rope] = call.query.parts(problem.dims.latent as usize)?;
    let tokens = latent.shape()[0];
    let Output::Plain(out) = call.out else {
        return Err(Error::argument("out", "e4m3", problem.dtype));
    };
    let out_layout = *out.layout();
    let Some(lists) = call.slots else {
        let accepted = "present: this backend is sparse";
        return Err(Error::argument("slots", "absent", accepted));
    };
    let cache = call.cache.layout();
    if tokens == 0 {
        return Ok(None);
    }
    let mut params = shape(config)?;
    params.q_latent = latent.bytes().address() as *const _;
    params.q_rope = rope.bytes().address() as *const _;
    params.cache = call.cache.bytes().address() as *const _;
    params.cache_rope = call.cache.rope_bytes().address() as *const _;
    params.lists = lists.slots.bytes().address() as *const _;
    if let Some(counts) = &lists.counts {
        params.counts = counts.bytes().address() as *const _;
    }
    params.out = out.into_bytes().address() as *mut _;
    if let Some(lse) = call.lse {
        let layout = lse.layout();
        params.lse_head_stride = wide("lse", layout.row_stride)?;
        params.lse = lse.into_bytes().address() as *mut _;
    }
    params.q_latent_token_stride = wide("query latent", latent.layout().strides[0])?;
    params.q_latent_head_stride = wide("query latent", latent.layout().strides[1])?;
    params.q_rope_token_stride = wide("query rope", rope.layout().strides[0])?;
    params.q_rope_head_stride = wide("query rope", rope.layout().strides[1])?;
    params.cache_page_stride = wide("page stride", cache.page_stride)?;
    params.cache_slot_stride = wide("row stride", cache.row_stride)?;
    let rope = cache.rope_strides();
    params.cache_rope_page_stride = wide("rope page stride", rope.page_stride)?;
    params.cache_rope_slot_stride = wide("rope row stride", rope.row_stride)?;
    params.list_stride = wide("slots", lists.width)?;
    params.out_token_stride = wide("out", out_layout.strides[0])?;
    params.out_head_stride = wide("out", out_layout.strides[1])?;
    params.pages = wide("pages", cache.pages)?;
    params.tokens = narrow("tokens", tokens)?;
    if let Some(sinks) = &call.sinks {
        params.sinks = sinks.bytes().address() as *const _;
    }
    if let Some(second) = &lists.second {
        params.second = listed(second)?;
    }
    add_dense_requests(&mut params, lists.dense_within, &call.batch)?;
    params.width = narrow("slots", lists.width)?;
    params.page_size = narrow("page_size", cache.page_size)?;
    params.cache_scale = cache.scale;
    Ok(Some(params))
}

/// Adds the length up to which requests are dense, and their block table, if there may be dense
/// requests.
fn add_dense_requests(
    params: &mut raw::MlaSparseParams,
    dense_within: usize,
    batch: &DecodeBatch<'_, Cuda>,
) -> Result<()> {
    if dense_within == 0 {
        return Ok(());
    }
    params.dense_within = narrow("dense_within", dense_within)?;
    params.requests = narrow("requests", batch.block_table.requests())?;
    params.block_table = batch.block_table.entries().bytes().address() as *const _;
    params.block_table_stride = wide("block table", batch.block_table.max_pages())?;
    params.seq_lens = batch.seq_lens.bytes().address() as *const _;
    params.query_starts = batch.query_starts.bytes().address() as *const _;
    Ok(())
}

/// Returns the parameters of a second cache and its lists.
fn listed(
    (cache, slots, width): &(CacheRef<'_, Cuda>, ArrayRef<'_, Cuda, i32>, usize),
) -> Result<raw::MlaListedCache> {
    let layout = cache.layout();
    let rope = layout.rope_strides();
    Ok(raw::MlaListedCache {
        cache: cache.bytes().address() as *const _,
        cache_rope: cache.rope_bytes().address() as *const _,
        lists: slots.bytes().address() as *const _,
        counts: std::ptr::null(),
        cache_page_stride: wide("second page stride", layout.page_stride)?,
        cache_slot_stride: wide("second row stride", layout.row_stride)?,
        cache_rope_page_stride: wide("second rope page stride", rope.page_stride)?,
        cache_rope_slot_stride: wide("second rope row stride", rope.row_stride)?,
        list_stride: wide("second slots", *width)?,
        pages: wide("second pages", layout.pages)?,
        width: narrow("second slots", *width)?,
        page_size: narrow("second page size", layout.page_size)?,
    })
}
