//! Tests of kernels on the host. They are compiled for the CPU, with a fiber for each thread.
//! Kernels of the portable family run completely and are compared with f64. Of Hopper's sparse
//! decode, only the loading warps run, and their ring is explored. Timing and the memory model need
//! a GPU.
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
        // This macro adds glibc's check of longjmp, which would reject each fiber's stack.
        .arg("-U_FORTIFY_SOURCE")
        // The emulator's instructions are found before those of the kernels.
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
