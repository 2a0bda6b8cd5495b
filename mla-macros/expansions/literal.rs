/**
| backend | `FLASH_ATTN` |
|---|---|*/
#[doc = ::core::concat!("| provider | ", ::core::env!("CARGO_PKG_NAME"), " |")]
/**| phase | prefill |
| capability | 9.0, 10.0 |
| dtype | f16, bf16 |
| dims (P,R,V) | (128,64,128) |
| heads | any |
| keys | packed |
| alignment | an element's |
| CUDA graphs | never |
| dependent launch | no |
| log-sum-exp | ln |
| quantised output | no |
| features | none |
| priority | 0 |
*/
impl PrefillBackend for FlashAttn {
    type Device = Cuda;
    const SPEC: ::mla_runtime::spec::BackendSpec = ::mla_runtime::spec::BackendSpec::new(
            "FLASH_ATTN",
            ::mla_runtime::spec::Phase::Prefill,
            <<Self as ::mla_runtime::backend::PrefillBackend>::Device as ::mla_runtime::device::Device>::PLATFORM,
        )
        .with_provider(::core::env!("CARGO_PKG_NAME"))
        .with_capabilities(
            &[
                ::mla_runtime::spec::CapabilityMatch::Exact(
                    ::mla_runtime::spec::Capability::new(9, 0),
                ),
                ::mla_runtime::spec::CapabilityMatch::Exact(
                    ::mla_runtime::spec::Capability::new(10, 0),
                ),
            ],
        )
        .with_dtypes(
            &[::mla_runtime::model::DType::F16, ::mla_runtime::model::DType::BF16],
        )
        .with_dims(
            ::core::option::Option::Some(
                &[::mla_runtime::model::HeadDims::new(128, 64, 128)],
            ),
        )
        .with_cache_dims(::core::option::Option::None)
        .with_heads(::mla_runtime::spec::HeadCounts::Any)
        .with_kv_formats(&[])
        .with_page_sizes(::mla_runtime::spec::PageSizes::Any)
        .with_query_len(::mla_runtime::spec::QueryLen::Ragged)
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
        families: ::mla_runtime::private::families!(),
        run_on: ::core::option::Option::None,
    };
}
const _: () = {
    macro_rules! the_key_crate_has_to_name_mla_runtime {
        () => {
            use ::mla_runtime::the_key_crate_has_to_name_mla_runtime as runtime; const _
            : () = runtime::FOUND;
        };
    }
    the_key_crate_has_to_name_mla_runtime! {}
    const _: ::mla_runtime::spec::BackendSpec = <FlashAttn as ::mla_runtime::backend::PrefillBackend>::SPEC;
    const _: () = if let ::mla_runtime::spec::Platform::Cpu = <<FlashAttn as ::mla_runtime::backend::PrefillBackend>::Device as ::mla_runtime::device::Device>::PLATFORM {
        ::core::panic!(
            "sm: given `90`, `100`, accepted `any`: the device is a processor, which has no compute capability"
        )
    };
    const _: () = if let ::core::option::Option::Some(fault) = ::mla_runtime::private::build!()
        .fault()
    {
        ::core::panic!("{}", fault.as_str())
    };
    ::mla_runtime::private::link! {
        < FlashAttn as ::mla_runtime::backend::PrefillBackend > ::ENTRY
    }
};
#[doc(hidden)]
#[allow(non_local_definitions)]
#[macro_export]
macro_rules! a_second_prefill_backend_FLASH_ATTN_needs_the_key_name {
    () => {};
}
