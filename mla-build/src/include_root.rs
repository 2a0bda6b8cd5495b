//! A folder in which headers are looked for.

use std::path::PathBuf;

use crate::unit::Language;

/// An include root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IncludeRoot {
    pub(crate) role: String,
    pub(crate) folder: PathBuf,
    /// True for `-isystem`: the folder is searched after all others, and its headers cause no
    /// warnings.
    pub(crate) is_system: bool,
}

impl IncludeRoot {
    /// Returns the flag before its folder on the command line.
    pub(crate) fn flag(&self, language: Language) -> &'static str {
        match (self.is_system, language) {
            (false, _) => "-I",
            (true, Language::Cuda) => "-isystem=",
            (true, Language::Cpp) => "-isystem",
        }
    }
}
