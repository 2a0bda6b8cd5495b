//! A backend that takes rows of one pair of widths alone, so that every case of its conformance
//! tries these.

use mla_kernels::Cuda;
use mla_runtime::Result;
use mla_runtime::backend::{DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, StepLimits};
use mla_runtime::spec::{BackendSpec, CacheDims};

/// `B` for rows of `LATENT` and `ROPE` values.
pub(crate) struct OfRow<B, const LATENT: u32, const ROPE: u32>(B);

impl<B, const LATENT: u32, const ROPE: u32> OfRow<B, LATENT, ROPE> {
    const ROWS: &'static [CacheDims] = &[CacheDims::new(LATENT, ROPE)];
}

impl<B, const LATENT: u32, const ROPE: u32> DecodeBackend for OfRow<B, LATENT, ROPE>
where
    B: DecodeBackend<Device = Cuda>,
{
    type Device = Cuda;
    type State = B::State;
    type Metadata = B::Metadata;

    const SPEC: BackendSpec = B::SPEC.with_cache_dims(Some(Self::ROWS));

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        Ok(Self(B::new(device, config)?))
    }

    fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<u64> {
        self.0.workspace_bytes(device, limits)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<Self::State> {
        self.0.state(device, limits)
    }

    fn metadata(&self, device: &Cuda, limits: &StepLimits) -> Result<Self::Metadata> {
        self.0.metadata(device, limits)
    }

    fn prepare(
        &self,
        device: &Cuda,
        batch: &DecodeBatch<'_, Cuda>,
        state: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()> {
        self.0.prepare(device, batch, state, metadata)
    }

    unsafe fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()> {
        // SAFETY: the caller keeps to the same contract.
        unsafe { self.0.decode(device, call, state, metadata) }
    }
}
