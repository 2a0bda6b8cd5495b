// Cache formats, levels and features.

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct KvEmpty;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "")]
impl DecodeBackend for KvEmpty {
    decode_body!(common::Bytes);
}

struct KvNear;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "fp8_dsmla")]
impl DecodeBackend for KvNear {
    decode_body!(common::Bytes);
}

struct KvForeign;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "bf16,fp8_e4m3")]
impl DecodeBackend for KvForeign {
    decode_body!(common::Bytes);
}

struct KvTwice;

#[mla_backend(sm = "90", dtypes = "bf16", kv = "bf16,bf16")]
impl DecodeBackend for KvTwice {
    decode_body!(common::Bytes);
}

struct QueryLen;

#[mla_backend(sm = "90", dtypes = "bf16", query_len = "raged")]
impl DecodeBackend for QueryLen {
    decode_body!(common::Bytes);
}

struct QueryLenEmpty;

#[mla_backend(sm = "90", dtypes = "bf16", query_len = "")]
impl DecodeBackend for QueryLenEmpty {
    decode_body!(common::Bytes);
}

struct QueryLenList;

#[mla_backend(sm = "90", dtypes = "bf16", query_len = "single|uniform")]
impl DecodeBackend for QueryLenList {
    decode_body!(common::Bytes);
}

struct Graphs;

#[mla_backend(sm = "90", dtypes = "bf16", graphs = "full")]
impl DecodeBackend for Graphs {
    decode_body!(common::Bytes);
}

struct GraphsFlag;

#[mla_backend(sm = "90", dtypes = "bf16", graphs = true)]
impl DecodeBackend for GraphsFlag {
    decode_body!(common::Bytes);
}

struct Lse;

#[mla_backend(sm = "90", dtypes = "bf16", lse = "log")]
impl DecodeBackend for Lse {
    decode_body!(common::Bytes);
}

struct LseCase;

#[mla_backend(sm = "90", dtypes = "bf16", lse = "LN")]
impl DecodeBackend for LseCase {
    decode_body!(common::Bytes);
}

struct Sparse;

#[mla_backend(sm = "90", dtypes = "bf16", sparse = "allways")]
impl DecodeBackend for Sparse {
    decode_body!(common::Bytes);
}

struct SparseFlag;

#[mla_backend(sm = "90", dtypes = "bf16", sparse = true)]
impl DecodeBackend for SparseFlag {
    decode_body!(common::Bytes);
}

struct QuantOutput;

#[mla_backend(sm = "90", dtypes = "bf16", quant_output = yes)]
impl DecodeBackend for QuantOutput {
    decode_body!(common::Bytes);
}

struct FeatureNear;

#[mla_backend(sm = "90", dtypes = "bf16", features = "sink")]
impl DecodeBackend for FeatureNear {
    decode_body!(common::Bytes);
}

struct FeatureFar;

#[mla_backend(sm = "90", dtypes = "bf16", features = "sinks,telepathy")]
impl DecodeBackend for FeatureFar {
    decode_body!(common::Bytes);
}

struct FeatureTwice;

#[mla_backend(sm = "90", dtypes = "bf16", features = "sinks|sinks")]
impl DecodeBackend for FeatureTwice {
    decode_body!(common::Bytes);
}

struct FeatureEmpty;

#[mla_backend(sm = "90", dtypes = "bf16", features = "")]
impl DecodeBackend for FeatureEmpty {
    decode_body!(common::Bytes);
}

fn main() {}
