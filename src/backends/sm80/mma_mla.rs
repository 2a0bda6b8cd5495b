//! MMA_MLA and MMA_MLA_DS: dense absorbed decode on every GPU since Ampere, one launch per step.
//!
//! `docs/kernels/portable.md` tells how the kernel works. It divides a batch on the device, from the lengths
//! there, so [`prepare`](DecodeBackend::prepare) has nothing to do and a captured step can be replayed with
//! other lengths and pages in the same arrays.

use mla_runtime::mla_backend;

#[cfg(feature = "sm80")]
use {
    super::dense::Dense,
    crate::backends::absorbed::AbsorbedState,
    crate::device::Cuda,
    crate::raw,
    mla_runtime::backend::{DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, StepLimits},
    mla_runtime::error::Result,
};

/// A backend of the one dense kernel: its type, and what it takes.
macro_rules! dense_backend {
    ($(#[$about:meta])* $backend:ident, $($claims:tt)*) => {
        $(#[$about])*
        #[derive(Debug)]
        pub struct $backend {
            #[cfg(feature = "sm80")]
            dense: Dense,
        }

        #[cfg(feature = "sm80")]
        impl $backend {
            /// Uses no more of the device than `limits` say, as if it were a smaller one.
            #[must_use]
            pub fn limited_to(self, limits: raw::MlaDeviceLimits) -> Self {
                Self { dense: self.dense.limited_to(limits) }
            }
        }

        #[mla_backend($($claims)*)]
        impl DecodeBackend for $backend {
            type Device = Cuda;
            type State = AbsorbedState;
            type Metadata = ();

            fn new(_: &Cuda, config: &LayerConfig) -> Result<Self> {
                Ok(Self { dense: Dense::new(config) })
            }

            fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> u64 {
                // What keeps the size from being known keeps `state` from allocating it, and says so there.
                let bytes = self.dense.workspace_bytes(device, limits);
                bytes.map_or(0, |bytes| bytes as u64)
            }

            fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<AbsorbedState> {
                self.dense.state(device, limits)
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
                self.dense.decode(device, &Self::SPEC, call, state)
            }
        }
    };
}

dense_backend! {
    /// Dense absorbed decode on every GPU since Ampere: 1 to 128 heads, up to 16 query tokens per request,
    /// pages of any multiple of 16; caches of the queries' dtype, or of e4m3 with one scale.
    MmaMla,
    name = "MMA_MLA",
    provider = "native",
    feature = "sm80",
    sm = "80+",
    compiled = raw::compiled::SM80,
    run_on = super::RUN_ON,
    dtypes = "f16,bf16",
    kv = "f16,bf16,fp8",
    cache_dims = "(512,64)|(256,64)|(256,32)|(512,0)",
    heads = "1..=128",
    page_sizes = "x16",
    query_len = "ragged",
    // What the C interface takes: `query_len` in mla.h.
    max_query_len = 16,
    alignment = 16,
    graphs = "always",
    features = "deterministic,nan_propagation,strided_outputs",
    priority = "50"
}

dense_backend! {
    /// The same for caches of `fp8_ds_mla`, of which rows of (512, 64) alone are a multiple of 16 bytes.
    MmaMlaDs,
    name = "MMA_MLA_DS",
    provider = "native",
    feature = "sm80",
    sm = "80+",
    compiled = raw::compiled::SM80,
    run_on = super::RUN_ON_H200,
    dtypes = "f16,bf16",
    kv = "fp8_ds_mla",
    cache_dims = "(512,64)",
    heads = "1..=128",
    page_sizes = "x16",
    query_len = "ragged",
    // What the C interface takes: `query_len` in mla.h.
    max_query_len = 16,
    alignment = 16,
    graphs = "always",
    features = "deterministic,nan_propagation,strided_outputs",
    priority = "50"
}
