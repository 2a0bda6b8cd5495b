// The Cargo feature that compiles a backend.

#![deny(unexpected_cfgs)]

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct NoSuchFeature;

#[mla_backend(sm = "90", dtypes = "bf16", feature = "sm9O")]
impl DecodeBackend for NoSuchFeature {
    decode_body!(common::Bytes);
}

decode_backend!(Malformed: sm = "90", dtypes = "bf16", feature = "sm90 sm100");
decode_backend!(Empty: sm = "90", dtypes = "bf16", feature = "");
decode_backend!(AnotherKey: sm = "90", dtypes = "bf16", feature = "deterministic");

fn main() {}
