//! The guides are true: what they show is what is tested.

use std::fs;
use std::path::Path;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files that the guide shows: a path in a line of its own, then the file in a fence.
fn shown(guide: &str) -> Vec<(&str, String)> {
    let mut files = Vec::new();
    let mut lines = guide.lines();
    while let Some(line) = lines.next() {
        let path = line
            .strip_prefix('`')
            .and_then(|line| line.strip_suffix("`:"));
        if let Some(path) = path {
            let text = lines
                .by_ref()
                .skip_while(|line| !line.starts_with("```"))
                .skip(1)
                .take_while(|line| !line.starts_with("```"));
            files.push((path, text.map(|line| format!("{line}\n")).collect()));
        }
    }
    files
}

#[test]
fn the_tutorial_is_the_example_that_is_tested() {
    let guide = fs::read_to_string(root().join("docs/new-backend.md")).unwrap();
    let files = shown(&guide);
    let paths: Vec<&str> = files.iter().map(|(path, _)| *path).collect();
    assert_eq!(
        paths,
        [
            "Cargo.toml",
            "src/lib.rs",
            "tests/conformance.rs",
            "examples/mla.rs"
        ]
    );
    let mut lines = 0;
    for (path, text) in &files {
        let file = root().join("examples/cpu-backend").join(path);
        let real = fs::read_to_string(&file).unwrap();
        assert!(*text == real, "docs/new-backend.md shows another {path}");
        if path.ends_with(".rs") {
            lines += text.lines().count();
        }
    }
    assert!(lines < 100, "{lines} lines of the author's own code");
    let build = fs::read_to_string(root().join("examples/backend-crate/build.rs")).unwrap();
    assert!(
        guide.contains(&build),
        "docs/new-backend.md shows another build script"
    );
}
