// Per-head dimensions and cache rows.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct Empty;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "")]
impl DecodeBackend for Empty {
    decode_body!(common::Bytes);
}

struct Two;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(128,64)")]
impl DecodeBackend for Two {
    decode_body!(common::Bytes);
}

struct Bare;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "128,64,128")]
impl DecodeBackend for Bare {
    decode_body!(common::Bytes);
}

struct Open;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(128,64,128")]
impl DecodeBackend for Open {
    decode_body!(common::Bytes);
}

struct Zero;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(0,64,128)")]
impl DecodeBackend for Zero {
    decode_body!(common::Bytes);
}

struct ZeroValue;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(128,64,0)")]
impl DecodeBackend for ZeroValue {
    decode_body!(common::Bytes);
}

struct Negative;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(128,-64,128)")]
impl DecodeBackend for Negative {
    decode_body!(common::Bytes);
}

struct Overflow;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(4294967296,64,128)")]
impl DecodeBackend for Overflow {
    decode_body!(common::Bytes);
}

struct Twice;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(128,64,128)|(128, 64, 128)")]
impl DecodeBackend for Twice {
    decode_body!(common::Bytes);
}

struct BesideAny;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "any|(128,64,128)")]
impl DecodeBackend for BesideAny {
    decode_body!(common::Bytes);
}

struct Unquoted;

#[mla_backend(sm = "90", dtypes = "bf16", dims = (128, 64, 128))]
impl DecodeBackend for Unquoted {
    decode_body!(common::Bytes);
}

struct BothWays;

#[mla_backend(sm = "90", dtypes = "bf16", requires_r1 = true, dims = "(192,64,256)")]
impl DecodeBackend for BothWays {
    decode_body!(common::Bytes);
}

struct CacheThree;

#[mla_backend(sm = "90", dtypes = "bf16", cache_dims = "(512,64,128)")]
impl DecodeBackend for CacheThree {
    decode_body!(common::Bytes);
}

struct CacheZero;

#[mla_backend(sm = "90", dtypes = "bf16", cache_dims = "(0,64)")]
impl DecodeBackend for CacheZero {
    decode_body!(common::Bytes);
}

struct CacheTwice;

#[mla_backend(sm = "90", dtypes = "bf16", cache_dims = "(512,64)|(512,64)")]
impl DecodeBackend for CacheTwice {
    decode_body!(common::Bytes);
}

struct OtherRope;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(64,32,64)", cache_dims = "(512,64)")]
impl DecodeBackend for OtherRope {
    decode_body!(common::Bytes);
}

fn main() {}
