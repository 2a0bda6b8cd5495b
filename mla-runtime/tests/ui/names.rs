// Names and providers.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct Lower;

#[mla_backend(sm = "90", dtypes = "bf16", name = "flash_attn")]
impl DecodeBackend for Lower {
    decode_body!(common::Bytes);
}

struct Dash;

#[mla_backend(sm = "90", dtypes = "bf16", name = "FLASH-ATTN")]
impl DecodeBackend for Dash {
    decode_body!(common::Bytes);
}

struct Empty;

#[mla_backend(sm = "90", dtypes = "bf16", name = "")]
impl DecodeBackend for Empty {
    decode_body!(common::Bytes);
}

struct Digit;

#[mla_backend(sm = "90", dtypes = "bf16", name = "3FA")]
impl DecodeBackend for Digit {
    decode_body!(common::Bytes);
}

struct TwoUnderscores;

#[mla_backend(sm = "90", dtypes = "bf16", name = "FLASH__ATTN")]
impl DecodeBackend for TwoUnderscores {
    decode_body!(common::Bytes);
}

struct NotAscii;

#[mla_backend(sm = "90", dtypes = "bf16", name = "FLÄCHE")]
impl DecodeBackend for NotAscii {
    decode_body!(common::Bytes);
}

struct ProviderEmpty;

#[mla_backend(sm = "90", dtypes = "bf16", provider = "")]
impl DecodeBackend for ProviderEmpty {
    decode_body!(common::Bytes);
}

struct ProviderSpace;

#[mla_backend(sm = "90", dtypes = "bf16", provider = "flash infer")]
impl DecodeBackend for ProviderSpace {
    decode_body!(common::Bytes);
}

struct Größe;

#[mla_backend(sm = "90", dtypes = "bf16", provider = "native")]
impl DecodeBackend for Größe {
    decode_body!(common::Bytes);
}

struct Reserved;

#[mla_backend(sm = "90", dtypes = "bf16", name = "ALL")]
impl DecodeBackend for Reserved {
    decode_body!(common::Bytes);
}

struct Auto;

#[mla_backend(sm = "90", dtypes = "bf16")]
impl DecodeBackend for Auto {
    decode_body!(common::Bytes);
}

fn main() {}
