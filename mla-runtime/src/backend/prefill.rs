//! Expanded attention: queries, keys and values per head.

use std::any::Any;
use std::marker::PhantomData;

use super::entry::Entry;
use super::opaque::Opaque;
use super::prefill_call::{PrefillBatch, PrefillCall};
use super::{LayerConfig, StepLimits, keep_apart};
use crate::Result;
use crate::device::Device;
use crate::spec::{Availability, BackendSpec, KernelFacts};

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
    fn availability() -> Availability {
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

/// A prefill backend as the layer calls it: chosen by type, or at run time. Its methods are those
/// of [`PrefillBackend`].
pub trait PrefillStage: Send + Sync + 'static {
    /// The device; see [`PrefillBackend::Device`].
    type Device: Device;
    /// The state; see [`PrefillBackend::State`].
    type State: Send + 'static;
    /// The metadata; see [`PrefillBackend::Metadata`].
    type Metadata: Send + 'static;

    /// Returns the backend's [`PrefillBackend::SPEC`].
    fn spec(&self) -> &'static BackendSpec;

    /// Calls [`PrefillBackend::workspace_bytes`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64>;

    /// Calls [`PrefillBackend::state`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State>;

    /// Calls [`PrefillBackend::metadata`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    fn metadata(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata>;

    /// Calls [`PrefillBackend::prepare`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    fn prepare(
        &self,
        device: &Self::Device,
        batch: &PrefillBatch<'_>,
        state: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()>;

    /// Calls [`PrefillBackend::prefill`].
    ///
    /// # Safety
    ///
    /// The contract of [`PrefillBackend::prefill`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    unsafe fn prefill(
        &self,
        device: &Self::Device,
        call: PrefillCall<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()>;
}

// The stage's methods, from those of the same name of another trait on another receiver. A macro,
// because the two implementations below must never differ in anything else.
macro_rules! stage {
    ($source:ident, |$this:ident| $receiver:expr, $keep_apart:expr) => {
        fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64> {
            let $this = self;
            $source::workspace_bytes($receiver, device, limits)
        }

        fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State> {
            let $this = self;
            $source::state($receiver, device, limits)
        }

        fn metadata(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata> {
            let $this = self;
            $source::metadata($receiver, device, limits)
        }

        fn prepare(
            &self,
            device: &Self::Device,
            batch: &PrefillBatch<'_>,
            state: &mut Self::State,
            metadata: &mut Self::Metadata,
        ) -> Result<()> {
            let $this = self;
            $keep_apart(device)?;
            let prepared = $source::prepare($receiver, device, batch, state, metadata);
            $keep_apart(device)?;
            prepared
        }

        unsafe fn prefill(
            &self,
            device: &Self::Device,
            call: PrefillCall<'_, Self::Device>,
            state: &mut Self::State,
            metadata: &Self::Metadata,
        ) -> Result<()> {
            let $this = self;
            $keep_apart(device)?;
            // SAFETY: the contract is the same, and the caller keeps to it.
            let enqueued = unsafe { $source::prefill($receiver, device, call, state, metadata) };
            $keep_apart(device)?;
            enqueued
        }
    };
}

impl<B: PrefillBackend> PrefillStage for B {
    type Device = B::Device;
    type State = B::State;
    type Metadata = B::Metadata;

    fn spec(&self) -> &'static BackendSpec {
        const { &B::SPEC }
    }

    stage!(PrefillBackend, |this| this, |device| keep_apart(
        device,
        &B::SPEC
    ));
}

/// A prefill backend chosen at run time: a call goes through one pointer into the backend's own
/// code. Made by [`Registry::instantiate_prefill`](crate::select::Registry::instantiate_prefill).
pub struct SelectedPrefill<D: Device> {
    object: Box<dyn PrefillStage<Device = D, State = Opaque, Metadata = Opaque>>,
    config: LayerConfig,
    ordinal: usize,
}

/// An implementation, and what it was made for: so are its state and metadata.
struct Configured<B> {
    backend: B,
    config: LayerConfig,
}

impl<D: Device> SelectedPrefill<D> {
    pub(crate) fn new<B: PrefillBackend<Device = D>>(
        device: &D,
        config: &LayerConfig,
    ) -> Result<Self> {
        Ok(Self {
            object: Box::new(Configured {
                backend: B::new(device, config)?,
                config: *config,
            }),
            config: *config,
            ordinal: device.ordinal(),
        })
    }

    /// The configuration that it was made for.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// The number of the device that it was made for.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }
}

impl<D: Device> PrefillStage for SelectedPrefill<D> {
    type Device = D;
    type State = Opaque;
    type Metadata = Opaque;

    fn spec(&self) -> &'static BackendSpec {
        self.object.spec()
    }

    // The object's methods are those of the backend's own stage.
    stage!(PrefillStage, |this| &*this.object, |_| Result::Ok(()));
}

impl Entry {
    /// The entry of a prefill backend.
    pub const fn prefill<B: PrefillBackend>() -> Self {
        Self::implemented(
            B::SPEC,
            B::KERNELS,
            B::availability,
            Made::<B>::MAKER,
            std::any::type_name::<B>,
        )
    }

    /// The prefill implementation for one layer, or `None` if this is no prefill backend for
    /// devices of type `D`.
    pub fn make_prefill<D: Device>(
        &self,
        device: &D,
        config: &LayerConfig,
    ) -> Option<Result<SelectedPrefill<D>>> {
        self.maker?
            .downcast_ref::<Maker<D>>()
            .map(|maker| (maker.make)(device, config))
    }
}

struct Maker<D: Device> {
    make: fn(&D, &LayerConfig) -> Result<SelectedPrefill<D>>,
}

// Holds the maker as a constant, because a reference to it has to outlive the function that makes
// an entry.
struct Made<B>(PhantomData<B>);

impl<B: PrefillBackend> Made<B> {
    const MAKER: &'static (dyn Any + Send + Sync) = &Maker {
        make: SelectedPrefill::new::<B>,
    };
}

// Its state and metadata are opaque, so that a pointer to it needs no type but the device's.
impl<D: Device, B: PrefillBackend<Device = D>> PrefillStage for Configured<B> {
    type Device = D;
    type State = Opaque;
    type Metadata = Opaque;

    fn spec(&self) -> &'static BackendSpec {
        const { &B::SPEC }
    }

    fn workspace_bytes(&self, device: &D, limits: &StepLimits) -> Result<u64> {
        PrefillBackend::workspace_bytes(&self.backend, device, limits)
    }

    fn state(&self, device: &D, limits: &StepLimits) -> Result<Opaque> {
        let state = PrefillBackend::state(&self.backend, device, limits)?;
        Ok(Opaque::new(B::SPEC.name, &self.config, state))
    }

    fn metadata(&self, device: &D, limits: &StepLimits) -> Result<Opaque> {
        let metadata = PrefillBackend::metadata(&self.backend, device, limits)?;
        Ok(Opaque::new(B::SPEC.name, &self.config, metadata))
    }

    fn prepare(
        &self,
        device: &D,
        batch: &PrefillBatch<'_>,
        state: &mut Opaque,
        metadata: &mut Opaque,
    ) -> Result<()> {
        PrefillStage::prepare(
            &self.backend,
            device,
            batch,
            state.get_mut(B::SPEC.name, &self.config)?,
            metadata.get_mut(B::SPEC.name, &self.config)?,
        )
    }

    unsafe fn prefill(
        &self,
        device: &D,
        call: PrefillCall<'_, D>,
        state: &mut Opaque,
        metadata: &Opaque,
    ) -> Result<()> {
        let state = state.get_mut(B::SPEC.name, &self.config)?;
        let metadata = metadata.get(B::SPEC.name, &self.config)?;
        // SAFETY: the contract is the same, and the caller keeps to it.
        unsafe { PrefillStage::prefill(&self.backend, device, call, state, metadata) }
    }
}
