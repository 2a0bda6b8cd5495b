//! What the compiler says where `#[mla_backend]` is used wrongly. After a change of a message, run
//! `TRYBUILD=overwrite cargo test -p mla-runtime --test ui` and read the difference.

#[test]
fn errors() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/*.rs");
}
