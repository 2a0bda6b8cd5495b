//! The stages of both phases. The layer calls them, however the backend was chosen.

use super::LayerConfig;
use crate::Result;

/// An implementation and the configuration that it was made for.
pub(super) struct Configured<B> {
    pub(super) backend: B,
    pub(super) config: LayerConfig,
}

/// The function with which an entry makes its backend for a device.
pub(super) struct Maker<D, S> {
    pub(super) make: fn(&D, &LayerConfig) -> Result<S>,
}

// Writes the stage's methods. Each calls the method of the same name of another trait, on another
// receiver.
macro_rules! stage {
    (
        $source:ident, $run:ident, $Batch:ty, $Call:ident,
        |$this:ident| $receiver:expr, $keep_apart:expr
    ) => {
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
            batch: &$Batch,
            state: &mut Self::State,
            metadata: &mut Self::Metadata,
        ) -> Result<()> {
            let $this = self;
            $keep_apart(device)?;
            let prepared = $source::prepare($receiver, device, batch, state, metadata);
            $keep_apart(device)?;
            prepared
        }

        unsafe fn $run(
            &self,
            device: &Self::Device,
            call: $Call<'_, Self::Device>,
            state: &mut Self::State,
            metadata: &Self::Metadata,
        ) -> Result<()> {
            let $this = self;
            $keep_apart(device)?;
            // SAFETY: the contract of the stage's method is that of the source's method of this
            // name, and the caller keeps to it.
            let enqueued = unsafe { $source::$run($receiver, device, call, state, metadata) };
            $keep_apart(device)?;
            enqueued
        }
    };
}

/// Writes the stage of a phase and its part of an entry: once for backends chosen by type, once for
/// backends chosen at run time.
macro_rules! stages {
    (
        $Backend:ident, $Stage:ident, $Selected:ident, $run:ident, $Batch:ty,
        $Call:ident
    ) => {
        #[doc = concat!("A ", stringify!($run), " backend as the layer calls it: chosen by type,")]
        #[doc = concat!("or at run time. Its methods are those of [`", stringify!($Backend), "`].")]
        pub trait $Stage: Send + Sync + 'static {
            #[doc = concat!("The device; see [`", stringify!($Backend), "::Device`].")]
            type Device: Device;
            #[doc = concat!("The state; see [`", stringify!($Backend), "::State`].")]
            type State: Send + 'static;
            #[doc = concat!("The metadata; see [`", stringify!($Backend), "::Metadata`].")]
            type Metadata: Send + 'static;

            #[doc = concat!("Returns the backend's [`", stringify!($Backend), "::SPEC`].")]
            fn spec(&self) -> &'static BackendSpec;

            #[doc = concat!("Calls [`", stringify!($Backend), "::workspace_bytes`].")]
            ///
            /// # Errors
            ///
            /// Same as the backend's.
            fn workspace_bytes(&self, device: &Self::Device, limits: &StepLimits) -> Result<u64>;

            #[doc = concat!("Calls [`", stringify!($Backend), "::state`].")]
            ///
            /// # Errors
            ///
            /// Same as the backend's.
            fn state(&self, device: &Self::Device, limits: &StepLimits) -> Result<Self::State>;

            #[doc = concat!("Calls [`", stringify!($Backend), "::metadata`].")]
            ///
            /// # Errors
            ///
            /// Same as the backend's.
            fn metadata(
                &self,
                device: &Self::Device,
                limits: &StepLimits,
            ) -> Result<Self::Metadata>;

            #[doc = concat!("Calls [`", stringify!($Backend), "::prepare`].")]
            ///
            /// # Errors
            ///
            /// Same as the backend's.
            fn prepare(
                &self,
                device: &Self::Device,
                batch: &$Batch,
                state: &mut Self::State,
                metadata: &mut Self::Metadata,
            ) -> Result<()>;

            /// Calls the backend's method of this name.
            ///
            /// # Safety
            ///
            /// The caller keeps the contract of the backend's method of this name.
            ///
            /// # Errors
            ///
            /// Same as the backend's.
            unsafe fn $run(
                &self,
                device: &Self::Device,
                call: $Call<'_, Self::Device>,
                state: &mut Self::State,
                metadata: &Self::Metadata,
            ) -> Result<()>;
        }

        impl<B: $Backend> $Stage for B {
            type Device = B::Device;
            type State = B::State;
            type Metadata = B::Metadata;

            fn spec(&self) -> &'static BackendSpec {
                const { &B::SPEC }
            }

            stage!($Backend, $run, $Batch, $Call, |this| this, |device| {
                keep_apart(device, &B::SPEC)
            });
        }

        #[doc = concat!("A ", stringify!($run), " backend chosen at run time: a call goes")]
        /// through one pointer into the backend's own code. A registry makes it.
        pub struct $Selected<D: Device> {
            // The stage of a backend behind a pointer. The type of the pointer depends only on the
            // device.
            object: Box<dyn $Stage<Device = D, State = Opaque, Metadata = Opaque>>,
            config: LayerConfig,
            ordinal: usize,
        }

        impl<D: Device> $Selected<D> {
            pub(crate) fn new<B: $Backend<Device = D>>(
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

            /// The configuration that the backend was made for.
            pub fn config(&self) -> &LayerConfig {
                &self.config
            }

            /// The number of the device that the backend was made for.
            pub fn ordinal(&self) -> usize {
                self.ordinal
            }
        }

        impl<D: Device> $Stage for $Selected<D> {
            type Device = D;
            type State = Opaque;
            type Metadata = Opaque;

            fn spec(&self) -> &'static BackendSpec {
                self.object.spec()
            }

            // The object's methods call those of the backend's own stage.
            stage!($Stage, $run, $Batch, $Call, |this| &*this.object, |_| {
                Result::<()>::Ok(())
            });
        }

        impl Entry {
            #[doc = concat!("The entry of a ", stringify!($run), " backend.")]
            pub const fn $run<B: $Backend>() -> Self {
                Self {
                    spec: B::SPEC,
                    kernels: B::KERNELS,
                    availability: B::availability,
                    maker: Some(Made::<B>::MAKER),
                    type_name: Some(std::any::type_name::<B>),
                }
            }
        }

        // Holds the maker as a constant. A reference to it has to outlive the function that makes
        // an entry.
        struct Made<B>(PhantomData<B>);

        impl<B: $Backend> Made<B> {
            const MAKER: &'static (dyn Any + Send + Sync) = &Maker {
                make: $Selected::new::<B>,
            };
        }

        impl<D: Device, B: $Backend<Device = D>> $Stage for Configured<B> {
            type Device = D;
            type State = Opaque;
            type Metadata = Opaque;

            fn spec(&self) -> &'static BackendSpec {
                const { &B::SPEC }
            }

            fn workspace_bytes(&self, device: &D, limits: &StepLimits) -> Result<u64> {
                $Backend::workspace_bytes(&self.backend, device, limits)
            }

            fn state(&self, device: &D, limits: &StepLimits) -> Result<Opaque> {
                let state = $Backend::state(&self.backend, device, limits)?;
                Ok(Opaque::new(B::SPEC.name, &self.config, state))
            }

            fn metadata(&self, device: &D, limits: &StepLimits) -> Result<Opaque> {
                let metadata = $Backend::metadata(&self.backend, device, limits)?;
                Ok(Opaque::new(B::SPEC.name, &self.config, metadata))
            }

            fn prepare(
                &self,
                device: &D,
                batch: &$Batch,
                state: &mut Opaque,
                metadata: &mut Opaque,
            ) -> Result<()> {
                $Stage::prepare(
                    &self.backend,
                    device,
                    batch,
                    state.get_mut(B::SPEC.name, &self.config)?,
                    metadata.get_mut(B::SPEC.name, &self.config)?,
                )
            }

            unsafe fn $run(
                &self,
                device: &D,
                call: $Call<'_, D>,
                state: &mut Opaque,
                metadata: &Opaque,
            ) -> Result<()> {
                let state = state.get_mut(B::SPEC.name, &self.config)?;
                let metadata = metadata.get(B::SPEC.name, &self.config)?;
                // SAFETY: the contract of this method is that of the backend's stage, and the
                // caller keeps to it; the state and the metadata were made by this backend for
                // this configuration, which `get_mut` and `get` have just checked.
                unsafe { $Stage::$run(&self.backend, device, call, state, metadata) }
            }
        }
    };
}

pub(super) use {stage, stages};
