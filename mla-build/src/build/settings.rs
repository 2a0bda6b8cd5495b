//! Checks of the settings that need no search of the system.

use std::{
    collections::BTreeSet,
    env,
    sync::{Mutex, PoisonError},
};

use super::Library;
use crate::{Error, flags, variables};

/// Refuses wrong settings before anything is searched for.
pub(super) fn check(library: &Library) -> Result<(), Error> {
    let variable = |name| env::var(name).ok();
    check_target(variable("TARGET").as_deref(), variable("HOST").as_deref())?;
    let kernels = &library.kernels;
    for flag in kernels.flags.iter().chain(&kernels.source_flags()) {
        flags::check(flag)?;
    }
    for define in kernels.defines.iter().chain(&kernels.source_defines()) {
        flags::check_define(define)?;
    }
    match library.for_cargo {
        true => is_first(&library.name),
        false => Ok(()),
    }
}

pub(super) fn check_library(library: &str) -> Result<(), Error> {
    let named = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !library.is_empty() && library.chars().all(named) {
        return Ok(());
    }
    Err(Error::setting(
        "library",
        library,
        "a name of letters, digits, _ and -",
    ))
}

/// Refuses to compile for another machine, or for a C library that the runtime of CUDA does not
/// support. Neither is checked outside a build script.
fn check_target(target: Option<&str>, host: Option<&str>) -> Result<(), Error> {
    const SUPPORTED: &[&str] = &["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];
    let Some(target) = target else { return Ok(()) };
    if SUPPORTED.contains(&target) && host.is_none_or(|host| host == target) {
        return Ok(());
    }
    Err(Error::setting(
        "TARGET",
        target,
        format!(
            "{}, on a machine of the same: kernels are compiled with GCC and glibc, and not for \
             another machine than this ({}). {}=bindings checks the Rust code for any target",
            SUPPORTED.join(" or "),
            host.unwrap_or(target),
            variables::ONLY
        ),
    ))
}

/// Refuses a second library of the same name in a build script, since both would have the same
/// files.
fn is_first(library: &str) -> Result<(), Error> {
    static KNOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // The set holds only whole names at every moment, so it is valid even after a panic elsewhere.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if known.insert(library.to_owned()) {
        return Ok(());
    }
    Err(Error::setting(
        "library",
        library,
        "a name that no other library of this build script has",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_other_than_this_machine_is_refused_with_what_is_supported() {
        const HERE: &str = "x86_64-unknown-linux-gnu";
        check_target(Some(HERE), Some(HERE)).unwrap();
        check_target(None, None).unwrap();
        for target in [
            "aarch64-unknown-linux-gnu",
            "x86_64-unknown-linux-musl",
            "x86_64-pc-windows-msvc",
        ] {
            let message = check_target(Some(target), Some(HERE))
                .unwrap_err()
                .to_string();
            assert!(message.starts_with(&format!("TARGET: given {target:?}, accepted {HERE} or")));
            assert!(
                message.contains("GCC and glibc") && message.contains("MLA_BUILD_ONLY=bindings")
            );
        }
        let musl = "x86_64-unknown-linux-musl";
        assert!(check_target(Some(musl), Some(musl)).is_err());
    }
}
