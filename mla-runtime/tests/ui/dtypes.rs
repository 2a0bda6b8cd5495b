// The dtypes of queries and outputs.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct Empty;

#[mla_backend(sm = "90", dtypes = "")]
impl DecodeBackend for Empty {
    decode_body!(common::Bytes);
}

struct Blank;

#[mla_backend(sm = "90", dtypes = "  ")]
impl DecodeBackend for Blank {
    decode_body!(common::Bytes);
}

struct Gap;

#[mla_backend(sm = "90", dtypes = "f16,,bf16")]
impl DecodeBackend for Gap {
    decode_body!(common::Bytes);
}

struct Leading;

#[mla_backend(sm = "90", dtypes = ",bf16")]
impl DecodeBackend for Leading {
    decode_body!(common::Bytes);
}

struct Near;

#[mla_backend(sm = "90", dtypes = "bf61")]
impl DecodeBackend for Near {
    decode_body!(common::Bytes);
}

struct Foreign;

#[mla_backend(sm = "90", dtypes = "float16, bfloat16")]
impl DecodeBackend for Foreign {
    decode_body!(common::Bytes);
}

struct Case;

#[mla_backend(sm = "90", dtypes = "BF16")]
impl DecodeBackend for Case {
    decode_body!(common::Bytes);
}

struct Far;

#[mla_backend(sm = "90", dtypes = "int8")]
impl DecodeBackend for Far {
    decode_body!(common::Bytes);
}

struct Quantised;

#[mla_backend(sm = "90", dtypes = "fp8")]
impl DecodeBackend for Quantised {
    decode_body!(common::Bytes);
}

struct Twice;

#[mla_backend(sm = "90", dtypes = "bf16,f16,bf16")]
impl DecodeBackend for Twice {
    decode_body!(common::Bytes);
}

struct Unquoted;

#[mla_backend(sm = "90", dtypes = bf16)]
impl DecodeBackend for Unquoted {
    decode_body!(common::Bytes);
}

struct Number;

#[mla_backend(sm = "90", dtypes = 16)]
impl DecodeBackend for Number {
    decode_body!(common::Bytes);
}

struct Bytes;

#[mla_backend(sm = "90", dtypes = b"bf16")]
impl DecodeBackend for Bytes {
    decode_body!(common::Bytes);
}

struct Spaces;

#[mla_backend(sm = "90", dtypes = "f16 bf16")]
impl DecodeBackend for Spaces {
    decode_body!(common::Bytes);
}

fn main() {}
