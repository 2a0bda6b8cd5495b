//! The cuDNN of this machine: which version it is, and whether that is one to use.

use mla_runtime::availability::Cause;

/// Major, minor and patch.
pub type Version = [u32; 3];

/// What is taken: ragged batches with a mask that is aligned to the bottom right came with 9.7, and
/// 9.10.0 and 9.10.1 are known to be wrong.
const ACCEPTED: &str = "9.7.0 and up, without 9.10.0 and 9.10.1";

/// The version of the library that this program uses, which the first call opens; or why there is
/// none.
///
/// # Errors
///
/// The cause: the feature is off, the library is missing, or it has a version that is refused.
pub fn library() -> Result<Version, Cause> {
    accept(open()?)
}

/// Refuses versions that lack what is needed, or are known to be wrong.
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
    Err(Cause::FeatureOff("cudnn"))
}

#[cfg(feature = "cudnn")]
fn open() -> Result<Version, Cause> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStringExt;
    use std::sync::OnceLock;

    static OPENED: OnceLock<Option<Version>> = OnceLock::new();
    let opened = OPENED.get_or_init(|| {
        let given = std::env::var_os("MLA_CUDNN").filter(|path| !path.is_empty());
        let path = given.map(|path| CString::new(path.into_vec())).transpose();
        let path = path.ok()?;
        let mut version = 0;
        // SAFETY: the path is a string or null, and the address that of a value on this stack.
        // Opening the library runs its initialisers, as every user of it does.
        let status = unsafe {
            let path = path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
            crate::ffi::mc_open(path, &raw mut version)
        };
        let version = u32::try_from(version).ok().filter(|_| status == 0)?;
        Some([version / 10_000, version / 100 % 100, version % 100])
    });
    opened.ok_or(Cause::LibraryMissing("libcudnn.so.9"))
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
