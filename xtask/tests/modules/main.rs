//! Checks that the imports among the modules of a crate have no circles. A file can then be
//! understood from the modules that it imports, and none of those imports it.
//!
//! The files of one folder are compared with each other, and so are the folders of a crate. A
//! folder's own file and the files in it may name each other, and tests may name anything. For the
//! command, the number of modules at its top and the longest chain of imports are bounded, too.

mod reader;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use reader::{Crate, Name};

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Collects the sources of every crate below a folder, in any workspace: each `src` beside a
/// `Cargo.toml`.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let source = folder.join("src");
    if folder.join("Cargo.toml").is_file() && source.is_dir() {
        found.push(source);
    }
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        // The folder of a build holds copies of crates.
        let skipped = name.starts_with('.') || matches!(name.as_str(), "src" | "target");
        if entry.file_type().unwrap().is_dir() && !skipped {
            sources(&entry.path(), found);
        }
    }
}

/// Returns the files at the root of a `src`, one for each crate.
fn roots(source: &Path) -> Vec<PathBuf> {
    let mut roots: Vec<_> = ["lib.rs", "main.rs"].map(|name| source.join(name)).into();
    if let Ok(programs) = fs::read_dir(source.join("bin")) {
        roots.extend(programs.map(|entry| entry.unwrap().path()));
    }
    roots.retain(|root| root.is_file());
    roots
}

fn rust_files(folder: &Path) -> BTreeSet<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    let each = entries.map(|entry| entry.unwrap().path());
    each.flat_map(|path| {
        if path.is_dir() {
            rust_files(&path)
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            BTreeSet::from([path])
        } else {
            BTreeSet::new()
        }
    })
    .collect()
}

#[test]
fn the_modules_are_in_no_circle() {
    let mut all = Vec::new();
    sources(workspace(), &mut all);
    let mut circles = BTreeMap::new();
    for source in &all {
        let mut files = BTreeSet::new();
        for root in roots(source) {
            let read = Crate::read(&root);
            let found = read.circles();
            if !found.is_empty() {
                circles.insert(root, found);
            }
            files.extend(read.files);
        }
        // The reader must have read all files.
        let unread: Vec<_> = rust_files(source).difference(&files).cloned().collect();
        assert!(unread.is_empty(), "unread: {unread:#?}");
    }
    let names: Vec<_> = all
        .iter()
        .map(|it| it.strip_prefix(workspace()).unwrap())
        .collect();
    for known in ["src", "mla-build/src", "mla-macros/src", "xtask/front/src"] {
        assert!(names.contains(&Path::new(known)), "{known}: {names:?}");
    }
    assert!(
        circles.is_empty(),
        "modules that import each other: {circles:#?}"
    );
}

#[test]
fn imports_are_found() {
    let imports = Crate::read(&workspace().join("mla-runtime/src/lib.rs")).imports();
    let select = &imports[&Name::new()]["select"];
    assert!(
        select.contains("backend") && select.contains("spec"),
        "{select:?}"
    );
}

#[test]
fn a_circle_is_found() {
    let read = Crate::of(&[
        (
            "",
            "mod a; mod b; mod c; mod d; mod e; pub use b::inner as shown; mod f { use crate::a; }",
        ),
        ("a", "use crate::b::inner::Thing;"),
        ("b", "pub mod inner; pub use inner::Thing;"),
        (
            "b::inner",
            "use super::Thing; fn f() { use crate::c::C; } #[cfg(test)] mod tests { use crate::a; \
             }",
        ),
        ("c", "fn f() -> crate::shown::Thing { crate::b::Thing }"),
        ("d", "fn f() { println!(\"{}\", crate::e::E); }"),
        ("e", "fn f() { use super::d; }"),
    ]);
    assert_eq!(
        read.circles(),
        [": b -> c", ": c -> b", ": d -> e", ": e -> d"]
    );
}

/// The command is read from its root down. It has few modules at its root, and every module is
/// reached through few others.
#[test]
fn the_command_has_few_modules_in_short_chains() {
    let read = Crate::read(&workspace().join("mla-cli/src/lib.rs"));
    let top = read.top();
    assert!(top.len() <= 15, "{} modules at the top: {top:?}", top.len());
    let chain: Vec<String> = read
        .longest_chain()
        .iter()
        .map(|it| it.join("::"))
        .collect();
    assert!(
        chain.len() <= 8,
        "{} modules in a chain: {chain:#?}",
        chain.len()
    );
}

#[test]
fn the_longest_chain_is_found() {
    let read = Crate::of(&[
        ("", "mod a; mod b; mod c; fn f() { a::f(); }"),
        ("a", "mod inner; pub use inner::Thing;"),
        ("a::inner", "use super::Thing; use crate::c::C;"),
        ("b", "use crate::a::inner::Thing;"),
        ("c", ""),
    ]);
    assert_eq!(read.top(), ["a", "b", "c"]);
    let chain: Vec<String> = read
        .longest_chain()
        .iter()
        .map(|it| it.join("::"))
        .collect();
    assert_eq!(chain, ["", "a", "a::inner", "c"]);
}
