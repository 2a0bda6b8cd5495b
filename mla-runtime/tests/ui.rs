//! The compiler's errors for wrong uses of `#[mla_backend]`. After a change of a message, run
//! `cargo xtask goldens --bless` and read the difference.

#[test]
fn errors() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/*.rs");
}
