//! Uses `#[mla_backend]` where every name that it could depend on means something else.

#![deny(unsafe_code)]
#![deny(warnings, missing_docs)]

#[macro_use]
mod common;

const ANY_GPU: &[&str] = &["compute_80"];

/// A module without a prelude, in which names of the standard library and the runtime mean other
/// things.
#[allow(dead_code, non_camel_case_types, non_upper_case_globals)]
mod hostile {
    #![no_implicit_prelude]

    use ::mla_runtime::mla_backend;

    mod core {}
    mod std {}
    mod alloc {}
    mod linkme {}
    mod mla_runtime {}
    mod backend {}
    mod spec {}

    struct Option;
    struct Result;
    struct BackendSpec;
    struct Entry;
    struct Device;
    struct Phase;
    struct str;
    struct bool;
    struct u32;
    const Some: () = ();
    const None: () = ();
    const SPEC: () = ();
    static ENTRY: () = ();
    static LINKED: () = ();

    #[allow(unused_macros)]
    macro_rules! assert {
        ($($anything:tt)*) => {
            compile_error!("not this one")
        };
    }

    #[allow(unused_macros)]
    macro_rules! panic {
        ($($anything:tt)*) => {
            compile_error!("not this one")
        };
    }

    // A method on every type, with the name that the expansion calls.
    trait Checked: ::core::marker::Sized {
        fn checked(self) {}
        fn of(self) {}
    }

    impl<T> Checked for T {}

    pub(crate) struct HostilePrefill;

    #[mla_backend(
        sm = "90|100",
        dtypes = "f16,bf16",
        requires_r1 = true,
        compiled = super::ANY_GPU
    )]
    impl ::mla_runtime::backend::PrefillBackend for HostilePrefill {
        prefill_body!(crate::common::Bytes);
    }

    pub(crate) struct HostileDecode;

    #[mla_backend(
        sm = "80+",
        compiled = super::ANY_GPU,
        dtypes = "bf16",
        kv = "bf16|fp8",
        dims = "(128,64,128)",
        cache_dims = "(512,64)",
        heads = "16|128",
        page_sizes = "32|64",
        features = "sinks",
        priority = "90:1,*:0"
    )]
    impl ::mla_runtime::backend::DecodeBackend for HostileDecode {
        decode_body!(crate::common::Bytes);
    }

    pub(crate) mod nested {
        #[allow(clippy::upper_case_acronyms)]
        pub(crate) struct ENTRY;
    }

    // The type has the same name as the static that the expansion makes.
    #[mla_backend(sm = "any", dtypes = "f32", name = "NESTED")]
    impl ::mla_runtime::backend::DecodeBackend for nested::ENTRY {
        decode_body!(crate::common::Bytes<true>);
    }
}

#[test]
fn names_in_scope_change_nothing() {
    use mla_runtime::backend::{DecodeBackend, LINKED, PrefillBackend};

    assert_eq!(hostile::HostilePrefill::SPEC.name, "HOSTILE_PREFILL");
    assert_eq!(hostile::HostileDecode::SPEC.name, "HOSTILE_DECODE");
    assert_eq!(hostile::nested::ENTRY::SPEC.name, "NESTED");
    if cfg!(not(miri)) {
        let linked = LINKED.iter().filter(|entry| {
            ["HOSTILE_PREFILL", "HOSTILE_DECODE", "NESTED"].contains(&entry.spec.name)
        });
        assert_eq!(linked.count(), 3);
    }
}
