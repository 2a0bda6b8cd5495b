#[cfg(feature = "sm90")]
/**
| backend | `FLASH` |
|---|---|*/
#[doc = ::core::concat!("| provider | ", ::core::env!("CARGO_PKG_NAME"), " |")]
/**| phase | decode |
| capability | 9.0 |
| dtype | bf16 |
| dims (P,R,V) | any |
| heads | any |
| cache row (L,R) | any |
| kv format | bf16 |
| page size | any |
| query lengths | single |
| queries | split |
| sparse | never |
| plans on | the device |
| alignment | an element's |
| CUDA graphs | never |
| dependent launch | no |
| log-sum-exp | ln |
| quantised output | no |
| features | none |
| priority | 0 |
| Cargo feature | sm90 |
*/
impl DecodeBackend for Flash {
    type Device = Cuda;
    const SPEC: ::mla_runtime::spec::BackendSpec = ::mla_runtime::spec::BackendSpec::new(
            "FLASH",
            ::mla_runtime::spec::Phase::Decode,
            <<Self as ::mla_runtime::backend::DecodeBackend>::Device as ::mla_runtime::device::Device>::PLATFORM,
        )
        .with_provider(::core::env!("CARGO_PKG_NAME"))
        .with_capabilities(
            &[
                ::mla_runtime::spec::CapabilityMatch::Exact(
                    ::mla_runtime::spec::Capability::new(9, 0),
                ),
            ],
        )
        .with_dtypes(&[::mla_runtime::model::DType::BF16])
        .with_dims(::core::option::Option::None)
        .with_cache_dims(::core::option::Option::None)
        .with_heads(::mla_runtime::spec::HeadCounts::Any)
        .with_kv_formats(&[::mla_runtime::model::KvFormat::BF16])
        .with_page_sizes(::mla_runtime::spec::PageSizes::Any)
        .with_query_len(::mla_runtime::spec::QueryLen::Single)
        .with_max_query_len(::core::option::Option::None)
        .with_query_format(::mla_runtime::spec::QueryFormat::Split)
        .with_key_layout(::mla_runtime::spec::KeyLayout::Packed)
        .with_alignment(1)
        .with_graphs(::mla_runtime::spec::GraphSupport::Never)
        .with_plans_on_host(false)
        .with_dependent_launch(false)
        .with_lse(::mla_runtime::spec::LseOutput::Ln)
        .with_lse_precision(::mla_runtime::spec::LsePrecision::F32)
        .with_quant_output(false)
        .with_sparse(::mla_runtime::spec::SparseSupport::Never)
        .with_max_list_width(::core::option::Option::None)
        .with_features(::mla_runtime::spec::FeatureSet::of(&[]))
        .with_priority(::mla_runtime::spec::Priority {
            by_capability: &[],
            otherwise: 0,
        })
        .checked();
    const KERNELS: ::mla_runtime::spec::KernelFacts = ::mla_runtime::spec::KernelFacts {
        families: ::core::option::Option::Some(
            &[
                ::mla_runtime::spec::CompiledFamily {
                    name: "sm90",
                    targets: raw::SM90,
                },
            ],
        ),
        run_on: ::core::option::Option::None,
    };
}
#[cfg(feature = "sm90")]
const _: () = {
    macro_rules! the_key_crate_has_to_name_mla_runtime {
        () => {
            use ::mla_runtime::the_key_crate_has_to_name_mla_runtime as runtime; const _
            : () = runtime::FOUND;
        };
    }
    the_key_crate_has_to_name_mla_runtime! {}
    const _: ::mla_runtime::spec::BackendSpec = <Flash as ::mla_runtime::backend::DecodeBackend>::SPEC;
    const _: () = if let ::mla_runtime::spec::Platform::Cpu = <<Flash as ::mla_runtime::backend::DecodeBackend>::Device as ::mla_runtime::device::Device>::PLATFORM {
        ::core::panic!(
            "sm: given `90`, accepted `any`: the device is a processor, which has no compute capability"
        )
    };
    const _: () = if let ::core::option::Option::Some(fault) = <Flash as ::mla_runtime::backend::DecodeBackend>::KERNELS
        .fault(<Flash as ::mla_runtime::backend::DecodeBackend>::SPEC.capabilities)
    {
        ::core::panic!("{}", fault.as_str())
    };
    ::mla_runtime::private::link! {
        < Flash as ::mla_runtime::backend::DecodeBackend > ::ENTRY
    }
};
#[cfg(not(feature = "sm90"))]
/**
| backend | `FLASH` |
|---|---|*/
#[doc = ::core::concat!("| provider | ", ::core::env!("CARGO_PKG_NAME"), " |")]
/**| phase | decode |
| capability | 9.0 |
| dtype | bf16 |
| dims (P,R,V) | any |
| heads | any |
| cache row (L,R) | any |
| kv format | bf16 |
| page size | any |
| query lengths | single |
| queries | split |
| sparse | never |
| plans on | the device |
| alignment | an element's |
| CUDA graphs | never |
| dependent launch | no |
| log-sum-exp | ln |
| quantised output | no |
| features | none |
| priority | 0 |
| Cargo feature | sm90 |
*/
impl ::mla_runtime::dispatch::Absent for Flash {
    const SPEC: ::mla_runtime::spec::BackendSpec = ::mla_runtime::spec::BackendSpec::new(
            "FLASH",
            ::mla_runtime::spec::Phase::Decode,
            ::mla_runtime::spec::Platform::Cuda,
        )
        .with_provider(::core::env!("CARGO_PKG_NAME"))
        .with_capabilities(
            &[
                ::mla_runtime::spec::CapabilityMatch::Exact(
                    ::mla_runtime::spec::Capability::new(9, 0),
                ),
            ],
        )
        .with_dtypes(&[::mla_runtime::model::DType::BF16])
        .with_dims(::core::option::Option::None)
        .with_cache_dims(::core::option::Option::None)
        .with_heads(::mla_runtime::spec::HeadCounts::Any)
        .with_kv_formats(&[::mla_runtime::model::KvFormat::BF16])
        .with_page_sizes(::mla_runtime::spec::PageSizes::Any)
        .with_query_len(::mla_runtime::spec::QueryLen::Single)
        .with_max_query_len(::core::option::Option::None)
        .with_query_format(::mla_runtime::spec::QueryFormat::Split)
        .with_key_layout(::mla_runtime::spec::KeyLayout::Packed)
        .with_alignment(1)
        .with_graphs(::mla_runtime::spec::GraphSupport::Never)
        .with_plans_on_host(false)
        .with_dependent_launch(false)
        .with_lse(::mla_runtime::spec::LseOutput::Ln)
        .with_lse_precision(::mla_runtime::spec::LsePrecision::F32)
        .with_quant_output(false)
        .with_sparse(::mla_runtime::spec::SparseSupport::Never)
        .with_max_list_width(::core::option::Option::None)
        .with_features(::mla_runtime::spec::FeatureSet::of(&[]))
        .with_priority(::mla_runtime::spec::Priority {
            by_capability: &[],
            otherwise: 0,
        })
        .checked();
    const CAUSE: ::mla_runtime::spec::Cause = ::mla_runtime::spec::Cause::FeatureOff {
        package: ::core::env!("CARGO_PKG_NAME"),
        feature: "sm90",
    };
}
#[cfg(not(feature = "sm90"))]
const _: () = {
    impl ::mla_runtime::dispatch::DecodeMember for Flash {
        const MEMBER: ::mla_runtime::dispatch::Member = ::mla_runtime::dispatch::Member::absent::<
            Self,
        >(::mla_runtime::spec::Phase::Decode);
    }
    impl<D: ::mla_runtime::device::Device> ::mla_runtime::dispatch::DecodeArm<D>
    for Flash {}
    ::mla_runtime::private::link! {
        < Flash as ::mla_runtime::dispatch::Absent > ::ENTRY
    }
};
#[doc(hidden)]
#[allow(non_local_definitions)]
#[macro_export]
macro_rules! a_second_decode_backend_FLASH_needs_the_key_name {
    () => {};
}
