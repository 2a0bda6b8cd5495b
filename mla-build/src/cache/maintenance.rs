//! Maintenance of the cache by a person: statistics, cleaning, copying.

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use super::{
    Cache, Manifest,
    store::{KINDS, STAGING},
};
use crate::bounded;
use crate::{Error, exposure, report, variables};

/// The file in the cache with one line for each build, and its maximum size in bytes.
const BUILDS: &str = "builds";
const MAX_BUILDS: u64 = 1 << 18;

/// Returns the cache's folder: `MLA_BUILD_CACHE`, or `mla-build` in the user's cache folder.
/// Returns `None` without either.
///
/// # Errors
///
/// If the variable's value is a relative path.
pub fn folder() -> Result<Option<PathBuf>, Error> {
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
pub fn bound() -> Result<u64, Error> {
    let given = env::var(variables::CACHE_SIZE).ok();
    match given.filter(|given| !given.is_empty()) {
        None => Ok(10 << 30),
        Some(given) => bound_of(given),
    }
}

fn bound_of(given: String) -> Result<u64, Error> {
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

/// The content of a cache, and its use in the latest builds.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Statistics {
    /// The number of objects.
    pub objects: usize,
    /// The bytes of all files in the cache.
    pub bytes: u64,
    /// The last use of the object that has not been used for the longest time.
    pub oldest: Option<SystemTime>,
    /// The number of latest builds that are counted below.
    pub builds: usize,
    /// The number of units that these builds found in the cache.
    pub cached: u64,
    /// The number of units that these builds compiled.
    pub compiled: u64,
}

/// A line of the file of builds.
#[derive(Debug, Serialize, Deserialize)]
struct Build {
    finished: f64,
    package: String,
    library: String,
    cached: u64,
    compiled: u64,
}

/// Counts the content of a cache. A cache that does not exist counts as empty.
pub fn statistics(cache: &Path) -> Statistics {
    let objects = files(&cache.join("objects"));
    let builds: Vec<Build> = bounded::read_to_string(cache.join(BUILDS))
        .unwrap_or_default()
        .lines()
        // A line that was cut off is skipped.
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    Statistics {
        objects: objects.len(),
        bytes: all(cache).map(|file| file.bytes).sum(),
        oldest: objects.iter().map(|file| file.used).min(),
        builds: builds.len(),
        cached: builds.iter().map(|build| build.cached).sum(),
        compiled: builds.iter().map(|build| build.compiled).sum(),
    }
}

/// Removes files that were not used for `age`, and returns their number of bytes.
///
/// An `age` of 0 empties the cache. A build that runs meanwhile compiles what it misses.
///
/// # Errors
///
/// If the folder is not a cache, or a file cannot be removed.
pub fn clean(cache: &Path, age: Duration) -> Result<u64, Error> {
    // A folder that was named by mistake may have a folder `objects` with other files.
    if cache.is_dir() && !cache.join(STAGING).is_dir() {
        return Err(Error::setting(
            "cache",
            cache,
            format!("the folder of a cache, which holds a folder `{STAGING}`"),
        ));
    }
    let mut bytes = 0;
    for file in all(cache) {
        let unused = file.used.elapsed().unwrap_or_default();
        if unused >= age {
            fs::remove_file(&file.path).map_err(Error::file("remove", &file.path))?;
            bytes += file.bytes;
        }
    }
    Ok(bytes)
}

/// Copies the content of one cache to another, and returns the number of new objects there. A copy
/// can be used like any cache: nothing in it depends on its path or on the machine that made it.
///
/// # Errors
///
/// If a file cannot be read or written.
pub fn copy(from: &Path, to: &Path) -> Result<usize, Error> {
    if !from.join("objects").is_dir() {
        return Err(Error::setting(
            "cache",
            from,
            "the folder of a cache, which holds a folder `objects`",
        ));
    }
    let refuse = |folder, accepted| Err(Error::setting("cache", folder, accepted));
    if let Some(exposed) = exposure::of([from, &from.join("objects")])
        && exposed.is_to_all
    {
        let sentence = exposed.sentence;
        return refuse(
            from,
            format!("a folder that others cannot write to ({sentence})"),
        );
    }
    let cache = Cache::open(to.to_owned());
    if !cache.is_writable() {
        let notes: Vec<_> = cache.warning().into_iter().chain(cache.notes()).collect();
        return refuse(
            to,
            format!("a folder that can be written ({})", notes.join("; ")),
        );
    }
    let mut new = 0;
    // Objects come first: a manifest may name a missing object, but an object without a manifest is
    // never found.
    for kind in ["objects", "estimates", "manifests"] {
        for file in files(&from.join(kind)) {
            let place = to.join(file.path.strip_prefix(from).unwrap_or(&file.path));
            let mut bytes = bounded::read(&file.path).map_err(Error::file("read", &file.path))?;
            match bounded::read(&place) {
                Ok(_) if kind != "manifests" => continue,
                Ok(known) => bytes = merged(&known, &bytes).unwrap_or(bytes),
                Err(_) => {}
            }
            let published = cache.publish(&place, &bytes);
            published.map_err(Error::file("write", &place))?;
            new += usize::from(kind == "objects");
        }
    }
    Ok(new)
}

/// Returns a manifest with the sets of both, or `None` unless both are manifests.
fn merged(known: &[u8], more: &[u8]) -> Option<Vec<u8>> {
    let mut manifest: Manifest = serde_json::from_slice(known).ok()?;
    let more: Manifest = serde_json::from_slice(more).ok()?;
    manifest.add(more);
    serde_json::to_vec(&manifest).ok()
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

    /// Records a build for [`statistics`]. If that fails, only a count is lost.
    pub(crate) fn count(&self, report: &report::Report) {
        if !self.is_writable() {
            return;
        }
        let path = self.folder().join(BUILDS);
        if fs::metadata(&path).is_ok_and(|data| data.len() > MAX_BUILDS) {
            let text = bounded::read(&path).unwrap_or_default();
            let _ = self.publish(&path, &text[text.len() / 2..]);
        }
        let build = Build {
            finished: report.finished,
            package: report.package.clone(),
            library: report.library.clone(),
            cached: report.count(report::Outcome::Cached) as u64,
            compiled: report.count(report::Outcome::Compiled) as u64,
        };
        if let Ok(mut line) = serde_json::to_string(&build)
            && let Ok(mut file) = fs::File::options().append(true).create(true).open(path)
        {
            line.push('\n');
            // Each line is one write, since appending is atomic between processes.
            let _ = file.write_all(line.as_bytes());
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

    #[test]
    fn a_bound_that_would_empty_the_cache_is_refused() {
        for given in ["0", "10", "1 MiB", "much"] {
            let message = bound_of(given.to_owned()).unwrap_err().to_string();
            let start = format!("MLA_BUILD_CACHE_SIZE: given {given:?}, accepted 64 MiB and up");
            assert!(message.starts_with(&start), "{message}");
        }
        assert_eq!(bound_of("64 MiB".to_owned()).unwrap(), 64 << 20);
    }

    #[test]
    fn a_folder_that_is_no_cache_is_not_cleaned() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("objects/mine");
        fs::create_dir(folder.path().join("objects")).unwrap();
        fs::write(&file, "").unwrap();
        let message = clean(folder.path(), Duration::ZERO)
            .unwrap_err()
            .to_string();
        assert!(message.starts_with("cache: given "), "{message}");
        assert!(file.is_file());
        assert_eq!(
            clean(&folder.path().join("none"), Duration::ZERO).unwrap(),
            0
        );
    }
}
