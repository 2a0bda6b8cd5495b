//! The cache's folder and its bound.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use super::{
    Cache,
    store::{KINDS, STAGING},
};
use crate::{Error, variables};

/// Returns the cache's folder: `MLA_BUILD_CACHE`, or `mla-build` in the user's cache folder.
/// Returns `None` without either.
///
/// # Errors
///
/// If the variable's value is a relative path.
pub(crate) fn folder() -> Result<Option<PathBuf>, Error> {
    if let Some(given) = variables::set(variables::CACHE) {
        variables::check_absolute(variables::CACHE, &given)?;
        return Ok(Some(given.into()));
    }
    Ok(dirs::cache_dir().map(|folder| folder.join("mla-build")))
}

/// The smallest bound that is accepted, enough for a few builds of a package with many kernels.
const MIN_BOUND: u64 = 64 << 20;

/// Returns the bound of the cache in bytes: `MLA_BUILD_CACHE_SIZE`, or 10 GiB.
///
/// # Errors
///
/// If the variable's value is not a size, or is less than 64 MiB.
pub(crate) fn bound() -> Result<u64, Error> {
    let given = env::var(variables::CACHE_SIZE).unwrap_or_default();
    if given.is_empty() {
        return Ok(10 << 30);
    }
    let bound = parse_size(&given).filter(|&bound| bound >= MIN_BOUND);
    bound.ok_or_else(|| {
        Error::setting(
            variables::CACHE_SIZE,
            given,
            "64 MiB and up, as a number of bytes, or one with MiB or GiB after it: the \
                   cache, which all checkouts share, is cut to it. For a build of its own, \
                   MLA_BUILD_CACHE names another folder",
        )
    })
}

fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, shift) = match (text.strip_suffix("GiB"), text.strip_suffix("MiB")) {
        (Some(number), _) => (number, 30),
        (_, Some(number)) => (number, 20),
        _ => (text, 0),
    };
    number.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

impl Cache {
    /// Removes the files with the oldest last use until the cache is within `bound` bytes. Also
    /// removes what a killed build left in `staging`.
    pub(crate) fn shrink(&self, bound: u64) {
        const STALE: Duration = Duration::from_secs(24 * 60 * 60);
        for file in files(&self.folder().join(STAGING)) {
            if file.used.elapsed().is_ok_and(|age| age > STALE) {
                let _ = fs::remove_file(file.path);
            }
        }
        let mut kept: Vec<_> = all(self.folder()).collect();
        // Among files of the same age the smaller one goes first: a manifest without its object is
        // of no use.
        kept.sort_by_key(|file| (file.used, file.bytes));
        let mut total: u64 = kept.iter().map(|file| file.bytes).sum();
        for file in kept {
            if total <= bound {
                break;
            }
            if fs::remove_file(file.path).is_ok() {
                total -= file.bytes;
            }
        }
    }
}

/// A file of the cache. Its modification time is the time of its last use.
struct Kept {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

fn files(folder: &Path) -> Vec<Kept> {
    let kept = |entry: walkdir::DirEntry| {
        let data = entry.metadata().ok().filter(|data| data.is_file())?;
        Some(Kept {
            bytes: data.len(),
            used: data.modified().ok()?,
            path: entry.into_path(),
        })
    };
    let entries = walkdir::WalkDir::new(folder).into_iter().flatten();
    entries.filter_map(kept).collect()
}

/// Returns all files of the cache except those in staging.
fn all(cache: &Path) -> impl Iterator<Item = Kept> {
    KINDS.iter().flat_map(move |kind| files(&cache.join(kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("3 MiB"), Some(3 << 20));
        assert_eq!(parse_size("2GiB"), Some(2 << 30));
        assert_eq!(parse_size("much"), None);
        assert_eq!(parse_size("99999999999999GiB"), None);
    }
}
