//! Expanded attention: each head has its own queries, keys and values.

use std::any::Any;
use std::marker::PhantomData;

use super::entry::Entry;
use super::opaque::Opaque;
use super::prefill_call::{PrefillBatch, PrefillCall};
use super::stage::{Configured, Maker, stage, stages};
use super::{LayerConfig, StepLimits, keep_apart};
use crate::Result;
use crate::device::Device;
use crate::spec::{BackendSpec, Cause, KernelFacts};

/// A prefill backend. `#[mla_backend(…)]` on the `impl` block writes [`SPEC`](Self::SPEC) and
/// registers the [`ENTRY`](Self::ENTRY).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no prefill backend",
    note = "write `#[mla_backend(sm = \"…\", dtypes = \"…\")] \
            impl PrefillBackend for {Self} {{ … }}`"
)]
pub trait PrefillBackend: Sized + Send + Sync + 'static {
    /// The device whose memory the backend reads and writes.
    type Device: Device;
    /// The workspaces, made once per engine.
    type State: Send + 'static;
    /// Data that is made once per engine and prepared per step.
    type Metadata: Send + 'static;

    /// The problems that the backend supports. `#[mla_backend]` writes this constant.
    const SPEC: BackendSpec;

    /// The registry entry, for a registry made by hand.
    const ENTRY: Entry = Entry::prefill::<Self>();

    /// The facts of the kernels: the targets that they are compiled for, and the GPUs that they
    /// have run on. `#[mla_backend]` writes this constant from the keys `compiled` and `run_on`.
    const KERNELS: KernelFacts = KernelFacts::UNKNOWN;

    /// Tells if the backend can run on this machine.
    fn availability() -> Result<(), Cause> {
        Self::Device::availability()
    }

    /// Makes the implementation for one layer.
    ///
    /// # Errors
    ///
    /// If the device fails. The problem has been validated against the spec.
    fn new(device: &Self::Device, config: &LayerConfig) -> Result<Self>;

    /// The bytes of device memory that the state and the metadata for `limits` allocate together.
    ///
    /// # Errors
    ///
    /// If the backend does not support steps of these limits; [`Self::state`] refuses them as well.
    fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64> {
        let _ = (device, limits);
        Ok(0)
    }

    /// Makes the workspaces for steps within `limits`.
    ///
    /// # Errors
    ///
    /// If the device has too little free memory.
    fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State>;

    /// Makes the metadata of steps within `limits`, not yet prepared.
    ///
    /// # Errors
    ///
    /// If the device has too little free memory.
    fn metadata(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata>;

    /// Prepares the metadata of a step. The default implementation prepares nothing.
    ///
    /// # Errors
    ///
    /// If the batch exceeds the limits that the metadata was made for, or the device fails.
    fn prepare(
        &self,
        device: &Self::Device,
        batch: &PrefillBatch<'_>,
        state: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()> {
        let _ = (device, batch, state, metadata);
        Ok(())
    }

    /// Attends each request's query tokens to its keys. Without a chunk the attention is causal if
    /// the call says so: of `n` queries and `n` keys, query `i` sees the keys `0..=i`. If there are
    /// more keys than queries, the mask is aligned at the last of each (bottom-right). With a chunk
    /// every query sees all keys, and the call always asks for the log-sum-exp. For a row that sees
    /// nothing, the output is 0 and the log-sum-exp −inf.
    ///
    /// If the spec declares `dependent_launch`, kernels that may begin early keep [the contract of
    /// dependent launches](super#dependent-launches).
    ///
    /// # Safety
    ///
    /// The caller keeps [the contract of a call](super#the-contract-of-a-call): the arrays on the
    /// device hold valid starts, lengths and pages; the state and the metadata are of this
    /// configuration, and the metadata was prepared for this batch.
    ///
    /// # Errors
    ///
    /// If the call's shapes disagree, or the device fails.
    unsafe fn prefill(
        &self,
        device: &Self::Device,
        call: PrefillCall<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()>;
}

stages!(
    PrefillBackend,
    PrefillStage,
    SelectedPrefill,
    prefill,
    PrefillBatch<'_>,
    PrefillCall
);
