//! Calls of dense absorbed decode through the kernels' C interface, for the kernels of all
//! families.

use mla_runtime::backend::{DecodeCall, LayerConfig, Output, StepLimits};
use mla_runtime::model::KvFormat;
use mla_runtime::spec::{BackendSpec, Feature};
use mla_runtime::{Error, Result};

use super::kernel::State;
use crate::device::Cuda;
use crate::device::argument::{dtype_code, format_code, narrow, wide};
use crate::raw;

fn batch_invariant(config: &LayerConfig) -> bool {
    config.problem.features.contains(Feature::BatchInvariant)
}

/// Returns the parameters that do not depend on a tensor. They suffice for a kernel's checks and
/// for the size of its workspace.
pub(super) fn shape(config: &LayerConfig) -> Result<raw::MlaDecodeParams> {
    let problem = &config.problem;
    // A launch would refuse these null pointers. The query of the workspace's size reads none of
    // them.
    Ok(raw::MlaDecodeParams {
        heads: narrow("heads", problem.heads as usize)?,
        query_len: 1,
        requests: 1,
        page_size: narrow("page_size", problem.page_size as usize)?,
        latent_dim: narrow("latent", problem.dims.latent as usize)?,
        rope_dim: narrow("rope", problem.dims.head.rope as usize)?,
        q_dtype: dtype_code(problem.dtype),
        cache_format: format_code(problem.kv_format),
        causal: 1,
        batch_invariant: i32::from(batch_invariant(config)),
        softmax_scale: config.softmax_scale,
        cache_scale: 1.0,
        ..Default::default()
    })
}

/// Returns the parameters of the largest step within the limits. A kernel's workspace depends on
/// them, and a kernel may refuse them before anything is launched.
pub(super) fn largest(config: &LayerConfig, limits: &StepLimits) -> Result<raw::MlaDecodeParams> {
    let mut params = shape(config)?;
    params.query_len = narrow("query length", limits.decode_query_len.max(1))?;
    params.requests = narrow("limits.requests", limits.requests.max(1))?;
    params.max_pages = narrow("limits.pages_per_request", limits.pages_per_request)?;
    Ok(params)
}

/// Returns the checked parameters of a call, or `None` if there is nothing to do.
pub(super) fn params(
    config: &LayerConfig,
    spec: &BackendSpec,
    call: DecodeCall<'_, Cuda>,
    state: &State,
) -> Result<Option<raw::MlaDecodeParams>> {
    call.check(config, spec)?;
    let workspace = state.workspace(config)?;
    let problem = &config.problem;
    let batch = &call.batch;
    state.check(batch)?;
    let [latent, rope] = call.query.parts(problem.dims.latent as usize)?;
    let tokens = latent.shape()[0];
    let Output::Plain(out) = call.out else {
        return Err(Error::argument("out", "e4m3", problem.dtype));
    };
    let out_layout = *out.layout();
    let requests = batch.block_table.requests();
    if requests == 0 || tokens == 0 {
        return Ok(None);
    }
    let cache = call.cache.layout();
    let element = match cache.format {
        KvFormat::Fp8 | KvFormat::Fp8DsMla | KvFormat::Fp8PerToken => 1,
        KvFormat::F32 | KvFormat::F16 | KvFormat::BF16 => problem.dtype.bytes(),
    };
    // A batch-invariant kernel is chosen for the longest request that there may be in any batch.
    let query_len = match batch_invariant(config) {
        true => state.query_len(),
        false => batch.max_query_len.max(1),
    };
    let mut params = shape(config)?;
    params.query_len = narrow("query length", query_len)?;
    params.q_latent = latent.bytes().address() as *const _;
    params.q_rope = rope.bytes().address() as *const _;
    params.cache = call.cache.bytes().address() as *const _;
    params.cache_rope = call.cache.rope_bytes().address() as *const _;
    params.block_table = batch.block_table.entries().bytes().address() as *const _;
    params.kv_lens = batch.seq_lens.bytes().address() as *const _;
    params.causal = i32::from(batch.causal);
    params.cu_q_lens = batch.query_starts.bytes().address() as *const _;
    params.out = out.into_bytes().address() as *mut _;
    if let Some(lse) = call.lse {
        let layout = lse.layout();
        params.lse_head_stride = wide("lse", layout.row_stride)?;
        params.lse = lse.into_bytes().address() as *mut _;
    }
    params.workspace = workspace.address() as *mut _;
    params.workspace_bytes = workspace.len();
    params.q_latent_token_stride = wide("query latent", latent.layout().strides[0])?;
    params.q_latent_head_stride = wide("query latent", latent.layout().strides[1])?;
    params.q_rope_token_stride = wide("query rope", rope.layout().strides[0])?;
    params.q_rope_head_stride = wide("query rope", rope.layout().strides[1])?;
    params.cache_page_stride = wide("page stride", cache.page_stride / element)?;
    params.cache_slot_stride = wide("row stride", cache.row_stride / element)?;
    let rope = cache.rope_strides();
    params.cache_rope_page_stride = wide("rope page stride", rope.page_stride / element)?;
    params.cache_rope_slot_stride = wide("rope row stride", rope.row_stride / element)?;
    params.block_table_stride = wide("max pages", batch.block_table.max_pages())?;
    params.out_token_stride = wide("out", out_layout.strides[0])?;
    params.out_head_stride = wide("out", out_layout.strides[1])?;
    params.pages = wide("pages", cache.pages)?;
    params.cache_scale = cache.scale;
    params.requests = narrow("requests", requests)?;
    params.tokens = narrow("tokens", tokens)?;
    // The launch covers only the columns of the table that a request may use. Fewer columns make it
    // shorter.
    let used = batch.max_seq_len.div_ceil(cache.page_size).max(1);
    params.max_pages = narrow("max pages", used.min(batch.block_table.max_pages()))?;
    Ok(Some(params))
}
