//! The cuDNN of this machine: its version, and a check that the version is usable.

use mla_runtime::spec::Cause;

/// A version of cuDNN: major, minor and patch.
pub type Version = [u32; 3];

/// Accepted versions. 9.7 is the first with ragged batches and a mask that is aligned to the bottom
/// right. 9.10.0 and 9.10.1 are known to give wrong results.
const ACCEPTED: &str = "9.7.0 and up, without 9.10.0 and 9.10.1";

/// Returns the version of the library that this program uses, or the reason why there is none. The
/// first call opens the library.
///
/// # Errors
///
/// If the feature is off, the library is missing, or its version is refused.
pub fn library() -> Result<Version, Cause> {
    accept(open()?)
}

/// Refuses versions that lack needed features, or that are known to be wrong.
fn accept(version: Version) -> Result<Version, Cause> {
    let is_wrong = version[..2] == [9, 10] && version[2] < 2;
    if version[0] == 9 && version[1] >= 7 && !is_wrong {
        return Ok(version);
    }
    Err(Cause::LibraryVersion {
        library: "libcudnn",
        given: version,
        accepted: ACCEPTED,
    })
}

#[cfg(not(feature = "cudnn"))]
fn open() -> Result<Version, Cause> {
    Err(Cause::FeatureOff {
        package: env!("CARGO_PKG_NAME"),
        feature: "cudnn",
    })
}

#[cfg(feature = "cudnn")]
fn open() -> Result<Version, Cause> {
    use std::sync::OnceLock;

    static OPENED: OnceLock<Result<Version, &'static str>> = OnceLock::new();
    let opened = OPENED.get_or_init(|| {
        let given = std::env::var_os("MLA_CUDNN").filter(|path| !path.is_empty());
        open_file(given.as_deref()).map_err(|why| match given {
            None => DEFAULT,
            // A cause holds a constant text. This text is made only once in the program.
            Some(path) => {
                let path = path.display().to_string();
                // The loader's message begins with the path, too.
                let why = why.strip_prefix(&format!("{path}: ")).unwrap_or(&why);
                String::leak(format!("MLA_CUDNN={path} ({why})"))
            }
        })
    });
    opened.map_err(Cause::LibraryMissing)
}

/// The name by which the system looks for the library.
#[cfg(feature = "cudnn")]
const DEFAULT: &str = "libcudnn.so.9";

/// Opens the library at this path, or the system's, and returns its version.
#[cfg(feature = "cudnn")]
fn open_file(path: Option<&std::ffi::OsStr>) -> Result<Version, String> {
    use std::ffi::{CStr, CString};
    use std::os::unix::ffi::OsStrExt;

    let path = path.map(|path| CString::new(path.as_bytes())).transpose();
    let path = path.map_err(|error| error.to_string())?;
    let mut version = 0;
    // SAFETY: the path is a string or null, and the address is that of a value on this stack.
    // Opening the library runs its initialisers, as every program that uses it does.
    let status = unsafe {
        let path = path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        crate::ffi::mc_open(path, &raw mut version)
    };
    let version = u32::try_from(version).ok().filter(|_| status == 0);
    let Some(version) = version else {
        // SAFETY: the function has no parameters, and its text lives until this thread's next call.
        let text = unsafe { CStr::from_ptr(crate::ffi::mc_last_error()) };
        return Err(text.to_string_lossy().into_owned());
    };
    Ok([version / 10_000, version / 100 % 100, version % 100])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_are_too_old_or_known_to_be_wrong_are_refused_by_name() {
        for version in [[9, 7, 0], [9, 9, 1], [9, 10, 2], [9, 19, 0], [9, 27, 0]] {
            assert_eq!(accept(version), Ok(version));
        }
        for version in [[8, 9, 7], [9, 6, 0], [9, 10, 0], [9, 10, 1], [10, 0, 0]] {
            let text = accept(version).unwrap_err().to_string();
            let [major, minor, patch] = version;
            assert_eq!(
                text,
                format!("library libcudnn: given {major}.{minor}.{patch}, accepted {ACCEPTED}")
            );
        }
    }
}
