//! The compiler's errors for an attribute that does not name its kernels' family, in a package
//! whose families have GPUs in common. After a change of a message, run `cargo xtask goldens
//! --bless` and read the difference.

#[test]
fn errors() {
    // SAFETY: no other thread runs. This is the only test of the program, and it has started none.
    unsafe {
        // The value has the format that mla-build writes.
        std::env::set_var(
            "MLA_BUILD_COMPILED",
            "sm80:on:sm_80,sm_90,compute_80;sm90:on:sm_90a",
        );
    }
    trybuild::TestCases::new().compile_fail("tests/ui_build/*.rs");
}
