//! The files that the includes of a file find.
//!
//! A dependency with unchanged content may still mean something else. For example, a new header in
//! a folder that is searched earlier hides the one that was found before. `__has_include` asks for
//! a header that may come or go. Each dependency is therefore kept with a hash of *every* file that
//! an include in it would find in any of the searched folders. With this hash, neither the order of
//! the folders matters nor which branch of an `#if` was taken.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use super::{hash_parts, last_change, lock};
use crate::roles::Roles;

/// A header as a directive spells it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Include {
    /// The name, or an empty text if a macro stands in its place. In quotes, the macro may name any
    /// file beside this one.
    pub(crate) name: String,
    /// True if the name is in quotes. The folder of the file is then searched, too.
    pub(crate) quoted: bool,
}

/// Returns every header that a text includes or asks for with `__has_include`, in any branch. Not
/// among them is a header that `__has_include` asks for by a macro's name.
pub(crate) fn includes(text: &str) -> BTreeSet<Include> {
    let mut found = BTreeSet::new();
    let mut rest = text;
    while let Some(at) = rest.find('#') {
        rest = &rest[at + 1..];
        let directive = skip_blank(rest);
        let end = directive.find(|c: char| !(c.is_ascii_alphabetic() || c == '_'));
        let (word, after) = directive.split_at(end.unwrap_or(directive.len()));
        match word {
            "include" | "include_next" | "import" | "embed" => {
                let named = skip_blank(after);
                let by_macro = named.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
                found.extend(header(named));
                found.extend(by_macro.then(|| Include {
                    name: String::new(),
                    quoted: true,
                }));
            }
            "if" | "elif" | "define" => {
                let line = logical_line(after);
                for (at, question) in line.match_indices("__has_") {
                    let after = line[at + question.len()..].split_once('(');
                    if let Some(("include" | "include_next" | "embed", after)) =
                        after.map(|(word, after)| (word.trim_end(), after))
                    {
                        found.extend(header(skip_blank(after)));
                    }
                }
                rest = &after[line.len()..];
            }
            _ => {}
        }
    }
    found
}

/// Returns the header at the start of a text.
fn header(text: &str) -> Option<Include> {
    let (quoted, close) = match text.chars().next()? {
        '"' => (true, '"'),
        '<' => (false, '>'),
        _ => return None,
    };
    let end = text[1..].find([close, '\n'])?;
    let name = &text[1..=end];
    (text[1 + end..].starts_with(close) && !name.is_empty()).then(|| Include {
        name: name.to_owned(),
        quoted,
    })
}

/// Skips blanks and comments at the start of a text, within its first line.
fn skip_blank(mut text: &str) -> &str {
    loop {
        text = text.trim_start_matches([' ', '\t']);
        if let Some(rest) = text.strip_prefix("\\\n") {
            text = rest;
        } else if let Some(rest) = text.strip_prefix("/*") {
            text = rest.split_once("*/").map_or("", |(_, after)| after);
        } else {
            return text;
        }
    }
}

/// Returns the text up to the first end of a line that no backslash continues.
fn logical_line(text: &str) -> &str {
    let mut end = 0;
    while let Some(length) = text[end..].find('\n') {
        end += length;
        if !text[..end].trim_end_matches('\r').ends_with('\\') {
            return &text[..end];
        }
        end += 1;
    }
    text
}

/// The folders that a compiler searches, and the files that it would find there. Each file is
/// looked for once.
#[derive(Debug)]
pub(crate) struct Lookup {
    folders: Vec<PathBuf>,
    /// The folder where nvcc runs. nvcc includes `cuda_runtime.h` itself, as a file in this folder
    /// would.
    root: PathBuf,
    /// The candidates in the folders, by name.
    found: Mutex<HashMap<String, Arc<Vec<Candidate>>>>,
    /// The searched folders that have a folder of this name.
    parents: Mutex<HashMap<String, Arc<Vec<PathBuf>>>>,
    /// The meaning of each file. A name in quotes is also searched beside the file.
    files: Mutex<HashMap<PathBuf, Meaning>>,
}

/// A file that an include may refer to.
#[derive(Clone, Debug)]
struct Candidate {
    path: PathBuf,
    /// The time since 1970 at which the file or its name last changed.
    changed: Duration,
}

/// The files that the includes of one file may refer to.
#[derive(Clone, Debug)]
pub(crate) struct Meaning {
    /// The hash of all candidates, named by their roles.
    pub(crate) hash: blake3::Hash,
    /// The candidate that changed last.
    newest: Option<(Duration, PathBuf)>,
}

impl Meaning {
    /// Returns a candidate that changed at `moment` or later. The compiler may not have seen it.
    pub(crate) fn newer_than(&self, moment: Duration) -> Option<&Path> {
        let (changed, path) = self.newest.as_ref()?;
        (*changed >= moment).then_some(path)
    }
}

impl Lookup {
    /// Makes a lookup in `folders`, which are absolute and in any order. The compiler runs in
    /// `root`.
    pub(crate) fn new(folders: Vec<PathBuf>, root: PathBuf) -> Self {
        Self {
            folders,
            root,
            found: Mutex::default(),
            parents: Mutex::default(),
            files: Mutex::default(),
        }
    }

    /// Returns the files that the includes of `file` find, and other files of the same name, since
    /// a macro of another file may name them.
    pub(crate) fn meaning(
        &self,
        file: &Path,
        includes: &BTreeSet<Include>,
        roles: &Roles,
    ) -> Meaning {
        if let Some(known) = lock(&self.files).get(file) {
            return known.clone();
        }
        let mut candidates = Vec::new();
        let own = file.parent().unwrap_or(Path::new("/"));
        for include in includes {
            if include.name.is_empty() {
                // Headers of the toolkit and of wheels stay as they were released.
                if roles.name(file).is_of_the_script() {
                    candidates.extend(beside(own));
                }
                continue;
            }
            if include.quoted {
                candidates.extend(candidate(own.join(&include.name)));
            }
            candidates.extend(self.in_folders(&include.name).iter().cloned());
        }
        for folder in &self.folders {
            if let Some(name) = file.strip_prefix(folder).ok().and_then(Path::to_str) {
                candidates.extend(self.in_folders(name).iter().cloned());
            }
        }
        candidates.extend(candidate(self.root.join("cuda_runtime.h")));
        let names: Vec<_> = candidates.iter().map(|it| roles.name(&it.path)).collect();
        let parts = names
            .iter()
            .flat_map(|it| [it.role.as_bytes(), it.path.as_bytes()]);
        let changes = candidates.iter().map(|it| (it.changed, it.path.clone()));
        let meaning = Meaning {
            hash: hash_parts(parts),
            newest: changes.max(),
        };
        lock(&self.files).insert(file.to_owned(), meaning.clone());
        meaning
    }

    fn in_folders(&self, name: &str) -> Arc<Vec<Candidate>> {
        let (parent, file) = name.rsplit_once('/').unwrap_or(("", name));
        known(&self.found, name, || {
            let folders = known(&self.parents, parent, || {
                let folders = self.folders.iter().map(|folder| folder.join(parent));
                folders.filter(|folder| folder.is_dir()).collect()
            });
            let paths = folders.iter().map(|folder| folder.join(file));
            paths.filter_map(candidate).collect()
        })
    }
}

/// Returns the list for a name, which is made once.
fn known<T>(
    lists: &Mutex<HashMap<String, Arc<Vec<T>>>>,
    name: &str,
    make: impl FnOnce() -> Vec<T>,
) -> Arc<Vec<T>> {
    if let Some(known) = lock(lists).get(name) {
        return known.clone();
    }
    let made = Arc::new(make());
    lock(lists).insert(name.to_owned(), made.clone());
    made
}

/// Returns the files in a folder, always in the same order.
fn beside(folder: &Path) -> Vec<Candidate> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries.filter_map(|it| candidate(it.path())).collect();
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn candidate(path: PathBuf) -> Option<Candidate> {
    let data = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
    Some(Candidate {
        path,
        changed: last_change(&data),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        let shown = |include: Include| {
            if include.quoted {
                format!("{:?}", include.name)
            } else {
                format!("<{}>", include.name)
            }
        };
        includes(text).into_iter().map(shown).collect()
    }

    #[test]
    fn every_spelling_of_an_include_is_read() {
        assert_eq!(
            names(
                "#include <a.h>\n  #  include\t\"b.h\" // c.h\n#include_next <d/e.h>\n\
                 # /* odd */ include /* too */ <f.h>\n#import \"g.h\"\n#include MACRO\n\
                 #define CAT(a, b) a ## b\n#include <unfinished\n#pragma once\n"
            ),
            ["\"\"", "<a.h>", "\"b.h\"", "<d/e.h>", "<f.h>", "\"g.h\""]
        );
    }

    #[test]
    fn headers_that_are_asked_for_are_read_in_every_branch() {
        assert_eq!(
            names(
                "#if defined(X) && \\\r\n    __has_include(<a.h>) || __has_include ( \"b.h\" )\n\
                 #elif __has_include_next(<c.h>)\n#endif\n\
                 #define HAS __has_include(<d.h>)\n#ifdef __has_include\nint __has_include;\n"
            ),
            ["<a.h>", "\"b.h\"", "<c.h>", "<d.h>"]
        );
        assert_eq!(names("#if __has_include(NAME)\n#define \\\n#"), [""; 0]);
    }

    #[test]
    fn an_include_by_a_macro_means_any_file_beside_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let (file, includes) = (at("a.cu"), includes("#include TILE\n"));
        let meaning = || {
            let roles = Roles::new([("package".to_owned(), at(""))]);
            let lookup = Lookup::new(Vec::new(), at(""));
            lookup.meaning(&file, &includes, &roles).hash
        };
        let nothing = meaning();
        fs::write(at("tile.h"), "").unwrap();
        let one = meaning();
        fs::write(at("other.h"), "").unwrap();
        assert!(nothing != one && one != meaning());
        fs::remove_file(at("other.h")).unwrap();
        assert_eq!(one, meaning());
    }

    #[test]
    fn a_file_that_comes_or_goes_in_any_folder_changes_what_is_meant() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["one", "two/sub", "package/cuda"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        let file = at("package/cuda/a.cu");
        let includes = includes("#include \"near.h\"\n#include <sub/far.h>\n");
        let meaning = || {
            let lookup = Lookup::new(vec![at("one"), at("two")], at("package"));
            let roles = Roles::new([("package".to_owned(), at("package"))]);
            lookup.meaning(&file, &includes, &roles)
        };
        let nothing = meaning();
        assert!(nothing.newer_than(Duration::ZERO).is_none());
        for new in [
            "two/sub/far.h",
            "package/cuda/near.h",
            "one/near.h",
            "package/cuda_runtime.h",
        ] {
            fs::write(at(new), "").unwrap();
            let now = meaning();
            assert_ne!(now.hash, nothing.hash, "{new}");
            assert_eq!(now.newer_than(Duration::ZERO), Some(at(new).as_path()));
            fs::remove_file(at(new)).unwrap();
        }
        for other in ["one/far.h", "package/near.h", "package/cuda/sub"] {
            fs::write(at(other), "").unwrap();
        }
        assert_eq!(meaning().hash, nothing.hash);
    }
}
