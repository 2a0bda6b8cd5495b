//! The files of the cache.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::bounded;
use crate::exposure::{self, Exposure};

use super::{Entry, Key, Manifest, Meta, hasher::content_now, last_change, lock};

/// The folders in the cache, by their content.
pub(super) const KINDS: [&str; 4] = ["objects", "manifests", "estimates", "files"];

/// The folder in the cache for files that are being written.
pub(super) const STAGING: &str = "staging";

/// A folder of the cache, which may be missing, read-only or full. Then existing objects can still
/// be read, nothing is kept, and [`notes`](Self::notes) gives the reason.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    notes: Mutex<Vec<String>>,
    /// Other users who may write to the folder.
    exposure: Option<Exposure>,
    /// False once writing has failed. It is not tried again in this build.
    writable: Mutex<bool>,
}

/// The result of looking up an object.
#[derive(Debug)]
pub(crate) enum Loaded {
    Whole(Entry),
    Missing,
    /// The content differs from the stored content.
    Corrupted,
}

/// The lock of a unit, held until this is dropped.
#[derive(Debug)]
pub(crate) struct Guard(#[allow(dead_code, reason = "its drop is its use")] Option<File>);

/// The time and the memory of the last compilation of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Estimate {
    pub(crate) seconds: f64,
    /// Peak memory in bytes.
    pub(crate) peak: u64,
}

impl Cache {
    pub(crate) fn open(folder: PathBuf) -> Self {
        let made = exposure::make_private(&folder);
        let inside = KINDS.map(|kind| folder.join(kind));
        let all = inside.iter().map(PathBuf::as_path);
        let exposure = exposure::of(all.chain([folder.as_path()]));
        let is_usable = exposure.as_ref().is_none_or(|it| !it.is_to_all);
        let cache = Self {
            folder,
            notes: Mutex::default(),
            exposure,
            writable: Mutex::new(is_usable),
        };
        if !is_usable {
            return cache;
        }
        let staging = cache.folder.join(STAGING);
        let opened = made
            .and_then(|()| fs::create_dir_all(&staging))
            .and_then(|()| fs::create_dir_all(cache.folder.join("locks")))
            // Only writing a file shows that files can be written.
            .and_then(|()| tempfile::NamedTempFile::new_in(&staging).map(drop));
        if let Err(error) = opened {
            cache.give_up(&error);
        }
        cache
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the warnings for the user, in the order in which they arose.
    pub(crate) fn notes(&self) -> Vec<String> {
        lock(&self.notes).clone()
    }

    /// True if its content may be used. It may not if every user can write to the folder.
    fn is_trusted(&self) -> bool {
        self.exposure.as_ref().is_none_or(|it| !it.is_to_all)
    }

    /// Returns a warning about other users who may write to the folder, and the consequence.
    pub(crate) fn warning(&self) -> Option<String> {
        let exposure = self.exposure.as_ref()?;
        let consequence = match exposure.is_to_all {
            true => "the cache is not used",
            false => "the cache is used; MLA_BUILD_CACHE names another folder",
        };
        Some(format!("{}; {consequence}", exposure.sentence))
    }

    pub(crate) fn is_writable(&self) -> bool {
        *lock(&self.writable)
    }

    /// Waits until no other process or thread compiles the unit, and locks it.
    pub(crate) fn lock(&self, key: Key) -> Guard {
        if !self.is_writable() {
            return Guard(None);
        }
        // A file for each unit would pile up, since a lock's file cannot be removed safely. Two
        // units with the same file merely wait for each other.
        let path = self.folder.join("locks").join(&key.hex()[..3]);
        let file = OpenOptions::new().create(true).append(true).open(path);
        match file.and_then(|file| file.lock().map(|()| file)) {
            Ok(file) => Guard(Some(file)),
            Err(error) => {
                self.give_up(&error);
                Guard(None)
            }
        }
    }

    pub(crate) fn manifest(&self, key: Key) -> Manifest {
        let manifest = self.read_json(&self.place("manifests", key));
        manifest.unwrap_or_default()
    }

    /// Records that a manifest led to an object, so that both are kept for the same time.
    pub(crate) fn used(&self, first: Key) {
        self.touch(&self.place("manifests", first));
    }

    /// Sets the time of last use, which decides only what is removed first. A cache that cannot be
    /// written does without it.
    fn touch(&self, path: &Path) {
        let _ = File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
    }

    pub(crate) fn load(&self, key: Key) -> Loaded {
        if !self.is_trusted() {
            return Loaded::Missing;
        }
        let path = self.place("objects", key);
        let bytes = match bounded::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    let path = path.display();
                    self.note(format!("cache entry {path} cannot be read ({error})"));
                }
                return Loaded::Missing;
            }
        };
        match unpack(&bytes) {
            Some(entry) => {
                self.touch(&path);
                Loaded::Whole(entry)
            }
            None => {
                self.throw_away(&path);
                Loaded::Corrupted
            }
        }
    }

    fn throw_away(&self, path: &Path) {
        let entry = path.display();
        self.note(format!(
            "cache entry {entry} is corrupted; it is thrown away"
        ));
        let _ = fs::remove_file(path);
    }

    /// Stores an object. The caller holds the unit's lock.
    pub(crate) fn keep(&self, first: Key, set: super::DependencySet, entry: &Entry) {
        if !self.is_writable() {
            return;
        }
        // The object goes first. If a manifest names a missing object, the unit is compiled. An
        // object without a manifest would never be found.
        let second = first.with_dependencies(&set);
        let kept =
            pack(entry).and_then(|bytes| self.publish(&self.place("objects", second), &bytes));
        match kept {
            Err(error) => self.give_up(&error),
            Ok(()) => {
                let mut manifest = self.manifest(first);
                manifest.remember(set);
                self.write_json(&self.place("manifests", first), &manifest);
            }
        }
    }

    /// Returns the hash of a large file that rarely changes. The file is read again only if it
    /// changed: its inode number, length and times are kept with the hash, and the time of its last
    /// change cannot be set.
    pub(crate) fn content_of(&self, path: &Path) -> io::Result<blake3::Hash> {
        let path = path.canonicalize()?;
        let data = fs::metadata(&path)?;
        let changed = last_change(&data);
        let identity = [data.dev(), data.ino(), data.len(), data.mtime() as u64];
        let identity = (identity, changed);
        let key = Key::new([path.as_os_str().as_encoded_bytes()]);
        let place = self.place("files", key);
        if let Some((known, hash)) = self.read_json::<(([u64; 4], Duration), String)>(&place)
            && known == identity
            && let Ok(hash) = blake3::Hash::from_hex(hash)
        {
            return Ok(hash);
        }
        let hash = content_now(&path)?;
        // A file that has just changed may change again within the same tick of its clock.
        let settled = SystemTime::UNIX_EPOCH + changed + Duration::from_secs(2);
        if settled < SystemTime::now() {
            self.write_json(&place, &(identity, hash.to_hex().as_str()));
        }
        Ok(hash)
    }

    pub(crate) fn estimate(&self, unit: Key) -> Option<Estimate> {
        self.read_json(&self.place("estimates", unit))
    }

    pub(crate) fn keep_estimate(&self, unit: Key, estimate: Estimate) {
        self.write_json(&self.place("estimates", unit), &estimate);
    }

    /// Returns the path of a file of this kind. All but objects are JSON.
    fn place(&self, kind: &str, key: Key) -> PathBuf {
        let hex = key.hex();
        let extension = if kind == "objects" { "" } else { ".json" };
        let folder = self.folder.join(kind).join(&hex[..2]);
        folder.join(format!("{hex}{extension}"))
    }

    fn read_json<T: DeserializeOwned>(&self, path: &Path) -> Option<T> {
        let bytes = self.is_trusted().then(|| bounded::read(path).ok())??;
        let value = serde_json::from_slice(&bytes).ok();
        if value.is_none() {
            self.throw_away(path);
        }
        value
    }

    /// Writes a file of JSON if files can be written.
    fn write_json(&self, path: &Path, value: &impl Serialize) {
        if self.is_writable() {
            let bytes = serde_json::to_vec(value).map_err(io::Error::from);
            let written = bytes.and_then(|bytes| self.publish(path, &bytes));
            written.unwrap_or_else(|error| self.give_up(&error));
        }
    }

    /// Writes a file that is either complete or absent.
    pub(super) fn publish(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let folder = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(self.folder.join(STAGING))?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        // The new name is on disk only after the folder is synchronised.
        File::open(folder)?.sync_all()
    }

    fn give_up(&self, error: &io::Error) {
        let mut writable = lock(&self.writable);
        if std::mem::take(&mut *writable) {
            self.note(format!(
                "the cache at {} cannot be written ({error}); what this build compiles is not \
                 kept. MLA_BUILD_CACHE names another folder",
                self.folder.display()
            ));
        }
    }

    fn note(&self, text: String) {
        lock(&self.notes).push(text);
    }
}

/// Packs the hash of everything that follows, the length of the description, the description, and
/// the object.
fn pack(entry: &Entry) -> io::Result<Vec<u8>> {
    let meta = serde_json::to_vec(&entry.meta)?;
    let mut body = Vec::with_capacity(8 + meta.len() + entry.object.len());
    body.extend((meta.len() as u64).to_le_bytes());
    body.extend(meta);
    body.extend(&entry.object);
    let mut bytes = blake3::hash(&body).as_bytes().to_vec();
    bytes.append(&mut body);
    Ok(bytes)
}

/// Returns `None` if the bytes are not those that were packed.
fn unpack(bytes: &[u8]) -> Option<Entry> {
    let (hash, body) = bytes.split_at_checked(blake3::OUT_LEN)?;
    if blake3::hash(body).as_bytes() != hash {
        return None;
    }
    let (length, rest) = body.split_first_chunk::<8>()?;
    let (meta, object) =
        rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let meta: Meta = serde_json::from_slice(meta).ok()?;
    Some(Entry {
        meta,
        object: object.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::DependencySet;

    fn entry(object: &[u8]) -> Entry {
        Entry {
            meta: Meta {
                seconds: 1.5,
                peak: 7,
                log: "said".into(),
            },
            object: object.to_vec(),
        }
    }

    fn no_dependencies() -> DependencySet {
        DependencySet { files: Vec::new() }
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let bytes = pack(&entry(b"object")).unwrap();
        assert_eq!(unpack(&bytes).unwrap().object, b"object");
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1;
            assert!(unpack(&flipped).is_none(), "byte {at}");
            assert!(unpack(&bytes[..at]).is_none(), "cut at {at}");
        }
    }

    #[test]
    fn what_was_not_used_for_longest_goes_first() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().to_owned());
        let key = |n: u8| Key::new([[n].as_slice()]);
        for n in 0..4 {
            cache.keep(key(n), no_dependencies(), &entry(&[n; 100_000]));
            let path = cache.place("objects", key(n).with_dependencies(&no_dependencies()));
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + u64::from(n));
            File::open(path).unwrap().set_modified(time).unwrap();
        }
        // Using the oldest object makes it the youngest.
        let load = |n| cache.load(key(n).with_dependencies(&no_dependencies()));
        assert!(matches!(load(0), Loaded::Whole(_)));
        cache.shrink(250_000);
        assert!(matches!(load(0), Loaded::Whole(_)));
        assert!(matches!(load(1), Loaded::Missing));
        assert!(matches!(load(2), Loaded::Missing));
        assert!(matches!(load(3), Loaded::Whole(_)));
        assert!(cache.notes().is_empty(), "{:?}", cache.notes());
    }

    #[test]
    fn a_large_file_is_read_again_when_it_changed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path().join("cache"));
        let file = folder.path().join("ptxas");
        fs::write(&file, "one").unwrap();
        assert_eq!(cache.content_of(&file).unwrap(), blake3::hash(b"one"));
        let kept = || {
            let files = walkdir::WalkDir::new(folder.path().join("cache/files"));
            let files = files.into_iter().flatten();
            files.filter(|it| it.path().is_file()).count()
        };
        assert_eq!(kept(), 0, "it changed a moment ago");
        std::thread::sleep(Duration::from_millis(2100));
        assert_eq!(cache.content_of(&file).unwrap(), blake3::hash(b"one"));
        assert_eq!(kept(), 1);
        // The new file has the same length and modification time.
        let time = fs::metadata(&file).unwrap().modified().unwrap();
        fs::write(&file, "two").unwrap();
        File::open(&file).unwrap().set_modified(time).unwrap();
        assert_eq!(cache.content_of(&file).unwrap(), blake3::hash(b"two"));
        assert!(cache.content_of(&folder.path().join("none")).is_err());
    }
}
