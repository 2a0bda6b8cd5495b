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

forwarded! {
    [const SHARED: i32, const SMS: i32] Smaller<B, SHARED, SMS>: DecodeBackend + Limited,
    decode of DecodeCall<'_, Cuda>, DecodeBatch<'_, Cuda>;
    spec: B::SPEC; new: |backend| backend.with(limits(SHARED, SMS))
}

forwarded! {
    [const SHARED: i32, const SMS: i32] Smaller<B, SHARED, SMS>: PrefillBackend + Limited,
    prefill of PrefillCall<'_, Cuda>, PrefillBatch<'_>;
    spec: B::SPEC; new: |backend| backend.with(limits(SHARED, SMS))
}
