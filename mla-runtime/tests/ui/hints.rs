// Recommendations are accepted, and missing parts are named.

use mla_runtime::backend::{DecodeBackend, PrefillBackend};
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct Bracketed;

#[mla_backend(sm = [90, 100], dtypes = (f16, bf16), kv = ["bf16", "fp8"])]
impl DecodeBackend for Bracketed {
    decode_body!(common::Bytes);
}

struct Unquoted;

#[mla_backend(sm = SM, dtypes = bf16, priority = 5 - 3, heads = 16.., page_sizes = 1.5)]
impl DecodeBackend for Unquoted {
    decode_body!(common::Bytes);
}

struct Capital;

#[mla_backend(SM = "90", dtypes = "bf16")]
impl DecodeBackend for Capital {
    decode_body!(common::Bytes);
}

struct NoComma;

#[mla_backend(sm = "90" dtypes = "bf16" heads = 16)]
impl DecodeBackend for NoComma {
    decode_body!(common::Bytes);
}

struct NoParentheses;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "128,64,128", cache_dims = "512,64|256,64")]
impl DecodeBackend for NoParentheses {
    decode_body!(common::Bytes);
}

struct ThreeOfTwo;

#[mla_backend(sm = "90", dtypes = "bf16", cache_dims = "512,64,128")]
impl DecodeBackend for ThreeOfTwo {
    decode_body!(common::Bytes);
}

struct NotAlone;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "x16", page_sizes = "1..=3")]
impl DecodeBackend for NotAlone {
    decode_body!(common::Bytes);
}

struct Alone;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "1..=3|8", page_sizes = "x16|8")]
impl DecodeBackend for Alone {
    decode_body!(common::Bytes);
}

struct Ranges;

#[mla_backend(sm = "90-100", dtypes = "bf16", heads = "16..")]
impl DecodeBackend for Ranges {
    decode_body!(common::Bytes);
}

struct Names;

#[mla_backend(sm = "hopper|B200", dtypes = "bf16", query_len = "varlen", lse = "natural", priority = "hopper:1")]
impl DecodeBackend for Names {
    decode_body!(common::Bytes);
}

struct Generation1;

#[mla_backend(sm = "10|12+", dtypes = "bf16", requires_r1 = true)]
impl PrefillBackend for Generation1 {
    prefill_body!(common::Bytes);
}

struct Twice;

#[mla_backend(sm = "90", dtypes = "bf16")]
#[mla_backend(sm = "100", dtypes = "bf16")]
impl DecodeBackend for Twice {
    decode_body!(common::Bytes);
}

struct Semicolons;

#[mla_backend(sm = "90"; dtypes = "bf16")]
impl DecodeBackend for Semicolons {
    decode_body!(common::Bytes);
}

fn main() {}
