//! The CPU's backends, as if they read 16 bytes at a time and took short lists: what most kernels
//! on GPUs ask for.

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, PrefillBackend, PrefillBatch, PrefillCall,
    StepLimits,
};
use mla_runtime::spec::BackendSpec;

/// Maximum number of entries of a list of slots.
pub(crate) const LIST: u32 = 16;

/// A backend whose spec says 16 bytes, and how long lists are.
pub(crate) struct Aligned<B>(B);

impl PrefillBackend for Aligned<CpuPrefill> {
    type Device = Cpu;
    type State = <CpuPrefill as PrefillBackend>::State;
    type Metadata = ();

    const SPEC: BackendSpec = CpuPrefill::SPEC.with_alignment(16);

    fn new(device: &Cpu, config: &LayerConfig) -> Result<Self> {
        CpuPrefill::new(device, config).map(Self)
    }

    fn state(&self, device: &Cpu, limits: &StepLimits) -> Result<Self::State> {
        PrefillBackend::state(&self.0, device, limits)
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        device: &Cpu,
        batch: &PrefillBatch<'_>,
        state: &mut Self::State,
        (): &mut (),
    ) -> Result<()> {
        PrefillBackend::prepare(&self.0, device, batch, state, &mut ())
    }

    unsafe fn prefill(
        &self,
        device: &Cpu,
        call: PrefillCall<'_, Cpu>,
        state: &mut Self::State,
        (): &(),
    ) -> Result<()> {
        // SAFETY: the caller keeps to the same contract.
        unsafe { PrefillBackend::prefill(&self.0, device, call, state, &()) }
    }
}

impl DecodeBackend for Aligned<CpuDecode> {
    type Device = Cpu;
    type State = <CpuDecode as DecodeBackend>::State;
    type Metadata = ();

    const SPEC: BackendSpec = CpuDecode::SPEC
        .with_alignment(16)
        .with_max_list_width(Some(LIST));

    fn new(device: &Cpu, config: &LayerConfig) -> Result<Self> {
        CpuDecode::new(device, config).map(Self)
    }

    fn state(&self, device: &Cpu, limits: &StepLimits) -> Result<Self::State> {
        DecodeBackend::state(&self.0, device, limits)
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(
        &self,
        device: &Cpu,
        batch: &DecodeBatch<'_, Cpu>,
        state: &mut Self::State,
        (): &mut (),
    ) -> Result<()> {
        DecodeBackend::prepare(&self.0, device, batch, state, &mut ())
    }

    unsafe fn decode(
        &self,
        device: &Cpu,
        call: DecodeCall<'_, Cpu>,
        state: &mut Self::State,
        (): &(),
    ) -> Result<()> {
        // SAFETY: the caller keeps to the same contract.
        unsafe { DecodeBackend::decode(&self.0, device, call, state, &()) }
    }
}
