//! A use of the attribute in a crate that knows mla-runtime by another name. It has no other
//! dependency of the project.

/// An engine may also re-export the runtime for its plug-ins.
pub mod engine {
    pub use ::mla as runtime;
}

#[cfg(test)]
mod tests {
    use mla::backend::{DecodeBackend, DecodeCall, LINKED, LayerConfig, StepLimits};
    use mla::{Error, Result, mla_backend};
    use mla_cpu::Cpu;

    // A backend that refuses to be made.
    macro_rules! refusing {
        ($name:ident: crate = $($path:tt)*) => {
            struct $name;

            #[mla_backend(sm = "any", dtypes = "bf16", crate = $($path)*)]
            impl DecodeBackend for $name {
                type Device = Cpu;
                type State = ();
                type Metadata = ();

                fn new(_: &Cpu, _: &LayerConfig) -> Result<Self> {
                    Err(Error::argument("backend", "any", "none"))
                }

                fn state(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
                    Ok(())
                }

                fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
                    Ok(())
                }

                unsafe fn decode(
                    &self,
                    _: &Cpu,
                    _: DecodeCall<'_, Cpu>,
                    (): &mut (),
                    (): &(),
                ) -> Result<()> {
                    Err(Error::argument("backend", "any", "none"))
                }
            }
        };
    }

    refusing!(ByName: crate = ::mla);
    refusing!(InQuotes: crate = "mla");
    refusing!(ByReExport: crate = crate::engine::runtime);

    #[test]
    fn crate_found_under_every_name() {
        let linked: Vec<_> = LINKED.iter().map(|entry| entry.spec.name).collect();
        for name in ["BY_NAME", "IN_QUOTES", "BY_RE_EXPORT"] {
            assert!(linked.contains(&name), "{linked:?}");
        }
    }
}
