// Errors in the block are reported at their own lines, although the attribute adds code to it.

use mla_runtime::backend::{DecodeBackend, StepLimits};
use mla_runtime::{Result, mla_backend};

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

const ANY_GPU: &[&str] = &["compute_80"];

struct WrongReturn;

#[mla_backend(sm = "90", dtypes = "bf16", compiled = ANY_GPU)]
impl DecodeBackend for WrongReturn {
    decode_body!(common::Bytes);

    fn workspace_bytes(&self, _: &common::Bytes, limits: &StepLimits) -> Result<u64> {
        limits.tokens
    }
}

// The same holds if the attribute has errors, too.
struct WrongTwice;

#[mla_backend(sm = "90", dtypes = "bf61")]
impl DecodeBackend for WrongTwice {
    decode_body!(common::Bytes);

    fn workspace_bytes(&self, _: &common::Bytes, limits: &StepLimits) -> Result<u64> {
        limits.tokens
    }
}

fn main() {}
