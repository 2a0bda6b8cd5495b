//! Limits of the number of types that a user of mla-runtime and mla-kernels has to look through,
//! and of those that the guide for engines names. Both limits may only fall.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The maximum number of public types of both crates. A type that several modules show counts once.
const TYPES: usize = 120;

/// The maximum number of them that `docs/engine.md` names.
const NAMED: usize = 60;

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns a type's name and the rest of the line, if this line of `cargo xtask api` defines a
/// type. Lines about associated types and about members of a type do not count.
fn definition<'a>(line: &'a str, package: &str) -> Option<(&'a str, &'a str)> {
    let line = line.trim_start_matches("#[non_exhaustive] ");
    let line = line.strip_prefix("pub ")?;
    let line = line.strip_prefix("unsafe ").unwrap_or(line);
    let (kind, line) = line.split_once(' ')?;
    if !["struct", "enum", "union", "trait", "type"].contains(&kind) {
        return None;
    }
    let mut rest = line.strip_prefix(package)?.strip_prefix("::")?;
    loop {
        let end = rest
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        if name.starts_with(char::is_uppercase) {
            // For a member, its name follows the type's name and parameters.
            let is_of_a_type = kind == "type" && !behind.contains(" = ")
                || behind.split(" = ").next()?.contains(">::")
                || behind.starts_with("::");
            return (!is_of_a_type).then_some((name, behind));
        }
        rest = behind.strip_prefix("::")?;
    }
}

/// Returns the public types, each with the text after its name. A type that several modules show is
/// then one entry.
fn types() -> BTreeSet<(String, String)> {
    let packages = ["mla-runtime", "mla-kernels"];
    let each = packages.iter().flat_map(|package| {
        let list = read(&format!("xtask/api/{package}.txt"));
        let package = package.replace('-', "_");
        let types = list
            .lines()
            .filter_map(|line| definition(line, &package))
            .map(|(name, behind)| (name.to_owned(), behind.to_owned()));
        types.collect::<Vec<_>>()
    });
    each.collect()
}

#[test]
fn types_are_few() {
    let types = types();
    assert!(
        types.len() <= TYPES,
        "public types: given {}, accepted at most {TYPES}: keep private what nobody outside names",
        types.len()
    );
    assert!(
        TYPES - types.len() < 5,
        "public types: given {}, and a bound of {TYPES} that is to fall with them",
        types.len()
    );
}

#[test]
fn the_guide_names_few_of_them() {
    let guide = read("docs/engine.md");
    // In the guide, code is between backticks, both as words and as blocks.
    let code: String = guide
        .split('`')
        .skip(1)
        .step_by(2)
        .collect::<Vec<_>>()
        .join(" ");
    let words: BTreeSet<&str> = code
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .collect();
    let types = types();
    let named: BTreeSet<&str> = types
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| words.contains(name))
        .collect();
    assert!(named.contains("MlaLayer"), "{named:?}");
    assert!(
        named.len() <= NAMED,
        "types that docs/engine.md names: given {}, accepted at most {NAMED}: {named:?}",
        named.len()
    );
}

#[test]
fn a_line_of_a_type_is_told_from_others() {
    let name = |line| definition(line, "a").map(|(name, _)| name);
    assert_eq!(name("pub struct a::b::C<'d, D: a::E>"), Some("C"));
    assert_eq!(name("#[non_exhaustive] pub enum a::C"), Some("C"));
    assert_eq!(name("pub trait a::C: core::marker::Sized"), Some("C"));
    assert_eq!(name("pub type a::b::C<T> = a::D<T, a::b::E>"), Some("C"));
    assert_eq!(name("pub type a::b::C<D>::State = a::b::D"), None);
    assert_eq!(name("pub type a::b::C::State: core::marker::Send"), None);
    assert_eq!(name("pub type B::State = a::C"), None);
    assert_eq!(name("pub fn a::b::C::d(&self)"), None);
    assert_eq!(name("pub mod a::b"), None);
}
