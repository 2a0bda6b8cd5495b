//! MMA_ATTN: expanded prefill on every GPU since Ampere, one launch per attention.
//!
//! `docs/kernels/portable.md` tells how the kernel works. It finds its tiles from the lengths on the device,
//! so [`prepare`](PrefillBackend::prepare) has nothing to do.

use mla_runtime::mla_backend;

#[cfg(feature = "sm80")]
use {
    crate::backends::expanded,
    crate::device::{Buffer, Cuda},
    crate::raw,
    mla_runtime::backend::{LayerConfig, PrefillBackend, PrefillBatch, PrefillCall, StepLimits},
    mla_runtime::device::Memory as _,
    mla_runtime::error::Result,
};

/// Expanded attention on every GPU since Ampere, for new tokens and for context chunks.
///
/// Keys come as two sources, the head's part and the shared rotary part, so that nobody packs them;
/// packed keys are taken as well. Every request's end is exact: what lies behind it in memory is never
/// used. Pointers, and strides in bytes, are multiples of 16.
#[derive(Debug)]
pub struct MmaAttn {
    #[cfg(feature = "sm80")]
    config: LayerConfig,
    #[cfg(feature = "sm80")]
    limits: raw::MlaDeviceLimits,
}

#[mla_backend(
    name = "MMA_ATTN",
    provider = "native",
    feature = "sm80",
    sm = "80+",
    compiled = raw::compiled::SM80,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    dims = "(128,64,128)|(192,64,256)|(64,64,128)|(256,0,256)|(64,32,64)",
    key_layout = "split",
    alignment = 16,
    graphs = "always",
    features = "deterministic,nan_propagation,strided_outputs",
    priority = "50"
)]
impl PrefillBackend for MmaAttn {
    type Device = Cuda;
    type State = Buffer;
    type Metadata = ();

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        let params = expanded::shape(config)?;
        device.bind()?;
        // SAFETY: the address is that of a value on this stack; the context it loads into is current.
        raw::check("load prefill kernels", unsafe {
            raw::mla_load_prefill_sm80(&params)
        })?;
        Ok(Self {
            config: *config,
            limits: raw::MlaDeviceLimits::default(),
        })
    }

    fn workspace_bytes(&self, device: &Cuda, _: &StepLimits) -> u64 {
        // What keeps the size from being known keeps `state` from allocating it, and says so there.
        self.workspace(device).map_or(0, |bytes| bytes as u64)
    }

    fn state(&self, device: &Cuda, _: &StepLimits) -> Result<Buffer> {
        // Zeros are how the kernel's counters have to begin.
        device.allocate(self.workspace(device)?)
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(&self, _: &Cuda, _: &PrefillBatch<'_>, _: &mut Buffer, (): &mut ()) -> Result<()> {
        Ok(())
    }

    fn prefill(
        &self,
        device: &Cuda,
        call: PrefillCall<'_, Cuda>,
        workspace: &mut Buffer,
        (): &(),
    ) -> Result<()> {
        let Some(mut params) = expanded::params(&self.config, &Self::SPEC, call)? else {
            return Ok(());
        };
        params.workspace = workspace.address() as *mut _;
        params.workspace_bytes = workspace.len();
        device.bind()?;
        // SAFETY: `params` checked every tensor to hold what its layout says and the layouts to agree, the
        // output and the workspace are borrowed mutably, the latter was made for the same limits, and the call states the bounds of the lengths, which the kernel relies
        // on.
        raw::check("prefill", unsafe {
            raw::mla_prefill_sm80(&params, &self.limits, device.raw_stream())
        })
    }
}

#[cfg(feature = "sm80")]
impl MmaAttn {
    /// Uses no more of the device than `limits` say, as if it were a smaller one.
    #[must_use]
    pub fn limited_to(self, limits: raw::MlaDeviceLimits) -> Self {
        Self { limits, ..self }
    }

    /// Bytes of the workspace, which depend on the dimensions and on the device.
    fn workspace(&self, device: &Cuda) -> Result<usize> {
        let params = expanded::shape(&self.config)?;
        let mut bytes = 0;
        device.bind()?;
        // SAFETY: the addresses are those of values that outlive the call.
        let status = unsafe { raw::mla_prefill_sm80_workspace(&params, &self.limits, &mut bytes) };
        raw::check("prefill workspace", status)?;
        Ok(bytes)
    }
}
