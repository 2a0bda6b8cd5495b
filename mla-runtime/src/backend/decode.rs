//! Absorbed attention: every head attends to the cache's own rows.

use std::any::Any;
use std::marker::PhantomData;

use super::decode_call::{DecodeBatch, DecodeCall};
use super::entry::Entry;
use super::opaque::Opaque;
use super::{LayerConfig, StepLimits, keep_apart};
use crate::device::Device;
use crate::spec::{Availability, BackendSpec, KernelFacts};
use crate::{Error, Result};

/// A decode backend. `#[mla_backend(…)]` on the `impl` block writes [`SPEC`](Self::SPEC) and links
/// the [`ENTRY`](Self::ENTRY).
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no decode backend",
    note = "write `#[mla_backend(sm = \"…\", dtypes = \"…\")] \
            impl DecodeBackend for {Self} {{ … }}`"
)]
pub trait DecodeBackend: Sized + Send + Sync + 'static {
    /// The device whose memory it reads and writes.
    type Device: Device;
    /// Made once per engine: workspaces.
    type State: Send + 'static;
    /// Made once per engine and prepared per step, in buffers that never move: a graph that was
    /// captured with them stays valid.
    type Metadata: Send + 'static;

    /// The problems that it supports; written by `#[mla_backend]`.
    const SPEC: BackendSpec;

    /// Its registry entry, for a registry made by hand.
    const ENTRY: Entry = Entry::decode::<Self>();

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

    /// Prepares the metadata of a step, such as a schedule, from the lengths on the device. If this
    /// is left out, nothing is prepared.
    ///
    /// It is safe to call: whatever the batch's arrays hold, it writes nothing but the state and
    /// the metadata. Only [`decode`](Self::decode) may trust the arrays.
    ///
    /// # Errors
    ///
    /// If the batch exceeds the limits that the metadata was made for, or the device fails.
    fn prepare(
        &self,
        device: &Self::Device,
        batch: &DecodeBatch<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()> {
        let _ = (device, batch, state, metadata);
        Ok(())
    }

    /// Attends each query token to its request's rows, with the whole row as key and its latent as
    /// value. A token that sees nothing gives 0 and −inf.
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
    unsafe fn decode(
        &self,
        device: &Self::Device,
        call: DecodeCall<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()>;

    /// Divides each request's rows into at most `splits` splits, in place of the backend's own
    /// choice: for benchmarks that look for the best number.
    ///
    /// # Errors
    ///
    /// If the backend alone decides, or takes no such number.
    fn set_num_splits(&mut self, splits: u32) -> Result<()> {
        let accepted = format!("none: {} divides rows by itself", Self::SPEC.name);
        Err(Error::argument("num_splits", splits, accepted))
    }
}

/// A decode backend as the layer calls it: chosen by type, or at run time. Its methods are those of
/// [`DecodeBackend`].
pub trait DecodeStage: Send + Sync + 'static {
    /// The device; see [`DecodeBackend::Device`].
    type Device: Device;
    /// The state; see [`DecodeBackend::State`].
    type State: Send + 'static;
    /// The metadata; see [`DecodeBackend::Metadata`].
    type Metadata: Send + 'static;

    /// Returns the backend's [`DecodeBackend::SPEC`].
    fn spec(&self) -> &'static BackendSpec;

    /// Calls [`DecodeBackend::workspace_bytes`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64>;

    /// Calls [`DecodeBackend::state`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State>;

    /// Calls [`DecodeBackend::metadata`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    fn metadata(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::Metadata>;

    /// Calls [`DecodeBackend::prepare`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    fn prepare(
        &self,
        device: &Self::Device,
        batch: &DecodeBatch<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &mut Self::Metadata,
    ) -> Result<()>;

    /// Calls [`DecodeBackend::decode`].
    ///
    /// # Safety
    ///
    /// The contract of [`DecodeBackend::decode`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    unsafe fn decode(
        &self,
        device: &Self::Device,
        call: DecodeCall<'_, Self::Device>,
        state: &mut Self::State,
        metadata: &Self::Metadata,
    ) -> Result<()>;
}

// The macro is like the prefill module's: two implementations that must never differ in anything
// but the source of their methods.
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
            batch: &DecodeBatch<'_, Self::Device>,
            state: &mut Self::State,
            metadata: &mut Self::Metadata,
        ) -> Result<()> {
            let $this = self;
            $keep_apart(device)?;
            let prepared = $source::prepare($receiver, device, batch, state, metadata);
            $keep_apart(device)?;
            prepared
        }

        unsafe fn decode(
            &self,
            device: &Self::Device,
            call: DecodeCall<'_, Self::Device>,
            state: &mut Self::State,
            metadata: &Self::Metadata,
        ) -> Result<()> {
            let $this = self;
            $keep_apart(device)?;
            // SAFETY: the contract is the same, and the caller keeps to it.
            let enqueued = unsafe { $source::decode($receiver, device, call, state, metadata) };
            $keep_apart(device)?;
            enqueued
        }
    };
}

impl<B: DecodeBackend> DecodeStage for B {
    type Device = B::Device;
    type State = B::State;
    type Metadata = B::Metadata;

    fn spec(&self) -> &'static BackendSpec {
        const { &B::SPEC }
    }

    stage!(DecodeBackend, |this| this, |device| keep_apart(
        device,
        &B::SPEC
    ));
}

/// A decode backend chosen at run time: a call goes through one pointer into the backend's own
/// code. Made by [`Registry::instantiate_decode`](crate::select::Registry::instantiate_decode).
pub struct SelectedDecode<D: Device> {
    object: Box<dyn DecodeObject<D>>,
    config: LayerConfig,
    ordinal: usize,
}

/// An implementation, and what it was made for: so are its state and metadata.
struct Configured<B> {
    backend: B,
    config: LayerConfig,
}

impl<D: Device> SelectedDecode<D> {
    pub(crate) fn new<B: DecodeBackend<Device = D>>(
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

    /// Calls [`DecodeBackend::set_num_splits`].
    ///
    /// # Errors
    ///
    /// Same as the backend's.
    pub fn set_num_splits(&mut self, splits: u32) -> Result<()> {
        self.object.set_num_splits(splits)
    }
}

impl<D: Device> DecodeStage for SelectedDecode<D> {
    type Device = D;
    type State = Opaque;
    type Metadata = Opaque;

    fn spec(&self) -> &'static BackendSpec {
        self.object.spec()
    }

    // The object's methods are those of the backend's own stage.
    stage!(DecodeStage, |this| &*this.object, |_| Result::Ok(()));
}

impl Entry {
    /// The entry of a decode backend.
    pub const fn decode<B: DecodeBackend>() -> Self {
        Self::implemented(
            B::SPEC,
            B::KERNELS,
            B::availability,
            Made::<B>::MAKER,
            std::any::type_name::<B>,
        )
    }

    /// The decode implementation for one layer, or `None` if this is no decode backend for
    /// devices of type `D`.
    pub fn make_decode<D: Device>(
        &self,
        device: &D,
        config: &LayerConfig,
    ) -> Option<Result<SelectedDecode<D>>> {
        self.maker?
            .downcast_ref::<Maker<D>>()
            .map(|maker| (maker.make)(device, config))
    }
}

struct Maker<D: Device> {
    make: fn(&D, &LayerConfig) -> Result<SelectedDecode<D>>,
}

// Holds the maker as a constant, because a reference to it has to outlive the function that makes
// an entry.
struct Made<B>(PhantomData<B>);

impl<B: DecodeBackend> Made<B> {
    const MAKER: &'static (dyn Any + Send + Sync) = &Maker {
        make: SelectedDecode::new::<B>,
    };
}

/// The stage of a backend that is behind a pointer, whose type is the device's alone.
trait DecodeObject<D: Device>: DecodeStage<Device = D, State = Opaque, Metadata = Opaque> {
    fn set_num_splits(&mut self, splits: u32) -> Result<()>;
}

impl<D: Device, B: DecodeBackend<Device = D>> DecodeObject<D> for Configured<B> {
    fn set_num_splits(&mut self, splits: u32) -> Result<()> {
        self.backend.set_num_splits(splits)
    }
}

impl<D: Device, B: DecodeBackend<Device = D>> DecodeStage for Configured<B> {
    type Device = D;
    type State = Opaque;
    type Metadata = Opaque;

    fn spec(&self) -> &'static BackendSpec {
        const { &B::SPEC }
    }

    fn workspace_bytes(&self, device: &D, limits: &StepLimits) -> Result<u64> {
        DecodeBackend::workspace_bytes(&self.backend, device, limits)
    }

    fn state(&self, device: &D, limits: &StepLimits) -> Result<Opaque> {
        let state = DecodeBackend::state(&self.backend, device, limits)?;
        Ok(Opaque::new(B::SPEC.name, &self.config, state))
    }

    fn metadata(&self, device: &D, limits: &StepLimits) -> Result<Opaque> {
        let metadata = DecodeBackend::metadata(&self.backend, device, limits)?;
        Ok(Opaque::new(B::SPEC.name, &self.config, metadata))
    }

    fn prepare(
        &self,
        device: &D,
        batch: &DecodeBatch<'_, D>,
        state: &mut Opaque,
        metadata: &mut Opaque,
    ) -> Result<()> {
        DecodeStage::prepare(
            &self.backend,
            device,
            batch,
            state.get_mut(B::SPEC.name, &self.config)?,
            metadata.get_mut(B::SPEC.name, &self.config)?,
        )
    }

    unsafe fn decode(
        &self,
        device: &D,
        call: DecodeCall<'_, D>,
        state: &mut Opaque,
        metadata: &Opaque,
    ) -> Result<()> {
        let state = state.get_mut(B::SPEC.name, &self.config)?;
        let metadata = metadata.get(B::SPEC.name, &self.config)?;
        // SAFETY: the contract is the same, and the caller keeps to it.
        unsafe { DecodeStage::decode(&self.backend, device, call, state, metadata) }
    }
}
