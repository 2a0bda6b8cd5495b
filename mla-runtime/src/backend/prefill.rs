//! Expanded attention: queries, keys and values per head.

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

/// A prefill backend. `#[mla_backend(…)]` on the `impl` block writes [`SPEC`](Self::SPEC) and links
/// the [`ENTRY`](Self::ENTRY).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no prefill backend",
    note = "write `#[mla_backend(sm = \"…\", dtypes = \"…\")] \
            impl PrefillBackend for {Self} {{ … }}`"
)]
pub trait PrefillBackend: Sized + Send + Sync + 'static {
    /// The device whose memory it reads and writes.
    type Device: Device;
    /// Made once per engine: workspaces.
    type State: Send + 'static;
    /// Made once per engine and prepared per step.
    type Metadata: Send + 'static;

    /// The problems that it supports; written by `#[mla_backend]`.
    const SPEC: BackendSpec;

    /// Its registry entry, for a registry made by hand.
    const ENTRY: Entry = Entry::prefill::<Self>();

    /// The facts of its kernels: the targets that they are compiled for, and the GPUs that they
    /// have run on; written by `#[mla_backend]` from the keys `compiled` and `run_on`.
    const KERNELS: KernelFacts = KernelFacts::UNKNOWN;

    /// Tells if it can run on this machine.
    fn availability() -> Result<(), Cause> {
        Self::Device::availability()
    }

    /// The implementation for one layer.
    ///
    /// # Errors
    ///
    /// If the device fails. The problem has been validated against the spec.
    fn new(device: &Self::Device, config: &LayerConfig) -> Result<Self>;

    /// The bytes of device memory that the state and the metadata for `limits` allocate together.
    ///
    /// # Errors
    ///
    /// If the backend takes no steps of these limits; [`Self::state`] refuses them as well.
    fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64> {
        let _ = (device, limits);
        Ok(0)
    }

    /// The workspaces for steps within `limits`.
    ///
    /// # Errors
    ///
    /// If the device has not as much memory left.
    fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State>;

    /// Room for the metadata of steps within `limits`.
    ///
    /// # Errors
    ///
    /// If the device has not as much memory left.
    fn metadata(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata>;

    /// Prepares the metadata of a step. If this is left out, nothing is prepared.
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

    /// Attends each request's query tokens to its keys. If the call has no chunk, causally:
    /// query `i` of `n` sees keys `0..=i` (bottom-right aligned if there are more keys than
    /// queries). If it has one, to all of them, and the log-sum-exp is always asked for. A row
    /// that sees nothing gives 0 and −inf.
    ///
    /// Kernels that are launched to begin early keep [the contract of dependent
    /// launches](super#dependent-launches), or the spec does not declare `dependent_launch`.
    ///
    /// # Safety
    ///
    /// The caller keeps to [the contract of a call](super#the-contract-of-a-call): the arrays on
    /// the device hold valid starts, lengths and pages; the state and the metadata are of this
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
    make_prefill,
    PrefillBatch<'_>,
    PrefillCall,
    {},
    {}
);
