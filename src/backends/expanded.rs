//! Calls of expanded prefill through the kernels' C interface, for the kernels of all families.

use mla_runtime::backend::{Keys, LayerConfig, Output, PrefillCall, StepLimits};
use mla_runtime::spec::{BackendSpec, Feature};
use mla_runtime::tensor::TensorRef;
use mla_runtime::{Error, Result};

use super::kernel::State;
use crate::device::Cuda;
use crate::device::argument::{dtype_code, narrow, wide};
use crate::raw;

/// Returns the parameters that do not depend on a tensor. They suffice to choose the kernel.
pub(super) fn shape(config: &LayerConfig) -> Result<raw::MlaPrefillParams> {
    if !(config.softmax_scale.is_finite() && config.softmax_scale > 0.0) {
        return Err(Error::argument(
            "softmax_scale",
            config.softmax_scale,
            "a finite number above 0",
        ));
    }
    let problem = &config.problem;
    let dims = problem.dims.head;
    // A launch refuses null pointers.
    Ok(raw::MlaPrefillParams {
        heads: narrow("heads", problem.heads as usize)?,
        nope_dim: narrow("nope", dims.nope as usize)?,
        rope_dim: narrow("rope", dims.rope as usize)?,
        value_dim: narrow("v", dims.v as usize)?,
        dtype: dtype_code(problem.dtype),
        softmax_scale: config.softmax_scale,
        batch_invariant: problem.features.contains(Feature::BatchInvariant).into(),
        ..Default::default()
    })
}

/// Returns the parameters of the largest step. The kernels' workspaces do not depend on its size.
pub(super) fn largest(config: &LayerConfig, _: &StepLimits) -> Result<raw::MlaPrefillParams> {
    shape(config)
}

/// Address and strides of one of the two parts of all keys.
struct KeySource {
    address: u64,
    // Strides are in elements.
    token_stride: usize,
    head_stride: usize,
}

/// Returns two sources: the part of each head, which is `nope_bytes` bytes of a packed key, and the
/// rotary part.
fn key_sources(keys: &Keys<'_, Cuda>, nope_bytes: usize) -> [KeySource; 2] {
    let source = |keys: &TensorRef<'_, Cuda>, offset: usize| KeySource {
        address: keys.bytes().address() + offset as u64,
        token_stride: keys.layout().strides[0],
        head_stride: keys.layout().strides[1],
    };
    match keys {
        Keys::Packed(keys) => [source(keys, 0), source(keys, nope_bytes)],
        Keys::Split { nope, rope } => {
            let rope = source(rope, 0);
            // All heads read the one rotary head.
            let head_stride = 0;
            [
                source(nope, 0),
                KeySource {
                    head_stride,
                    ..rope
                },
            ]
        }
    }
}

/// Returns the checked parameters of a call, or `None` if there is nothing to do.
pub(super) fn params(
    config: &LayerConfig,
    spec: &BackendSpec,
    call: PrefillCall<'_, Cuda>,
    state: &State,
) -> Result<Option<raw::MlaPrefillParams>> {
    call.check(config, spec)?;
    let workspace = state.workspace(config)?;
    let problem = &config.problem;
    let nope = problem.dims.head.nope as usize;
    let causal = call.is_causal();
    let (query_tokens, key_tokens) = (call.query.shape()[0], call.values.shape()[0]);
    let (query, value) = (*call.query.layout(), *call.values.layout());
    let [key_nope, key_rope] = key_sources(&call.keys, nope * problem.dtype.bytes());
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
    // A call without query tokens writes nothing, and the kernel's tensors must not be empty.
    if requests == 0 || query_tokens == 0 {
        return Ok(None);
    }

    let mut params = shape(config)?;
    params.query = call.query.bytes().address() as *const _;
    params.key_nope = key_nope.address as *const _;
    params.key_rope = key_rope.address as *const _;
    params.value = call.values.bytes().address() as *const _;
    params.out = out.into_bytes().address() as *mut _;
    params.lse = lse as *mut _;
    params.cu_query_lens = call.query_starts.bytes().address() as *const _;
    params.cu_key_lens = call.key_starts.bytes().address() as *const _;
    params.query_token_stride = wide("query stride", query.strides[0])?;
    params.query_head_stride = wide("query stride", query.strides[1])?;
    params.key_nope_token_stride = wide("keys stride", key_nope.token_stride)?;
    params.key_nope_head_stride = wide("keys stride", key_nope.head_stride)?;
    params.key_rope_token_stride = wide("keys stride", key_rope.token_stride)?;
    params.key_rope_head_stride = wide("keys stride", key_rope.head_stride)?;
    params.value_token_stride = wide("values stride", value.strides[0])?;
    params.value_head_stride = wide("values stride", value.strides[1])?;
    params.out_token_stride = wide("output stride", out_layout.strides[0])?;
    params.out_head_stride = wide("output stride", out_layout.strides[1])?;
    params.lse_head_stride = wide("lse stride", lse_head_stride)?;
    params.query_tokens = narrow("query tokens", query_tokens)?;
    params.key_tokens = narrow("key tokens", key_tokens)?;
    params.requests = narrow("requests", requests)?;
    params.max_query_len = narrow("max_query_len", call.max_query_len)?;
    params.max_key_len = narrow("max_key_len", call.max_key_len)?;
    params.causal = i32::from(causal);
    params.workspace = workspace.address() as *mut _;
    params.workspace_bytes = workspace.len();
    Ok(Some(params))
}
