//! Dense absorbed decode, whichever backend offers it.

use mla_runtime::backend::{DecodeCall, LayerConfig, StepLimits};
use mla_runtime::error::Result;
use mla_runtime::spec::BackendSpec;

use crate::backends::absorbed::{self, AbsorbedState};
use crate::device::Cuda;
use crate::raw;

/// The kernel for one layer.
#[derive(Debug)]
pub(super) struct Dense {
    config: LayerConfig,
    limits: raw::MlaDeviceLimits,
}

impl Dense {
    pub(super) fn new(config: &LayerConfig) -> Self {
        Self {
            config: *config,
            limits: raw::MlaDeviceLimits::default(),
        }
    }

    pub(super) fn limited_to(self, limits: raw::MlaDeviceLimits) -> Self {
        Self { limits, ..self }
    }

    pub(super) fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<usize> {
        let params = absorbed::shape(&self.config, limits.decode_query_len.max(1))?;
        let mut bytes = 0;
        device.bind()?;
        // SAFETY: the addresses are those of values that outlive the call.
        let status = unsafe { raw::mla_decode_sm80_workspace(&params, &self.limits, &mut bytes) };
        raw::check("decode workspace", status)?;
        Ok(bytes)
    }

    pub(super) fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<AbsorbedState> {
        let bytes = self.workspace_bytes(device, limits)?;
        AbsorbedState::new(device, bytes, limits.decode_query_len.max(1))
    }

    pub(super) fn decode(
        &self,
        device: &Cuda,
        spec: &BackendSpec,
        call: DecodeCall<'_, Cuda>,
        state: &mut AbsorbedState,
    ) -> Result<()> {
        let Some(params) = absorbed::params(&self.config, spec, call, state)? else {
            return Ok(());
        };
        device.bind()?;
        // SAFETY: `params` checked every tensor and array to hold what its layout says and the layouts to
        // agree; the workspace was allocated zeroed for this many query tokens and is borrowed mutably, so
        // no other launch of this stream's order uses it at the same time; it was made for the same limits.
        raw::check("decode", unsafe {
            raw::mla_decode_sm80(&params, &self.limits, device.raw_stream())
        })
    }
}
