//! Calls the backend that the program selected, through a pointer that it keeps.

use std::hint::black_box;

use mla_cpu::{Cpu, CpuPrefill};
use mla_dispatch::{Backends, Engine, drive, select};
use mla_runtime::Result;
use mla_runtime::backend::{DecodeBackend, DecodeCall, PrefillBackend};
use mla_runtime::dispatch::{LayerVisitor, backends, with_backends};
use mla_runtime::select::SelectionError;

trait Step {
    fn step(&mut self, call: DecodeCall<'_, Cpu>) -> Result<()>;
}

impl<B: DecodeBackend<Device = Cpu>> Step for Engine<B> {
    #[inline(never)]
    fn step(&mut self, call: DecodeCall<'_, Cpu>) -> Result<()> {
        let Engine {
            device,
            backend,
            state,
            metadata,
        } = self;
        // SAFETY: the backend reads no array of a call; the state is its own.
        unsafe { DecodeBackend::decode(backend, device, call, state, metadata) }
    }
}

struct Start;

impl LayerVisitor<Cpu> for Start {
    type Output = Result<Box<dyn Step>>;

    fn visit<P: PrefillBackend<Device = Cpu>, B: DecodeBackend<Device = Cpu>>(
        self,
    ) -> Self::Output {
        Ok(Box::new(Engine::<B>::new()?))
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn selected(engine: &mut dyn Step, call: DecodeCall<'_, Cpu>) -> Result<()> {
    engine.step(call)
}

fn main() -> std::result::Result<(), SelectionError> {
    let selection = select()?;
    // `black_box` hides the pointer's only origin from the compiler, which would otherwise call it
    // directly.
    let engine = with_backends::<backends![CpuPrefill], Backends, Cpu, _>(&selection, Start)??;
    let mut engine = black_box(engine);
    if std::env::args().nth(2).is_some() {
        drive(&mut |call| selected(&mut *engine, call))?;
    } else {
        drive(&mut |call| engine.step(call))?;
    }
    Ok(())
}
