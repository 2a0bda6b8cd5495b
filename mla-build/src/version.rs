//! A release of CUDA or CUTLASS.

use std::fmt;

/// A release of CUDA or CUTLASS, such as 13.0 or 12.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The number before the dot.
    pub major: u32,
    /// The number after the dot.
    pub minor: u32,
}

impl Version {
    /// Reads the release from the output of `nvcc --version`.
    pub(crate) fn from_nvcc(text: &str) -> Option<Self> {
        Self::from_start(text.split("release ").nth(1)?)
    }

    /// Reads the first two numbers of a version, such as 4.2 of "4.2.0".
    pub fn from_start(text: &str) -> Option<Self> {
        let (major, rest) = text.split_once('.')?;
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        Some(Self {
            major: major.parse().ok()?,
            minor: rest[..digits].parse().ok()?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_from_what_nvcc_prints() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\n\
                    Cuda compilation tools, release 12.8, V12.8.93\n";
        let [major, minor] = [12, 8];
        assert_eq!(Version::from_nvcc(text), Some(Version { major, minor }));
        assert_eq!(Version::from_nvcc("gcc (Debian) 12.2.0"), None);
    }
}
