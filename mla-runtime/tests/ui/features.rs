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

struct Malformed;

#[mla_backend(sm = "90", dtypes = "bf16", feature = "sm90 sm100")]
impl DecodeBackend for Malformed {
    decode_body!(common::Bytes);
}

struct Empty;

#[mla_backend(sm = "90", dtypes = "bf16", feature = "")]
impl DecodeBackend for Empty {
    decode_body!(common::Bytes);
}

struct AnotherKey;

#[mla_backend(sm = "90", dtypes = "bf16", feature = "deterministic")]
impl DecodeBackend for AnotherKey {
    decode_body!(common::Bytes);
}

fn main() {}
