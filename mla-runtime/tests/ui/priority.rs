// Priorities.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct Word;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "high")]
impl DecodeBackend for Word {
    decode_body!(common::Bytes);
}

struct Empty;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "")]
impl DecodeBackend for Empty {
    decode_body!(common::Bytes);
}

struct Overflow;

#[mla_backend(sm = "90", dtypes = "bf16", priority = 2147483648)]
impl DecodeBackend for Overflow {
    decode_body!(common::Bytes);
}

struct Fraction;

#[mla_backend(sm = "90", dtypes = "bf16", priority = 1.5)]
impl DecodeBackend for Fraction {
    decode_body!(common::Bytes);
}

struct NoNumber;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "90:,*:0")]
impl DecodeBackend for NoNumber {
    decode_body!(common::Bytes);
}

struct NoCapability;

#[mla_backend(sm = "90", dtypes = "bf16", priority = ":100")]
impl DecodeBackend for NoCapability {
    decode_body!(common::Bytes);
}

struct NoColon;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "90:1,*")]
impl DecodeBackend for NoColon {
    decode_body!(common::Bytes);
}

struct Any;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "any:1")]
impl DecodeBackend for Any {
    decode_body!(common::Bytes);
}

struct Outside;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "100:50,*:0")]
impl DecodeBackend for Outside {
    decode_body!(common::Bytes);
}

struct TwoOtherwise;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "*:0,*:1")]
impl DecodeBackend for TwoOtherwise {
    decode_body!(common::Bytes);
}

struct Behind;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "9x:5,90:10")]
impl DecodeBackend for Behind {
    decode_body!(common::Bytes);
}

struct BehindOtherwise;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "*:0,90:10")]
impl DecodeBackend for BehindOtherwise {
    decode_body!(common::Bytes);
}

struct BadCapability;

#[mla_backend(sm = "90", dtypes = "bf16", priority = "hopper:3")]
impl DecodeBackend for BadCapability {
    decode_body!(common::Bytes);
}

fn main() {}
