//! Everything that can go wrong, in words that say what was given and what is accepted.

use std::{fmt, io, path::PathBuf};

use crate::{diagnostic::FailedUnits, version::Version};

/// The reason why a build stopped.
///
/// `Debug` prints what `Display` prints: a build script that ends with
/// `fn main() -> Result<(), mla_build::Error>` shows its error through `Debug`, and the message is
/// written for a person.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A feature or an argument names a family of kernels that the build does not declare.
    #[error(
        "family: given {given:?}, accepted {accepted}; another is declared with \
         Kernels::family(Family::new({given:?}, [{:?}]))",
        target_of(given)
    )]
    UnknownFamily {
        /// The name as it was spelled.
        given: String,
        /// Every family of this build.
        accepted: String,
    },

    /// No family of kernels was turned on, neither by a feature nor by a call.
    #[error(
        "family: none is turned on; enable a feature of this package named one of {accepted} \
         (cargo build --features sm90), or call Kernels::enable. A package that is of use \
         without kernels calls Kernels::optional"
    )]
    NoFamily {
        /// Every family of this build.
        accepted: String,
    },

    /// A source lies where its family cannot be told, or where no source belongs.
    #[error("{}: {problem}", source_file.display())]
    SourcePlace {
        /// The source, relative to the package.
        source_file: PathBuf,
        /// The problem of its place, and the accepted places.
        problem: String,
    },

    /// A part of the toolkit is too old for the targets that are compiled for.
    #[error(
        "target{} {} {} {part} {needed} or newer; given {part} {found}, {}",
        if targets.len() > 1 { "s" } else { "" },
        targets.join(" and "),
        if targets.len() > 1 { "together need" } else { "needs" },
        path.display()
    )]
    ToolkitTooOld {
        /// Every target for which this release is too old, under nvcc's name.
        targets: Vec<String>,
        /// The part that is too old: `CUDA` or `CUTLASS`.
        part: &'static str,
        /// The first release that would do for all of them.
        needed: Version,
        /// The release that was found.
        found: Version,
        /// The path of CUDA's compiler or of the folder of CUTLASS's headers.
        path: PathBuf,
    },

    /// A part of the toolkit is missing everywhere.
    #[error(transparent)]
    ToolkitNotFound(#[from] NotFound),

    /// An environment variable or a setter has a value that is not accepted.
    #[error("{field}: given {given:?}, accepted {accepted}")]
    Setting {
        /// The variable or setter.
        field: String,
        /// Its value.
        given: String,
        /// The accepted values.
        accepted: String,
    },

    /// The globs given to [`Kernels::sources`](crate::Kernels::sources) match nothing that is
    /// compiled for the families that are turned on.
    #[error(
        "sources: no source for {families} among {globs}, in {}; globs are relative to that \
         folder, as in Kernels::sources(\"kernels/**/*.cu\"), and a family's sources lie below a \
         folder of its name",
        root.display()
    )]
    NoSources {
        /// The families that are turned on.
        families: String,
        /// The globs, as given.
        globs: String,
        /// The folder that they are relative to.
        root: PathBuf,
    },

    /// nvcc refused at least one unit. The others are in the cache.
    #[error("{0}")]
    Compile(FailedUnits),

    /// Two units of a library define one name, of which a linker would silently take one.
    #[error(
        "symbol {symbol}: given definitions in {} and {}, accepted one in a library; make one \
         static, or give it a namespace or a name of its own",
        sources[0],
        sources[1]
    )]
    DuplicateSymbol {
        /// The name, as its author wrote it.
        symbol: String,
        /// The sources that define it, relative to the package.
        sources: [String; 2],
    },

    /// Two units of a library have a kernel of one name each, and not the same one.
    #[error(
        "kernel {kernel}: given different code in {} and {}, accepted the same; of templates of \
         one name a linker keeps one, so give them namespaces or names of their own",
        sources[0],
        sources[1]
    )]
    DifferentKernels {
        /// Its name, as its author wrote it.
        kernel: String,
        /// The sources, relative to the package.
        sources: [String; 2],
    },

    /// A header declares what no source defines.
    #[error(
        "symbol {}: declared in {}, accepted a definition in a source{}; without one a program \
         fails when it is linked",
        symbols.join(", "),
        header.display(),
        hint(mangled.as_ref())
    )]
    UndefinedSymbols {
        /// The names, as they are declared.
        symbols: Vec<String>,
        /// The header that declares the first of them.
        header: PathBuf,
        /// A C++ function of the first one's name, with its source.
        mangled: Option<(String, String)>,
    },

    /// Objects that were compiled before are not of this package's sources and settings, or are not
    /// whole.
    #[error(
        "{}: {field}: given {given}, accepted {accepted}; MLA_BUILD_PREBUILT=none compiles the \
         kernels instead",
        path.display()
    )]
    Prebuilt {
        /// The objects' description, or an object.
        path: PathBuf,
        /// The field that differs: `format`, `library`, `platform`, `sources`, `objects` or
        /// `content`.
        field: String,
        /// The value that was found.
        given: String,
        /// The value that is needed.
        accepted: String,
    },

    /// Prebuilt objects are not of these sources, and nothing is there to compile the kernels.
    #[error("{stale}\n\nTo compile them needs a toolkit: {toolkit}")]
    StaleWithoutToolkit {
        /// The reason why the objects are refused.
        stale: Box<Error>,
        /// The missing part.
        toolkit: NotFound,
    },

    /// bindgen could not wrap the header.
    #[error("bindings of {}: {message}", header.display())]
    Bindings {
        /// The header.
        header: PathBuf,
        /// The message of bindgen or clang.
        message: String,
    },

    /// A tool that the build needs did not start or ended badly.
    #[error("{program}: {message}")]
    Tool {
        /// The program.
        program: String,
        /// The problem.
        message: String,
    },

    /// A file or folder that the build itself needs could not be used. The cache never causes this:
    /// where it cannot be used, the build goes on without it and says so.
    #[error("cannot {action} {}: {source}{}", path.display(), full(source))]
    File {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The path that it was attempted on.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A part that was found nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFound {
    /// The name of the missing part.
    pub part: String,
    /// Every place that was looked at, in order, and what it lacked.
    pub looked: Vec<String>,
    /// The one command that fixes it.
    pub command: String,
}

impl std::error::Error for NotFound {}

impl fmt::Display for NotFound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} is nowhere to be found. Looked, in this order, at:",
            self.part
        )?;
        for place in &self.looked {
            writeln!(f, "  {place}")?;
        }
        write!(f, "To install it, run:\n  {}", self.command)
    }
}

impl Error {
    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File {
            action,
            path,
            source,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The target that a family of this name is likely for.
fn target_of(family: &str) -> String {
    let digits = family
        .strip_prefix("sm")
        .map(|rest| rest.trim_start_matches('_'));
    let number = digits.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    format!("sm_{}", number.unwrap_or("120"))
}

fn hint(mangled: Option<&(String, String)>) -> String {
    match mangled {
        Some((function, source)) => {
            format!(", with extern \"C\" (in {source} is the C++ function {function})")
        }
        None => " of a family that is on, with extern \"C\"".to_owned(),
    }
}

fn full(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::StorageFull {
        "; free some space, or move the target folder with CARGO_TARGET_DIR"
    } else {
        ""
    }
}
