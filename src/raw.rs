//! The raw tier: the kernels' C interface, for engines with their own memory pools and streams.
//!
//! The interface is that of `cuda/include/mla.h`. Functions of a family are declared in the
//! family's folder, such as `cuda/sm90/mla_sm90.h`.
//!
//! A launch takes a plain struct of device addresses, extents and strides, and a stream
//! (`CUstream`). It checks what the host can see, enqueues on that stream, and returns an
//! [`MlaStatus`], which [`check`] converts to a `Result`. The calling thread must have the stream's
//! context current.
//!
//! Some functions enqueue nothing. Their names end in `_workspace` or begin with `mla_load_`. With
//! the feature `division` there are also functions that say how work would be divided; these take
//! addresses of host memory.
//!
//! # Safety
//!
//! The functions are `unsafe`. Every address must be that of memory of the kind and size that the
//! header says. The memory is on the device unless the header says that it is on the host. It must
//! stay valid until the stream has passed the launch. For a function that enqueues nothing, it must
//! stay valid until the function has returned.

use std::ffi::CStr;

use mla_runtime::{Error, Result};

pub use generated::*;

// Bindings that bindgen generates from the headers. The headers document everything.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::missing_safety_doc,
    unused_variables,
    clippy::undocumented_unsafe_blocks
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/mla.rs"));
}

/// Targets for which the kernels of each family and the device's helpers were compiled. The list of
/// a family is empty if its feature is off.
pub mod compiled {
    include!(concat!(env!("OUT_DIR"), "/mla_compiled.rs"));
}

/// Status code of every function in a build without kernels (feature `gpu` alone).
pub const LEFT_OUT: i32 = -1;

/// Status of every function in a build without kernels.
#[allow(dead_code)]
fn left_out() -> MlaStatus {
    MlaStatus {
        code: LEFT_OUT,
        cuda_error: 0,
        field: c"kernels".as_ptr(),
        given: 0,
        accepted: c"those of a family: build with its feature, such as `sm90`".as_ptr(),
    }
}

/// Converts a status to a result: a refused argument becomes [`Error::Argument`], anything else an
/// [`Error::Device`].
///
/// # Safety
///
/// `field` and `accepted` of the status are null, or point to texts that end in a zero byte and are
/// never freed or changed. The statuses that functions of this module return meet this condition.
///
/// # Errors
///
/// Returns the status as an error, unless it is `MLA_OK`.
///
/// Safe code cannot make this function read through the pointers of a status of its own:
///
/// ```compile_fail,E0133
/// use mla_kernels::raw::{MLA_BAD_ARGUMENT, MlaStatus, check};
///
/// let status = MlaStatus {
///     code: MLA_BAD_ARGUMENT as i32,
///     field: 8 as *const _,
///     ..MlaStatus::default()
/// };
/// let _ = check("launch", status);
/// ```
pub unsafe fn check(operation: &'static str, status: MlaStatus) -> Result<()> {
    // SAFETY: this function's own contract covers `text`'s for both pointers.
    let [field, accepted] = unsafe { [text(status.field), text(status.accepted)] };
    const OK: i64 = MLA_OK as i64;
    const BAD_ARGUMENT: i64 = MLA_BAD_ARGUMENT as i64;
    match i64::from(status.code) {
        OK => Ok(()),
        BAD_ARGUMENT => Err(Error::argument(field, status.given, accepted)),
        _ if status.code == LEFT_OUT => Err(Error::argument(field, "none", accepted)),
        _ => Err(Error::Device {
            device: "cuda",
            operation,
            message: format!("{}: {} (accepted: {})", field, status.given, accepted),
        }),
    }
}

/// Returns a text of a status, or an empty one if there is none.
///
/// # Safety
///
/// `pointer` is null, or points to a text that ends in a zero byte and is never freed or changed.
unsafe fn text(pointer: *const std::ffi::c_char) -> &'static str {
    if pointer.is_null() {
        return "";
    }
    // SAFETY: the contract of `CStr::from_ptr`, which is this function's own.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or("")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    // Builds of the documentation have no bindgen and take the checked-in declarations.
    #[test]
    fn the_checked_in_declarations_are_those_of_the_headers() {
        let made = include_str!(concat!(env!("OUT_DIR"), "/mla.rs"));
        if made.contains("left_out") {
            // This build has only the device, without the headers' functions.
            return;
        }
        // Declarations follow a line that names their header.
        for made in made
            .split("\n// ")
            .map(|part| part.trim_start_matches("// "))
        {
            let (header, made) = made.split_once('\n').unwrap();
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(header);
            assert!(
                path.is_file(),
                "a line that begins with // names a header: {header}"
            );
            let path = path.with_extension("rs");
            let made = format!("// {header}\n{}\n", made.trim_end());
            let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(
                checked_in == made,
                "{} is stale; run `cargo xtask declarations`",
                path.display()
            );
        }
    }
}
