//! The wheels that make a toolkit, and the folder that they are installed into. `xtask/front`
//! compiles this file, too, so it has few dependencies.

use std::{env, path::PathBuf, sync::LazyLock};

/// The pinned wheels, from `toolkit.txt`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pins {
    /// The name of the folder.
    pub name: String,
    /// The wheels with their pinned versions, such as `nvidia-cuda-nvcc==13.0.88`.
    pub packages: Vec<String>,
    /// The SHA-256 hashes of each package's wheels, in hexadecimal.
    pub hashes: Vec<Vec<String>>,
}

impl Pins {
    /// Returns the pins of this version of the crate.
    pub fn current() -> &'static Self {
        static PINS: LazyLock<Pins> =
            LazyLock::new(|| Pins::read(include_str!("../../toolkit.txt")));
        &PINS
    }

    /// Reads a requirements file of pip, which has an extra line for the folder.
    fn read(text: &str) -> Self {
        let mut pins = Self {
            name: String::new(),
            packages: Vec::new(),
            hashes: Vec::new(),
        };
        for line in text.lines().map(|line| line.trim_end_matches('\\').trim()) {
            if let Some(name) = line.strip_prefix("# folder: ") {
                pins.name = name.to_owned();
            } else if let Some(hash) = line.strip_prefix("--hash=sha256:") {
                if let Some(hashes) = pins.hashes.last_mut() {
                    hashes.push(hash.to_owned());
                }
            } else if !line.is_empty() && !line.starts_with('#') {
                pins.packages.push(line.to_owned());
                pins.hashes.push(Vec::new());
            }
        }
        pins
    }

    /// Returns the folder that these wheels are installed into. It is `$MLA_TOOLKIT` if that is
    /// set, and otherwise a folder in the user's data folder, named after the pins. Returns `None`
    /// if there is neither.
    pub fn folder(&self) -> Option<PathBuf> {
        if let Some(folder) = env::var_os("MLA_TOOLKIT").filter(|v| !v.is_empty()) {
            return Some(folder.into());
        }
        Some(dirs::data_dir()?.join("mla-build/toolkit").join(&self.name))
    }

    /// Returns the command that installs them, for a package without an installer of its own.
    pub fn command(&self) -> String {
        let target = self
            .folder()
            .map(|folder| format!(" --target '{}'", folder.display()))
            .unwrap_or_default();
        format!(
            "python3 -m pip install --no-deps --only-binary=:all: --require-hashes{target} \
             --requirement '{}/toolkit.txt'",
            env!("CARGO_MANIFEST_DIR")
        )
    }
}
