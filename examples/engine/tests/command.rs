//! Tests of the program as a user calls it.

use std::process::{Command, Output, Stdio};

fn engine(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine"));
    command
        .args(arguments.split_whitespace())
        .stdin(Stdio::null());
    command
}

fn refused(arguments: &str) -> String {
    let output = engine(arguments).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{arguments}: {said}");
    assert_eq!(said.lines().count(), 1, "{arguments}: {said}");
    assert!(!said.contains("panicked"), "{arguments}: {said}");
    said
}

/// The smallest run that streams tokens.
const LITTLE: &str = "--requests 1 --prompt 2 --tokens 2 --step 16 --pages 1";

#[test]
fn tokens_are_streamed_and_counted() {
    let output = engine(LITTLE).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("\n   0 | "), "{text}");
    assert!(text.contains("2 tokens of 1 requests in "), "{text}");
    for what in [
        "time to first token: ",
        "cache: at most 1 of 1 pages",
        "drafts: ",
    ] {
        assert!(text.contains(what), "{text}");
    }
    let nothing = engine(&LITTLE.replace("--requests 1", "--requests 0"))
        .output()
        .unwrap();
    let text = String::from_utf8(nothing.stdout).unwrap();
    assert!(
        nothing.status.success() && text.contains("0 tokens of 0 requests in 0 steps"),
        "{text}"
    );
}

#[test]
fn a_reader_that_stops_early_ends_it_without_an_error() {
    let mut child = engine(LITTLE)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    assert_eq!(stderr, b"");
}

#[test]
fn a_negative_number_is_refused_by_its_argument() {
    let output = engine("--requests -1").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("'-1' for '--requests <REQUESTS>'"), "{said}");
}

#[test]
fn settings_that_make_no_sense_are_refused_in_one_line() {
    let huge = usize::MAX.to_string();
    for (arguments, said) in [
        ("--pages 0", "pages: given 0, accepted 1 to "),
        ("--prompt 0", "--prompt: given 0, accepted 1 to 1073741824"),
        ("--tokens 0", "--tokens: given 0, accepted 1 to "),
        ("--step 15", "--step: given 15, accepted 16 to "),
        (
            "--pages 1",
            "prompt: given 71 and 48 more, accepted at most 64 tokens in all",
        ),
        (&format!("--pages {huge}"), "pages: given "),
        (&format!("--step {huge}"), "--step: given "),
        (&format!("--drafts {huge}"), "drafts: given "),
        (&format!("--prompt {huge}"), "--prompt: given "),
        (&format!("--tokens {huge}"), "--tokens: given "),
        (
            "--config /nowhere/config.json",
            "--config: given /nowhere/config.json (",
        ),
        ("--config Cargo.toml", "config: "),
        (
            "--config /dev/zero",
            "--config: given /dev/zero (more than 1048576 bytes), accepted a file that can be read",
        ),
    ] {
        let told = refused(arguments);
        assert!(
            told.starts_with(&format!("engine: {said}")),
            "{arguments}: {told}"
        );
    }
}
