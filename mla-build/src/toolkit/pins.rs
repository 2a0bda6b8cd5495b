//! The wheels that make a toolkit, and the folder that they are installed into.

use std::{env, path::PathBuf, sync::LazyLock};

use serde::Deserialize;

/// The pinned wheels, from `toolkit.toml`.
#[derive(Clone, Debug, Deserialize)]
pub struct Pins {
    /// Names the folder.
    pub release: String,
    /// One requirement per wheel, as pip takes it.
    pub packages: Vec<String>,
}

impl Pins {
    /// The pins of this version of the crate.
    pub fn current() -> &'static Self {
        static PINS: LazyLock<Pins> = LazyLock::new(|| {
            // The file is part of the crate, and a test reads it.
            toml::from_str(include_str!("../../toolkit.toml")).expect("toolkit.toml is valid")
        });
        &PINS
    }

    /// The folder that these pins are installed into: `$MLA_TOOLKIT` where it is set, otherwise a
    /// folder of the user's data folder that is named after the pins. `None` where there is neither.
    pub fn folder(&self) -> Option<PathBuf> {
        if let Some(folder) = env::var_os("MLA_TOOLKIT").filter(|v| !v.is_empty()) {
            return Some(folder.into());
        }
        let hash = blake3::hash(self.packages.join("\n").as_bytes()).to_hex();
        let name = format!("{}-{}", self.release, &hash[..8]);
        Some(dirs::data_dir()?.join("mla-build/toolkit").join(name))
    }

    /// The command that installs them, for a package that has no chore of its own for it.
    pub fn command(&self) -> String {
        let target = self
            .folder()
            .map(|f| format!(" --target {}", f.display()))
            .unwrap_or_default();
        format!(
            "python3 -m pip install --no-deps{target} {}",
            self.packages.join(" ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_is_pinned_to_one_version() {
        let pins = Pins::current();
        assert!(
            pins.packages
                .iter()
                .any(|p| p.starts_with("nvidia-cuda-nvcc=="))
        );
        for package in &pins.packages {
            let (name, version) = package.split_once("==").expect(package);
            assert!(
                !name.is_empty() && version.starts_with(|c: char| c.is_ascii_digit()),
                "{package}"
            );
            assert!(pins.command().contains(package));
        }
    }
}
