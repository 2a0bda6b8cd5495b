// A GPU's backend in a package without mla-build has to say what its kernels are compiled for.

use mla_runtime::backend::{DecodeBackend, PrefillBackend};
use mla_runtime::mla_backend;

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct OnGpus;

#[mla_backend(sm = "90|100|120", dtypes = "bf16")]
impl DecodeBackend for OnGpus {
    decode_body!(common::Bytes);
}

#[mla_backend(sm = "80+", dtypes = "bf16")]
impl PrefillBackend for OnGpus {
    prefill_body!(common::Bytes);
}

// A constant says it.
const ANY_GPU: &[&str] = &["compute_80"];

struct Told;

#[mla_backend(sm = "90|100|120", dtypes = "bf16", compiled = ANY_GPU)]
impl DecodeBackend for Told {
    decode_body!(common::Bytes);
}

struct OnProcessors;

#[mla_backend(sm = "any", dtypes = "bf16")]
impl DecodeBackend for OnProcessors {
    decode_body!(common::Bytes<true>);
}

fn main() {}
