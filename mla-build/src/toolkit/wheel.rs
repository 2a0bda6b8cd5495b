//! Headers of a Python wheel, pinned by the package that includes them.

use std::{
    env,
    path::{Path, PathBuf},
};

use super::{
    Found, NotFound, Search,
    pinned::{FoundHeaders, Pinned},
    search,
};
use crate::Error;

/// A wheel whose headers the sources include, in exactly one version.
///
/// It is looked for in the same places as the toolkit's wheels. The first is the folder that
/// `MLA_WHEEL_<NAME>` names. Next are the site-packages of the active environment, of the user and
/// of the system. The last is a separate folder for the wheel, `<name>-<version>` below
/// `MLA_WHEELS` or below `mla-build/wheels` in the user's data folder. Another version is skipped.
/// No build installs anything: the error names the command of pip that does.
///
/// ```
/// use mla_build::{Kernels, Wheel};
///
/// let kernels = Kernels::new().wheel(
///     Wheel::new("flashinfer-python", "0.7.2.post1")
///         .include("flashinfer/data/cccl/libcudacxx/include")
///         .system("flashinfer/data/include"),
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wheel {
    name: String,
    version: String,
    pinned: Pinned,
}

impl Wheel {
    /// Pins the wheel of this name to this version. It has no include root yet.
    pub fn new(name: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            version: version.into(),
            pinned: Pinned::default(),
        }
    }

    /// Pins the contents of the include roots to a hash. If the contents differ, the error shows
    /// their hash. That is how to find the hash at first. pip checks a wheel when it installs it;
    /// this hash is checked when the wheel is used.
    #[must_use]
    pub fn contents(mut self, hash: impl Into<String>) -> Self {
        self.pinned.contents = Some(hash.into());
        self
    }

    /// Adds an include root (`-I`), relative to site-packages. Roots are searched in the order of
    /// the calls, after the package's own and before CUTLASS.
    #[must_use]
    pub fn include(mut self, folder: impl Into<String>) -> Self {
        self.pinned.add(folder.into(), false);
        self
    }

    /// Adds an include root whose headers the compilers do not warn about (`-isystem`). It is
    /// searched after every root that [`include`](Self::include) adds, and after CUDA's headers.
    #[must_use]
    pub fn system(mut self, folder: impl Into<String>) -> Self {
        self.pinned.add(folder.into(), true);
        self
    }

    /// Returns the environment variable that names the folder with the installed wheel.
    pub(crate) fn variable(&self) -> String {
        let name = normal(&self.name).to_uppercase().replace('-', "_");
        format!("MLA_WHEEL_{name}")
    }

    /// Finds the wheel.
    pub(crate) fn find(&self, search: &Search) -> Result<FoundHeaders, Error> {
        let variable = self.variable();
        if let Some(given) = search.variable(&variable) {
            let site = PathBuf::from(&given);
            let checked = self.at(&site);
            checked.map_err(|lacks| super::unusable(&variable, &given, &lacks))?;
            return self.found(site, variable);
        }
        let mut looked = vec![format!("{variable}: not set")];
        let mut sites = search.site_packages(&mut looked);
        let own = self.folder();
        match &own {
            Some(folder) => sites.push(("wheel folder".to_owned(), folder.clone())),
            None => {
                looked.push("wheel folder: MLA_WHEELS, XDG_DATA_HOME and HOME are not set".into())
            }
        }
        let at = |site: &Path| self.at(site).map(|()| site.to_owned());
        if let Some((place, site)) = super::first(&sites, &at, &mut looked) {
            return self.found(site, place);
        }
        let target = own.map(|folder| format!(" --target {}", folder.display()));
        let (name, version, target) = (&self.name, &self.version, target.unwrap_or_default());
        Err(NotFound {
            part: format!("the wheel {name} {version}"),
            looked,
            command: format!("python3 -m pip install --no-deps{target} {name}=={version}"),
        }
        .into())
    }

    /// Returns the folder for this wheel alone.
    fn folder(&self) -> Option<PathBuf> {
        let wheels = match env::var_os("MLA_WHEELS").filter(|value| !value.is_empty()) {
            Some(folder) => PathBuf::from(folder),
            None => dirs::data_dir()?.join("mla-build/wheels"),
        };
        Some(wheels.join(format!("{}-{}", normal(&self.name), self.version)))
    }

    /// Checks that a site-packages folder holds the wheel. The error says what the folder lacks.
    fn at(&self, site: &Path) -> Result<(), String> {
        let version = |path: &PathBuf| {
            let file = path.file_name()?.to_str()?.strip_suffix(".dist-info")?;
            let (name, version) = file.split_once('-')?;
            (normal(name) == normal(&self.name)).then(|| version.to_owned())
        };
        let versions: Vec<_> = search::children(site, "")
            .iter()
            .filter_map(version)
            .collect();
        if !versions.contains(&self.version) {
            return Err(match versions.first() {
                None => self.name.clone(),
                Some(other) => format!("{} {} (it holds {other})", self.name, self.version),
            });
        }
        let missing = self.pinned.missing(site).map_or(Ok(()), Err);
        missing.map_err(|it| format!("{it}, a folder of {} {}", self.name, self.version))
    }

    fn found(&self, path: PathBuf, place: String) -> Result<FoundHeaders, Error> {
        let role = format!("wheel {}", normal(&self.name));
        let name = format!("the wheel {} {}", self.name, self.version);
        let found = Found {
            part: self.name.clone(),
            path,
            version: Some(self.version.clone()),
            place,
        };
        self.pinned
            .found((role, name, "install the wheel anew"), found)
    }
}

/// Returns the name by which Python compares packages: runs of `-`, `_` and `.` become one dash.
fn normal(name: &str) -> String {
    let parts: Vec<_> = name
        .split(['-', '_', '.'])
        .filter(|part| !part.is_empty())
        .collect();
    parts.join("-").to_lowercase()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn site(wheels: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, version) in wheels {
            let info = format!("{name}-{version}.dist-info");
            fs::create_dir_all(folder.path().join(info)).unwrap();
            fs::create_dir_all(folder.path().join("flash/include")).unwrap();
        }
        folder
    }

    fn search_of(site: &tempfile::TempDir) -> Search {
        Search::for_test(&[("MLA_WHEEL_FLASH_INFER_PY", site.path())])
    }

    fn wheel() -> Wheel {
        Wheel::new("Flash-Infer.py", "0.7.2.post1").system("flash/include")
    }

    #[test]
    fn it_is_found_by_its_dist_info_under_any_spelling_and_in_its_version_alone() {
        let right = site(&[("flash_infer_py", "0.7.2.post1")]);
        assert_eq!(wheel().at(right.path()), Ok(()));
        let other = site(&[("flash_infer_py", "0.7.2")]);
        assert_eq!(
            wheel().at(other.path()).unwrap_err(),
            "Flash-Infer.py 0.7.2.post1 (it holds 0.7.2)"
        );
        assert_eq!(
            wheel().at(Path::new("/no/such")).unwrap_err(),
            "Flash-Infer.py"
        );
        let lacking = wheel().include("flash/other");
        assert_eq!(
            lacking.at(right.path()).unwrap_err(),
            "flash/other, a folder of Flash-Infer.py 0.7.2.post1"
        );
    }

    #[test]
    fn pinned_contents_are_taken_and_others_are_refused_wherever_they_lie() {
        let header = |site: &tempfile::TempDir, text: &str| {
            fs::write(site.path().join("flash/include/a.h"), text).unwrap();
        };
        let find = |site: &tempfile::TempDir, pinned: &str| {
            wheel().contents(pinned).find(&search_of(site)).map(drop)
        };
        let here = site(&[("flash_infer_py", "0.7.2.post1")]);
        header(&here, "one");
        let refused = find(&here, "0123").unwrap_err().to_string();
        let told = "the contents of the wheel Flash-Infer.py 0.7.2.post1: given \"";
        let hash = refused.strip_prefix(told).and_then(|rest| rest.get(..64));
        let hash = hash.unwrap_or_else(|| panic!("{refused}"));
        assert!(refused.contains("accepted 0123: install the wheel anew"));
        assert!(find(&here, hash).is_ok());
        let elsewhere = site(&[("flash_infer_py", "0.7.2.post1")]);
        header(&elsewhere, "one");
        // Files beside the include roots do not count. Neither does bytecode that pip writes within
        // them.
        fs::write(elsewhere.path().join("flash/module.py"), "pass").unwrap();
        let bytecode = elsewhere.path().join("flash/include/tools/__pycache__");
        fs::create_dir_all(&bytecode).unwrap();
        fs::write(bytecode.join("gen.cpython-312.pyc"), "bytecode").unwrap();
        assert!(find(&elsewhere, hash).is_ok());
        header(&elsewhere, "two");
        assert!(find(&elsewhere, hash).is_err());
        header(&elsewhere, "one");
        fs::write(elsewhere.path().join("flash/include/b.h"), "").unwrap();
        assert!(find(&elsewhere, hash).is_err());
    }

    #[test]
    fn the_variable_is_obeyed_or_refused_and_a_missing_wheel_says_how_to_get_it() {
        let right = site(&[("flash_infer_py", "0.7.2.post1")]);
        let wrong = site(&[("flash_infer_py", "0.6.13")]);
        let found = wheel().find(&search_of(&right)).unwrap();
        assert_eq!(found.includes[0].role, "wheel flash-infer-py/flash/include");
        assert_eq!(found.includes[0].folder, right.path().join("flash/include"));
        let refused = wheel().find(&search_of(&wrong)).unwrap_err().to_string();
        assert!(
            refused.starts_with("MLA_WHEEL_FLASH_INFER_PY: given")
                && refused.contains(
                    "accepted a place that holds Flash-Infer.py 0.7.2.post1 (it holds 0.6.13)"
                ),
            "{refused}"
        );

        let elsewhere = Search {
            own: Some(wrong.path().to_owned()),
            ..Search::default()
        };
        let missing = wheel().find(&elsewhere).unwrap_err().to_string();
        assert!(
            missing.starts_with("the wheel Flash-Infer.py 0.7.2.post1 is nowhere to be found")
                && missing.contains("it holds 0.6.13")
                && missing.contains("pip install --no-deps --target")
                && missing.ends_with("Flash-Infer.py==0.7.2.post1"),
            "{missing}"
        );
    }
}
