//! Checks that an adapter's kernels stay within its `budget.toml`, which shows changes by a new
//! release or compiler.

use std::path::Path;

use mla_build::budget::Budget;
use mla_build::report::Report;

#[test]
fn every_kernel_is_within_its_budget() {
    let library = env!("CARGO_PKG_NAME").trim_start_matches("mla-");
    let report = format!("{}/{library}.report.json", env!("OUT_DIR"));
    let report = Report::load(Path::new(&report)).unwrap();
    let kernels: usize = report.units.iter().map(|unit| unit.kernels.len()).sum();
    assert!(kernels > 0, "the report names no kernel");

    let budget = Budget::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("budget.toml")).unwrap();
    let violations: Vec<_> = budget
        .check(&report)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}
