//! The content of files, read once per build.

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
    /// The headers that its directives name.
    pub(crate) includes: Arc<BTreeSet<Include>>,
}

/// Contents of files, as they were when first asked for.
#[derive(Debug, Default)]
pub(crate) struct Hasher {
    contents: Mutex<HashMap<PathBuf, Option<Content>>>,
}

impl Hasher {
    /// `None` for a file that cannot be read.
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

    /// The hash of a file that was asked for before.
    pub(crate) fn known(&self, path: &Path) -> Option<blake3::Hash> {
        let contents = lock(&self.contents);
        contents.get(path)?.as_ref().map(|content| content.hash)
    }
}

/// The hash of what the file holds at this moment.
pub(crate) fn content_now(path: &Path) -> io::Result<blake3::Hash> {
    bounded::read(path).map(|bytes| blake3::hash(&bytes))
}
