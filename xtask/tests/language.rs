//! Every comment begins with its subject.

use std::process::Command;

#[test]
fn comments_begin_with_a_subject() {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("language")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
