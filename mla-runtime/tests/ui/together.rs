// One use with many mistakes. All of them are reported at once.

use mla_runtime::backend::PrefillBackend;
use mla_runtime::mla_backend;
use mla_runtime::spec::{BackendSpec, Phase, Platform};

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

struct FlashAttn;

#[mla_backend(
    sm = "90|9o|sm100",
    dtypes = "f16,bf61,f16",
    requires_r1 = yes,
    page_size = 0,
    lse = "none",
    priority = "90:high",
    name = "FlashAttn",
)]
unsafe impl<D: Send> PrefillBackend for FlashAttn {
    prefill_body!(common::Bytes);
    const SPEC: BackendSpec = BackendSpec::new("BY_HAND", Phase::Prefill, Platform::Cuda);
}

fn main() {}
