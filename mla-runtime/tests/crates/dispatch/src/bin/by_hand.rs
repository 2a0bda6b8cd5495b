//! The code that a program without this project would have: it takes the addresses and calls the C
//! function.

use std::hint::black_box;

use mla_cpu::Cpu;
use mla_dispatch::{Engine, Launch, Params, drive, example_decode, refused};
use mla_runtime::Result;
use mla_runtime::backend::{DecodeCall, Output, Query};

#[unsafe(no_mangle)]
#[inline(never)]
fn by_hand(engine: &mut Engine<Launch>, call: DecodeCall<'_, Cpu>) -> Result<()> {
    let (stream, workspace) = (engine.backend.stream, engine.state.workspace.as_mut_ptr());
    let Query::Concatenated(query) = call.query else {
        return Err(refused(-1));
    };
    let Output::Plain(out) = call.out else {
        return Err(refused(-2));
    };
    let params = Params {
        query: query.bytes().as_ptr(),
        cache: call.cache.bytes().as_ptr(),
        block_table: call.batch.block_table.entries().bytes().as_ptr(),
        tokens: query.shape()[0] as i32,
        heads: query.shape()[1] as i32,
        out: out.into_bytes().as_mut_ptr(),
        workspace,
    };
    // SAFETY: the parameters are on this stack, and the output was checked to have the size of its
    // shape.
    match unsafe { example_decode(&params, stream) } {
        0 => Ok(()),
        status => Err(refused(status)),
    }
}

fn main() -> Result<()> {
    let mut engine = black_box(Box::new(Engine::<Launch>::new()?));
    drive(&mut |call| by_hand(&mut engine, call))
}
