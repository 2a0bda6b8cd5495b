//! Checks that the CPU backends conform to their specs.

#[macro_use]
#[path = "../../mla-runtime/tests/common/mod.rs"]
mod common;

use mla_conformance::DecodeTopic;
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;

mod decode {
    use super::*;
    mla_conformance::decode_conformance!(CpuDecode, Cpu::new());

    mod portable {
        use super::*;
        mla_conformance::decode_conformance!(CpuDecode, Cpu::new().portable());
    }

    mod without_matrix_unit {
        use super::*;
        mla_conformance::decode_conformance!(CpuDecode, Cpu::new().without_matrix_unit());
    }
}

mod prefill {
    use super::*;
    mla_conformance::prefill_conformance!(CpuPrefill, Cpu::new());

    mod portable {
        use super::*;
        mla_conformance::prefill_conformance!(CpuPrefill, Cpu::new().portable());
    }

    mod without_matrix_unit {
        use super::*;
        mla_conformance::prefill_conformance!(CpuPrefill, Cpu::new().without_matrix_unit());
    }
}

const ANY_GPU: &[&str] = &["compute_80"];

struct OtherGpu;

#[mla_backend(sm = "100", dtypes = "bf16", compiled = ANY_GPU)]
impl DecodeBackend for OtherGpu {
    decode_body!(common::Bytes<false>);
}

#[test]
fn unaccepted_devices() {
    let outcome = mla_conformance::decode::<OtherGpu>(&common::Bytes, DecodeTopic::SingleTokens);
    assert_eq!(
        outcome.expect_err("another GPU").to_string(),
        "OTHER_GPU: the spec accepts no problem of this suite on sm 9.0; what speaks against the \
         plainest: capability: given 9.0, accepted 10.0. Give it a device that it accepts, or \
         widen the keys of #[mla_backend]"
    );
}
