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

struct Declared;

#[mla_backend(sm = "90|120", dtypes = "bf16", compiled = "SM90|SM100")]
impl DecodeBackend for Declared {
    decode_body!(common::Bytes);
}

struct Older;

#[mla_backend(sm = "75", dtypes = "bf16", compiled = SM80)]
impl DecodeBackend for Older {
    decode_body!(common::Bytes);
}

// A family that is left out might run it: no error.
struct LeftOut;

#[mla_backend(sm = "90|10x", dtypes = "bf16", compiled = "SM90|OFF")]
impl DecodeBackend for LeftOut {
    decode_body!(common::Bytes);
}

struct NotATarget;

#[mla_backend(sm = "90", dtypes = "bf16", compiled = TYPO)]
impl DecodeBackend for NotATarget {
    decode_body!(common::Bytes);
}

struct NotAConstant;

#[mla_backend(sm = "90", dtypes = "bf16", compiled = "sm_90a or so")]
impl DecodeBackend for NotAConstant {
    decode_body!(common::Bytes);
}

struct WithoutConstant;

#[mla_backend(sm = "compiled", dtypes = "bf16")]
impl DecodeBackend for WithoutConstant {
    decode_body!(common::Bytes);
}

struct WithFeature;

#[mla_backend(sm = "compiled", dtypes = "bf16", feature = "sm90", compiled = SM90)]
impl DecodeBackend for WithFeature {
    decode_body!(common::Bytes);
}

struct NotAlone;

#[mla_backend(sm = "90|compiled", dtypes = "bf16", compiled = SM90)]
impl DecodeBackend for NotAlone {
    decode_body!(common::Bytes);
}

struct Any;

#[mla_backend(sm = "any", dtypes = "bf16", compiled = SM80)]
impl DecodeBackend for Any {
    decode_body!(common::Bytes<true>);
}

fn main() {}
