// Values that are no literals, and other marks than the equals sign.

use mla_runtime::backend::{DecodeBackend};
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct Max;

#[mla_backend(sm = "90", dtypes = "bf16", priority = i32::MAX)]
impl DecodeBackend for Max {
    decode_body!(common::Bytes);
}

struct Sum;

#[mla_backend(sm = "90", dtypes = "bf16", priority = 5 + 3)]
impl DecodeBackend for Sum {
    decode_body!(common::Bytes);
}

struct Constant;

#[mla_backend(sm = "90", dtypes = "bf16", heads = HEADS)]
impl DecodeBackend for Constant {
    decode_body!(common::Bytes);
}

struct Call;

#[mla_backend(sm = "90", dtypes = "bf16", alignment = size_of::<u128>())]
impl DecodeBackend for Call {
    decode_body!(common::Bytes);
}

struct Suffix;

#[mla_backend(sm = "90", dtypes = "bf16", alignment = 16u32)]
impl DecodeBackend for Suffix {
    decode_body!(common::Bytes);
}

struct SuffixOfHeads;

#[mla_backend(sm = "90", dtypes = "bf16", heads = 16u32)]
impl DecodeBackend for SuffixOfHeads {
    decode_body!(common::Bytes);
}

struct Float;

#[mla_backend(sm = "90", dtypes = "bf16", max_query_len = 8.0)]
impl DecodeBackend for Float {
    decode_body!(common::Bytes);
}

struct Hexadecimal;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = 0x40u8)]
impl DecodeBackend for Hexadecimal {
    decode_body!(common::Bytes);
}

struct Bytes;

#[mla_backend(sm = "90", dtypes = "bf16", lse = b"log2")]
impl DecodeBackend for Bytes {
    decode_body!(common::Bytes);
}

struct Letter;

#[mla_backend(sm = "90", dtypes = "bf16", priority = '1')]
impl DecodeBackend for Letter {
    decode_body!(common::Bytes);
}

struct Wrapped;

#[mla_backend(sm = "90", dtypes = "bf16", max_query_len = Some(8))]
impl DecodeBackend for Wrapped {
    decode_body!(common::Bytes);
}

struct Vector;

#[mla_backend(sm = "90", dtypes = "bf16", heads = vec![16, 32])]
impl DecodeBackend for Vector {
    decode_body!(common::Bytes);
}

struct Colon;

#[mla_backend(dtypes = "bf16", sm: "any")]
impl DecodeBackend for Colon {
    decode_body!(common::Bytes);
}

struct Parentheses;

#[mla_backend(dtypes = "bf16", sm("any"))]
impl DecodeBackend for Parentheses {
    decode_body!(common::Bytes);
}

struct Comparison;

#[mla_backend(dtypes = "bf16", sm == "any")]
impl DecodeBackend for Comparison {
    decode_body!(common::Bytes);
}

struct Arrow;

#[mla_backend(dtypes = "bf16", sm => hopper)]
impl DecodeBackend for Arrow {
    decode_body!(common::Bytes);
}

struct Nothing;

#[mla_backend(dtypes = "bf16", sm "90")]
impl DecodeBackend for Nothing {
    decode_body!(common::Bytes);
}

struct ProviderOfPackage;

#[mla_backend(sm = "90", dtypes = "bf16", provider = env!("CARGO_PKG_NAME"))]
impl DecodeBackend for ProviderOfPackage {
    decode_body!(common::Bytes);
}

struct ProviderJoined;

#[mla_backend(sm = "90", dtypes = "bf16", provider = concat!("a", "b"))]
impl DecodeBackend for ProviderJoined {
    decode_body!(common::Bytes);
}

struct NameJoined;

#[mla_backend(sm = "90", dtypes = "bf16", name = concat!("A", "B"))]
impl DecodeBackend for NameJoined {
    decode_body!(common::Bytes);
}

struct Target;

#[mla_backend(sm = "90", dtypes = "bf16", compiled = "sm_90a")]
impl DecodeBackend for Target {
    decode_body!(common::Bytes);
}

struct TargetWithoutQuotes;

#[mla_backend(sm = "90", dtypes = "bf16", compiled = compute_90)]
impl DecodeBackend for TargetWithoutQuotes {
    decode_body!(common::Bytes);
}

struct Gpu;

#[mla_backend(sm = "90", dtypes = "bf16", run_on = "H200")]
impl DecodeBackend for Gpu {
    decode_body!(common::Bytes);
}

fn main() {}
