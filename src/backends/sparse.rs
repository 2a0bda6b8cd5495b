//! Calls of sparse absorbed attention as the kernels' C interface takes them, whichever family the kernel is
//! of.

use mla_runtime::backend::{DecodeCall, LayerConfig, Output};
use mla_runtime::error::{Error, Result};
use mla_runtime::spec::BackendSpec;

use crate::device::Cuda;
use crate::device::argument::{dtype_code, format_code, narrow, wide};
use crate::raw;

/// What a kernel's workspace depends on without any tensor.
pub(super) fn shape(config: &LayerConfig) -> Result<raw::MlaSparseParams> {
    let problem = &config.problem;
    // SAFETY: a struct of plain numbers and pointers, for which zeros are values: null pointers are
    // refused by the launch, or mean that something is absent.
    let mut params: raw::MlaSparseParams = unsafe { std::mem::zeroed() };
    params.heads = narrow("heads", problem.heads as usize)?;
    params.latent_dim = narrow("latent", problem.dims.latent as usize)?;
    params.rope_dim = narrow("rope", problem.dims.head.rope as usize)?;
    params.q_dtype = dtype_code(problem.dtype);
    params.cache_format = format_code(problem.kv_format);
    params.softmax_scale = config.softmax_scale;
    Ok(params)
}

/// The call, checked; `None` if there is nothing to do.
pub(super) fn params(
    config: &LayerConfig,
    spec: &BackendSpec,
    call: DecodeCall<'_, Cuda>,
) -> Result<Option<raw::MlaSparseParams>> {
    call.check(config, spec)?;
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
    params.lists = lists.slots.bytes().address() as *const _;
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
    params.list_stride = wide("slots", lists.width)?;
    params.out_token_stride = wide("out", out_layout.strides[0])?;
    params.out_head_stride = wide("out", out_layout.strides[1])?;
    params.pages = wide("pages", cache.pages)?;
    params.tokens = narrow("tokens", tokens)?;
    params.width = narrow("slots", lists.width)?;
    params.page_size = narrow("page size", cache.page_size)?;
    params.cache_scale = cache.scale;
    Ok(Some(params))
}
