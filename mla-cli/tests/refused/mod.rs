//! Refusals of a program. Files of refused arguments have parts of the message, too: each line is
//! `ARGUMENTS => PART => PART`.

use std::process::Command;

/// Runs a program that refuses its arguments: it prints nothing but one message, which is returned.
pub(crate) fn message(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let stderr = String::from_utf8(output.stderr).unwrap();
    let told = (output.status.code(), &*output.stdout);
    assert_eq!(told, (Some(2), &b""[..]), "{command:?}: {stderr}");
    assert!(stderr.starts_with("error: "), "{command:?}: {stderr}");
    assert_eq!(stderr.matches("error:").count(), 1, "{command:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{command:?}: {stderr}");
    stderr
}

/// Checks that the lines of a file are refused for its reasons. `command` makes the command of a
/// line's arguments.
pub(crate) fn lines(text: &str, command: impl Fn(&str) -> Command) {
    for line in text.lines() {
        let mut parts = line.split(" => ");
        let arguments = parts.next().unwrap_or_default();
        let message = message(&mut command(arguments));
        for part in parts {
            assert!(message.contains(part), "{arguments}: {part:?} in {message}");
        }
    }
}
