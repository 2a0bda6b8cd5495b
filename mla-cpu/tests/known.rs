//! mla-runtime knows the CPU backends even in programs that do not link them. Its specs must have
//! the same constraints.

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{DecodeBackend, PrefillBackend};
use mla_runtime::device::Device as _;
use mla_runtime::select::{Registry, known};
use mla_runtime::spec::Phase;

#[test]
fn known_specs_match() {
    assert_eq!(known::CPU_PREFILL, <CpuPrefill as PrefillBackend>::SPEC);
    assert_eq!(known::CPU_DECODE, <CpuDecode as DecodeBackend>::SPEC);
}

#[test]
fn backends_are_linked() {
    let (known, linked) = (Registry::known(), Registry::linked().unwrap());
    let target = Cpu::new().target();
    for phase in [Phase::Prefill, Phase::Decode] {
        assert!(!known.get_on(target, phase, "CPU").unwrap().is_implemented());
        assert!(
            linked
                .get_on(target, phase, "CPU")
                .unwrap()
                .is_implemented()
        );
    }
}
