//! WGMMA_MLA_SPARSE: sparse absorbed attention on Hopper GPUs, one or two launches per step.
//!
//! `docs/kernels/sparse.md` tells how the kernel works. It needs no workspace, and nothing is
//! prepared, so a captured step can be replayed with other lists in the same arrays.

use mla_runtime::mla_backend;

#[cfg(feature = "sm90")]
use {
    crate::backends::sparse,
    crate::device::Cuda,
    crate::raw,
    mla_runtime::Result,
    mla_runtime::backend::{DecodeBackend, DecodeCall, LayerConfig, StepLimits},
};

/// Sparse absorbed attention on Hopper GPUs.
///
/// Each query token attends to the cache rows in its list of slots. There may be 1 to 128 heads,
/// without padding. Lists have up to 8192 slots, any of which may be invalid. Pages have any size.
/// Caches have the queries' dtype, e4m3 with one scale, or `fp8_ds_mla` or `fp8_per_token` with any
/// scales. A second cache with its own lists and a sink per head take part in the same softmax.
/// Short requests may use their block tables instead of lists.
#[derive(Debug)]
pub struct WgmmaMlaSparse {
    #[cfg(feature = "sm90")]
    config: LayerConfig,
}

#[mla_backend(
    name = "WGMMA_MLA_SPARSE",
    provider = "native",
    feature = "sm90",
    sm = "90",
    compiled = raw::compiled::SM90,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    kv = "f16,bf16,fp8,fp8_ds_mla,fp8_per_token",
    cache_dims = "(512,64)|(512,0)",
    heads = "1..=128",
    query_len = "ragged",
    graphs = "always",
    dependent_launch = true,
    alignment = 16,
    sparse = "required",
    // The maximum of the C interface: `width` in mla.h.
    max_list_width = 8192,
    features = "sinks,deterministic,nan_propagation,strided_outputs,dense_requests,\
                second_cache,split_cache",
    priority = "100"
)]
impl DecodeBackend for WgmmaMlaSparse {
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

    unsafe fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        (): &mut (),
        (): &(),
    ) -> Result<()> {
        let Some(params) = sparse::params(&self.config, &Self::SPEC, call)? else {
            return Ok(());
        };
        device.bind()?;
        // SAFETY: `params` checked every tensor and array to hold what its layout says, and the
        // layouts agree. The kernel itself skips slots that the cache does not have. The contents
        // of the batch's arrays keep to the contract of a call, by the caller's promise.
        unsafe {
            raw::check(
                "sparse attention",
                raw::mla_sparse_sm90(&params, device.raw_stream()),
            )
        }
    }
}
