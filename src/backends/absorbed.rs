//! Dense absorbed decode for the kernels of all families: calls through the kernels' C interface,
//! and the backends that make these calls.

use std::ffi::c_void;

use mla_runtime::backend::{DecodeBatch, DecodeCall, LayerConfig, Output, StepLimits};
use mla_runtime::model::KvFormat;
use mla_runtime::spec::{BackendSpec, Feature, Problem};
use mla_runtime::tensor::Memory as _;
use mla_runtime::{Error, Result};

use crate::backends::workspace;
use crate::device::argument::{dtype_code, format_code, narrow, wide};
use crate::device::{Buffer, Cuda};
use crate::raw;

/// The functions of a family's kernel, `mla_decode_<family>` and `mla_decode_<family>_workspace` of
/// `mla_<family>.h`.
pub(super) trait DenseKernel: Copy {
    /// Writes the bytes of the workspace to `bytes`.
    ///
    /// # Safety
    ///
    /// A context is current, as the header says.
    unsafe fn workspace(self, params: &raw::MlaDecodeParams, bytes: &mut usize) -> raw::MlaStatus;

    /// Enqueues a call.
    ///
    /// # Safety
    ///
    /// Every address in `params` is as the header says.
    unsafe fn launch(self, params: &raw::MlaDecodeParams, stream: *mut c_void) -> raw::MlaStatus;
}

/// A workspace. It limits the query tokens of a request, but not the number of requests.
pub struct AbsorbedState {
    made_for: Problem,
    workspace: Buffer,
    query_len: usize,
}

impl AbsorbedState {
    /// Allocates a workspace of `bytes` bytes, for requests of up to `query_len` query tokens.
    fn new(config: &LayerConfig, device: &Cuda, bytes: usize, query_len: usize) -> Result<Self> {
        // The kernels' counters in it have to begin at zero.
        Ok(Self {
            made_for: config.problem,
            workspace: device.allocate(bytes)?,
            query_len,
        })
    }

    /// Checks that the batch's requests have no more query tokens than the workspace was made for.
    pub(super) fn check(&self, batch: &DecodeBatch<'_, Cuda>) -> Result<()> {
        if batch.max_query_len <= self.query_len {
            return Ok(());
        }
        let accepted = format!(
            "at most {}, for which the workspace was made",
            self.query_len
        );
        Err(Error::argument(
            "max_query_len",
            batch.max_query_len,
            accepted,
        ))
    }
}

fn batch_invariant(config: &LayerConfig) -> bool {
    config.problem.features.contains(Feature::BatchInvariant)
}

/// Returns the parameters that do not depend on a tensor. They suffice for a kernel's checks and
/// for the size of its workspace.
fn shape(config: &LayerConfig, query_len: usize) -> Result<raw::MlaDecodeParams> {
    let problem = &config.problem;
    // A launch would refuse these null pointers. The query of the workspace's size reads none of
    // them.
    Ok(raw::MlaDecodeParams {
        heads: narrow("heads", problem.heads as usize)?,
        query_len: narrow("query length", query_len)?,
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
fn largest(config: &LayerConfig, limits: &StepLimits) -> Result<raw::MlaDecodeParams> {
    let mut params = shape(config, limits.decode_query_len.max(1))?;
    params.requests = narrow("limits.requests", limits.requests.max(1))?;
    params.max_pages = narrow("limits.pages_per_request", limits.pages_per_request)?;
    Ok(params)
}

/// Names the step's limits in an error about the parameters that [`largest`] returned.
fn of_limits(error: Error) -> Error {
    match error {
        Error::Argument {
            field,
            given,
            accepted,
        } if field == "requests" => Error::argument("limits.requests", given, accepted),
        Error::Argument {
            field,
            given,
            accepted,
        } if field == "max_pages" => Error::argument("limits.pages_per_request", given, accepted),
        error => error,
    }
}

/// Returns the checked parameters of a call, or `None` if there is nothing to do.
fn params(
    config: &LayerConfig,
    spec: &BackendSpec,
    call: DecodeCall<'_, Cuda>,
    state: &AbsorbedState,
) -> Result<Option<raw::MlaDecodeParams>> {
    call.check(config, spec)?;
    state.made_for.check_same("state", &config.problem)?;
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
        true => state.query_len,
        false => batch.max_query_len.max(1),
    };
    let mut params = shape(config, query_len)?;
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
    params.workspace = state.workspace.address() as *mut _;
    params.workspace_bytes = state.workspace.len();
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

fn workspace(
    kernel: impl DenseKernel,
    config: &LayerConfig,
    device: &Cuda,
    limits: &StepLimits,
) -> Result<usize> {
    let params = largest(config, limits)?;
    // SAFETY: the context is current.
    workspace::size(device, |bytes| unsafe { kernel.workspace(&params, bytes) }).map_err(of_limits)
}

pub(super) fn workspace_bytes(
    kernel: impl DenseKernel,
    config: &LayerConfig,
    device: &Cuda,
    limits: &StepLimits,
) -> Result<u64> {
    Ok(workspace(kernel, config, device, limits)? as u64)
}

pub(super) fn state(
    kernel: impl DenseKernel,
    config: &LayerConfig,
    device: &Cuda,
    limits: &StepLimits,
) -> Result<AbsorbedState> {
    let bytes = workspace(kernel, config, device, limits)?;
    AbsorbedState::new(config, device, bytes, limits.decode_query_len.max(1))
}

/// # Safety
///
/// The contract of [`DecodeBackend::decode`](mla_runtime::backend::DecodeBackend::decode).
pub(super) unsafe fn decode(
    kernel: impl DenseKernel,
    config: &LayerConfig,
    spec: &BackendSpec,
    device: &Cuda,
    call: DecodeCall<'_, Cuda>,
    state: &mut AbsorbedState,
) -> Result<()> {
    let Some(params) = params(config, spec, call, state)? else {
        return Ok(());
    };
    device.bind()?;
    // SAFETY: `params` checked every tensor and array to hold what its layout says, and the layouts
    // agree. The contents of the arrays keep to the contract of a call, by the caller's promise.
    // The workspace was allocated zeroed for this many query tokens by the same kernel's query. It
    // is borrowed mutably, so no other launch of this stream uses it at the same time. The status
    // is the launch's own.
    unsafe { raw::check("decode", kernel.launch(&params, device.raw_stream())) }
}
