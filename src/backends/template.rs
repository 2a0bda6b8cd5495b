//! The `impl` blocks of backends that launch one kernel, written once for all families.
//!
//! The blocks call `absorbed` and `expanded`, which a build without kernels leaves out. They are in
//! this module because in such a build the attribute turns them into absent entries.

/// Defines a backend's type: the layer's configuration and the kernel. With its feature off, the
/// type has no fields.
macro_rules! backend_type {
    ($(#[$about:meta])* $backend:ident: $kernel:path, $feature:tt) => {
        $(#[$about])*
        #[derive(Debug)]
        pub struct $backend {
            #[cfg(feature = $feature)]
            config: mla_runtime::backend::LayerConfig,
            #[cfg(feature = $feature)]
            pub(super) kernel: $kernel,
        }
    };
}

/// Defines a dense decode backend from its type, its kernel (a `DenseKernel`), its feature and its
/// other claims.
macro_rules! dense_backend {
    (
        $(#[$about:meta])*
        $backend:ident: $kernel:path,
        feature = $feature:tt,
        $($claims:tt)*
    ) => {
        $crate::backends::template::backend_type! { $(#[$about])* $backend: $kernel, $feature }

        #[mla_runtime::mla_backend(feature = $feature, $($claims)*)]
        impl mla_runtime::backend::DecodeBackend for $backend {
            type Device = $crate::device::Cuda;
            type State = $crate::backends::absorbed::AbsorbedState;
            type Metadata = ();

            fn new(
                _: &Self::Device,
                config: &mla_runtime::backend::LayerConfig,
            ) -> mla_runtime::Result<Self> {
                Ok(Self { config: *config, kernel: Default::default() })
            }

            fn workspace_bytes(
                &self,
                device: &Self::Device,
                limits: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<u64> {
                $crate::backends::absorbed::workspace_bytes(
                    self.kernel, &self.config, device, limits,
                )
            }

            fn state(
                &self,
                device: &Self::Device,
                limits: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<Self::State> {
                $crate::backends::absorbed::state(self.kernel, &self.config, device, limits)
            }

            fn metadata(
                &self,
                _: &Self::Device,
                _: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<()> {
                Ok(())
            }

            fn prepare(
                &self,
                _: &Self::Device,
                batch: &mla_runtime::backend::DecodeBatch<'_, Self::Device>,
                state: &mut Self::State,
                (): &mut (),
            ) -> mla_runtime::Result<()> {
                state.check(batch)
            }

            unsafe fn decode(
                &self,
                device: &Self::Device,
                call: mla_runtime::backend::DecodeCall<'_, Self::Device>,
                state: &mut Self::State,
                (): &(),
            ) -> mla_runtime::Result<()> {
                // SAFETY: the caller keeps to the same contract.
                unsafe {
                    $crate::backends::absorbed::decode(
                        self.kernel, &self.config, &Self::SPEC, device, call, state,
                    )
                }
            }
        }
    };
}

/// Defines an expanded prefill backend from its type, its kernel (an `ExpandedKernel`), its feature
/// and its other claims.
macro_rules! expanded_backend {
    (
        $(#[$about:meta])*
        $backend:ident: $kernel:path,
        feature = $feature:tt,
        $($claims:tt)*
    ) => {
        $crate::backends::template::backend_type! { $(#[$about])* $backend: $kernel, $feature }

        #[mla_runtime::mla_backend(feature = $feature, $($claims)*)]
        impl mla_runtime::backend::PrefillBackend for $backend {
            type Device = $crate::device::Cuda;
            type State = $crate::device::Buffer;
            type Metadata = ();

            fn new(
                device: &Self::Device,
                config: &mla_runtime::backend::LayerConfig,
            ) -> mla_runtime::Result<Self> {
                let kernel = Default::default();
                $crate::backends::expanded::load(kernel, config, device)?;
                Ok(Self { config: *config, kernel })
            }

            fn workspace_bytes(
                &self,
                device: &Self::Device,
                _: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<u64> {
                $crate::backends::expanded::workspace_bytes(self.kernel, &self.config, device)
            }

            fn state(
                &self,
                device: &Self::Device,
                _: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<Self::State> {
                $crate::backends::expanded::state(self.kernel, &self.config, device)
            }

            fn metadata(
                &self,
                _: &Self::Device,
                _: &mla_runtime::backend::StepLimits,
            ) -> mla_runtime::Result<()> {
                Ok(())
            }

            unsafe fn prefill(
                &self,
                device: &Self::Device,
                call: mla_runtime::backend::PrefillCall<'_, Self::Device>,
                workspace: &mut Self::State,
                (): &(),
            ) -> mla_runtime::Result<()> {
                // SAFETY: the caller keeps to the same contract.
                unsafe {
                    $crate::backends::expanded::prefill(
                        self.kernel, &self.config, &Self::SPEC, device, call, workspace,
                    )
                }
            }
        }
    };
}

pub(super) use {backend_type, dense_backend, expanded_backend};
