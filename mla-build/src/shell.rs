//! Paths that are safe to pass to a shell.
//!
//! nvcc runs its passes through `sh -c`. It puts some paths in double quotes, leaves others
//! unquoted, and splits some at commas. A folder named `$(…)` would therefore run its command. This
//! module refuses such a path with the reason, or finds a way not to give it to nvcc, so the
//! package itself may have any path.

use std::path::Path;

use crate::Error;

/// The use of a path, with the characters that break nvcc there, as tried with nvcc 13.0.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// A source, relative to the package.
    Source,
    /// The file name of a source, which ptxas and fatbinary parse, too.
    SourceName,
    /// An include root, relative to the package if it lies there.
    Include,
    /// The toolkit's folder.
    Toolkit,
    /// The host compiler's path.
    HostCompiler,
    /// The folder that the passes write to.
    Temporary,
    /// The package's folder, since nvcc uses the real path of a source.
    Package,
}

impl Place {
    /// Returns the problem of a path in this use, if it has one.
    fn problem(self, path: &Path) -> Option<String> {
        let breaking = match self {
            Self::Source => "\"$`\\",
            Self::SourceName | Self::Temporary => "\"$`\\,",
            Self::Include => "\"'$`\\,",
            Self::Toolkit => "\"$`",
            Self::HostCompiler => "\"'$`\\;()&<>|",
            Self::Package => "$`\\",
        };
        let Some(path) = path.to_str() else {
            return Some("a path in UTF-8".to_owned());
        };
        let breaks = |c: &char| c.is_control() || breaking.contains(*c);
        let bad = path.chars().find(breaks)?;
        Some(format!("a path without {bad:?}"))
    }

    /// True if the path can be given to nvcc.
    pub(crate) fn takes(self, path: &Path) -> bool {
        self.problem(path).is_none()
    }

    /// Refuses a path that cannot be given to nvcc.
    pub(crate) fn check(self, field: &str, path: &Path) -> Result<(), Error> {
        let Some(holds) = self.problem(path) else {
            return Ok(());
        };
        let accepted = format!("{holds}, which nvcc hands to a shell");
        Err(Error::setting(field, path, accepted))
    }
}

/// Refuses a path that Cargo cannot be told, since its protocol consists of lines of UTF-8.
pub(crate) fn check_for_cargo(field: &str, path: &Path) -> Result<(), Error> {
    if path.to_str().is_some_and(|path| !path.contains('\n')) {
        return Ok(());
    }
    Err(Error::setting(
        field,
        path,
        "a path in UTF-8 and on one line, which Cargo can be told of",
    ))
}
