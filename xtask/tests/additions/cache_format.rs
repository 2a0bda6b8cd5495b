//! A made-up cache format with the memory layout of `fp8`.

use std::{collections::BTreeSet, process::Command};

use cargo_metadata::diagnostic::Diagnostic;

use crate::tree::{Tree, contributing};

/// The features with which all Rust code that may name a format is checked.
const FEATURES: &str = "--features=mla-kernels/sm80,mla-kernels/sm90,mla-cli/sm90";

/// Places that name formats but do not match on them. Each has a part of the error that leads to
/// it, the file, and its text before and after the format is added.
const NAMED: [(&str, &str, &str, &str); 3] = [
    (
        "see mla-macros/src/vocabulary.rs",
        "mla-macros/src/vocabulary.rs",
        "    name(\"fp8_per_token\", \"Fp8PerToken\"),\n",
        "    name(\"fp8_per_token\", \"Fp8PerToken\"),\n    name(\"made_up\", \"MadeUp\"),\n",
    ),
    (
        "other names than vocabulary::KV_FORMATS",
        "mla-macros/src/key.rs",
        "\"a list of f32, f16, bf16, fp8, fp8_ds_mla, fp8_per_token\"",
        "\"a list of f32, f16, bf16, fp8, fp8_ds_mla, fp8_per_token, made_up\"",
    ),
    (
        "cannot find value `MLA_CACHE_MADE_UP`",
        "cuda/include/mla.rs",
        "pub const MLA_CACHE_FP8_PER_TOKEN: MlaCacheFormat = 5;\n",
        "pub const MLA_CACHE_FP8_PER_TOKEN: MlaCacheFormat = 5;\n\
         pub const MLA_CACHE_MADE_UP: MlaCacheFormat = 6;\n",
    ),
];

/// Adds an arm to each match without the format, as the compiler suggests, until everything
/// compiles. Returns the changed files.
fn rust(tree: &Tree) -> BTreeSet<String> {
    let enumeration = "mla-runtime/src/model/kv_format.rs";
    let mut places = BTreeSet::from([enumeration.to_owned()]);
    tree.edit(
        enumeration,
        "        Fp8PerToken = \"fp8_per_token\",\n",
        "        Fp8PerToken = \"fp8_per_token\",\n        /// Made up.\n        MadeUp = \
         \"made_up\",\n",
    );
    for _ in 0..16 {
        let errors = tree.check(&["--workspace", "--lib", "--bins", FEATURES]);
        if errors.is_empty() {
            return places;
        }
        let changed = mend(tree, &errors);
        assert!(!changed.is_empty(), "{errors:#?}");
        places.extend(changed);
    }
    panic!("it does not compile after 16 steps: {places:?}");
}

/// Adds the format where these errors report that it is missing, and returns the changed files.
fn mend(tree: &Tree, errors: &[Diagnostic]) -> BTreeSet<String> {
    let (mut changed, mut arms) = (BTreeSet::new(), BTreeSet::new());
    for error in errors {
        let named = NAMED.iter().find(|it| error.message.contains(it.0));
        let Some((_, file, before, after)) = named else {
            arms.insert(missing_arm(tree, error));
            continue;
        };
        // Several crates may report the same place.
        if changed.insert((*file).to_owned()) {
            tree.edit(file, before, after);
        }
    }
    // Insertions begin at the end of each file, so that earlier positions stay valid.
    for (file, at, text) in arms.into_iter().rev() {
        let mut source = tree.read(&file);
        source.insert_str(at, &text);
        tree.write(&file, &source);
        changed.insert(file);
    }
    changed
}

/// Returns the place of a match without the format, and the arm that the compiler suggests.
fn missing_arm(tree: &Tree, error: &Diagnostic) -> (String, usize, String) {
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
    let at = span.byte_start as usize;
    // The arm of its number in the C interface is different. The other arms check specs at compile
    // time.
    let arm = match span.file_name.as_str() {
        "src/device/argument.rs" => "raw::MLA_CACHE_MADE_UP as i32",
        file @ "mla-runtime/src/model/kv_format.rs" => match function_at(&tree.read(file), at) {
            "dtype" => "None",
            "latent_multiple" => "1",
            _ => "todo!()",
        },
        _ => "todo!()",
    };
    let text = text.replace("todo!()", arm);
    (span.file_name.clone(), at, text)
}

/// Returns the name of the constant function around a position in a source.
fn function_at(source: &str, at: usize) -> &str {
    let (_, signature) = source[..at].rsplit_once("const fn ").unwrap_or_default();
    signature.split('(').next().unwrap_or_default()
}

/// Adds the format to the CUDA sources, following the compiler's errors in the order in which an
/// author sees them.
fn cuda(tree: &Tree) -> BTreeSet<String> {
    let mut places = BTreeSet::from(["cuda/include/mla.h".to_owned()]);
    tree.edit(
        "cuda/include/mla.h",
        "    MLA_CACHE_FP8_PER_TOKEN = 5\n",
        "    MLA_CACHE_FP8_PER_TOKEN = 5,\n    MLA_CACHE_MADE_UP = 6\n",
    );
    let units = units();
    places.extend(switches(tree, &units));
    assert!(places.contains(LIST), "{places:?}");
    places.insert(row(tree));
    let left = errors(tree, &units);
    assert!(left.is_empty(), "{left:?}");
    places.insert(instantiation(tree));
    places
}

/// Adds a case to each switch over the formats, except that of the list. The compiler names all
/// switches.
fn switches(tree: &Tree, units: &[String]) -> BTreeSet<String> {
    let lacks = "'MLA_CACHE_MADE_UP' not handled in switch";
    let mut places = BTreeSet::new();
    for error in errors(tree, units) {
        assert!(error.message.contains(lacks), "{error:?}");
        if error.file != LIST {
            let source = tree.read(&error.file);
            let mut lines: Vec<_> = source.lines().collect();
            assert!(lines[error.line - 1].contains("switch ("), "{error:?}");
            lines.insert(error.line, "        case MLA_CACHE_MADE_UP: break;");
            tree.write(&error.file, &(lines.join("\n") + "\n"));
        }
        places.insert(error.file);
    }
    places
}

/// Adds the format to the list of all formats. The compiler first reports that its text is missing,
/// and then that its row is. Returns the file of the format's rows.
fn row(tree: &Tree) -> String {
    tree.edit(
        LIST,
        "    each(MLA_CACHE_FP8_PER_TOKEN)\n",
        "    each(MLA_CACHE_FP8_PER_TOKEN) each(MLA_CACHE_MADE_UP)\n",
    );
    // All units that include the list give the same error.
    let units = [CACHE_UNIT.to_owned()];
    let of_the_list = errors(tree, &units);
    let counts = |error: &Error| error.message.contains("kCacheFormats") && error.file == LIST;
    assert!(
        !of_the_list.is_empty() && of_the_list.iter().all(counts),
        "{of_the_list:?}"
    );
    tree.edit(LIST, "(MLA_ONE_MORE) == 6", "(MLA_ONE_MORE) == 7");
    let rows = errors(tree, &units);
    assert!(
        rows.iter().any(|error| error.message.contains("Row<")),
        "{rows:?}"
    );
    let file = "cuda/formats/made_up.cuh";
    tree.write(
        file,
        "#pragma once\n#include \"fp8.cuh\"\nnamespace mla {\ntemplate <>\n\
         struct Row<MLA_CACHE_MADE_UP> : Row<MLA_CACHE_FP8> {};\n}  // namespace mla\n",
    );
    tree.edit(
        LIST,
        "#include \"fp8.cuh\"\n",
        "#include \"fp8.cuh\"\n#include \"made_up.cuh\"\n",
    );
    file.to_owned()
}

/// Checks that the unit compiles, but does not link before the new source has cache writes and
/// gathers of the format.
fn instantiation(tree: &Tree) -> String {
    let wanted = kernels(tree, CACHE_UNIT, "--undefined-only");
    assert_eq!(wanted.len(), 2, "{wanted:?}");
    let source = "cuda/all/instantiations/cache_made_up.cu";
    let fp8 = tree.read("cuda/all/instantiations/cache_fp8.cu");
    tree.write(source, &fp8.replace("MLA_CACHE_FP8", "MLA_CACHE_MADE_UP"));
    assert_eq!(kernels(tree, source, "--defined-only"), wanted);
    source.to_owned()
}

const LIST: &str = "cuda/formats/formats.cuh";
/// The unit that selects the cache's kernels by the list.
const CACHE_UNIT: &str = "cuda/all/cache.cu";

/// A compiler's error about a line.
#[derive(Debug)]
struct Error {
    file: String,
    line: usize,
    message: String,
}

/// Returns the sources that select kernels.
fn units() -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "cuda/*.cu"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    listed
        .lines()
        .filter(|unit| !unit.contains("/instantiations/"))
        .map(str::to_owned)
        .collect()
}

/// Returns the errors in these sources. Code for the GPU is only checked.
fn errors(tree: &Tree, units: &[String]) -> Vec<Error> {
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

// Reads GCC's `file:line:column: error: …` or nvcc's `file(line): error: …`.
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

/// Returns the functions in a unit's object for kernels of the made-up format.
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
        .filter(|name| name.contains("(MlaCacheFormat)6>::kernel("));
    made_up.map(str::to_owned).collect()
}

#[test]
#[ignore = "checks a copy of the workspace: cargo test -p xtask --test additions -- --ignored"]
fn a_made_up_cache_format_lacks_exactly_the_listed_places_in_rust() {
    let mut listed = contributing("Add a cache format", "made_up");
    listed.retain(|file| file.ends_with(".rs"));
    let tree = Tree::for_cargo();
    assert_eq!(rust(&tree), listed);
    // The tests use the list of formats.
    let errors = tree.check(&["--workspace", "--tests", FEATURES]);
    assert!(errors.is_empty(), "{errors:#?}");
}

#[test]
#[ignore = "needs nvcc: cargo xtask toolkit && cargo test -p xtask --test additions -- --ignored"]
fn a_made_up_cache_format_lacks_exactly_the_listed_places_in_cuda() {
    let mut listed = contributing("Add a cache format", "made_up");
    listed.retain(|file| !file.ends_with(".rs"));
    assert_eq!(cuda(&Tree::for_nvcc()), listed);
}
