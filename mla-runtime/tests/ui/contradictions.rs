// Keys that contradict each other or the phase.

use mla_runtime::backend::{DecodeBackend, PrefillBackend};
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct KvWithoutDtype;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "bf16,f16")]
impl DecodeBackend for KvWithoutDtype {
    decode_body!(common::Bytes);
}

struct DtypeWithoutKv;

#[mla_backend(sm = "90", dtypes = "f16,bf16", kv = "bf16")]
impl DecodeBackend for DtypeWithoutKv {
    decode_body!(common::Bytes);
}

struct PartialGroup;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "fp8_ds_mla", cache_dims = "(448,64)")]
impl DecodeBackend for PartialGroup {
    decode_body!(common::Bytes);
}

struct GraphsBeyondSingle;

#[mla_backend(sm = "90", dtypes = "bf16", graphs = "uniform_batch")]
impl DecodeBackend for GraphsBeyondSingle {
    decode_body!(common::Bytes);
}

struct GraphsBeyondUniform;

#[mla_backend(sm = "90", dtypes = "bf16", query_len = "uniform", graphs = "always")]
impl DecodeBackend for GraphsBeyondUniform {
    decode_body!(common::Bytes);
}

struct RowWithoutHead;

#[mla_backend(sm = "90", dtypes = "bf16", dims = "(128,64,128)", cache_dims = "(512,64)|(256,32)")]
impl DecodeBackend for RowWithoutHead {
    decode_body!(common::Bytes);
}

struct PrefillWithoutLse;

#[mla_backend(sm = "90", dtypes = "bf16", lse = "none")]
impl PrefillBackend for PrefillWithoutLse {
    prefill_body!(common::Bytes);
}

struct PrefillCache;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "bf16")]
impl PrefillBackend for PrefillCache {
    prefill_body!(common::Bytes);
}

struct PrefillPages;

#[mla_backend(sm = "90", dtypes = "bf16", page_sizes = 64)]
impl PrefillBackend for PrefillPages {
    prefill_body!(common::Bytes);
}

struct PrefillQueryLen;

#[mla_backend(sm = "90", dtypes = "bf16", query_len = "ragged")]
impl PrefillBackend for PrefillQueryLen {
    prefill_body!(common::Bytes);
}

struct PrefillSparse;

#[mla_backend(sm = "90", dtypes = "bf16", sparse = "never")]
impl PrefillBackend for PrefillSparse {
    prefill_body!(common::Bytes);
}

struct PrefillRow;

#[mla_backend(sm = "90", dtypes = "bf16", cache_dims = "any")]
impl PrefillBackend for PrefillRow {
    prefill_body!(common::Bytes);
}

struct WidthWithoutLists;

#[mla_backend(sm = "90", dtypes = "bf16", max_list_width = 8192)]
impl DecodeBackend for WidthWithoutLists {
    decode_body!(common::Bytes);
}

struct SeveralOfSingle;

#[mla_backend(sm = "90", dtypes = "bf16", max_query_len = 8)]
impl DecodeBackend for SeveralOfSingle {
    decode_body!(common::Bytes);
}

struct PrecisionOfNothing;

#[mla_backend(sm = "90", dtypes = "bf16", lse = "none", lse_precision = "f32")]
impl DecodeBackend for PrecisionOfNothing {
    decode_body!(common::Bytes);
}

struct FeaturesOfLists;

#[mla_backend(sm = "90", dtypes = "bf16", features = "second_cache,sinks,dense_requests")]
impl DecodeBackend for FeaturesOfLists {
    decode_body!(common::Bytes);
}

struct PrefillLists;

#[mla_backend(sm = "90", dtypes = "bf16", features = "dense_requests")]
impl PrefillBackend for PrefillLists {
    prefill_body!(common::Bytes);
}

struct PriorityOnProcessors;

#[mla_backend(sm = "any", dtypes = "bf16", priority = "90:10")]
impl DecodeBackend for PriorityOnProcessors {
    decode_body!(common::Bytes<true>);
}

fn main() {}
