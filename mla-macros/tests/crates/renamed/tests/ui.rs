//! The compiler's messages if the attribute does not find its runtime. After a change of a message,
//! run `cargo xtask goldens --bless` and read the difference.

#[test]
fn errors() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
