//! The modules of a crate, and the paths that each of them names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use syn::{Attribute, Item, Meta, UseTree, visit::Visit};

/// A path in the crate, without `crate`.
pub(crate) type Name = Vec<String>;

/// Modules by their paths, each with the paths that it names.
#[derive(Default)]
pub(crate) struct Crate {
    modules: BTreeMap<Name, Module>,
    pub(crate) files: BTreeSet<PathBuf>,
}

#[derive(Default)]
struct Module {
    /// The paths that the module names, from the crate's root.
    names: BTreeSet<Name>,
    /// The re-exports: a name in the module, and the path that it stands for.
    exports: BTreeMap<String, Name>,
}

impl Crate {
    /// Reads the crate with this root file.
    pub(crate) fn read(root: &Path) -> Self {
        let mut read = Self::default();
        read.add_file(root, root.parent().unwrap(), Vec::new(), false);
        read
    }

    /// Makes a crate of only these modules.
    pub(crate) fn of(modules: &[(&str, &str)]) -> Self {
        let mut read = Self::default();
        for (path, text) in modules {
            let each = path.split("::").filter(|name| !name.is_empty());
            let items = syn::parse_file(text).unwrap().items;
            read.add_items(&items, None, each.map(str::to_owned).collect());
        }
        read
    }

    /// Reads a file and the files of its modules, which are in `folder`. Names in a test's file are
    /// left out.
    fn add_file(&mut self, file: &Path, folder: &Path, path: Name, test: bool) {
        let text = fs::read_to_string(file).unwrap_or_else(|_| panic!("{}", file.display()));
        let parsed =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.files.insert(file.to_path_buf());
        if !test {
            self.add_items(&parsed.items, Some(folder), path);
        }
    }

    fn add_items(&mut self, items: &[Item], folder: Option<&Path>, path: Name) {
        let named = |item: &Item| match item {
            Item::Mod(item) => Some(item.ident.to_string()),
            _ => None,
        };
        let children: Vec<_> = items.iter().filter_map(named).collect();
        let mut module = Module::default();
        for item in items {
            if let Item::Use(import) = item
                && !matches!(import.vis, syn::Visibility::Inherited)
            {
                flatten(&import.tree, Vec::new(), &mut |named, last| {
                    if let Some(named) = absolute(named, &path, &children) {
                        module.exports.insert(last, named);
                    }
                });
            }
        }
        let mut paths = Paths {
            path: &path,
            children: &children,
            names: &mut module.names,
        };
        items.iter().for_each(|item| paths.visit_item(item));
        self.modules.insert(path.clone(), module);
        for item in items {
            if let Item::Mod(item) = item
                && !(item.content.is_some() && is_test(&item.attrs))
            {
                self.add_module(item, folder, &path);
            }
        }
    }

    fn add_module(&mut self, item: &syn::ItemMod, folder: Option<&Path>, path: &[String]) {
        let name = item.ident.to_string();
        let path = child(path, &name);
        let inside = folder.map(|folder| folder.join(&name));
        if let Some((_, items)) = &item.content {
            self.add_items(items, inside.as_deref(), path);
        } else if let Some(inside) = inside {
            let files = [inside.with_extension("rs"), inside.join("mod.rs")];
            // A module in another place, by its attribute `path`, belongs to another crate.
            if let Some(file) = files.iter().find(|file| file.is_file()) {
                self.add_file(file, &inside, path, is_test(&item.attrs));
            }
        }
    }

    /// Returns the module that a path leads to, through re-exports.
    fn resolve(&self, named: &[String]) -> Option<Name> {
        let mut at = Name::new();
        let mut rest = named.to_vec();
        // No chain of re-exports is this long. A circular one does not compile.
        for _ in 0..64 {
            let Some(next) = rest.first().cloned() else {
                break;
            };
            let inner = child(&at, &next);
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

    /// Returns, for each folder, the imports of its modules from each other.
    pub(crate) fn imports(&self) -> BTreeMap<Name, BTreeMap<String, BTreeSet<String>>> {
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

    /// Returns the modules that the crate's root declares.
    pub(crate) fn top(&self) -> Vec<&str> {
        let at_top = self.modules.keys().filter(|path| path.len() == 1);
        at_top.map(|path| path[0].as_str()).collect()
    }

    /// Returns the longest chain of imports. It consists of modules, including the root, and each
    /// names something in the next one. A re-export leads to the module behind it. A module that
    /// names an enclosing module does not add a step.
    pub(crate) fn longest_chain(&self) -> Vec<Name> {
        let mut known = BTreeMap::new();
        let chains = self.modules.keys().map(|at| self.chain(at, &mut known));
        chains.max_by_key(Vec::len).unwrap_or_default()
    }

    /// Returns the longest chain that begins at a module.
    fn chain(&self, from: &Name, known: &mut BTreeMap<Name, Vec<Name>>) -> Vec<Name> {
        if let Some(chain) = known.get(from) {
            return chain.clone();
        }
        // A circle, which another test finds, ends a chain where it began.
        known.insert(from.clone(), Vec::new());
        let named = self.modules[from].names.iter();
        let next = named.filter_map(|named| self.resolve(named));
        let rest = next
            .filter(|to| !from.starts_with(to))
            .map(|to| self.chain(&to, known));
        let rest = rest.max_by_key(Vec::len).unwrap_or_default();
        let chain = [vec![from.clone()], rest].concat();
        known.insert(from.clone(), chain.clone());
        chain
    }

    /// Returns the circles: for each folder, the imports that lead from one of its modules back to
    /// it.
    pub(crate) fn circles(&self) -> Vec<String> {
        let folders = self.imports();
        let each = folders.iter().flat_map(|(folder, imports)| {
            imports.iter().flat_map(move |(from, to)| {
                let back = to.iter().filter(|to| leads(imports, to, from));
                back.map(move |to| format!("{}: {from} -> {to}", folder.join("::")))
            })
        });
        each.collect()
    }
}

/// True if imports lead from one module to another.
fn leads(imports: &BTreeMap<String, BTreeSet<String>>, from: &str, to: &str) -> bool {
    let mut seen = BTreeSet::new();
    let mut next = vec![from];
    while let Some(at) = next.pop() {
        if at == to {
            return true;
        }
        if seen.insert(at) {
            next.extend(imports.get(at).into_iter().flatten().map(String::as_str));
        }
    }
    false
}

fn child(path: &[String], name: &str) -> Name {
    [path, &[name.to_owned()]].concat()
}

/// Collects the paths that a module names. The modules inside it are read separately.
struct Paths<'a> {
    path: &'a [String],
    children: &'a [String],
    names: &'a mut BTreeSet<Name>,
}

impl Paths<'_> {
    fn add(&mut self, named: Name) {
        if let Some(named) = absolute(named, self.path, self.children) {
            self.names.insert(named);
        }
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item_mod(&mut self, _: &'ast syn::ItemMod) {}

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test(&item.attrs) {
            flatten(&item.tree, Vec::new(), &mut |named, _| self.add(named));
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter().map(|it| it.ident.to_string());
        let segments: Name = segments.collect();
        // A single segment is not the name of a module.
        let is_child = segments.len() > 1 && self.children.contains(&segments[0]);
        if is_child || matches!(segments[0].as_str(), "crate" | "super") {
            self.add(segments);
        }
        syn::visit::visit_path(self, path);
    }

    /// A macro's tokens are not syntax yet, so anything that begins with `crate` or `super` counts
    /// as a path.
    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        let text = called.tokens.to_string();
        let separate = |c: char| !(c.is_alphanumeric() || c == '_' || c == ':');
        let text = text.replace(" :: ", "::").replace(separate, " ");
        for word in text.split_whitespace() {
            if word.starts_with("crate::") || word.starts_with("super::") {
                self.add(word.split("::").map(str::to_owned).collect());
            }
        }
        syn::visit::visit_macro(self, called);
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        _ => false,
    })
}

/// Calls `found` with each path of an import, and the name under which it is imported.
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

/// Returns a path from the crate's root, or `None` if it does not belong to this crate.
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
