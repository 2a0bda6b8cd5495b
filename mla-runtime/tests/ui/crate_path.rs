// A path that does not lead to the runtime. The errors point at the key.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct NoSuchCrate;

#[mla_backend(sm = "90", dtypes = "bf16", crate = ::no_such_crate)]
impl DecodeBackend for NoSuchCrate {
    decode_body!(common::Bytes);
}

struct AnotherCrate;

#[mla_backend(sm = "90", dtypes = "bf16", crate = ::std)]
impl DecodeBackend for AnotherCrate {
    decode_body!(common::Bytes);
}

fn main() {}
