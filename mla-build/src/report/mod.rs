//! The report of a build: its actions and its results.
//!
//! Every build writes its report, as JSON, to `OUT_DIR/<library>.report.json` and to `<target
//! folder>/mla-build/<package>-<library>.json`. [`newest`] finds the latter. With the feature
//! `table`, `table` formats a report as text.

#[cfg(feature = "table")]
mod table;

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};

use crate::bounded;
pub use crate::ptxas::Kernel;
use crate::{Error, toolkit::Found};
#[cfg(feature = "table")]
pub use table::table;

/// A build of one library.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// The package that was built.
    pub package: String,
    /// The library: `mla` for `libmla.a`.
    pub library: String,
    /// The time at which the build ended, in seconds since 1970.
    pub finished: f64,
    /// The targets, as the compiler spells them.
    pub targets: Vec<String>,
    /// The parts of the toolkit, with their places and versions.
    pub toolkit: Vec<Found>,
    /// The C++ compiler and its version.
    pub host_compiler: (PathBuf, String),
    /// The cache's folder.
    pub cache: PathBuf,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// The seconds that the whole build took.
    pub seconds: f64,
    /// Size of the library, in bytes.
    pub library_bytes: u64,
    /// The units, in the order of their sources.
    pub units: Vec<Unit>,
}

/// One source, compiled for one or more targets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Unit {
    /// The path relative to the package.
    pub source: String,
    /// The targets, as the compiler spells them.
    pub targets: Vec<String>,
    /// The origin of the object.
    pub outcome: Outcome,
    /// The reason why it was compiled, or an empty text if it was not.
    pub reason: String,
    /// The processor seconds that its compilation took, in this build or in the one that compiled
    /// it.
    pub compile_seconds: f64,
    /// Peak resident memory of its largest compiler process, in bytes.
    pub peak: u64,
    /// Size of its object, in bytes.
    pub object_bytes: u64,
    /// The bytes of code for the GPU in the object, per target.
    pub device_bytes: BTreeMap<String, u64>,
    /// Its kernels, per target.
    pub kernels: Vec<Kernel>,
}

/// The origin of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The object is from the cache.
    Cached,
    /// The object is from the compiler.
    Compiled,
    /// The object was compiled by the publisher of the package.
    Prebuilt,
    /// There is no object, because the unit failed.
    Failed,
    /// There is no object, because another unit failed first.
    Stopped,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

impl Report {
    /// Reads a report.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or is not a report.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let bytes = bounded::read(path).map_err(Error::file("read", path))?;
        serde_json::from_slice(&bytes).map_err(Error::file("understand", &path))
    }

    pub(crate) fn save(&self, path: &Path) -> Result<(), Error> {
        let write = || {
            let folder = path.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(folder)?;
            let file = tempfile::NamedTempFile::new_in(folder)?;
            serde_json::to_writer_pretty(&file, self)?;
            file.persist(path).map_err(|error| error.error)?;
            std::io::Result::Ok(())
        };
        write().map_err(Error::file("write", path))
    }

    /// Returns the bytes of GPU code that each target adds to a program that uses the whole
    /// library.
    pub fn device_bytes(&self) -> BTreeMap<String, u64> {
        let mut bytes = BTreeMap::new();
        for (target, more) in self.units.iter().flat_map(|unit| &unit.device_bytes) {
            *bytes.entry(target.clone()).or_default() += more;
        }
        bytes
    }

    /// Returns the sum of the processor seconds for all units.
    pub fn compile_seconds(&self) -> f64 {
        self.units.iter().map(|unit| unit.compile_seconds).sum()
    }

    /// Returns the peak memory of the `count` largest units together, in bytes. No build with that
    /// many jobs needs more.
    pub fn peak_of_largest(&self, count: usize) -> u64 {
        let mut peaks: Vec<_> = self.units.iter().map(|unit| unit.peak).collect();
        peaks.sort_unstable_by_key(|&peak| std::cmp::Reverse(peak));
        peaks.iter().take(count).sum()
    }

    /// Returns the number of units whose objects have this origin.
    pub fn count(&self, outcome: Outcome) -> usize {
        let units = self.units.iter();
        units.filter(|unit| unit.outcome == outcome).count()
    }
}

/// Returns the time in seconds since 1970.
pub(crate) fn now() -> f64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}

/// Returns the folder of the reports within a target folder.
pub fn folder(target: &Path) -> PathBuf {
    target.join("mla-build")
}

/// Returns the report of the latest build in a target folder (`target`, or what `CARGO_TARGET_DIR`
/// names).
///
/// # Errors
///
/// If no build of kernels has ended there, or if its report cannot be read.
pub fn newest(target: &Path) -> Result<Report, Error> {
    let folder = folder(target);
    let entries =
        fs::read_dir(&folder).map_err(Error::file("find the report of a build in", &folder))?;
    let mut newest: Option<Report> = None;
    for entry in entries {
        let path = entry.map_err(Error::file("read", &folder))?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            let report = Report::load(&path)?;
            if (newest.as_ref()).is_none_or(|known| known.finished < report.finished) {
                newest = Some(report);
            }
        }
    }
    let missing = Error::file("find the report of a build in", folder);
    newest.ok_or(std::io::ErrorKind::NotFound).map_err(missing)
}

/// Formats a size for people, such as `12.3 MiB`.
pub fn size(bytes: u64) -> String {
    let power = (bytes.max(1).ilog2() / 10).min(3);
    match power {
        0 => format!("{bytes} B"),
        _ => {
            let value = bytes as f64 / 1024_f64.powi(power as i32);
            format!("{value:.1} {}iB", ["K", "M", "G"][power as usize - 1])
        }
    }
}

/// Returns the name of a kernel without its return type and parameters. Template arguments stay,
/// since they tell instantiations apart. Parameters would only make the line long.
pub fn short(name: &str) -> &str {
    // Only instantiations of templates are mangled with their return type, and a kernel's is void.
    let name = name.strip_prefix("void ").unwrap_or(name);
    let mut depth = 0_i32;
    for (at, c) in name.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            '(' if depth == 0 && !name[at..].starts_with("(anonymous namespace)") => {
                return &name[..at];
            }
            _ => {}
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_before_its_parameters() {
        for (name, expected) in [
            ("k(float*, int)", "k"),
            (
                "void mla::decode<64, (Mode)1>(P)",
                "mla::decode<64, (Mode)1>",
            ),
            (
                "void mla::(anonymous namespace)::copy<unsigned char>(Plan)",
                "mla::(anonymous namespace)::copy<unsigned char>",
            ),
            ("plain", "plain"),
        ] {
            assert_eq!(short(name), expected);
        }
    }

    #[test]
    fn sizes_are_for_people() {
        assert_eq!(size(900), "900 B");
        assert_eq!(size(3 << 20), "3.0 MiB");
        assert_eq!(size(5 << 30), "5.0 GiB");
    }
}
