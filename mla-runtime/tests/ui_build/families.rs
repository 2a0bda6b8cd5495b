// A package with the families sm80 and sm90, which both run on 9.0.

#![allow(unexpected_cfgs)]

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

decode_backend!(OfWhich: sm = "90|100", dtypes = "bf16");

// A constant or the feature names the family.
const SM90: &[&str] = &["sm_90a"];

decode_backend!(OfHopper: sm = "90", dtypes = "bf16", compiled = SM90);
decode_backend!(Portable: sm = "80+", dtypes = "bf16", feature = "sm80");

decode_backend!(OnProcessors on common::Bytes<true>: sm = "any", dtypes = "bf16");

fn main() {}
