//! No circle of imports among the modules: what a reader has to know before a file is above it,
//! never beside it.
//!
//! The files of one folder are compared with each other, and so are the folders of the crate. A
//! folder's own file and those in it may name each other, and tests may name anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::Visit;
use syn::{Attribute, Item, Meta, UseTree};

type Name = Vec<String>;

/// Modules by their paths, and what each names.
#[derive(Default)]
struct Crate {
    modules: BTreeMap<Name, Module>,
}

#[derive(Default)]
struct Module {
    /// The paths that it names, from the crate's root.
    names: BTreeSet<Name>,
    /// What it re-exports: a name of its own, and the path behind it.
    exports: BTreeMap<String, Name>,
}

impl Crate {
    fn read(root: &Path) -> Self {
        let mut read = Self::default();
        read.add(&root.join("lib.rs"), Vec::new());
        read
    }

    fn add(&mut self, file: &Path, path: Name) {
        let text = fs::read_to_string(file).unwrap_or_else(|_| panic!("{}", file.display()));
        self.add_source(&text, file, path);
    }

    fn add_source(&mut self, text: &str, file: &Path, path: Name) {
        let parsed =
            syn::parse_file(text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let mut module = Module::default();
        let mut children = Vec::new();
        for item in &parsed.items {
            match item {
                Item::Mod(inner) if inner.content.is_none() => {
                    children.push(inner.ident.to_string())
                }
                Item::Use(import) if !is_test(&import.attrs) => {
                    let exported = !matches!(import.vis, syn::Visibility::Inherited);
                    flatten(&import.tree, Vec::new(), &mut |named, last| {
                        let Some(named) = absolute(named, &path, &children) else {
                            return;
                        };
                        if exported {
                            module.exports.insert(last, named.clone());
                        }
                        module.names.insert(named);
                    });
                }
                _ => {}
            }
        }
        let mut paths = Paths {
            path: &path,
            children: &children,
            names: &mut module.names,
        };
        paths.visit_file(&parsed);
        self.modules.insert(path.clone(), module);
        let folder = if file.ends_with("mod.rs") || file.ends_with("lib.rs") {
            file.parent().map(Path::to_path_buf)
        } else {
            Some(file.with_extension(""))
        };
        for child in children {
            let inside = [folder.clone().unwrap_or_default(), PathBuf::from(&child)]
                .iter()
                .collect::<PathBuf>();
            let files = [inside.with_extension("rs"), inside.join("mod.rs")];
            let Some(file) = files.iter().find(|file| file.is_file()) else {
                continue;
            };
            self.add(file, [&path[..], &[child]].concat());
        }
    }

    /// The module that a path leads into, through re-exports.
    fn resolve(&self, named: &[String]) -> Option<Name> {
        let mut at = Name::new();
        let mut rest = named.to_vec();
        // No chain of re-exports is as long; one that runs in a circle does not compile.
        for _ in 0..64 {
            let Some(next) = rest.first().cloned() else {
                break;
            };
            let inner = [&at[..], std::slice::from_ref(&next)].concat();
            if self.modules.contains_key(&inner) {
                at = inner;
                rest.remove(0);
            } else if let Some(behind) = self.modules.get(&at)?.exports.get(&next) {
                rest.splice(..1, behind.clone());
                at = Name::new();
            } else {
                break;
            }
        }
        Some(at)
    }

    /// For each folder, what its modules import of each other.
    fn imports(&self) -> BTreeMap<Name, BTreeMap<String, BTreeSet<String>>> {
        let mut folders: BTreeMap<Name, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
        for (from, module) in &self.modules {
            for to in module.names.iter().filter_map(|named| self.resolve(named)) {
                let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
                if let (Some(a), Some(b)) = (from.get(shared), to.get(shared)) {
                    let folder = folders.entry(from[..shared].to_vec()).or_default();
                    folder.entry(a.clone()).or_default().insert(b.clone());
                }
            }
        }
        folders
    }

    /// The circles: for each folder, the imports that lead from one of its modules back to it.
    fn circles(&self) -> Vec<String> {
        let mut circles = Vec::new();
        for (folder, mut imports) in self.imports() {
            // What imports nothing that is left, or is imported by nothing that is left, is in no
            // circle.
            loop {
                let sources: BTreeSet<String> = imports.keys().cloned().collect();
                let targets: BTreeSet<String> = imports.values().flatten().cloned().collect();
                let before = imports.values().map(BTreeSet::len).sum::<usize>();
                imports.retain(|from, _| targets.contains(from));
                imports
                    .values_mut()
                    .for_each(|to| to.retain(|to| sources.contains(to)));
                imports.retain(|_, to| !to.is_empty());
                if imports.values().map(BTreeSet::len).sum::<usize>() == before {
                    break;
                }
            }
            let edges = imports
                .iter()
                .flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
            circles
                .extend(edges.map(|(from, to)| format!("{}: {from} -> {to}", folder.join("::"))));
        }
        circles
    }
}

struct Paths<'a> {
    path: &'a [String],
    children: &'a [String],
    names: &'a mut BTreeSet<Name>,
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_macro(&mut self, _: &'ast syn::ItemMacro) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path
            .segments
            .iter()
            .map(|it| it.ident.to_string())
            .collect::<Name>();
        if matches!(segments[0].as_str(), "crate" | "super")
            && let Some(named) = absolute(segments, self.path, self.children)
        {
            self.names.insert(named);
        }
        syn::visit::visit_path(self, path);
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        _ => false,
    })
}

/// Each path of an import, and the name under which it is known.
fn flatten(tree: &UseTree, mut before: Name, found: &mut impl FnMut(Name, String)) {
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            flatten(&path.tree, before, found);
        }
        UseTree::Name(name) if name.ident == "self" => {
            let last = before.last().cloned().unwrap_or_default();
            found(before, last);
        }
        UseTree::Name(name) => {
            before.push(name.ident.to_string());
            found(before, name.ident.to_string());
        }
        UseTree::Rename(name) => {
            before.push(name.ident.to_string());
            found(before, name.rename.to_string());
        }
        UseTree::Glob(_) => found(before, String::new()),
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, before.clone(), found);
            }
        }
    }
}

/// A path from the crate's root, if it is one of this crate.
fn absolute(named: Name, path: &[String], children: &[String]) -> Option<Name> {
    let (first, rest) = named.split_first()?;
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" => Some([path, rest].concat()),
        "super" => {
            let (_, parent) = path.split_last()?;
            absolute([&["self".to_owned()], rest].concat(), parent, children)
        }
        first if children.iter().any(|child| child == first) => Some([path, &named[..]].concat()),
        _ => None,
    }
}

/// The sources of a package of this workspace, and how many modules there are at least: whatever
/// the reader above misses, it has read what there is.
const PACKAGES: &[(&str, usize)] = &[
    (".", 20),
    ("mla-cli", 30),
    ("mla-conformance", 5),
    ("mla-cpu", 15),
    ("mla-cudnn", 2),
    ("mla-flashinfer", 5),
    ("mla-runtime", 40),
];

#[test]
fn the_modules_are_in_no_circle() {
    let mut circles = Vec::new();
    for (package, least) in PACKAGES {
        let sources = [env!("CARGO_MANIFEST_DIR"), "..", package, "src"];
        let read = Crate::read(&sources.iter().collect::<PathBuf>());
        let found = read.modules.keys();
        assert!(found.len() > *least, "{package}: {found:?}");
        circles.extend(
            read.circles()
                .iter()
                .map(|circle| format!("{package}{circle}")),
        );
    }
    assert!(
        circles.is_empty(),
        "modules that import each other: {circles:#?}"
    );
}

#[test]
fn imports_are_found() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let imports = Crate::read(&sources).imports();
    let select = &imports[&Name::new()]["select"];
    assert!(
        select.contains("backend") && select.contains("rules"),
        "{select:?}"
    );
}

#[test]
fn a_circle_is_found() {
    let mut read = Crate::default();
    for (path, text) in [
        ("", "mod a; mod b; mod c; pub use b::inner as shown;"),
        ("a", "use crate::b::inner::Thing;"),
        ("b", "pub mod inner; pub use inner::Thing;"),
        ("b::inner", "use super::Thing; use crate::c::C;"),
        ("c", "fn f() -> crate::shown::Thing { crate::b::Thing }"),
    ] {
        let path: Name = path
            .split("::")
            .filter(|it| !it.is_empty())
            .map(str::to_owned)
            .collect();
        read.add_source(text, Path::new("none.rs"), path);
    }
    assert_eq!(read.circles(), [": b -> c", ": c -> b"]);
}
