//! The CPU's backends, declared as if they read 16 bytes at a time and supported only short lists.
//! Most GPU kernels have such limits.

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, PrefillBackend, PrefillBatch, PrefillCall,
    StepLimits,
};
use mla_runtime::spec::BackendSpec;

/// Maximum number of entries of a list of slots.
pub(crate) const LIST: u32 = 16;

/// A backend whose spec declares an alignment of 16 bytes and a maximum width of lists.
pub(crate) struct Aligned<B>(B);

macro_rules! aligned {
    ($backend:ident for $cpu:ident: $run:ident($call:ident), $batch:ty, $spec:expr) => {
        impl $backend for Aligned<$cpu> {
            type Device = Cpu;
            type State = <$cpu as $backend>::State;
            type Metadata = ();

            const SPEC: BackendSpec = $spec;

            fn new(device: &Cpu, config: &LayerConfig) -> Result<Self> {
                $cpu::new(device, config).map(Self)
            }

            fn state(&self, device: &Cpu, limits: &StepLimits) -> Result<Self::State> {
                $backend::state(&self.0, device, limits)
            }

            fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
                Ok(())
            }

            fn prepare(
                &self,
                device: &Cpu,
                batch: &$batch,
                state: &mut Self::State,
                (): &mut (),
            ) -> Result<()> {
                $backend::prepare(&self.0, device, batch, state, &mut ())
            }

            unsafe fn $run(
                &self,
                device: &Cpu,
                call: $call<'_, Cpu>,
                state: &mut Self::State,
                (): &(),
            ) -> Result<()> {
                // SAFETY: the caller keeps the same contract.
                unsafe { $backend::$run(&self.0, device, call, state, &()) }
            }
        }
    };
}

aligned! {
    PrefillBackend for CpuPrefill: prefill(PrefillCall), PrefillBatch<'_>,
    CpuPrefill::SPEC.with_alignment(16)
}

aligned! {
    DecodeBackend for CpuDecode: decode(DecodeCall), DecodeBatch<'_, Cpu>,
    CpuDecode::SPEC.with_alignment(16).with_max_list_width(Some(LIST))
}
