// Declarations that disagree with the targets of the kernels.

#![allow(unexpected_cfgs)]

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

const SM80: &[&str] = &["sm_80", "compute_80"];
const SM90: &[&str] = &["sm_90a"];
const SM100: &[&str] = &["sm_100a"];
const OFF: &[&str] = &[];
const TYPO: &[&str] = &["sm90a"];

decode_backend!(Declared: sm = "90|120", dtypes = "bf16", compiled = "SM90|SM100");
decode_backend!(Older: sm = "75", dtypes = "bf16", compiled = SM80);

// A family that is left out might run it, so this is no error.
decode_backend!(LeftOut: sm = "90|10x", dtypes = "bf16", compiled = "SM90|OFF");

struct NotATarget;

#[mla_backend(sm = "90", dtypes = "bf16", compiled = TYPO)]
impl DecodeBackend for NotATarget {
    decode_body!(common::Bytes);
}

decode_backend!(NotAConstant: sm = "90", dtypes = "bf16", compiled = "sm_90a or so");
decode_backend!(WithoutConstant: sm = "compiled", dtypes = "bf16");
decode_backend!(WithFeature: sm = "compiled", dtypes = "bf16", feature = "sm90", compiled = SM90);
decode_backend!(NotAlone: sm = "90|compiled", dtypes = "bf16", compiled = SM90);

decode_backend!(Any on common::Bytes<true>: sm = "any", dtypes = "bf16", compiled = SM80);

fn main() {}
