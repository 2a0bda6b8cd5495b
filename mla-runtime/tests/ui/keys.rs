// Keys in the words of other libraries.

use mla_runtime::backend::{DecodeBackend};
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct NumHeads;

#[mla_backend(sm = "90", dtypes = "bf16", num_heads = 16)]
impl DecodeBackend for NumHeads {
    decode_body!(common::Bytes);
}

struct CudaGraph;

#[mla_backend(sm = "90", dtypes = "bf16", cuda_graph = "always")]
impl DecodeBackend for CudaGraph {
    decode_body!(common::Bytes);
}

struct Sinks;

#[mla_backend(sm = "90", dtypes = "bf16", sinks = true)]
impl DecodeBackend for Sinks {
    decode_body!(common::Bytes);
}

struct SupportsFp8;

#[mla_backend(sm = "90", dtypes = "bf16", supports_fp8 = true)]
impl DecodeBackend for SupportsFp8 {
    decode_body!(common::Bytes);
}

struct Dtype;

#[mla_backend(sm = "90", bf16 = true, dtype = "bf16")]
impl DecodeBackend for Dtype {
    decode_body!(common::Bytes);
}

struct Causal;

#[mla_backend(sm = "90", dtypes = "bf16", causal = true)]
impl DecodeBackend for Causal {
    decode_body!(common::Bytes);
}

struct KvCacheDtype;

#[mla_backend(sm = "90", dtypes = "bf16", kv_cache_dtype = "fp8")]
impl DecodeBackend for KvCacheDtype {
    decode_body!(common::Bytes);
}

struct HeadDim;

#[mla_backend(sm = "90", dtypes = "bf16", head_dim = 128)]
impl DecodeBackend for HeadDim {
    decode_body!(common::Bytes);
}

struct NoContradiction;

#[mla_backend(sm = "90", dtype = "f32", kv = "f32")]
impl DecodeBackend for NoContradiction {
    decode_body!(common::Bytes);
}

struct NoPriority;

#[mla_backend(dtypes = "bf16", arch = "80", priority = "80:1")]
impl DecodeBackend for NoPriority {
    decode_body!(common::Bytes);
}

fn main() {}
