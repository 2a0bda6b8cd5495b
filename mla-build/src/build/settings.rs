//! Checks of the settings that need no search of the system.

use std::env;

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
    Ok(())
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
