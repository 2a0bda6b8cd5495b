// Two types of one name in a crate, in whatever modules. Of each phase there may be one.

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

mod hopper {
    use mla_runtime::backend::{DecodeBackend, PrefillBackend};
    use mla_runtime::mla_backend;

    struct Naive;

    #[mla_backend(sm = "90", dtypes = "bf16")]
    impl DecodeBackend for Naive {
        decode_body!(crate::common::Bytes);
    }

    #[mla_backend(sm = "90", dtypes = "bf16")]
    impl PrefillBackend for Naive {
        prefill_body!(crate::common::Bytes);
    }
}

mod blackwell {
    use mla_runtime::backend::DecodeBackend;
    use mla_runtime::mla_backend;

    struct Naive;

    #[mla_backend(sm = "100", dtypes = "bf16")]
    impl DecodeBackend for Naive {
        decode_body!(crate::common::Bytes);
    }
}

fn main() {}
