//! A use of the attribute in a crate that knows mla-runtime by another name. It has no other
//! dependency of the project.

/// An engine may also re-export the runtime for its plug-ins.
pub mod engine {
    pub use ::mla as runtime;
}

#[cfg(test)]
mod tests {
    use mla::backend::{DecodeBackend, DecodeBatch, DecodeCall, LINKED, LayerConfig, StepLimits};
    use mla::mla_backend;
    use mla_cpu::{Cpu, CpuDecode};

    // The CPU's own backend under another name.
    macro_rules! same_as_cpu {
        () => {
            type Device = Cpu;
            type State = <CpuDecode as DecodeBackend>::State;
            type Metadata = <CpuDecode as DecodeBackend>::Metadata;

            fn new(device: &Cpu, config: &LayerConfig) -> mla::Result<Self> {
                CpuDecode::new(device, config).map(Self)
            }

            fn state(&self, device: &Cpu, limits: &StepLimits) -> mla::Result<Self::State> {
                DecodeBackend::state(&self.0, device, limits)
            }

            fn metadata(&self, device: &Cpu, limits: &StepLimits) -> mla::Result<Self::Metadata> {
                DecodeBackend::metadata(&self.0, device, limits)
            }

            fn prepare(
                &self,
                device: &Cpu,
                batch: &DecodeBatch<'_, Cpu>,
                state: &mut Self::State,
                metadata: &mut Self::Metadata,
            ) -> mla::Result<()> {
                DecodeBackend::prepare(&self.0, device, batch, state, metadata)
            }

            unsafe fn decode(
                &self,
                device: &Cpu,
                call: DecodeCall<'_, Cpu>,
                state: &mut Self::State,
                metadata: &Self::Metadata,
            ) -> mla::Result<()> {
                // SAFETY: the caller keeps to the same contract.
                unsafe { DecodeBackend::decode(&self.0, device, call, state, metadata) }
            }
        };
    }

    struct ByName(CpuDecode);

    #[mla_backend(sm = "any", dtypes = "bf16", crate = ::mla)]
    impl DecodeBackend for ByName {
        same_as_cpu!();
    }

    struct InQuotes(CpuDecode);

    #[mla_backend(sm = "any", dtypes = "bf16", crate = "mla")]
    impl DecodeBackend for InQuotes {
        same_as_cpu!();
    }

    struct ByReExport(CpuDecode);

    #[mla_backend(sm = "any", dtypes = "bf16", crate = crate::engine::runtime)]
    impl DecodeBackend for ByReExport {
        same_as_cpu!();
    }

    #[test]
    fn crate_found_under_every_name() {
        let linked: Vec<_> = LINKED.iter().map(|entry| entry.spec.name).collect();
        for name in ["BY_NAME", "IN_QUOTES", "BY_RE_EXPORT"] {
            assert!(linked.contains(&name), "{linked:?}");
        }
    }
}
