//! FLASH_ATTN: expanded prefill on Hopper GPUs, one launch per attention.
//!
//! `docs/kernels/prefill.md` tells how the kernel works. It makes its schedule from the lengths on the
//! device, so [`prepare`](mla_runtime::backend::PrefillBackend::prepare) has nothing to do.

use mla_runtime::mla_backend;

#[cfg(feature = "sm90")]
use {
    crate::backends::expanded,
    crate::device::{Buffer, Cuda},
    crate::raw,
    mla_runtime::backend::{LayerConfig, PrefillBackend, PrefillBatch, PrefillCall, StepLimits},
    mla_runtime::device::Memory as _,
    mla_runtime::error::Result,
};

/// Expanded attention on sm_90a, for new tokens and for context chunks.
///
/// Keys come as two sources, the head's part and the shared rotary part, so that nobody packs them;
/// packed keys are taken as well, a little slower. Every request's end is exact: what lies behind
/// it in memory is never used. Pointers, and strides in bytes, are multiples of 16.
#[derive(Debug)]
pub struct FlashAttn {
    #[cfg(feature = "sm90")]
    config: LayerConfig,
}

/// The counters by which CTAs share out their work, and the partial results of query tiles whose keys
/// they divide.
#[cfg(feature = "sm90")]
pub struct FlashAttnState {
    workspace: Buffer,
}

#[mla_backend(
    name = "FLASH_ATTN",
    provider = "native",
    feature = "sm90",
    sm = "90",
    compiled = raw::compiled::SM90,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    dims = "(128,64,128)|(192,64,256)|(64,32,64)",
    key_layout = "split",
    alignment = 16,
    graphs = "always",
    features = "deterministic,nan_propagation,strided_outputs",
    priority = "100"
)]
impl PrefillBackend for FlashAttn {
    type Device = Cuda;
    type State = FlashAttnState;
    type Metadata = ();

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        expanded::shape(config)?;
        device.bind()?;
        // SAFETY: the function takes nothing; the context it loads into is current.
        raw::check("load prefill kernels", unsafe {
            raw::mla_load_prefill_sm90()
        })?;
        Ok(Self { config: *config })
    }

    fn workspace_bytes(&self, device: &Cuda, _: &StepLimits) -> u64 {
        // What keeps the size from being known keeps `state` from allocating it, and says so there.
        self.workspace(device).map_or(0, |bytes| bytes as u64)
    }

    fn state(&self, device: &Cuda, _: &StepLimits) -> Result<FlashAttnState> {
        // Zeros are how the kernel's counters have to begin.
        Ok(FlashAttnState {
            workspace: device.allocate(self.workspace(device)?)?,
        })
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        _: &Cuda,
        _: &PrefillBatch<'_>,
        _: &mut FlashAttnState,
        (): &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn prefill(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        state: &mut FlashAttnState,
        (): &(),
    ) -> Result<()> {
        let Some(mut params) = expanded::params(&self.config, &Self::SPEC, call)? else {
            return Ok(());
        };
        params.workspace = state.workspace.address() as *mut _;
        params.workspace_bytes = state.workspace.len();
        device.bind()?;
        // SAFETY: `params` checked every tensor to hold what its layout says and the layouts to agree, the
        // output and the workspace are borrowed mutably, and the call states the bounds of the lengths,
        // which the kernel relies on.
        raw::check("prefill", unsafe {
            raw::mla_prefill_sm90(&params, device.raw_stream())
        })
    }
}

#[cfg(feature = "sm90")]
impl FlashAttn {
    /// Bytes of the workspace, which depend on the width of a value and on the device.
    fn workspace(&self, device: &Cuda) -> Result<usize> {
        let params = expanded::shape(&self.config)?;
        let mut bytes = 0;
        device.bind()?;
        // SAFETY: both addresses are those of values on this stack.
        let status = unsafe { raw::mla_prefill_sm90_workspace(&params, &mut bytes) };
        raw::check("prefill workspace", status)?;
        Ok(bytes)
    }
}
