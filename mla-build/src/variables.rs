//! The environment variables by which a user changes a build. Those of the toolkit's search and of
//! the compilers are listed beside what reads them.

/// Asks for bindings alone.
pub(crate) const ONLY: &str = "MLA_BUILD_ONLY";

/// By this one docs.rs makes itself known, where bindings are all that is needed.
pub(crate) const DOCUMENTATION: &str = "DOCS_RS";

/// Names folders of objects that were compiled before, or refuses those of the package.
pub(crate) const PREBUILT: &str = "MLA_BUILD_PREBUILT";

/// Names a folder to add a build's objects to.
pub(crate) const EXPORT: &str = "MLA_BUILD_EXPORT";

/// Asks for the lines of sources in objects, for profilers.
pub(crate) const LINE_INFO: &str = "MLA_BUILD_LINE_INFO";

/// Names the file that clangd reads.
pub(crate) const COMPILE_COMMANDS: &str = "MLA_BUILD_COMPILE_COMMANDS";

/// The cache's folder.
pub(crate) const CACHE: &str = "MLA_BUILD_CACHE";

/// The cache's bound.
pub(crate) const CACHE_SIZE: &str = "MLA_BUILD_CACHE_SIZE";

/// All of them: a change of one asks for another build.
pub(crate) const ALL: &[&str] = &[
    ONLY,
    DOCUMENTATION,
    PREBUILT,
    EXPORT,
    LINE_INFO,
    COMPILE_COMMANDS,
    CACHE,
    CACHE_SIZE,
];
