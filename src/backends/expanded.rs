//! Expanded prefill for the kernels of all families: calls through the kernels' C interface, and
//! what the backends that make these calls share.

use std::ffi::c_void;

use mla_runtime::backend::{Keys, LayerConfig, Output, PrefillCall};
use mla_runtime::spec::{BackendSpec, Feature};
use mla_runtime::tensor::{Memory as _, TensorRef};
use mla_runtime::{Error, Result};

use crate::backends::workspace;
use crate::device::argument::{dtype_code, narrow, wide};
use crate::device::{Buffer, Cuda};
use crate::raw;

/// The functions of a family's kernel: `mla_prefill_<family>` of `mla_<family>.h`, and those for
/// its workspace.
pub(super) trait ExpandedKernel: Copy {
    /// Loads the kernel, so that no launch has to.
    ///
    /// # Safety
    ///
    /// A context is current, as the header says.
    unsafe fn load(self, params: &raw::MlaPrefillParams) -> raw::MlaStatus;

    /// Writes the bytes of the workspace to `bytes`.
    ///
    /// # Safety
    ///
    /// A context is current, as the header says.
    unsafe fn workspace(self, params: &raw::MlaPrefillParams, bytes: &mut usize) -> raw::MlaStatus;

    /// Enqueues a call.
    ///
    /// # Safety
    ///
    /// Every address in `params` is as the header says.
    unsafe fn launch(self, params: &raw::MlaPrefillParams, stream: *mut c_void) -> raw::MlaStatus;
}

/// Loads the kernel for this layer, or refuses a layer that no kernel supports.
pub(super) fn load(kernel: impl ExpandedKernel, config: &LayerConfig, device: &Cuda) -> Result<()> {
    let params = shape(config)?;
    device.bind()?;
    // SAFETY: the context is current.
    unsafe { raw::check("load prefill kernels", kernel.load(&params)) }
}

fn workspace(kernel: impl ExpandedKernel, config: &LayerConfig, device: &Cuda) -> Result<usize> {
    let params = shape(config)?;
    // SAFETY: the query is made with the context current.
    workspace::size(device, |bytes| unsafe { kernel.workspace(&params, bytes) })
}

pub(super) fn workspace_bytes(
    kernel: impl ExpandedKernel,
    config: &LayerConfig,
    device: &Cuda,
) -> Result<u64> {
    Ok(workspace(kernel, config, device)? as u64)
}

pub(super) fn state(
    kernel: impl ExpandedKernel,
    config: &LayerConfig,
    device: &Cuda,
) -> Result<Buffer> {
    // The kernel's counters in the workspace have to begin at zero.
    device.allocate(workspace(kernel, config, device)?)
}

/// # Safety
///
/// The contract of [`PrefillBackend::prefill`](mla_runtime::backend::PrefillBackend::prefill).
pub(super) unsafe fn prefill(
    kernel: impl ExpandedKernel,
    config: &LayerConfig,
    spec: &BackendSpec,
    device: &Cuda,
    call: PrefillCall<'_, Cuda>,
    workspace: &mut Buffer,
) -> Result<()> {
    let Some(mut params) = params(config, spec, call)? else {
        return Ok(());
    };
    params.workspace = workspace.address() as *mut _;
    params.workspace_bytes = workspace.len();
    device.bind()?;
    // SAFETY: `params` checked every tensor to hold what its layout says, and the layouts agree.
    // The contents of the arrays keep to the contract of a call, by the caller's promise. The
    // output and the workspace are borrowed mutably. The workspace was allocated zeroed by the same
    // kernel's query. The status is the launch's own.
    unsafe { raw::check("prefill", kernel.launch(&params, device.raw_stream())) }
}

/// Returns the parameters that do not depend on a tensor. They suffice to choose the kernel.
fn shape(config: &LayerConfig) -> Result<raw::MlaPrefillParams> {
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

/// Returns the checked parameters of a call without a workspace, or `None` if there is nothing to
/// do.
fn params(
    config: &LayerConfig,
    spec: &BackendSpec,
    call: PrefillCall<'_, Cuda>,
) -> Result<Option<raw::MlaPrefillParams>> {
    call.check(config, spec)?;
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
    Ok(Some(params))
}
