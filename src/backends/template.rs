//! The `impl` blocks of backends that launch one kernel, written once for all families.
//!
//! The blocks call `kernel` and the module of the calls, which a build without kernels leaves out.
//! They are in this module because in such a build the attribute turns them into absent entries.

/// Defines a backend from its trait, its calls and their module, its type, its kernel (a `Kernel`),
/// its feature and its other claims. A batch to `prepare` is checked against the state. With the
/// feature off, the type has no fields.
macro_rules! kernel_backend {
    (
        $phase:ident::$attend:ident($call:ident) by $calls:ident, $operation:literal,
        prepare($($batch:ident)?),
        $(#[$about:meta])*
        $backend:ident: $kernel:path,
        feature = $feature:tt,
        $($claims:tt)*
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        pub struct $backend {
            #[cfg(feature = $feature)]
            config: mla_runtime::backend::LayerConfig,
            #[cfg(feature = $feature)]
            pub(super) kernel: $kernel,
        }

        #[mla_runtime::mla_backend(feature = $feature, $($claims)*)]
        impl mla_runtime::backend::$phase for $backend {
            type Device = $crate::device::Cuda;
            type State = $crate::backends::kernel::State;
            type Metadata = ();

            fn new(
                device: &Self::Device,
                config: &mla_runtime::backend::LayerConfig,
            ) -> mla_runtime::Result<Self> {
                let kernel = Default::default();
                let shape = $crate::backends::$calls::shape(config)?;
                let operation = concat!("load ", $operation, " kernels");
                $crate::backends::kernel::load(kernel, operation, &shape, device)?;
                Ok(Self { config: *config, kernel })
            }

            fn workspace_bytes(
                &self,
                device: &Self::Device,
                limits: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<u64> {
                let largest = $crate::backends::$calls::largest(&self.config, limits)?;
                let bytes =
                    $crate::backends::kernel::workspace_bytes(self.kernel, &largest, device)?;
                Ok(bytes as u64)
            }

            fn state(
                &self,
                device: &Self::Device,
                limits: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<Self::State> {
                let largest = $crate::backends::$calls::largest(&self.config, limits)?;
                Self::State::new(self.kernel, &self.config, &largest, device, limits)
            }

            fn metadata(
                &self,
                _: &Self::Device,
                _: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<()> {
                Ok(())
            }

            $(
                fn prepare(
                    &self,
                    _: &Self::Device,
                    batch: &mla_runtime::backend::$batch<'_, Self::Device>,
                    state: &mut Self::State,
                    (): &mut (),
                ) -> mla_runtime::Result<()> {
                    state.check(batch)
                }
            )?

            unsafe fn $attend(
                &self,
                device: &Self::Device,
                call: mla_runtime::backend::$call<'_, Self::Device>,
                state: &mut Self::State,
                (): &(),
            ) -> mla_runtime::Result<()> {
                let (config, spec) = (&self.config, &Self::SPEC);
                let Some(params) = $crate::backends::$calls::params(config, spec, call, state)?
                else {
                    return Ok(());
                };
                // SAFETY: `params` checked every tensor and array. The caller promises the contents
                // of the arrays, and that a backend of this type made the state.
                unsafe {
                    $crate::backends::kernel::launch(
                        self.kernel, $operation, &params, state, device,
                    )
                }
            }
        }
    };
}

/// Defines a dense decode backend.
macro_rules! dense_backend {
    ($($backend:tt)*) => {
        $crate::backends::template::kernel_backend! {
            DecodeBackend::decode(DecodeCall) by absorbed, "decode", prepare(DecodeBatch),
            $($backend)*
        }
    };
}

/// Defines a sparse decode backend.
macro_rules! sparse_backend {
    ($($backend:tt)*) => {
        $crate::backends::template::kernel_backend! {
            DecodeBackend::decode(DecodeCall) by sparse, "sparse attention", prepare(),
            $($backend)*
        }
    };
}

/// Defines an expanded prefill backend.
macro_rules! expanded_backend {
    ($($backend:tt)*) => {
        $crate::backends::template::kernel_backend! {
            PrefillBackend::prefill(PrefillCall) by expanded, "prefill", prepare(),
            $($backend)*
        }
    };
}

pub(super) use {dense_backend, expanded_backend, kernel_backend, sparse_backend};
