// Two types with one name in different modules of a crate. Each phase may have one of them.

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

const ANY_GPU: &[&str] = &["compute_80"];

mod hopper {
    use mla_runtime::backend::{DecodeBackend, PrefillBackend};
    use mla_runtime::mla_backend;

    struct Naive;

    #[mla_backend(sm = "90", dtypes = "bf16", compiled = crate::ANY_GPU)]
    impl DecodeBackend for Naive {
        decode_body!(crate::common::Bytes);
    }

    #[mla_backend(sm = "90", dtypes = "bf16", compiled = crate::ANY_GPU)]
    impl PrefillBackend for Naive {
        prefill_body!(crate::common::Bytes);
    }
}

mod blackwell {
    use mla_runtime::backend::DecodeBackend;
    use mla_runtime::mla_backend;

    struct Naive;

    #[mla_backend(sm = "100", dtypes = "bf16", compiled = crate::ANY_GPU)]
    impl DecodeBackend for Naive {
        decode_body!(crate::common::Bytes);
    }
}

fn main() {}
