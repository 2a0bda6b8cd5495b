// The compute capabilities.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct Empty;

#[mla_backend(sm = "", dtypes = "bf16")]
impl DecodeBackend for Empty {
    decode_body!(common::Bytes);
}

struct Gap;

#[mla_backend(sm = "90||100", dtypes = "bf16")]
impl DecodeBackend for Gap {
    decode_body!(common::Bytes);
}

struct Trailing;

#[mla_backend(sm = "90|", dtypes = "bf16")]
impl DecodeBackend for Trailing {
    decode_body!(common::Bytes);
}

struct LetterO;

#[mla_backend(sm = "9o", dtypes = "bf16")]
impl DecodeBackend for LetterO {
    decode_body!(common::Bytes);
}

struct Prefixed;

#[mla_backend(sm = "sm_90a|sm_100", dtypes = "bf16")]
impl DecodeBackend for Prefixed {
    decode_body!(common::Bytes);
}

struct MajorOnly;

#[mla_backend(sm = "9", dtypes = "bf16")]
impl DecodeBackend for MajorOnly {
    decode_body!(common::Bytes);
}

struct Word;

#[mla_backend(sm = "hopper", dtypes = "bf16")]
impl DecodeBackend for Word {
    decode_body!(common::Bytes);
}

struct AtLeast;

#[mla_backend(sm = ">=80", dtypes = "bf16")]
impl DecodeBackend for AtLeast {
    decode_body!(common::Bytes);
}

struct LeadingZero;

#[mla_backend(sm = "090", dtypes = "bf16")]
impl DecodeBackend for LeadingZero {
    decode_body!(common::Bytes);
}

struct Overflow;

#[mla_backend(sm = "99999", dtypes = "bf16")]
impl DecodeBackend for Overflow {
    decode_body!(common::Bytes);
}

struct ArabicDigits;

#[mla_backend(sm = "٩٠", dtypes = "bf16")]
impl DecodeBackend for ArabicDigits {
    decode_body!(common::Bytes);
}

struct Newline;

#[mla_backend(sm = "90\n", dtypes = "bf16")]
impl DecodeBackend for Newline {
    decode_body!(common::Bytes);
}

struct Twice;

#[mla_backend(sm = "90|90", dtypes = "bf16")]
impl DecodeBackend for Twice {
    decode_body!(common::Bytes);
}

struct BesideAny;

#[mla_backend(sm = "90|any", dtypes = "bf16")]
impl DecodeBackend for BesideAny {
    decode_body!(common::Bytes);
}

struct InFloor;

#[mla_backend(sm = "80+|90", dtypes = "bf16")]
impl DecodeBackend for InFloor {
    decode_body!(common::Bytes);
}

struct InFamily;

#[mla_backend(sm = "103|10x", dtypes = "bf16")]
impl DecodeBackend for InFamily {
    decode_body!(common::Bytes);
}

struct Floors;

#[mla_backend(sm = "90+|80+", dtypes = "bf16")]
impl DecodeBackend for Floors {
    decode_body!(common::Bytes);
}

struct FamilyInFloor;

#[mla_backend(sm = "10x|80+", dtypes = "bf16")]
impl DecodeBackend for FamilyInFloor {
    decode_body!(common::Bytes);
}

struct Float;

#[mla_backend(sm = 9.0, dtypes = "bf16")]
impl DecodeBackend for Float {
    decode_body!(common::Bytes);
}

struct Unquoted;

#[mla_backend(sm = 90|100, dtypes = "bf16")]
impl DecodeBackend for Unquoted {
    decode_body!(common::Bytes);
}

struct Boolean;

#[mla_backend(sm = true, dtypes = "bf16")]
impl DecodeBackend for Boolean {
    decode_body!(common::Bytes);
}

fn main() {}
