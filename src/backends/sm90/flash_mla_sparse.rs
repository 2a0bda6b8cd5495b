//! FLASHMLA_SPARSE: sparse absorbed attention on Hopper GPUs, one launch per step.
//!
//! `docs/kernels/sparse.md` tells how the kernel works. It needs no workspace and nothing prepared: a
//! captured step can be replayed with other lists in the same arrays.

use mla_runtime::backend::LayerConfig;
use mla_runtime::capability::Capability;
use mla_runtime::kernels::Run;
use mla_runtime::mla_backend;

#[cfg(feature = "sm90")]
use {
    crate::device::Cuda,
    crate::device::argument::{dtype_code, format_code, narrow, wide},
    crate::raw,
    mla_runtime::backend::{DecodeBackend, DecodeBatch, DecodeCall, Output, StepLimits},
    mla_runtime::error::{Error, Result},
};

/// Where all conformance cases of the backend passed.
const RUN_ON: &[Run] = &[Run {
    gpu: "H200",
    capability: Capability::new(9, 0),
    date: "2026-11-22",
    commit: "c4900a6",
}];

/// Attention to the cache rows that each query token's list of slots names, on Hopper GPUs: 1 to 128
/// heads without padding, lists of up to 8192 slots of which any may be invalid, pages of any size;
/// caches of the queries' dtype, of e4m3 with one scale, or of `fp8_ds_mla` with any scales.
#[derive(Debug)]
pub struct FlashMlaSparse {
    config: LayerConfig,
}

#[mla_backend(
    name = "FLASHMLA_SPARSE",
    provider = "native",
    feature = "sm90",
    sm = "90",
    compiled = raw::compiled::SM90,
    run_on = RUN_ON,
    dtypes = "f16,bf16",
    kv = "f16,bf16,fp8,fp8_ds_mla",
    cache_dims = "(512,64)",
    heads = "1..=128",
    query_len = "ragged",
    graphs = "always",
    alignment = 16,
    sparse = "required",
    features = "deterministic,nan_propagation,strided_outputs",
    priority = "100"
)]
impl DecodeBackend for FlashMlaSparse {
    type Device = Cuda;
    type State = ();
    type Metadata = ();

    fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self { config: *config })
    }

    fn state(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(&self, _: &Cuda, _: &DecodeBatch<'_, Cuda>, (): &mut (), (): &mut ()) -> Result<()> {
        Ok(())
    }

    fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        (): &mut (),
        (): &(),
    ) -> Result<()> {
        call.check(&self.config, &Self::SPEC)?;
        let problem = &self.config.problem;
        let (heads, dtype) = (problem.heads as usize, problem.dtype);
        let (latent_dim, rope_dim) = (
            problem.dims.latent as usize,
            problem.dims.head.rope as usize,
        );
        let [latent, rope] = call.query.parts(latent_dim)?;
        let tokens = latent.shape()[0];
        let Output::Plain(out) = call.out else {
            return Err(Error::argument("out", "e4m3", dtype));
        };
        let out_layout = *out.layout();
        let Some(lists) = call.slots else {
            let accepted = "present: this backend is sparse";
            return Err(Error::argument("slots", "absent", accepted));
        };
        let cache = call.cache.layout();
        if tokens == 0 {
            return Ok(());
        }
        // SAFETY: a struct of plain numbers and pointers, for which zeros are values: null pointers are
        // refused by the launch, or mean that something is absent.
        let mut params: raw::MlaSparseParams = unsafe { std::mem::zeroed() };
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
        params.heads = narrow("heads", heads)?;
        params.width = narrow("slots", lists.width)?;
        params.page_size = narrow("page size", cache.page_size)?;
        params.latent_dim = narrow("latent", latent_dim)?;
        params.rope_dim = narrow("rope", rope_dim)?;
        params.q_dtype = dtype_code(dtype);
        params.cache_format = format_code(cache.format);
        params.softmax_scale = self.config.softmax_scale;
        params.cache_scale = cache.scale;
        device.bind()?;
        // SAFETY: every tensor and array was checked to hold what its layout says, and the layouts to
        // agree; the kernel itself skips slots that the cache does not have.
        raw::check("sparse attention", unsafe {
            raw::mla_sparse_sm90(&params, device.raw_stream())
        })
    }
}
