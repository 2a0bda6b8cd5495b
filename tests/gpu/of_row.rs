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

forwarded! {
    [const LATENT: u32, const ROPE: u32] OfRow<B, LATENT, ROPE>: DecodeBackend,
    decode of DecodeCall<'_, Cuda>, DecodeBatch<'_, Cuda>;
    spec: B::SPEC.with_cache_dims(Some(Self::ROWS)); new: |backend| backend
}
