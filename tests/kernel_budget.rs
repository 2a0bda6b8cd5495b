//! No kernel spills, and none uses more than `cuda/budget.toml` allows.
#![cfg(any(feature = "sm90", feature = "sm100"))]

use std::path::Path;

use mla_build::{budget::Budget, report::Report};

#[test]
fn every_kernel_is_within_its_budget() {
    let report = report();
    let kernels: usize = report.units.iter().map(|unit| unit.kernels.len()).sum();
    assert!(kernels > 0, "the report names no kernel");

    let budget =
        Budget::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/budget.toml")).unwrap();
    let violations: Vec<_> = budget
        .check(&report)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn each_architecture_adds_at_most_20_mib() {
    const MOST: u64 = 20 << 20;
    let code = report().device_bytes();
    assert!(!code.is_empty(), "the report names no code for the GPU");
    for (target, bytes) in code {
        assert!(
            bytes <= MOST,
            "{target}: {bytes} bytes of code, allowed: at most {MOST}"
        );
    }
}

/// Of the build that this test was built with.
fn report() -> Report {
    Report::load(&Path::new(env!("OUT_DIR")).join("mla.report.json")).unwrap()
}
