// Only the compiler knows the device's platform. The error points at the key that contradicts it.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct OnProcessor;

#[mla_backend(sm = "90|100", dtypes = "bf16")]
impl DecodeBackend for OnProcessor {
    decode_body!(common::Bytes<true>);
}

fn main() {}
