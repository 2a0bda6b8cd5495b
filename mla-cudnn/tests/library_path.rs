//! A wrong `MLA_CUDNN` gives an error that names it. This is a separate program, since a process
//! opens only one library.
#![cfg(feature = "cudnn")]

use mla_cudnn::{Cudnn, library};
use mla_runtime::backend::PrefillBackend as _;

#[test]
fn a_path_without_a_library_is_named() {
    let path = "/nonexistent/libcudnn.so.9";
    // SAFETY: this is the program's only test, so no other thread reads the environment.
    unsafe { std::env::set_var("MLA_CUDNN", path) };
    let text = library().unwrap_err().to_string();
    assert_eq!(
        text,
        format!(
            "library MLA_CUDNN={path} (cannot open shared object file: No such file or directory) \
             is missing"
        )
    );
    assert!(Cudnn::availability().is_err());
}
