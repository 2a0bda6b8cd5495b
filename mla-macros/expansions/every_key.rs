/// The author's description.
#[cfg(feature = "flash")]
/**
| backend | `EVERY_KEY` |
|---|---|
| provider | elsewhere |
| phase | decode |
| capability | 9.0, 10.x, 12.0+ |
| dtype | f16, bf16 |
| dims (P,R,V) | (128,64,128), (192,64,256) |
| heads | 1 to 128 |
| cache row (L,R) | (512,64) |
| kv format | f16, bf16, fp8, fp8_ds_mla |
| page size | multiples of 16 |
| query lengths | ragged, at most 8 |
| queries | concatenated |
| sparse | optional, lists of at most 8192 |
| plans on | the host |
| alignment | 16 bytes |
| CUDA graphs | always |
| dependent launch | yes |
| log-sum-exp | log2, as exact as the dtype |
| quantised output | yes |
| features | sinks, deterministic |
| priority | 100 on 9.0, -50 on 10.x, 7 elsewhere |
*/
impl mla_runtime::backend::DecodeBackend for inner::Flash {
    #![allow(unused)]
    type Device = Cuda;
    const SPEC: crate::engine::mla_runtime::spec::BackendSpec = crate::engine::mla_runtime::spec::BackendSpec::new(
            "EVERY_KEY",
            crate::engine::mla_runtime::spec::Phase::Decode,
            <<Self as crate::engine::mla_runtime::backend::DecodeBackend>::Device as crate::engine::mla_runtime::device::Device>::PLATFORM,
        )
        .with_provider("elsewhere")
        .with_capabilities(
            &[
                crate::engine::mla_runtime::spec::CapabilityMatch::Exact(
                    crate::engine::mla_runtime::spec::Capability::new(9, 0),
                ),
                crate::engine::mla_runtime::spec::CapabilityMatch::Family(10),
                crate::engine::mla_runtime::spec::CapabilityMatch::Floor(
                    crate::engine::mla_runtime::spec::Capability::new(12, 0),
                ),
            ],
        )
        .with_dtypes(
            &[
                crate::engine::mla_runtime::model::DType::F16,
                crate::engine::mla_runtime::model::DType::BF16,
            ],
        )
        .with_dims(
            ::core::option::Option::Some(
                &[
                    crate::engine::mla_runtime::model::HeadDims::new(128, 64, 128),
                    crate::engine::mla_runtime::model::HeadDims::new(192, 64, 256),
                ],
            ),
        )
        .with_cache_dims(
            ::core::option::Option::Some(
                &[crate::engine::mla_runtime::spec::CacheDims::new(512, 64)],
            ),
        )
        .with_heads(crate::engine::mla_runtime::spec::HeadCounts::Range(1, 128))
        .with_kv_formats(
            &[
                crate::engine::mla_runtime::model::KvFormat::F16,
                crate::engine::mla_runtime::model::KvFormat::BF16,
                crate::engine::mla_runtime::model::KvFormat::Fp8,
                crate::engine::mla_runtime::model::KvFormat::Fp8DsMla,
            ],
        )
        .with_page_sizes(crate::engine::mla_runtime::spec::PageSizes::MultipleOf(16))
        .with_query_len(crate::engine::mla_runtime::spec::QueryLen::Ragged)
        .with_max_query_len(::core::option::Option::Some(8))
        .with_query_format(crate::engine::mla_runtime::spec::QueryFormat::Concatenated)
        .with_key_layout(crate::engine::mla_runtime::spec::KeyLayout::Packed)
        .with_alignment(16)
        .with_graphs(crate::engine::mla_runtime::spec::GraphSupport::Always)
        .with_plans_on_host(true)
        .with_dependent_launch(true)
        .with_lse(crate::engine::mla_runtime::spec::LseOutput::Log2)
        .with_lse_precision(crate::engine::mla_runtime::spec::LsePrecision::DType)
        .with_quant_output(true)
        .with_sparse(crate::engine::mla_runtime::spec::SparseSupport::Optional)
        .with_max_list_width(::core::option::Option::Some(8192))
        .with_features(
            crate::engine::mla_runtime::spec::FeatureSet::of(
                &[
                    crate::engine::mla_runtime::spec::Feature::Sinks,
                    crate::engine::mla_runtime::spec::Feature::Deterministic,
                ],
            ),
        )
        .with_priority(crate::engine::mla_runtime::spec::Priority {
            by_capability: &[
                (
                    crate::engine::mla_runtime::spec::CapabilityMatch::Exact(
                        crate::engine::mla_runtime::spec::Capability::new(9, 0),
                    ),
                    100,
                ),
                (crate::engine::mla_runtime::spec::CapabilityMatch::Family(10), -50),
            ],
            otherwise: 7,
        })
        .checked();
    const KERNELS: crate::engine::mla_runtime::spec::KernelFacts = crate::engine::mla_runtime::spec::KernelFacts {
        families: ::core::option::Option::Some(
            &[
                crate::engine::mla_runtime::spec::CompiledFamily {
                    name: "sm90",
                    targets: raw::SM90,
                },
                crate::engine::mla_runtime::spec::CompiledFamily {
                    name: "sm80",
                    targets: raw::SM80,
                },
            ],
        ),
        run_on: ::core::option::Option::Some(RUN_ON),
    };
}
#[cfg(feature = "flash")]
const _: () = {
    macro_rules! the_key_crate_has_to_name_mla_runtime {
        () => {
            use crate ::engine::mla_runtime::the_key_crate_has_to_name_mla_runtime as
            runtime; const _ : () = runtime::FOUND;
        };
    }
    the_key_crate_has_to_name_mla_runtime! {}
    const _: crate::engine::mla_runtime::spec::BackendSpec = <inner::Flash as crate::engine::mla_runtime::backend::DecodeBackend>::SPEC;
    const _: () = if let crate::engine::mla_runtime::spec::Platform::Cpu = <<inner::Flash as crate::engine::mla_runtime::backend::DecodeBackend>::Device as crate::engine::mla_runtime::device::Device>::PLATFORM {
        ::core::panic!(
            "sm: given `90`, `10x`, `120+`, accepted `any`: the device is a processor, which has no compute capability"
        )
    };
    const _: () = if let ::core::option::Option::Some(fault) = <inner::Flash as crate::engine::mla_runtime::backend::DecodeBackend>::KERNELS
        .fault(
            <inner::Flash as crate::engine::mla_runtime::backend::DecodeBackend>::SPEC
                .capabilities,
        )
    {
        ::core::panic!("{}", fault.as_str())
    };
    crate::engine::mla_runtime::private::link! {
        < inner::Flash as crate ::engine::mla_runtime::backend::DecodeBackend > ::ENTRY
    }
};
#[cfg(feature = "flash")]
#[doc(hidden)]
#[allow(non_local_definitions)]
#[macro_export]
macro_rules! a_second_decode_backend_EVERY_KEY_needs_the_key_name {
    () => {};
}
