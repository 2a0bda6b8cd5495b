//! Backends that wrap another one and forward all calls to it.

/// Implements a backend's trait for a wrapper of `B`, which is its field. The wrapper has a spec of
/// its own, and may change the backend when it is made.
macro_rules! forwarded {
    (
        [$($parameter:tt)*] $wrapper:ty: $backend:ident $(+ $bound:ident)?,
        $run:ident of $call:ty, $batch:ty;
        spec: $spec:expr; new: |$inner:ident| $made:expr
    ) => {
        impl<B, $($parameter)*> $backend for $wrapper
        where
            B: $backend<Device = Cuda> $(+ $bound)?,
        {
            type Device = Cuda;
            type State = B::State;
            type Metadata = B::Metadata;

            const SPEC: BackendSpec = $spec;

            fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
                let $inner = B::new(device, config)?;
                Ok(Self($made))
            }

            fn workspace_bytes(&self, device: &Cuda, limits: &StepLimits) -> Result<u64> {
                self.0.workspace_bytes(device, limits)
            }

            fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<Self::State> {
                self.0.state(device, limits)
            }

            fn metadata(&self, device: &Cuda, limits: &StepLimits) -> Result<Self::Metadata> {
                self.0.metadata(device, limits)
            }

            fn prepare(
                &self,
                device: &Cuda,
                batch: &$batch,
                state: &mut Self::State,
                metadata: &mut Self::Metadata,
            ) -> Result<()> {
                self.0.prepare(device, batch, state, metadata)
            }

            unsafe fn $run(
                &self,
                device: &Cuda,
                call: $call,
                state: &mut Self::State,
                metadata: &Self::Metadata,
            ) -> Result<()> {
                // SAFETY: the caller keeps to the same contract.
                unsafe { self.0.$run(device, call, state, metadata) }
            }
        }
    };
}
