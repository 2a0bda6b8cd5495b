// In a package of the families sm80 and sm90, which both run on 9.0.

#![allow(unexpected_cfgs)]

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

decode_backend!(OfWhich: sm = "90|100", dtypes = "bf16");

// The family is named, by a constant or by the feature.
const SM90: &[&str] = &["sm_90a"];

decode_backend!(OfHopper: sm = "90", dtypes = "bf16", compiled = SM90);
decode_backend!(Portable: sm = "80+", dtypes = "bf16", feature = "sm80");

struct OnProcessors;

#[mla_backend(sm = "any", dtypes = "bf16")]
impl DecodeBackend for OnProcessors {
    decode_body!(common::Bytes<true>);
}

fn main() {}
