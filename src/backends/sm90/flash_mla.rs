//! FLASHMLA: dense absorbed decode on Hopper GPUs, one launch per step.
//!
//! `docs/kernels/decode.md` tells how the kernel works. Everything a step needs is worked out on the
//! device from the lengths there, so [`prepare`](mla_runtime::backend::DecodeBackend::prepare) has nothing to do and a captured
//! step can be replayed with other lengths and pages in the same arrays.

use mla_runtime::backend::LayerConfig;
use mla_runtime::mla_backend;

#[cfg(feature = "sm90")]
use {
    crate::device::argument::{dtype_code, format_code, narrow, unit_columns, wide},
    crate::device::{Buffer, Cuda},
    crate::raw,
    mla_runtime::backend::{
        DecodeBackend, DecodeBatch, DecodeCall, Output, Query, QueryFormat, StepLimits,
    },
    mla_runtime::device::Device,
    mla_runtime::error::{Error, Result},
    mla_runtime::kv_format::KvFormat,
    mla_runtime::tensor::TensorRef,
};

/// Dense absorbed decode on Hopper GPUs: 1 to 128 heads without padding waste, up to 8 query tokens per
/// request, batches of up to 1024 requests, pages of any multiple of 16; caches of the queries' dtype, or
/// of e4m3 with one scale.
#[derive(Debug)]
pub struct FlashMla {
    config: LayerConfig,
}

/// The workspace, which bounds the query tokens of a request but not the number of requests.
#[cfg(feature = "sm90")]
pub struct FlashMlaState {
    workspace: Buffer,
    query_len: usize,
}

#[cfg(feature = "sm90")]
impl FlashMla {
    // What the kernel's checks and its workspace depend on without any tensor.
    fn shape(&self, query_len: usize) -> Result<raw::MlaDecodeParams> {
        let problem = &self.config.problem;
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
        params.softmax_scale = self.config.softmax_scale;
        params.cache_scale = 1.0;
        Ok(params)
    }

    fn workspace(&self, device: &Cuda, limits: &StepLimits) -> Result<usize> {
        let params = self.shape(limits.decode_query_len.max(1))?;
        let mut bytes = 0;
        device.bind()?;
        // SAFETY: both addresses are those of values on this stack.
        let status = unsafe { raw::mla_decode_sm90_workspace(&params, &mut bytes) };
        raw::check("decode workspace", status)?;
        Ok(bytes)
    }
}

#[mla_backend(
    name = "FLASHMLA",
    provider = "native",
    feature = "sm90",
    sm = "90",
    compiled = raw::compiled::SM90,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    kv = "f16,bf16,fp8",
    cache_dims = "(512,64)",
    heads = "1..=128",
    page_sizes = "x16",
    query_len = "ragged",
    graphs = "always",
    features = "deterministic",
    priority = "100"
)]
impl DecodeBackend for FlashMla {
    type Device = Cuda;
    type State = FlashMlaState;
    type Metadata = ();

    fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self { config: *config })
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> u64 {
        // What keeps the size from being known keeps `state` from allocating it, and says so there.
        self.workspace(device, limits)
            .map_or(0, |bytes| bytes as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<FlashMlaState> {
        let bytes = self.workspace(device, limits)?;
        // Zeros are how the kernel's counters have to begin.
        Ok(FlashMlaState {
            workspace: device.allocate(bytes)?,
            query_len: limits.decode_query_len.max(1),
        })
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &Cuda,
        batch: &DecodeBatch<'_, Cuda>,
        state: &mut FlashMlaState,
        (): &mut (),
    ) -> Result<()> {
        check_query_len(batch, state)
    }

    fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        state: &mut FlashMlaState,
        (): &(),
    ) -> Result<()> {
        let problem = &self.config.problem;
        let heads = problem.heads as usize;
        let (latent_dim, rope_dim) = (
            problem.dims.latent as usize,
            problem.dims.head.rope as usize,
        );
        let batch = &call.batch;
        check_query_len(batch, state)?;
        let (latent, rope) = query_parts(&call.query, latent_dim)?;
        let tokens = latent.shape()[0];
        let dtype = problem.dtype;
        latent
            .layout()
            .expect("query latent", dtype, [tokens, heads, latent_dim])?;
        rope.layout()
            .expect("query rope", dtype, [tokens, heads, rope_dim])?;
        unit_columns("query latent", latent.layout())?;
        unit_columns("query rope", rope.layout())?;
        let Output::Plain(out) = call.out else {
            return Err(Error::argument("out", "e4m3", dtype));
        };
        let out_layout = *out.layout();
        out_layout.expect("out", dtype, [tokens, heads, latent_dim])?;
        unit_columns("out", &out_layout)?;
        if call.slots.is_some() {
            return Err(Error::argument(
                "slots",
                "present",
                "absent: this backend is dense",
            ));
        }
        let requests = batch.block_table.requests();
        for (field, given, accepted) in [
            ("seq_lens", batch.seq_lens.len(), requests),
            ("query_starts", batch.query_starts.len(), requests + 1),
        ] {
            if given != accepted {
                return Err(Error::argument(field, given, accepted));
            }
        }
        if requests == 0 || tokens == 0 {
            return Ok(());
        }
        let cache = call.cache.layout();
        // Selection lets no other format through, and a layer that was made by hand may bring another cache.
        if cache.format != problem.kv_format {
            return Err(Error::argument(
                "kv format",
                cache.format,
                problem.kv_format,
            ));
        }
        let element = match cache.format {
            KvFormat::Fp8 | KvFormat::Fp8DsMla => 1,
            KvFormat::F32 | KvFormat::F16 | KvFormat::BF16 => dtype.bytes(),
        };
        for (field, stride) in [
            ("page stride", cache.page_stride),
            ("row stride", cache.row_stride),
        ] {
            if !stride.is_multiple_of(element) {
                return Err(Error::argument(
                    field,
                    stride,
                    format!("a multiple of {element} bytes"),
                ));
            }
        }
        let mut params = self.shape(batch.max_query_len.max(1))?;
        params.q_latent = latent.bytes().address() as *const _;
        params.q_rope = rope.bytes().address() as *const _;
        params.cache = call.cache.bytes().address() as *const _;
        params.block_table = batch.block_table.entries().bytes().address() as *const _;
        params.kv_lens = batch.seq_lens.bytes().address() as *const _;
        params.cu_q_lens = batch.query_starts.bytes().address() as *const _;
        params.out = out.into_bytes().address() as *mut _;
        if let Some(lse) = call.lse {
            let layout = lse.layout();
            layout.expect("lse", heads, tokens)?;
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
        device.bind()?;
        // SAFETY: every tensor and array was checked to hold what its layout says, the layouts to agree,
        // and the workspace was allocated zeroed for this many query tokens and is borrowed mutably, so
        // no other launch of this stream's order uses it at the same time.
        raw::check("decode", unsafe {
            raw::mla_decode_sm90(&params, device.raw_stream())
        })
    }

    fn query_format(&self) -> QueryFormat {
        QueryFormat::Split
    }
}

#[cfg(feature = "sm90")]
fn check_query_len(batch: &DecodeBatch<'_, Cuda>, state: &FlashMlaState) -> Result<()> {
    if batch.max_query_len <= state.query_len {
        return Ok(());
    }
    let accepted = format!(
        "at most {}, for which the workspace was made",
        state.query_len
    );
    Err(Error::argument(
        "max_query_len",
        batch.max_query_len,
        accepted,
    ))
}

/// The latent and the rotary part, which a concatenated query has side by side.
#[cfg(feature = "sm90")]
pub(super) fn query_parts<'a>(
    query: &Query<'a, Cuda>,
    latent_dim: usize,
) -> Result<(TensorRef<'a, Cuda>, TensorRef<'a, Cuda>)> {
    match query {
        Query::Split { latent, rope } => Ok((*latent, *rope)),
        Query::Concatenated(rows) => {
            let width = rows.shape()[2];
            let cut = latent_dim.min(width);
            Ok((rows.narrow(2, 0..cut)?, rows.narrow(2, cut..width)?))
        }
    }
}
