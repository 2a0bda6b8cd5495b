//! The GPU architectures that the build knows, and how each is spelled for each tool.

use std::{collections::BTreeSet, env, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Error, toolkit::Version};

/// A GPU architecture. A Cargo feature of the same name (`sm90`, `sm100`) turns it on, and a source
/// folder of the same name holds its kernels; how nvcc spells it is this type's business.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Architecture {
    /// Hopper (H100, H200, GH200), compiled as `sm_90a`: the architecture-specific target, without
    /// which `wgmma` and `setmaxnreg` do not assemble.
    Sm90,
    /// Blackwell for data centres (B200, GB200), compiled as `sm_100a`, which `tcgen05` needs.
    Sm100,
}

impl Architecture {
    /// All of them, in ascending order.
    pub const ALL: &[Self] = &[Self::Sm90, Self::Sm100];

    /// The name of the feature and of the source folder.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm90 => "sm90",
            Self::Sm100 => "sm100",
        }
    }

    /// The real architecture as nvcc and ptxas spell it.
    pub const fn target(self) -> &'static str {
        match self {
            Self::Sm90 => "sm_90a",
            Self::Sm100 => "sm_100a",
        }
    }

    /// The value of `-gencode`: machine code for this target alone. PTX is left out, because an
    /// architecture-specific target is not forward compatible and its PTX would never be used.
    pub(crate) fn gencode(self) -> String {
        let number = &self.target()["sm_".len()..];
        format!("arch=compute_{number},code=sm_{number}")
    }

    /// The first toolkit whose nvcc has the target.
    pub const fn needs_toolkit(self) -> Version {
        match self {
            Self::Sm90 => Version {
                major: 12,
                minor: 0,
            },
            Self::Sm100 => Version {
                major: 12,
                minor: 8,
            },
        }
    }

    /// The first release of CUTLASS whose headers know the target.
    pub const fn needs_cutlass(self) -> Version {
        match self {
            Self::Sm90 => Version { major: 3, minor: 0 },
            Self::Sm100 => Version { major: 3, minor: 8 },
        }
    }

    /// The architectures that the features of the package being built turn on, as Cargo tells its
    /// build script in `CARGO_FEATURE_*`.
    ///
    /// # Errors
    ///
    /// A feature that is spelled like an architecture (`sm` and digits) but is none.
    pub fn from_features() -> Result<BTreeSet<Self>, Error> {
        let mut found = BTreeSet::new();
        for (key, _) in env::vars_os() {
            let Some(feature) = key
                .to_str()
                .and_then(|key| key.strip_prefix("CARGO_FEATURE_"))
            else {
                continue;
            };
            let feature = feature.to_ascii_lowercase();
            if looks_like_one(&feature) {
                found.insert(feature.parse()?);
            }
        }
        Ok(found)
    }
}

/// Whether `name` is spelled like an architecture (`sm90`, `sm_91`, `SM120`), known or not.
pub(crate) fn looks_like_one(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower
        .strip_prefix("sm")
        .map(|rest| rest.trim_start_matches(['_', '-']))
        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Architecture {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .iter()
            .copied()
            .find(|architecture| architecture.name() == text)
            .ok_or_else(|| Error::UnknownArchitecture {
                given: text.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_parses_to_itself_and_a_typo_names_what_is_accepted() {
        for &architecture in Architecture::ALL {
            assert_eq!(
                architecture.name().parse::<Architecture>().unwrap(),
                architecture
            );
        }
        for typo in ["sm91", "sm_90a", "SM90", "sm90a", "hopper", ""] {
            let message = typo.parse::<Architecture>().unwrap_err().to_string();
            assert!(message.contains(&format!("{typo:?}")), "{message}");
            assert!(message.contains("sm90, sm100"), "{message}");
        }
    }

    #[test]
    fn the_tool_spells_the_target() {
        assert_eq!(Architecture::Sm90.gencode(), "arch=compute_90a,code=sm_90a");
        assert_eq!(
            Architecture::Sm100.gencode(),
            "arch=compute_100a,code=sm_100a"
        );
    }

    #[test]
    fn folders_that_look_like_architectures_are_told_from_others() {
        for name in ["sm90", "sm_90", "SM120", "sm90a", "sm-75"] {
            assert!(looks_like_one(name), "{name}");
        }
        for name in ["small", "smem", "all", "common", "sm", "decode"] {
            assert!(!looks_like_one(name), "{name}");
        }
    }
}
