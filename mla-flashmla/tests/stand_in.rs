//! Tests of the shim without FlashMLA, CUDA or a GPU. A C++ compiler compiles it with a stand-in
//! that records what FlashMLA's launchers would get.

use std::path::Path;
use std::process::Command;

fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}\n{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

#[test]
fn flashmla_is_given_the_call() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("stand-in");
    let compiler = std::env::var_os("CXX").unwrap_or("c++".into());
    run(Command::new(compiler)
        .current_dir(package)
        .args([
            "-std=c++20",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-I",
            "tests/stand-in",
        ])
        .args(["-I", "kernels", "-x", "c++", "kernels/sm90/decode.cu"])
        .args(["tests/stand-in/main.cc", "-o"])
        .arg(&program));
    assert_eq!(run(&mut Command::new(&program)), "as expected\n");
}
