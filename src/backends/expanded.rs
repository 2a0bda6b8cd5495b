//! Calls of expanded prefill as the kernels' C interface takes them, whichever family the kernel is of.

use mla_runtime::backend::{Keys, LayerConfig, Output, PrefillCall};
use mla_runtime::error::{Error, Result};
use mla_runtime::spec::BackendSpec;

use crate::device::Cuda;
use crate::device::argument::{dtype_code, narrow, wide};
use crate::raw;

/// What decides about the kernel, without any tensor.
pub(super) fn shape(config: &LayerConfig) -> Result<raw::MlaPrefillParams> {
    if !(config.softmax_scale.is_finite() && config.softmax_scale > 0.0) {
        return Err(Error::argument(
            "softmax scale",
            config.softmax_scale,
            "a finite number above 0",
        ));
    }
    let problem = &config.problem;
    let dims = problem.dims.head;
    // SAFETY: a struct of plain numbers and pointers, for which zeros are values: a launch refuses them.
    let mut params: raw::MlaPrefillParams = unsafe { std::mem::zeroed() };
    params.heads = narrow("heads", problem.heads as usize)?;
    params.nope_dim = narrow("nope", dims.nope as usize)?;
    params.rope_dim = narrow("rope", dims.rope as usize)?;
    params.value_dim = narrow("v", dims.v as usize)?;
    params.dtype = dtype_code(problem.dtype);
    params.softmax_scale = config.softmax_scale;
    Ok(params)
}

/// The call, checked, without a workspace; `None` if there is nothing to do.
pub(super) fn params(
    config: &LayerConfig,
    spec: &BackendSpec,
    call: PrefillCall<'_, Cuda>,
) -> Result<Option<raw::MlaPrefillParams>> {
    call.check(config, spec)?;
    let problem = &config.problem;
    let nope = problem.dims.head.nope as usize;
    let (query_tokens, key_tokens) = (call.query.shape()[0], call.values.shape()[0]);
    let (query, value) = (*call.query.layout(), *call.values.layout());
    let (key_nope, key_nope_layout, key_rope, key_rope_layout) = match &call.keys {
        Keys::Packed(keys) => {
            let address = keys.bytes().address();
            let rotary = address + (nope * problem.dtype.bytes()) as u64;
            (address, *keys.layout(), rotary, *keys.layout())
        }
        Keys::Split {
            nope: head,
            rope: shared,
        } => {
            let mut shared_layout = *shared.layout();
            // One head that every head reads.
            shared_layout.strides[1] = 0;
            let addresses = (head.bytes().address(), shared.bytes().address());
            (addresses.0, *head.layout(), addresses.1, shared_layout)
        }
    };
    let Output::Plain(out) = call.out else {
        return Err(Error::argument("out", "e4m3", problem.dtype));
    };
    let out_layout = *out.layout();
    let (lse, lse_head_stride) = match call.lse {
        None => (0, query_tokens),
        Some(lse) => {
            let stride = lse.layout().row_stride;
            (lse.into_bytes().address(), stride)
        }
    };
    let requests = call.query_starts.len().saturating_sub(1);
    // Nothing to write, and the kernel's tensors must not be empty.
    if requests == 0 || query_tokens == 0 {
        return Ok(None);
    }

    let mut params = shape(config)?;
    params.query = call.query.bytes().address() as *const _;
    params.key_nope = key_nope as *const _;
    params.key_rope = key_rope as *const _;
    params.value = call.values.bytes().address() as *const _;
    params.out = out.into_bytes().address() as *mut _;
    params.lse = lse as *mut _;
    params.cu_query_lens = call.query_starts.bytes().address() as *const _;
    params.cu_key_lens = call.key_starts.bytes().address() as *const _;
    params.query_token_stride = wide("query stride", query.strides[0])?;
    params.query_head_stride = wide("query stride", query.strides[1])?;
    params.key_nope_token_stride = wide("keys stride", key_nope_layout.strides[0])?;
    params.key_nope_head_stride = wide("keys stride", key_nope_layout.strides[1])?;
    params.key_rope_token_stride = wide("keys stride", key_rope_layout.strides[0])?;
    params.key_rope_head_stride = wide("keys stride", key_rope_layout.strides[1])?;
    params.value_token_stride = wide("values stride", value.strides[0])?;
    params.value_head_stride = wide("values stride", value.strides[1])?;
    params.out_token_stride = wide("output stride", out_layout.strides[0])?;
    params.out_head_stride = wide("output stride", out_layout.strides[1])?;
    params.lse_head_stride = wide("lse stride", lse_head_stride)?;
    params.query_tokens = narrow("query tokens", query_tokens)?;
    params.key_tokens = narrow("key tokens", key_tokens)?;
    params.requests = narrow("requests", requests)?;
    params.max_query_len = narrow("longest query", call.max_query_len)?;
    params.max_key_len = narrow("most keys", call.max_key_len)?;
    params.causal = i32::from(call.chunk.is_none());
    Ok(Some(params))
}
