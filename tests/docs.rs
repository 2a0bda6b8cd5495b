//! Checks that the guides are true: the code that they show is tested.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the files that the guide shows. The path is in a line of its own, and the file follows
/// in a fence.
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
}

/// Returns the fenced blocks of one language.
fn fenced<'a>(guide: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let blocks = guide.split(&*fence).skip(1);
    blocks.filter_map(|rest| rest.split("```").next()).collect()
}

/// Returns true if a file has the parts of a block in this order. Where the block leaves something
/// out, the file may have any text.
fn holds(file: &str, block: &str) -> bool {
    let mut rest = file;
    block.split("    /* … */\n").all(|part| {
        let found = rest.split_once(part);
        rest = found.map_or("", |(_, after)| after);
        found.is_some()
    })
}

#[test]
fn what_a_kernel_adds_is_the_example_that_is_tested() {
    let guide = fs::read_to_string(root().join("docs/new-backend.md")).unwrap();
    let (_, guide) = guide.split_once("## With a CUDA kernel").unwrap();
    let example = |path: &str| {
        let file = root().join("examples/backend-crate").join(path);
        fs::read_to_string(file).unwrap()
    };
    let files = [
        "build.rs",
        "src/lib.rs",
        "tests/conformance.rs",
        "kernels/naive.h",
        "kernels/all/naive.cu",
    ];
    let files = files.map(example);
    let blocks = ["rust,ignore", "c", "cuda"].map(|language| fenced(guide, language));
    assert_eq!(blocks.each_ref().map(Vec::len), [5, 1, 1]);
    for block in blocks.into_iter().flatten() {
        let shown = files.iter().any(|file| holds(file, block));
        assert!(
            shown,
            "docs/new-backend.md shows what is in no file:\n{block}"
        );
    }
    let manifest = example("Cargo.toml");
    let lines = fenced(guide, "toml").into_iter().flat_map(str::lines);
    let keys: Vec<&str> = lines.filter(|line| line.contains('=')).collect();
    assert_eq!(keys.len(), 8);
    for line in keys {
        assert!(
            manifest.lines().any(|it| it == line),
            "docs/new-backend.md has another {line}"
        );
    }
}

#[test]
fn the_front_page_shows_the_guide_s_first_program() {
    let [page, guide] =
        ["README.md", "docs/engine.md"].map(|path| fs::read_to_string(root().join(path)).unwrap());
    assert_eq!(fenced(&page, "rust"), fenced(&guide, "rust")[..1]);
    let lines = page.lines().count();
    assert!(lines <= 135, "{lines} lines");
}

#[test]
fn the_first_program_of_the_guide_is_short_and_has_one_dependency() {
    let guide = fs::read_to_string(root().join("docs/engine.md")).unwrap();
    let programs = fenced(&guide, "rust");
    let lines = programs[0].lines().count();
    assert!(programs[0].contains("layer.forward("));
    assert!(lines <= 40, "{lines} lines");
    for program in programs {
        assert!(
            !program.contains("mla_runtime::") && !program.contains("mla_cpu::"),
            "{program}"
        );
    }
}

/// Checks that the first `cargo mla`, which compiles for minutes, shows what it compiles.
#[test]
fn the_command_s_alias_shows_what_is_compiled() {
    let aliases = fs::read_to_string(root().join(".cargo/config.toml")).unwrap();
    let mut lines = aliases.lines();
    let alias = lines.find(|line| line.starts_with("mla = ")).unwrap();
    assert!(
        !alias.contains("quiet") && !alias.contains(" -q"),
        "{alias}"
    );
}

/// Checks the pages that a user reads first.
#[test]
fn the_manuals_keep_to_120_columns() {
    for page in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "BENCHMARKS.md",
        "docs/adapters.md",
        "docs/engine.md",
        "docs/glossary.md",
        "docs/kernel-build.md",
        "docs/new-backend.md",
        "docs/numbers.md",
        "mla-candle/README.md",
    ] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let mut fence = false;
        for (index, line) in text.lines().enumerate() {
            fence ^= line.trim_start().starts_with("```");
            let width = line.chars().count();
            assert!(
                fence || line.starts_with('|') || width <= 120,
                "{page}:{} has {width} columns",
                index + 1
            );
        }
    }
}

/// Checks the table. Each of its rows ends with the names of tests and of topics.
#[test]
fn the_page_about_numbers_names_tests_that_exist() {
    let page = fs::read_to_string(root().join("docs/numbers.md")).unwrap();
    let topics = fs::read_to_string(root().join("mla-conformance/src/topic.rs")).unwrap();
    let all: Vec<String> = ["tests", "mla-cpu"]
        .iter()
        .flat_map(|folder| sources(&root().join(folder)))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let rows = page.lines().filter(|line| line.starts_with('|')).skip(2);
    for row in rows {
        let tests = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "{row}");
        for name in names.into_iter().filter(|name| !name.contains('/')) {
            let exists = topics.contains(&format!(" = {name},"))
                || all.iter().any(|text| text.contains(&format!("fn {name}(")));
            assert!(exists, "{name}");
        }
    }
}

/// Returns the Rust sources below a folder. Goldens, and folders with another line width, are
/// skipped.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_left_out = name.starts_with('.')
            || ["target", "cuda", "expansions", "ui", "ui_build"].contains(&name)
            || path.join("rustfmt.toml").exists();
        if path.is_dir() && !is_left_out {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// Checks lines that rustfmt does not change: comments, strings, and code that it cannot break.
#[test]
fn rust_keeps_to_100_columns() {
    let is_table = |line: &str| ["//! |", "/// |"].iter().any(|it| line.starts_with(it));
    // These are output of a program, and a bound that rustfmt does not break.
    let is_whole = |line: &str| line.starts_with("ptxas info ") || line.starts_with("impl<D> ");
    let mut checked = 0;
    for path in sources(root()) {
        let text = fs::read_to_string(&path).unwrap();
        for (index, line) in text.lines().enumerate() {
            checked += 1;
            let width = line.chars().count();
            assert!(
                width <= 100 || is_table(line.trim_start()) || is_whole(line),
                "{}:{} has {width} columns",
                path.display(),
                index + 1
            );
        }
    }
    assert!(checked > 50_000, "{checked} lines");
}
