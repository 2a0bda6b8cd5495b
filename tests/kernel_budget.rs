//! No kernel spills, and none uses more than `cuda/budget.toml` allows.
#![cfg(feature = "gpu")]

use std::path::Path;

use mla_build::{budget::Budget, report::Report};

#[test]
fn every_kernel_is_within_its_budget() {
    let Some(report) = report() else { return };
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
    let Some(report) = report() else { return };
    let code = report.device_bytes();
    assert!(!code.is_empty(), "the report names no code for the GPU");
    for (target, bytes) in code {
        assert!(
            bytes <= MOST,
            "{target}: {bytes} bytes of code, allowed: at most {MOST}"
        );
    }
}

/// What the report remembers of each unit's compilation is what a cold build of everything is made
/// of.
#[test]
fn a_cold_build_takes_at_most_15_minutes_and_16_gib_on_two_cores() {
    const CORES: usize = 2;
    let Some(report) = report() else { return };
    assert!(
        report
            .units
            .iter()
            .all(|unit| unit.compile_seconds > 0.0 && unit.peak > 0)
    );

    // No schedule that keeps both busy ends later than half of the work and the longest unit after
    // it.
    let longest = report
        .units
        .iter()
        .map(|unit| unit.compile_seconds)
        .fold(0.0, f64::max);
    let seconds = report.compile_seconds() / CORES as f64 + longest;
    assert!(
        seconds <= 900.0,
        "{seconds:.0} s on {CORES} cores, allowed: at most 900"
    );

    let together = report.peak_of_largest(CORES);
    assert!(
        together <= 16 << 30,
        "the {CORES} largest units together: {together} bytes, allowed: at most {}",
        16u64 << 30
    );
}

/// What the driver makes of the family's PTX on GPUs for which this build has no machine code is
/// what ptxas makes of it for them.
#[test]
#[cfg(feature = "sm80")]
#[ignore = "compiles for GPUs that a build leaves to the driver: MLA_BUILD_TARGETS_SM80=sm_80,sm_86,sm_89,sm_90,sm_100,sm_120,sm_121,compute_80 cargo test --features sm80 --test kernel_budget -- --include-ignored"]
fn the_portable_family_spills_on_no_gpu() {
    let report = report().expect("a build with kernels");
    for target in [
        "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121",
    ] {
        let kernels: Vec<_> = report
            .units
            .iter()
            .filter(|unit| unit.source.starts_with("cuda/sm80/"))
            .flat_map(|unit| &unit.kernels)
            .filter(|kernel| kernel.target == target)
            .collect();
        assert!(!kernels.is_empty(), "nothing was compiled for {target}");
        for kernel in kernels {
            let spilled = kernel.spill_stores + kernel.spill_loads;
            assert_eq!(spilled, 0, "{} for {target}", kernel.name);
        }
    }
}

/// Of the build that this test was built with; `None` if that compiled no kernels.
fn report() -> Option<Report> {
    if mla_kernels::raw::compiled::ALL.is_empty() {
        return None;
    }
    Some(Report::load(&Path::new(env!("OUT_DIR")).join("mla.report.json")).unwrap())
}
