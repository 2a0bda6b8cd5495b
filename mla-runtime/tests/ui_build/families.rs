// In a package of the families sm80 and sm90, which both run on 9.0.

#![allow(unexpected_cfgs)]

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct OfWhich;

#[mla_backend(sm = "90|100", dtypes = "bf16")]
impl DecodeBackend for OfWhich {
    decode_body!(common::Bytes);
}

// The family is named, by a constant or by the feature.
const SM90: &[&str] = &["sm_90a"];

struct OfHopper;

#[mla_backend(sm = "90", dtypes = "bf16", compiled = SM90)]
impl DecodeBackend for OfHopper {
    decode_body!(common::Bytes);
}

struct Portable;

#[mla_backend(sm = "80+", dtypes = "bf16", feature = "sm80")]
impl DecodeBackend for Portable {
    decode_body!(common::Bytes);
}

struct OnProcessors;

#[mla_backend(sm = "any", dtypes = "bf16")]
impl DecodeBackend for OnProcessors {
    decode_body!(common::Bytes<true>);
}

fn main() {}
