// mla-runtime has another name here, and nothing says so.

use mla::backend::{DecodeBackend, DecodeCall, LayerConfig, StepLimits};
use mla_cpu::Cpu;
use mla::{Result, mla_backend};

struct NoKey;

#[mla_backend(sm = "any", dtypes = "bf16")]
impl DecodeBackend for NoKey {
    type Device = Cpu;
    type State = ();
    type Metadata = ();

    fn new(_: &Cpu, _: &LayerConfig) -> Result<Self> {
        Ok(Self)
    }

    fn state(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn decode(&self, _: &Cpu, _: DecodeCall<'_, Cpu>, _: &mut (), _: &()) -> Result<()> {
        Ok(())
    }
}

fn main() {}
