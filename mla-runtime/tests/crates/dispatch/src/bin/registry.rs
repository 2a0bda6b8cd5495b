//! Calls the backend that the registry made. This program never names its type.

use mla_cpu::Cpu;
use mla_dispatch::{CONFIG, LIMITS, drive};
use mla_runtime::Result;
use mla_runtime::backend::{DecodeCall, DecodeStage, SelectedDecode};
use mla_runtime::select::{Registry, SelectionError};

#[unsafe(no_mangle)]
#[inline(never)]
fn registry(
    backend: &SelectedDecode<Cpu>,
    device: &Cpu,
    call: DecodeCall<'_, Cpu>,
    state: &mut <SelectedDecode<Cpu> as DecodeStage>::State,
    metadata: &<SelectedDecode<Cpu> as DecodeStage>::Metadata,
) -> Result<()> {
    // SAFETY: the backend reads no array of a call; the state is its own.
    unsafe { backend.decode(device, call, state, metadata) }
}

fn main() -> std::result::Result<(), SelectionError> {
    let device = Cpu::new();
    let backend = Registry::linked()?.instantiate_decode("LAUNCH", &device, &CONFIG)?;
    let mut state = backend.state(&device, &LIMITS)?;
    let metadata = backend.metadata(&device, &LIMITS)?;
    drive(&mut |call| registry(&backend, &device, call, &mut state, &metadata))?;
    Ok(())
}
