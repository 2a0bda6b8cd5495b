//! FLASHMLA: dense absorbed decode on Hopper GPUs, one launch per step.
//!
//! `docs/kernels/decode.md` tells how the kernel works. Everything a step needs is worked out on the
//! device from the lengths there, so [`prepare`](mla_runtime::backend::DecodeBackend::prepare) has nothing to do and a captured
//! step can be replayed with other lengths and pages in the same arrays.

use mla_runtime::mla_backend;

#[cfg(feature = "sm90")]
use {
    crate::backends::absorbed::{self, AbsorbedState},
    crate::device::Cuda,
    crate::raw,
    mla_runtime::backend::{DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, StepLimits},
    mla_runtime::error::Result,
};

/// Dense absorbed decode on Hopper GPUs: 1 to 128 heads without padding waste, up to 16 query tokens per
/// request, batches of up to 1024 requests, pages of any multiple of 16; caches of the queries' dtype, or
/// of e4m3 with one scale.
#[derive(Debug)]
pub struct FlashMla {
    #[cfg(feature = "sm90")]
    config: LayerConfig,
}

#[cfg(feature = "sm90")]
impl FlashMla {
    fn workspace(&self, device: &Cuda, limits: &StepLimits) -> Result<usize> {
        let params = absorbed::shape(&self.config, limits.decode_query_len.max(1))?;
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
    // What the C interface takes: `query_len` in mla.h.
    max_query_len = 16,
    alignment = 16,
    graphs = "always",
    features = "deterministic,nan_propagation,strided_outputs",
    priority = "100"
)]
impl DecodeBackend for FlashMla {
    type Device = Cuda;
    type State = AbsorbedState;
    type Metadata = ();

    fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self { config: *config })
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> u64 {
        // What keeps the size from being known keeps `state` from allocating it, and says so there.
        self.workspace(device, limits)
            .map_or(0, |bytes| bytes as u64)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<AbsorbedState> {
        let bytes = self.workspace(device, limits)?;
        AbsorbedState::new(device, bytes, limits.decode_query_len.max(1))
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &Cuda,
        batch: &DecodeBatch<'_, Cuda>,
        state: &mut AbsorbedState,
        (): &mut (),
    ) -> Result<()> {
        state.check(batch)
    }

    fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        state: &mut AbsorbedState,
        (): &(),
    ) -> Result<()> {
        let Some(params) = absorbed::params(&self.config, &Self::SPEC, call, state)? else {
            return Ok(());
        };
        device.bind()?;
        // SAFETY: `params` checked every tensor and array to hold what its layout says and the layouts to
        // agree; the workspace was allocated zeroed for this many query tokens and is borrowed mutably, so
        // no other launch of this stream's order uses it at the same time.
        raw::check("decode", unsafe {
            raw::mla_decode_sm90(&params, device.raw_stream())
        })
    }
}
