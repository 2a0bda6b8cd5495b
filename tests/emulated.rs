//! Kernels on the host: compiled for the processor, every thread a fiber. Those of the portable
//! family run whole and are compared with f64. Hopper's sparse decode runs its loading warps alone,
//! and their ring is explored. Timing and the memory model are left to a GPU.
#![cfg(any(feature = "sm80", feature = "sm90"))]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use mla_build::report::Report;

#[cfg(feature = "sm80")]
#[test]
fn decode_agrees_with_f64() {
    run("decode");
}

#[cfg(feature = "sm80")]
#[test]
fn prefill_agrees_with_f64() {
    run("prefill");
}

#[cfg(feature = "sm90")]
#[test]
fn no_slot_of_the_sparse_ring_is_filled_early_and_no_thread_waits_for_ever() {
    run("sparse_ring");
}

/// Compiles tests/emulator/`name`.cpp with the compiler and the headers of the kernels' build, and
/// runs it.
fn run(name: &str) {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let report = Report::load(&Path::new(env!("OUT_DIR")).join("mla.report.json")).unwrap();
    let cuda = report.toolkit.iter().find(|part| part.part == "CUDA");
    let headers = cuda.expect("the report names CUDA").path.join("include");
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("emulated-{name}"));
    let emulator = package.join("tests/emulator");

    let compiled = Command::new(&report.host_compiler.0)
        .args(["-std=c++20", "-O1", "-Wall", "-Wno-unknown-pragmas"])
        // glibc's check of longjmp, which this macro adds, would take each fiber's stack for a
        // broken one.
        .arg("-U_FORTIFY_SOURCE")
        // The emulator's instructions stand before those of the kernels.
        .arg("-I")
        .arg(&emulator)
        .arg("-I")
        .arg(package.join("cuda"))
        .arg("-isystem")
        .arg(headers)
        .arg(emulator.join(format!("{name}.cpp")))
        .args(["-lstdc++", "-lm", "-o"])
        .arg(&program)
        .output()
        .unwrap();
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );

    // The seed changes the data and the order of the fibers.
    let runs = ["1", "2"].map(|seed| {
        let run = Command::new(&program)
            .arg(seed)
            .stdout(Stdio::piped())
            .spawn();
        (seed, run.unwrap())
    });
    for (seed, run) in runs {
        let ran = run.wait_with_output().unwrap();
        assert!(
            ran.status.success(),
            "seed {seed}:\n{}",
            String::from_utf8_lossy(&ran.stdout)
        );
    }
}
