//! The content of files, read once per build.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Mutex,
};

/// Hashes of file contents, and which files exist, as they were when first asked for.
#[derive(Debug, Default)]
pub(crate) struct Hasher {
    contents: Mutex<HashMap<PathBuf, Option<blake3::Hash>>>,
    exists: Mutex<HashMap<PathBuf, bool>>,
}

impl Hasher {
    /// `None` for a file that cannot be read.
    pub(crate) fn content(&self, path: &Path) -> Option<blake3::Hash> {
        if let Some(known) = lock(&self.contents).get(path) {
            return *known;
        }
        let hash = content_now(path).ok();
        lock(&self.contents).insert(path.to_owned(), hash);
        hash
    }

    /// The hash of a file that was asked for before.
    pub(crate) fn known(&self, path: &Path) -> Option<blake3::Hash> {
        lock(&self.contents).get(path).copied().flatten()
    }

    pub(crate) fn exists(&self, path: &Path) -> bool {
        if let Some(known) = lock(&self.exists).get(path) {
            return *known;
        }
        let exists = path.is_file();
        lock(&self.exists).insert(path.to_owned(), exists);
        exists
    }
}

/// The hash of what the file holds at this moment.
pub(crate) fn content_now(path: &Path) -> io::Result<blake3::Hash> {
    fs::read(path).map(|bytes| blake3::hash(&bytes))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // The maps hold whole entries at every moment, so a panic elsewhere leaves them sound.
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
