//! Two crates that claim the same name: this crate and the program itself.

use backend_crate::Naive;
use mla_kernels::Cuda;
use mla_runtime::backend::{DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, StepLimits};
use mla_runtime::select::Registry;
use mla_runtime::spec::Phase;
use mla_runtime::{mla_backend, Result};

struct Mine(Naive);

#[mla_backend(name = "NAIVE", sm = "90", dtypes = "bf16")]
impl DecodeBackend for Mine {
    type Device = Cuda;
    type State = ();
    type Metadata = ();

    fn new(device: &Cuda, config: &LayerConfig) -> Result<Self> {
        Naive::new(device, config).map(Self)
    }

    fn state(&self, device: &Cuda, limits: &StepLimits) -> Result<()> {
        DecodeBackend::state(&self.0, device, limits)
    }

    fn metadata(&self, device: &Cuda, limits: &StepLimits) -> Result<()> {
        DecodeBackend::metadata(&self.0, device, limits)
    }

    fn prepare(
        &self,
        device: &Cuda,
        batch: &DecodeBatch<'_, Cuda>,
        state: &mut (),
        metadata: &mut (),
    ) -> Result<()> {
        DecodeBackend::prepare(&self.0, device, batch, state, metadata)
    }

    unsafe fn decode(
        &self,
        device: &Cuda,
        call: DecodeCall<'_, Cuda>,
        state: &mut (),
        metadata: &(),
    ) -> Result<()> {
        // SAFETY: the caller keeps to the same contract.
        unsafe { DecodeBackend::decode(&self.0, device, call, state, metadata) }
    }
}

#[test]
fn one_name_from_two_crates_is_an_error_that_names_both_and_the_ways_out() {
    let error = Registry::linked().unwrap_err().to_string();
    assert!(
        error.starts_with("name: given NAIVE for two decode backends, "),
        "{error}"
    );
    for part in [
        "`backend_crate::Naive`",
        "`clash::Mine`",
        "another name",
        "`Registry::linked_by`",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn the_program_settles_it() {
    let registry = Registry::linked_by(|entry| match entry.origin() {
        "clash::Mine" => Some(entry.named("MINE")),
        _ => Some(entry),
    });
    let registry = registry.unwrap();
    for (name, origin) in [("NAIVE", "backend_crate::Naive"), ("MINE", "clash::Mine")] {
        assert_eq!(registry.get(Phase::Decode, name).unwrap().origin(), origin);
    }
}
