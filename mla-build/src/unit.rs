//! Translation units: the sources, and the targets for which each is compiled.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fmt,
    io::ErrorKind::NotFound,
    path::{Component, Path, PathBuf},
};

use globset::{GlobBuilder, GlobMatcher};

use crate::{
    Error,
    family::{self, Declared, Families},
    target::{self, Target},
};

/// A source and the targets that it is compiled for, into one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// The path relative to the package, with `/` between its parts.
    pub(crate) source: String,
    pub(crate) language: Language,
    /// The targets, none for C++.
    pub(crate) targets: Vec<Target>,
    /// PTX from which the code for later targets is made, in place of each target's own PTX.
    pub(crate) ptx: Vec<Target>,
    /// Flags and macros for this source alone.
    pub(crate) flags: Vec<String>,
    /// The bytes of memory that its compilation needs, as the build script says.
    pub(crate) memory: Option<u64>,
}

/// The language of a source, by its extension. It decides which compiler is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    /// nvcc.
    Cuda,
    /// The C++ compiler that nvcc works with.
    Cpp,
}

impl Language {
    fn of(source: &Path) -> Result<Self, Error> {
        match source.extension().and_then(OsStr::to_str) {
            Some("cu") => Ok(Self::Cuda),
            Some("cc" | "cpp" | "cxx") => Ok(Self::Cpp),
            other => Err(Error::refused(
                source.display(),
                format!("the extension {:?}", other.unwrap_or_default()),
                "cu for CUDA; cc, cpp, cxx for C++",
            )),
        }
    }
}

/// A setting of a build script for the sources that a glob matches.
#[derive(Clone, Debug)]
pub(crate) struct UnitSetting {
    pub(crate) glob: String,
    pub(crate) value: SettingValue,
}

#[derive(Clone, Debug)]
pub(crate) enum SettingValue {
    Flag(String),
    Define(String),
    /// The name of a target.
    Ptx(String),
    /// Bytes of memory.
    Memory(u64),
}

impl SettingValue {
    /// Returns the setter of `Kernels` for this setting.
    pub(crate) fn setter(&self) -> &'static str {
        match self {
            Self::Flag(_) => "flag_for",
            Self::Define(_) => "define_for",
            Self::Ptx(_) => "ptx_for",
            Self::Memory(_) => "memory_for",
        }
    }
}

impl Unit {
    /// Returns a file name for the unit's products, from the name of its source and its whole path.
    pub(crate) fn file_stem(&self) -> String {
        let stem = Path::new(&self.source).file_stem().unwrap_or_default();
        let hash = blake3::hash(self.source.as_bytes()).to_hex();
        format!("{}-{}", stem.to_string_lossy(), &hash[..8])
    }

    /// Returns the value of `-gencode` for each target, from the latest PTX that serves it.
    pub(crate) fn gencodes(&self) -> impl Iterator<Item = String> {
        self.targets.iter().map(|&target| {
            let serve = self.ptx.iter().copied().filter(|ptx| ptx.serves(target));
            target.gencode(serve.max_by_key(|ptx| ptx.number))
        })
    }

    /// Splits the unit into one for each of its targets.
    pub(crate) fn apart(&self) -> impl Iterator<Item = Self> {
        self.targets.iter().map(|&target| Self {
            targets: vec![target],
            ..self.clone()
        })
    }

    /// Returns the names of its targets.
    pub(crate) fn targets(&self) -> Vec<String> {
        target::names(&self.targets)
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let compiled_for = match self.language {
            Language::Cuda => self.targets().join(", "),
            Language::Cpp => "C++".to_owned(),
        };
        write!(f, "{} ({compiled_for})", self.source)
    }
}

/// Returns the units of the globs, in the order of their paths.
pub(crate) fn discover(
    root: &Path,
    globs: &[String],
    families: &Families,
    unit_settings: &[UnitSetting],
) -> Result<Vec<Unit>, Error> {
    if globs.is_empty() {
        return Err(Error::setting(
            "sources",
            "no glob",
            "at least one, as in Kernels::sources(\"kernels/**/*.cu\")",
        ));
    }
    let sources = find(root, globs)?;
    let mut units = Vec::new();
    for source in &sources {
        let language = Language::of(Path::new(source))?;
        let family = of_path(Path::new(source), families)?;
        let targets = match (language, family) {
            (Language::Cpp, _) => &[][..],
            (Language::Cuda, None) => &families.of_all,
            (Language::Cuda, Some(family)) => family.compiled(),
        };
        // Sources for the host alone belong to every build, unless they are in the folder of a
        // family that is off.
        if family.is_none_or(|family| family.enabled) {
            units.push(Unit {
                source: source.clone(),
                language,
                targets: targets.to_vec(),
                ptx: Vec::new(),
                flags: Vec::new(),
                memory: None,
            });
        }
    }
    let needs_family = |unit: &Unit| unit.language == Language::Cuda && unit.targets.is_empty();
    let none_on = families.of_all.is_empty();
    if none_on && (units.is_empty() || units.iter().any(needs_family)) {
        return Err(Error::NoFamily {
            accepted: families.names(),
        });
    }
    if units.is_empty() {
        return Err(Error::Sentence(format!(
            "sources: no source for {} among {}, in {}; globs are relative to that folder, as in \
             Kernels::sources(\"kernels/**/*.cu\"), and a family's sources lie below a folder of \
             its name",
            families.enabled(),
            globs.join(", "),
            root.display()
        )));
    }
    apply_settings(&mut units, &sources, unit_settings)?;
    Ok(units)
}

/// Returns the families that have CUDA sources, turned on or not, with `None` for sources in no
/// family's folder.
pub(crate) fn folders<'a>(
    root: &Path,
    globs: &[String],
    families: &'a Families,
) -> Result<BTreeSet<Option<&'a str>>, Error> {
    let mut folders = BTreeSet::new();
    for source in find(root, globs)? {
        let source = Path::new(&source);
        let family = of_path(source, families)?;
        if Language::of(source)? == Language::Cuda {
            folders.insert(family.map(|family| family.name.as_str()));
        }
    }
    Ok(folders)
}

/// Returns the names of families that have CUDA sources and are off.
pub(crate) fn off(
    root: &Path,
    globs: &[String],
    families: &Families,
) -> Result<Vec<String>, Error> {
    let folders = folders(root, globs, families)?;
    let declared = families.declared.iter();
    let off = declared.filter(|it| !it.enabled && folders.contains(&Some(it.name.as_str())));
    Ok(off.map(|family| family.name.clone()).collect())
}

/// Applies the settings for sources to their units. A glob that matches no source of any family is
/// an error.
fn apply_settings(
    units: &mut [Unit],
    sources: &BTreeSet<String>,
    unit_settings: &[UnitSetting],
) -> Result<(), Error> {
    for UnitSetting { glob, value } in unit_settings {
        let matcher = matcher(value.setter(), glob)?;
        if !sources.iter().any(|source| matcher.is_match(source)) {
            return Err(Error::setting(
                value.setter(),
                glob.clone(),
                "a glob that matches a source",
            ));
        }
        for unit in units.iter_mut().filter(|it| matcher.is_match(&it.source)) {
            match value {
                SettingValue::Flag(flag) => unit.flags.push(flag.clone()),
                SettingValue::Define(define) => unit.flags.push(format!("-D{define}")),
                SettingValue::Ptx(name) => unit.ptx.push(ptx(name)?),
                SettingValue::Memory(bytes) => unit.memory = Some(*bytes),
            }
        }
    }
    Ok(())
}

/// Parses the name of PTX from which code for later targets can be made.
fn ptx(name: &str) -> Result<Target, Error> {
    let parsed = name.parse().ok().filter(|ptx: &Target| ptx.serves(*ptx));
    parsed.ok_or_else(|| {
        let accepted = "PTX of one capability and all later ones, such as compute_80";
        Error::setting("ptx_for", name, accepted)
    })
}

/// Compiles a glob for paths relative to the package.
pub(crate) fn matcher(field: &str, glob: &str) -> Result<GlobMatcher, Error> {
    GlobBuilder::new(glob)
        .literal_separator(true)
        .build()
        .map(|glob| glob.compile_matcher())
        .map_err(|error| Error::setting(field, glob, format!("a glob ({})", error.kind())))
}

/// Makes a glob relative to the package in `root`. An absolute glob must lie there.
pub(crate) fn relative_glob(root: &Path, field: &str, glob: &str) -> Result<String, Error> {
    let path = Path::new(glob);
    let relative = if path.is_absolute() {
        // `root` has its links resolved, and the glob may have links.
        let given = fixed_part(glob);
        let real = given.canonicalize().unwrap_or_else(|_| given.clone());
        let inside = real.strip_prefix(root).ok();
        let rest = path.strip_prefix(&given).ok();
        inside.zip(rest).map(|(inside, rest)| inside.join(rest))
    } else {
        let parts = path.components().filter(|part| *part != Component::CurDir);
        Some(parts.collect())
    };
    let relative = relative.ok_or_else(|| {
        Error::setting(
            field,
            glob,
            format!("a glob relative to the package, {}", root.display()),
        )
    })?;
    Ok(relative.to_string_lossy().into_owned())
}

/// Returns one sentence for each folder of CUDA sources that is in no family's folder and not in
/// `all`. A folder called `hopper`, for example, may have been meant as a family's.
pub(crate) fn unnamed_folders(
    globs: &[String],
    units: &[Unit],
    families: &Families,
) -> Vec<String> {
    let mut folders = BTreeSet::new();
    for unit in units.iter().filter(|unit| unit.language == Language::Cuda) {
        let folder = Path::new(&unit.source).parent().unwrap_or(Path::new(""));
        let is_named = folder.iter().any(|part| {
            let mut declared = families.declared.iter();
            part == "all" || declared.any(|family| part == family.name.as_str())
        });
        let base = globs.iter().map(|glob| fixed_part(glob));
        let base = base.filter(|base| folder.starts_with(base));
        let base = base.max_by_key(|base| base.components().count());
        let Some(base) = base.filter(|_| !is_named) else {
            continue;
        };
        let inside = folder.strip_prefix(&base).unwrap_or(folder);
        if let Some(first) = inside.iter().next() {
            folders.insert((base.join(first), unit.targets()));
        }
    }
    let sentence = |(folder, targets): (PathBuf, Vec<String>)| {
        format!(
            "{} has no family's name ({}), so what is in it is compiled for all that are on: {}",
            folder.display(),
            families.names(),
            targets.join(", ")
        )
    };
    folders.into_iter().map(sentence).collect()
}

/// True if a folder is a target folder of Cargo's. Cargo marks those that it made with
/// CACHEDIR.TAG, and keeps `.rustc_info.json` in all of them.
pub(crate) fn is_target_folder(folder: &Path) -> bool {
    ["CACHEDIR.TAG", ".rustc_info.json"]
        .iter()
        .any(|file| folder.join(file).is_file())
}

/// Returns the sources of the globs, of all families.
fn find(root: &Path, globs: &[String]) -> Result<BTreeSet<String>, Error> {
    let mut sources = BTreeSet::new();
    for glob in globs {
        let matcher = matcher("sources", glob)?;
        let base = root.join(fixed_part(glob));
        let walk = walkdir::WalkDir::new(&base)
            .follow_links(true)
            .into_iter()
            // A target folder below the sources holds copies, and files that other builds
            // generated.
            .filter_entry(|entry| entry.depth() == 0 || !is_target_folder(entry.path()));
        for entry in walk {
            let entry = match entry {
                Ok(entry) => entry,
                // A folder that does not exist matches nothing, which is refused elsewhere.
                Err(error) if (error.io_error()).is_some_and(|it| it.kind() == NotFound) => {
                    continue;
                }
                Err(error) => {
                    let path = error.path().unwrap_or(&base).to_owned();
                    return Err(Error::file("read", path)(error));
                }
            };
            let Ok(relative) = entry.path().strip_prefix(root) else {
                continue;
            };
            if entry.file_type().is_file() && matcher.is_match(relative) {
                sources.insert(relative.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    Ok(sources)
}

/// Returns the folders of a glob before its first wildcard.
pub(crate) fn fixed_part(glob: &str) -> PathBuf {
    let path = Path::new(glob);
    let is_wild = |part: &Component<'_>| {
        let part = part.as_os_str().to_string_lossy();
        part.contains(['*', '?', '[', '{'])
    };
    let fixed: PathBuf = path.components().take_while(|it| !is_wild(it)).collect();
    match fixed == path {
        true => fixed.parent().map(Path::to_owned).unwrap_or_default(),
        false => fixed,
    }
}

/// Returns the family that the folders of a source name, or `None` if the source is compiled for
/// the targets of all families. Such a source lies in `all`, or in no folder with a family's name.
/// `common` is only for headers.
fn of_path<'a>(source: &Path, families: &'a Families) -> Result<Option<&'a Declared>, Error> {
    let folders = source.parent().into_iter().flat_map(Path::components);
    for part in folders {
        let Component::Normal(name) = part else {
            continue;
        };
        let name = name.to_string_lossy();
        if name == "common" {
            return Err(Error::refused(
                source.display(),
                "a source in common/",
                "headers there; a source of every family goes into all/",
            ));
        }
        if name == "all" {
            return Ok(None);
        }
        let family = families.declared.iter().find(|family| family.name == name);
        if family.is_some() {
            return Ok(family);
        }
        if family::looks_like_one(&name) {
            return Err(Error::refused(
                source.display(),
                format!("the family's folder {name:?}"),
                format!("{}, all", families.names()),
            ));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walk_starts_below_the_wildcards() {
        assert_eq!(fixed_part("cuda/sm90/**/*.cu"), Path::new("cuda/sm90"));
        assert_eq!(fixed_part("cuda/a.cu"), Path::new("cuda"));
        assert_eq!(fixed_part("*.cu"), Path::new(""));
    }

    #[test]
    fn each_target_is_made_from_the_latest_ptx_that_serves_it() {
        let names = ["sm_75", "sm_86", "sm_89", "sm_120", "compute_80", "sm_90a"];
        let unit = Unit {
            source: "cuda/all/a.cu".into(),
            language: Language::Cuda,
            targets: names.map(|name| name.parse().unwrap()).into(),
            flags: Vec::new(),
            ptx: ["compute_89", "compute_80"]
                .map(|name| ptx(name).unwrap())
                .into(),
            memory: None,
        };
        assert_eq!(
            unit.gencodes().collect::<Vec<_>>(),
            [
                "arch=compute_75,code=sm_75",
                "arch=compute_80,code=sm_86",
                "arch=compute_89,code=sm_89",
                "arch=compute_89,code=sm_120",
                "arch=compute_80,code=compute_80",
                "arch=compute_90a,code=sm_90a",
            ]
        );
    }
}
