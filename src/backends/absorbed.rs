//! Calls of absorbed decode as the kernels' C interface takes them, whichever family the kernel is of.

use mla_runtime::backend::{DecodeBatch, DecodeCall, LayerConfig, Output};
use mla_runtime::device::Memory as _;
use mla_runtime::error::{Error, Result};
use mla_runtime::kv_format::KvFormat;
use mla_runtime::spec::BackendSpec;

use crate::device::argument::{dtype_code, format_code, narrow, wide};
use crate::device::{Buffer, Cuda};
use crate::raw;

/// The workspace, which bounds the query tokens of a request but not the number of requests.
pub struct AbsorbedState {
    workspace: Buffer,
    query_len: usize,
}

impl AbsorbedState {
    /// A workspace of so many bytes, for requests of up to `query_len` query tokens.
    pub(super) fn new(device: &Cuda, bytes: usize, query_len: usize) -> Result<Self> {
        // Zeros are how the kernels' counters have to begin.
        Ok(Self {
            workspace: device.allocate(bytes)?,
            query_len,
        })
    }

    /// Whether the batch's requests are as short as the workspace was made for.
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

/// What a kernel's checks and its workspace depend on without any tensor.
pub(super) fn shape(config: &LayerConfig, query_len: usize) -> Result<raw::MlaDecodeParams> {
    let problem = &config.problem;
    // SAFETY: a struct of plain numbers and pointers, for which zeros are values: null pointers are
    // refused by the launch, and the workspace's query reads none.
    let mut params: raw::MlaDecodeParams = unsafe { std::mem::zeroed() };
    params.heads = narrow("heads", problem.heads as usize)?;
    params.query_len = narrow("query length", query_len)?;
    params.requests = 1;
    params.page_size = narrow("page size", problem.page_size as usize)?;
    params.latent_dim = narrow("latent", problem.dims.latent as usize)?;
    params.rope_dim = narrow("rope", problem.dims.head.rope as usize)?;
    params.q_dtype = dtype_code(problem.dtype);
    params.cache_format = format_code(problem.kv_format);
    params.causal = 1;
    params.softmax_scale = config.softmax_scale;
    params.cache_scale = 1.0;
    Ok(params)
}

/// The call, checked; `None` if there is nothing to do.
pub(super) fn params(
    config: &LayerConfig,
    spec: &BackendSpec,
    call: DecodeCall<'_, Cuda>,
    state: &AbsorbedState,
) -> Result<Option<raw::MlaDecodeParams>> {
    call.check(config, spec)?;
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
        KvFormat::Fp8 | KvFormat::Fp8DsMla => 1,
        KvFormat::F32 | KvFormat::F16 | KvFormat::BF16 => problem.dtype.bytes(),
    };
    let mut params = shape(config, batch.max_query_len.max(1))?;
    params.q_latent = latent.bytes().address() as *const _;
    params.q_rope = rope.bytes().address() as *const _;
    params.cache = call.cache.bytes().address() as *const _;
    params.block_table = batch.block_table.entries().bytes().address() as *const _;
    params.kv_lens = batch.seq_lens.bytes().address() as *const _;
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
    params.block_table_stride = wide("max pages", batch.block_table.max_pages())?;
    params.out_token_stride = wide("out", out_layout.strides[0])?;
    params.out_head_stride = wide("out", out_layout.strides[1])?;
    params.pages = wide("pages", cache.pages)?;
    params.cache_scale = cache.scale;
    params.requests = narrow("requests", requests)?;
    params.tokens = narrow("tokens", tokens)?;
    params.max_pages = narrow("max pages", batch.block_table.max_pages())?;
    Ok(Some(params))
}
