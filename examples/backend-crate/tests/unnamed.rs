//! A dependency that the program does not name is not linked. Its backends are then missing, and
//! the error says how to change that.

use mla_runtime::select::Registry;
use mla_runtime::spec::Phase;

#[test]
fn a_crate_that_is_not_named_is_not_linked() {
    let registry = Registry::linked().unwrap();
    let error = registry.get(Phase::Decode, "NAIVE").unwrap_err().to_string();
    assert!(
        error.starts_with("decode: given \"NAIVE\", accepted CPU, "),
        "{error}"
    );
    assert!(
        error.ends_with("if a crate provides it, name the crate in the program: `use its_crate as _;`"),
        "{error}"
    );
}
