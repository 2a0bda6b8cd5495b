//! A portable backend that uses only the resources of a smaller GPU.

use mla_kernels::Cuda;
use mla_kernels::backends::sm80::{
    MmaAttn, MmaMla, MmaMlaScaled, MmaMlaSparse, MmaMlaSparseNarrow,
};
use mla_kernels::raw::MlaDeviceLimits;
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, PrefillBackend, PrefillBatch, PrefillCall,
    StepLimits,
};
use mla_runtime::spec::BackendSpec;

/// The backend `B` with `SHARED` bytes of shared memory per CTA, and `SMS` SMs.
pub(super) struct Smaller<B, const SHARED: i32, const SMS: i32>(B);

const fn limits(shared_memory_bytes: i32, multiprocessors: i32) -> MlaDeviceLimits {
    MlaDeviceLimits {
        shared_memory_bytes,
        multiprocessors,
    }
}

/// A backend that can be limited to a part of the GPU.
pub(super) trait Limited {
    fn with(self, limits: MlaDeviceLimits) -> Self;
}

macro_rules! limited {
    ($($backend:ident),*) => {$(
        impl Limited for $backend {
            fn with(self, limits: MlaDeviceLimits) -> Self {
                self.limited_to(limits)
            }
        }
    )*};
}

limited!(
    MmaAttn,
    MmaMla,
    MmaMlaScaled,
    MmaMlaSparse,
    MmaMlaSparseNarrow
);

macro_rules! smaller {
    ($backend:ident, $batch:ty, $call:ty, $run:ident) => {
        impl<B, const SHARED: i32, const SMS: i32> $backend for Smaller<B, SHARED, SMS>
        where
            B: $backend<Device = Cuda> + Limited,
        {
            type Device = Cuda;
            type State = B::State;
            type Metadata = B::Metadata;

            const SPEC: BackendSpec = B::SPEC;

            fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
                Ok(Self(B::new(device, config)?.with(limits(SHARED, SMS))))
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
                batch: &$batch,
                state: &mut Self::State,
                metadata: &mut Self::Metadata,
            ) -> Result<()> {
                self.0.prepare(device, batch, state, metadata)
            }

            unsafe fn $run(
                &self,
                device: &Cuda,
                call: $call,
                state: &mut Self::State,
                metadata: &Self::Metadata,
            ) -> Result<()> {
                // SAFETY: the caller keeps to the same contract.
                unsafe { self.0.$run(device, call, state, metadata) }
            }
        }
    };
}

smaller!(
    DecodeBackend,
    DecodeBatch<'_, Cuda>,
    DecodeCall<'_, Cuda>,
    decode
);
smaller!(
    PrefillBackend,
    PrefillBatch<'_>,
    PrefillCall<'_, Cuda>,
    prefill
);
