// Head counts and page sizes.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct HeadsEmpty;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "")]
impl DecodeBackend for HeadsEmpty {
    decode_body!(common::Bytes);
}

struct HeadsZero;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "0")]
impl DecodeBackend for HeadsZero {
    decode_body!(common::Bytes);
}

struct HeadsReversed;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "128..=1")]
impl DecodeBackend for HeadsReversed {
    decode_body!(common::Bytes);
}

struct HeadsFromZero;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "0..=128")]
impl DecodeBackend for HeadsFromZero {
    decode_body!(common::Bytes);
}

struct HeadsExclusive;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "1..128")]
impl DecodeBackend for HeadsExclusive {
    decode_body!(common::Bytes);
}

struct HeadsOpen;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "1..=")]
impl DecodeBackend for HeadsOpen {
    decode_body!(common::Bytes);
}

struct HeadsTwice;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "16|16")]
impl DecodeBackend for HeadsTwice {
    decode_body!(common::Bytes);
}

struct HeadsMixed;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "16|32..=64")]
impl DecodeBackend for HeadsMixed {
    decode_body!(common::Bytes);
}

struct HeadsAny;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "any|16")]
impl DecodeBackend for HeadsAny {
    decode_body!(common::Bytes);
}

struct HeadsNegative;

#[mla_backend(sm = "90", dtypes = "bf16", heads = -16)]
impl DecodeBackend for HeadsNegative {
    decode_body!(common::Bytes);
}

struct HeadsOverflow;

#[mla_backend(sm = "90", dtypes = "bf16", heads = "4294967296")]
impl DecodeBackend for HeadsOverflow {
    decode_body!(common::Bytes);
}

struct PageZero;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "0")]
impl DecodeBackend for PageZero {
    decode_body!(common::Bytes);
}

struct PageZeroNumber;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = 0)]
impl DecodeBackend for PageZeroNumber {
    decode_body!(common::Bytes);
}

struct PageZeroInList;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "32|0")]
impl DecodeBackend for PageZeroInList {
    decode_body!(common::Bytes);
}

struct PageMultipleZero;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "x0")]
impl DecodeBackend for PageMultipleZero {
    decode_body!(common::Bytes);
}

struct PageMultiple;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "x")]
impl DecodeBackend for PageMultiple {
    decode_body!(common::Bytes);
}

struct PageSigned;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "+64")]
impl DecodeBackend for PageSigned {
    decode_body!(common::Bytes);
}

struct PageTwice;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "64,64")]
impl DecodeBackend for PageTwice {
    decode_body!(common::Bytes);
}

struct PageMixed;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "x16|64")]
impl DecodeBackend for PageMixed {
    decode_body!(common::Bytes);
}

struct PageEmpty;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = "")]
impl DecodeBackend for PageEmpty {
    decode_body!(common::Bytes);
}

fn main() {}
