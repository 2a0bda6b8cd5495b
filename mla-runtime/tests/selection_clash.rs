//! If two crates use the same name, the registry reports it instead of choosing one of them.

#[macro_use]
mod common;

use mla_runtime::backend::{DecodeBackend, Entry};
use mla_runtime::select::{Registry, SelectionError};
use mla_runtime::spec::Phase;

const ANY_GPU: &[&str] = &["compute_80"];

decode_backend! {
    One on common::Bytes<false>:
        name = "CLAIMED", sm = "90", compiled = ANY_GPU, dtypes = "bf16", kv = "bf16"
}

decode_backend! {
    Other on common::Bytes<false>:
        name = "OTHER", sm = "100", compiled = ANY_GPU, dtypes = "bf16", kv = "bf16"
}

// This entry represents another crate's. Within one crate, the compiler refuses a second backend of
// the name.
const _: () = {
    mla_runtime::private::link! { <Other as DecodeBackend>::ENTRY.named("CLAIMED") }
};

#[test]
fn one_name_twice() {
    let Err(error) = Registry::linked() else {
        panic!("both were linked");
    };
    let SelectionError::Duplicate {
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

#[test]
fn program_settles_clashes() {
    let other =
        |entry: &Entry| entry.origin() == "selection_clash::Other" && entry.spec.name == "CLAIMED";
    let renamed = Registry::linked_by(|entry| match other(&entry) {
        true => Some(entry.named("CLAIMED_TOO")),
        false => Some(entry),
    });
    let renamed = renamed.unwrap();
    let origin = |name| renamed.get(Phase::Decode, name).unwrap().origin();
    assert_eq!(origin("CLAIMED"), "selection_clash::One");
    assert_eq!(origin("CLAIMED_TOO"), "selection_clash::Other");
    let without = Registry::linked_by(|entry| (!other(&entry)).then_some(entry)).unwrap();
    let left = without.get(Phase::Decode, "CLAIMED").unwrap().origin();
    assert_eq!(left, "selection_clash::One");
}
