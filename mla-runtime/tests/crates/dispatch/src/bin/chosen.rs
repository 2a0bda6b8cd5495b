//! Calls the backend that the compiler chose.

use std::hint::black_box;

use mla_cpu::Cpu;
use mla_dispatch::{Chosen, Engine, drive};
use mla_runtime::Result;
use mla_runtime::backend::{DecodeBackend, DecodeCall};

#[unsafe(no_mangle)]
#[inline(never)]
fn chosen(engine: &mut Engine<Chosen>, call: DecodeCall<'_, Cpu>) -> Result<()> {
    let Engine {
        device,
        backend,
        state,
        metadata,
    } = engine;
    // SAFETY: the backend reads no array of a call; the state is its own.
    unsafe { DecodeBackend::decode(backend, device, call, state, metadata) }
}

fn main() -> Result<()> {
    let mut engine = black_box(Box::new(Engine::<Chosen>::new()?));
    drive(&mut |call| chosen(&mut engine, call))
}
