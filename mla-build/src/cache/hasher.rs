//! The content of files. Each file is read once per build.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use crate::bounded;

use super::{
    includes::{Include, includes},
    lock,
};

/// The hash and the includes of a file.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    pub(crate) hash: blake3::Hash,
    /// The headers that its include directives name.
    pub(crate) includes: Arc<BTreeSet<Include>>,
}

/// Contents of files at the time of the first request for each.
#[derive(Debug, Default)]
pub(crate) struct Hasher {
    contents: Mutex<HashMap<PathBuf, Option<Content>>>,
}

impl Hasher {
    /// Returns the content of a file, or `None` if it cannot be read.
    pub(crate) fn content(&self, path: &Path) -> Option<Content> {
        if let Some(known) = lock(&self.contents).get(path) {
            return known.clone();
        }
        let content = bounded::read(path).ok().map(|bytes| Content {
            hash: blake3::hash(&bytes),
            includes: Arc::new(includes(&String::from_utf8_lossy(&bytes))),
        });
        lock(&self.contents).insert(path.to_owned(), content.clone());
        content
    }

    /// Returns the hash of a file that was requested before.
    pub(crate) fn known(&self, path: &Path) -> Option<blake3::Hash> {
        let contents = lock(&self.contents);
        contents.get(path)?.as_ref().map(|content| content.hash)
    }
}

/// Returns the hash of the file's content at this moment.
pub(crate) fn content_now(path: &Path) -> io::Result<blake3::Hash> {
    bounded::read(path).map(|bytes| blake3::hash(&bytes))
}
