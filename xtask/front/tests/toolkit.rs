//! Either the pinned wheels are installed, or none. In these tests, a small wheel stands for them.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

/// Writes a wheel with one file, and returns its hash.
fn wheel(folder: &Path, text: &str) -> String {
    const SCRIPT: &str = "\
import hashlib, sys, zipfile
path, text = sys.argv[1:]
with zipfile.ZipFile(path, 'w') as wheel:
    wheel.writestr('pinned.txt', text)
    info = 'pinned-1.0.dist-info'
    wheel.writestr(info + '/METADATA', 'Metadata-Version: 2.1\\nName: pinned\\nVersion: 1.0\\n')
    wheel.writestr(
        info + '/WHEEL',
        'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr(info + '/RECORD', '')
print(hashlib.sha256(open(path, 'rb').read()).hexdigest())
";
    let output = Command::new("python3")
        .args(["-c", SCRIPT])
        .arg(folder.join("pinned-1.0-py3-none-any.whl"))
        .arg(text)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text_of(&output));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn text_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_wheel_that_was_replaced_is_refused_and_nothing_is_installed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let hash = wheel(folder.path(), "as pinned");
    fs::write(
        at("pins.txt"),
        format!("pinned==1.0 \\\n    --hash=sha256:{hash}\n"),
    )
    .unwrap();
    let install = |into: &str| {
        Command::new(env!("CARGO_BIN_EXE_xtask-front"))
            .args(["toolkit", "--requirement"])
            .arg(at("pins.txt"))
            .env("MLA_TOOLKIT", at(into))
            .env("PIP_NO_INDEX", "1")
            .env("PIP_FIND_LINKS", folder.path())
            .output()
            .unwrap()
    };
    let output = install("good");
    assert!(output.status.success(), "{}", text_of(&output));
    assert_eq!(
        fs::read_to_string(at("good/pinned.txt")).unwrap(),
        "as pinned"
    );
    assert!(text_of(&install("good")).contains("is there already"));

    assert_ne!(wheel(folder.path(), "as replaced"), hash);
    let output = install("bad");
    assert!(!output.status.success());
    assert!(text_of(&output).contains("HASH"), "{}", text_of(&output));
    assert!(!at("bad").exists());

    fs::write(at("pins.txt"), "pinned==1.0\n").unwrap();
    let output = install("bad");
    assert!(!output.status.success(), "a pin without a hash");
    let left = fs::read_dir(folder.path()).unwrap().flatten();
    assert!(
        !left
            .map(|entry| entry.file_name())
            .any(|name| name.to_string_lossy().starts_with("installing"))
    );
}

#[test]
fn an_unknown_argument_is_refused_by_name() {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask-front"))
        .args(["toolkit", "--agian"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(
        text_of(&output).contains("'--agian'"),
        "{}",
        text_of(&output)
    );
}
