//! Two crates that claim one name make a registry that says so, instead of one of the two.

#[macro_use]
mod common;

use mla_runtime::backend::DecodeBackend;
use mla_runtime::mla_backend;
use mla_runtime::registry::{Registry, RegistryError};

struct One;

#[mla_backend(name = "CLAIMED", sm = "90", dtypes = "bf16", kv = "bf16")]
impl DecodeBackend for One {
    decode_body!(common::Bytes<false>);
}

struct Other;

#[mla_backend(name = "CLAIMED", sm = "100", dtypes = "bf16", kv = "bf16")]
impl DecodeBackend for Other {
    decode_body!(common::Bytes<false>);
}

#[test]
fn one_name_twice_is_an_error_that_names_both() {
    let Err(error) = Registry::linked() else {
        panic!("both were linked");
    };
    let RegistryError::Duplicate {
        name,
        first,
        second,
        ..
    } = error
    else {
        panic!("{error}");
    };
    let mut claims = [first, second];
    claims.sort_unstable();
    assert_eq!(name, "CLAIMED");
    assert_eq!(claims, ["selection_clash::One", "selection_clash::Other"]);
}
