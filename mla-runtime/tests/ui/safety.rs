// A backend's call trusts arrays on the device, so it is unsafe to make, and its implementation
// must say `unsafe fn`. Promises about the order of rows or of enqueued work are unsafe, too.

use mla_runtime::backend::{
    DecodeBackend, DecodeCall, DecodeStage, PrefillBackend, PrefillCall, PrefillStage,
    SelectedDecode, SelectedPrefill,
};
use mla_runtime::device::Device;
use mla_runtime::indexer::IndexRows;
use mla_runtime::tensor::{TensorMut, TensorRef};
use mla_runtime::{Result, mla_backend};

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

type Gpu = common::Bytes;

fn decode<B: DecodeBackend>(
    backend: &B,
    device: &B::Device,
    call: DecodeCall<'_, B::Device>,
    state: &mut B::State,
    metadata: &B::Metadata,
) -> Result<()> {
    DecodeBackend::decode(backend, device, call, state, metadata)
}

fn prefill<B: PrefillBackend>(
    backend: &B,
    device: &B::Device,
    call: PrefillCall<'_, B::Device>,
    state: &mut B::State,
    metadata: &B::Metadata,
) -> Result<()> {
    PrefillBackend::prefill(backend, device, call, state, metadata)
}

fn selected(
    (decode, prefill): (&SelectedDecode<Gpu>, &SelectedPrefill<Gpu>),
    device: &Gpu,
    (call, other): (DecodeCall<'_, Gpu>, PrefillCall<'_, Gpu>),
    state: &mut <SelectedDecode<Gpu> as DecodeStage>::State,
    metadata: &<SelectedDecode<Gpu> as DecodeStage>::Metadata,
) -> Result<()> {
    decode.decode(device, call, state, metadata)?;
    prefill.prefill(device, other, state, metadata)
}

fn ready(
    device: &Gpu,
    a: TensorRef<'_, Gpu>,
    b: TensorRef<'_, Gpu>,
    c: TensorMut<'_, Gpu>,
) -> Result<()> {
    device.gemm_ready(a, b.assume_constant(), c)
}

fn in_turn(rows: IndexRows<'_, Gpu>) -> IndexRows<'_, Gpu> {
    rows.with_in_turn(true)
}

struct Safe;

const ANY_GPU: &[&str] = &["compute_80"];

#[mla_backend(sm = "90", dtypes = "bf16", compiled = ANY_GPU)]
impl DecodeBackend for Safe {
    common_body!(Gpu);

    fn decode(&self, _: &Gpu, _: DecodeCall<'_, Gpu>, _: &mut (), _: &()) -> Result<()> {
        Ok(())
    }
}

fn main() {}
