//! A made-up cache format: it lies in memory as `fp8` does.

use std::{collections::BTreeSet, process::Command};

use cargo_metadata::diagnostic::Diagnostic;

use crate::tree::{Tree, contributing};

/// Everything of Rust that may name a format.
const CHECKED: &[&str] = &[
    "--workspace",
    "--features=mla-kernels/sm80,mla-kernels/sm90,mla-cli/sm90",
    "--lib",
    "--bins",
];

/// Gives each match that lacks the format an arm, as the compiler suggests, until everything
/// compiles. Returns the files that did not.
fn rust(tree: &Tree) -> BTreeSet<String> {
    let mut places = BTreeSet::new();
    tree.edit(
        "mla-runtime/src/facts/kv_format.rs",
        "    Fp8DsMla = \"fp8_ds_mla\",\n",
        "    Fp8DsMla = \"fp8_ds_mla\",\n    /// Made up.\n    MadeUp = \"made_up\",\n",
    );
    places.insert("mla-runtime/src/facts/kv_format.rs".to_owned());
    for _ in 0..16 {
        let errors = tree.check(CHECKED);
        if errors.is_empty() {
            return places;
        }
        let mut arms = Vec::new();
        for error in &errors {
            if error.message.contains("see mla-macros/src/vocabulary.rs") {
                // Several crates may report one place.
                if !places.insert("mla-macros/src/vocabulary.rs".to_owned()) {
                    continue;
                }
                tree.edit(
                    "mla-macros/src/vocabulary.rs",
                    "    name(\"fp8_ds_mla\", \"Fp8DsMla\"),\n",
                    "    name(\"fp8_ds_mla\", \"Fp8DsMla\"),\n    name(\"made_up\", \"MadeUp\"),\n",
                );
            } else if error
                .message
                .contains("other names than vocabulary::KV_FORMATS")
            {
                if !places.insert("mla-macros/src/key.rs".to_owned()) {
                    continue;
                }
                let from = "accepted: \"a list of f32, f16, bf16, fp8, fp8_ds_mla\"";
                tree.edit(
                    "mla-macros/src/key.rs",
                    from,
                    &from.replace("_mla\"", "_mla, made_up\""),
                );
            } else if error
                .message
                .contains("cannot find value `MLA_CACHE_MADE_UP`")
            {
                if !places.insert("cuda/include/mla.rs".to_owned()) {
                    continue;
                }
                let text = tree.read("cuda/include/mla.rs");
                let line = text
                    .lines()
                    .find(|line| line.contains("MLA_CACHE_FP8_DS_MLA:"))
                    .unwrap();
                let more = line
                    .replace("FP8_DS_MLA", "MADE_UP")
                    .replace("= 4;", "= 5;");
                tree.edit("cuda/include/mla.rs", line, &format!("{line}\n{more}"));
            } else {
                arms.extend(missing_arm(error));
            }
        }
        assert!(!arms.is_empty() || places.len() > 1, "{errors:#?}");
        // From the end of each file, so that a place stays what it was; one may be reported by
        // several crates.
        arms.sort();
        arms.dedup();
        for (file, at, text) in arms.into_iter().rev() {
            let mut source = tree.read(&file);
            source.insert_str(at, &text);
            tree.write(&file, &source);
            places.insert(file);
        }
    }
    panic!("it does not compile after 16 steps: {places:?}");
}

/// Where a match lacks the format, and the arm that the compiler suggests.
fn missing_arm(error: &Diagnostic) -> Option<(String, usize, String)> {
    let is_missing = error.code.as_ref().is_some_and(|code| code.code == "E0004");
    assert!(
        is_missing,
        "a missing case and nothing else: {}",
        error.message
    );
    let spans = error.children.iter().flat_map(|child| &child.spans);
    let (span, text) = spans
        .filter_map(|span| Some((span, span.suggested_replacement.clone()?)))
        .next()
        .unwrap_or_else(|| panic!("the compiler suggests an arm: {error:#?}"));
    // Its number in the C interface is another place.
    let text = match span.file_name.as_str() {
        "src/device/argument.rs" => text.replace("todo!()", "raw::MLA_CACHE_MADE_UP as i32"),
        _ => text,
    };
    Some((span.file_name.clone(), span.byte_start as usize, text))
}

/// The CUDA sources: what is not compiled, in the order in which an author meets it.
fn cuda(tree: &Tree) -> BTreeSet<String> {
    let mut places = BTreeSet::from(["cuda/include/mla.h".to_owned()]);
    tree.edit(
        "cuda/include/mla.h",
        "    MLA_CACHE_FP8_DS_MLA = 4\n",
        "    MLA_CACHE_FP8_DS_MLA = 4,\n    MLA_CACHE_MADE_UP = 5\n",
    );
    // Each switch over the formats.
    let switches = errors(tree);
    for error in &switches {
        assert!(
            error
                .message
                .contains("'MLA_CACHE_MADE_UP' not handled in switch"),
            "{error:?}"
        );
        places.insert(error.file.clone());
        if error.file == LIST {
            continue;
        }
        let source = tree.read(&error.file);
        let mut lines: Vec<_> = source.lines().collect();
        assert!(lines[error.line - 1].contains("switch ("), "{error:?}");
        lines.insert(error.line, "        case MLA_CACHE_MADE_UP: break;");
        tree.write(&error.file, &(lines.join("\n") + "\n"));
    }
    assert!(places.contains(LIST), "{switches:?}");
    tree.edit(
        LIST,
        "    each(MLA_CACHE_FP8_DS_MLA)\n",
        "    each(MLA_CACHE_FP8_DS_MLA) each(MLA_CACHE_MADE_UP)\n",
    );
    // The list's own text, and then what it lists, is not there.
    let of_the_list = errors(tree);
    let counts = |error: &Error| error.message.contains("kCacheFormats") && error.file == LIST;
    assert!(
        !of_the_list.is_empty() && of_the_list.iter().all(counts),
        "{of_the_list:?}"
    );
    tree.edit(LIST, "(MLA_ONE_MORE) == 5", "(MLA_ONE_MORE) == 6");
    let rows = errors(tree);
    assert!(
        rows.iter().any(|error| error.message.contains("Row<")),
        "{rows:?}"
    );
    places.insert("cuda/formats/made_up.cuh".to_owned());
    tree.write(
        "cuda/formats/made_up.cuh",
        "#pragma once\n#include \"fp8.cuh\"\nnamespace mla {\ntemplate <>\n\
         struct Row<MLA_CACHE_MADE_UP> : Row<MLA_CACHE_FP8> {};\n}  // namespace mla\n",
    );
    tree.edit(
        LIST,
        "#include \"fp8.cuh\"\n",
        "#include \"fp8.cuh\"\n#include \"made_up.cuh\"\n",
    );
    let left = errors(tree);
    assert!(left.is_empty(), "{left:?}");
    // It compiles, and does not link.
    let wanted = kernels(tree, "cuda/all/cache.cu", "--undefined-only");
    assert_eq!(wanted.len(), 2, "{wanted:?}");
    let source = "cuda/all/instantiations/cache_made_up.cu";
    places.insert(source.to_owned());
    let fp8 = tree.read("cuda/all/instantiations/cache_fp8.cu");
    tree.write(source, &fp8.replace("MLA_CACHE_FP8", "MLA_CACHE_MADE_UP"));
    assert_eq!(kernels(tree, source, "--defined-only"), wanted);
    places
}

const LIST: &str = "cuda/formats/formats.cuh";

/// What a compiler says of a line.
#[derive(Debug)]
struct Error {
    file: String,
    line: usize,
    message: String,
}

/// The errors in the sources that choose kernels; what is compiled for the GPU is looked at, and no
/// more.
fn errors(tree: &Tree) -> Vec<Error> {
    let listed = Command::new("git")
        .args(["ls-files", "cuda/*.cu"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let units = listed
        .lines()
        .filter(|unit| !unit.contains("/instantiations/"));
    let mut errors: Vec<Error> = Vec::new();
    for unit in units {
        let output = tree.compile(unit);
        let text = String::from_utf8_lossy(&output.stderr);
        let found: Vec<_> = text.lines().filter_map(error).collect();
        assert!(
            output.status.success() || !found.is_empty(),
            "{unit}: {text}"
        );
        for error in found {
            if !errors
                .iter()
                .any(|it| it.file == error.file && it.line == error.line)
            {
                errors.push(error);
            }
        }
    }
    errors
}

// As GCC says it, `file:line:column: error: …`, or nvcc, `file(line): error: …`.
fn error(line: &str) -> Option<Error> {
    let (place, message) = line.split_once(": error: ")?;
    let (file, numbers) = place.split_once([':', '('])?;
    let number = numbers.split([':', ')']).next()?;
    Some(Error {
        file: normal(file),
        line: number.parse().ok()?,
        message: message.to_owned(),
    })
}

fn normal(path: &str) -> String {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The functions of a unit's object that give the kernels of the made-up format.
fn kernels(tree: &Tree, unit: &str, which: &str) -> BTreeSet<String> {
    let output = tree.compile(unit);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let listed = Command::new("nm")
        .args(["--format=just-symbols", "--demangle", which])
        .arg(tree.object())
        .output()
        .unwrap();
    assert!(
        listed.status.success(),
        "{}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let names = String::from_utf8(listed.stdout).unwrap();
    let made_up = names
        .lines()
        .filter(|name| name.contains("(MlaCacheFormat)5>::kernel("));
    made_up.map(str::to_owned).collect()
}

#[test]
#[ignore = "checks a copy of the workspace: cargo test -p xtask --test additions -- --ignored"]
fn a_made_up_cache_format_lacks_exactly_the_listed_places_in_rust() {
    let mut listed = contributing("Add a cache format", "made_up");
    listed.retain(|file| file.ends_with(".rs"));
    assert_eq!(rust(&Tree::new()), listed);
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p xtask --test additions -- --ignored"]
fn a_made_up_cache_format_lacks_exactly_the_listed_places_in_cuda() {
    let mut listed = contributing("Add a cache format", "made_up");
    listed.retain(|file| !file.ends_with(".rs"));
    assert_eq!(cuda(&Tree::new()), listed);
}
