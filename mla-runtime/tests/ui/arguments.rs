// The arguments as a whole: missing, unknown and repeated keys, and values of the wrong kind.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct Nothing;

#[mla_backend()]
impl DecodeBackend for Nothing {
    decode_body!(common::Bytes);
}

struct NoSm;

#[mla_backend(dtypes = "bf16")]
impl DecodeBackend for NoSm {
    decode_body!(common::Bytes);
}

struct NoDtypes;

#[mla_backend(sm = "90")]
impl DecodeBackend for NoDtypes {
    decode_body!(common::Bytes);
}

struct Unknown;

#[mla_backend(sm = "90", dtype = "bf16")]
impl DecodeBackend for Unknown {
    decode_body!(common::Bytes);
}

struct Foreign;

#[mla_backend(arch = "90", dtypes = "bf16")]
impl DecodeBackend for Foreign {
    decode_body!(common::Bytes);
}

struct Strange;

#[mla_backend(sm = "90", dtypes = "bf16", colour = "red")]
impl DecodeBackend for Strange {
    decode_body!(common::Bytes);
}

struct Repeated;

#[mla_backend(sm = "90", dtypes = "bf16", sm = "100")]
impl DecodeBackend for Repeated {
    decode_body!(common::Bytes);
}

struct NoValue;

#[mla_backend(sm = "90", dtypes = "bf16", requires_r1)]
impl DecodeBackend for NoValue {
    decode_body!(common::Bytes);
}

struct NothingAfterEquals;

#[mla_backend(sm = "90", dtypes = "bf16", quant_output =)]
impl DecodeBackend for NothingAfterEquals {
    decode_body!(common::Bytes);
}

struct Parenthesised;

#[mla_backend(sm("90"), dtypes = "bf16")]
impl DecodeBackend for Parenthesised {
    decode_body!(common::Bytes);
}

struct Literal;

#[mla_backend("90", dtypes = "bf16")]
impl DecodeBackend for Literal {
    decode_body!(common::Bytes);
}

struct TwoCommas;

#[mla_backend(sm = "90",, dtypes = "bf16")]
impl DecodeBackend for TwoCommas {
    decode_body!(common::Bytes);
}

struct OnlyComma;

#[mla_backend(,)]
impl DecodeBackend for OnlyComma {
    decode_body!(common::Bytes);
}

struct Colon;

#[mla_backend(sm: "90", dtypes = "bf16")]
impl DecodeBackend for Colon {
    decode_body!(common::Bytes);
}

struct Suffix;

#[mla_backend(sm = "90", dtypes = "bf16", heads = 16u32)]
impl DecodeBackend for Suffix {
    decode_body!(common::Bytes);
}

struct SuffixString;

#[mla_backend(sm = "90", dtypes = "bf16", name = "A"x)]
impl DecodeBackend for SuffixString {
    decode_body!(common::Bytes);
}

struct FlagInQuotes;

#[mla_backend(sm = "90", dtypes = "bf16", requires_r1 = "true")]
impl DecodeBackend for FlagInQuotes {
    decode_body!(common::Bytes);
}

struct FlagNumber;

#[mla_backend(sm = "90", dtypes = "bf16", quant_output = 1)]
impl DecodeBackend for FlagNumber {
    decode_body!(common::Bytes);
}

struct BadCrate;

#[mla_backend(sm = "90", dtypes = "bf16", crate = "not a path")]
impl DecodeBackend for BadCrate {
    decode_body!(common::Bytes);
}

struct CrateNumber;

#[mla_backend(sm = "90", dtypes = "bf16", crate = 3)]
impl DecodeBackend for CrateNumber {
    decode_body!(common::Bytes);
}

fn main() {}
