//! Tests the code that `#[mla_backend]` writes through the code that uses it.

#[macro_use]
mod common;

use mla_runtime::backend::{DecodeBackend, LINKED, PrefillBackend};
use mla_runtime::mla_backend;
use mla_runtime::model::{DType, HeadDims, KvFormat};
use mla_runtime::spec::{
    BackendSpec, CacheDims, Capability, CapabilityMatch, CompiledFamily, Feature, FeatureSet,
    GraphSupport, HeadCounts, KernelFacts, KeyLayout, LseOutput, LsePrecision, PageSizes, Phase,
    Platform, Priority, QueryFormat, QueryLen, Run, SparseSupport,
};

const ANY_GPU: &[&str] = &["compute_80"];

struct FlashAttn;

#[mla_backend(sm = "90|100", dtypes = "f16,bf16", requires_r1 = true)]
impl PrefillBackend for FlashAttn {
    prefill_body!(common::Bytes);
}

const SM90_ALONE: CapabilityMatch = CapabilityMatch::Exact(Capability::new(9, 0));
const SM100: CapabilityMatch = CapabilityMatch::Exact(Capability::new(10, 0));

#[test]
fn literal_form() {
    const EXPECTED: BackendSpec = BackendSpec::new("FLASH_ATTN", Phase::Prefill, Platform::Cuda)
        .with_provider(env!("CARGO_PKG_NAME"))
        .with_capabilities(&[SM90_ALONE, SM100])
        .with_dtypes(&[DType::F16, DType::BF16])
        .with_dims(Some(&[HeadDims::new(128, 64, 128)]));
    assert_eq!(FlashAttn::SPEC, EXPECTED);
}

prefill_backend! {
    Split on common::Bytes:
        sm = "90", dtypes = "bf16", compiled = ANY_GPU, key_layout = "split"
}

#[test]
fn prefill_layout_in_the_spec() {
    const SPEC: BackendSpec = Split::SPEC;
    assert_eq!(SPEC.key_layout, KeyLayout::Split);
}

struct EveryKey;

#[mla_backend(
    sm = "9.0 | 10x | 120+",
    compiled = ANY_GPU,
    dtypes = "f16|bf16",
    dims = "(128,64,128) | (192, 64, 256)",
    cache_dims = "(512,64)",
    heads = "1..=128",
    kv = "f16,bf16,fp8,fp8_ds_mla",
    page_sizes = "x16",
    query_len = "ragged",
    max_query_len = 8,
    query_format = "concatenated",
    alignment = 16,
    graphs = "always",
    plans_on_host = true,
    dependent_launch = true,
    lse = "log2",
    lse_precision = "dtype",
    quant_output = true,
    sparse = "optional",
    max_list_width = 8192,
    features = "sinks,deterministic",
    name = "EVERY_KEY_2",
    provider = "elsewhere",
    priority = "90:100, 10x:-50, *:7",
    crate = ::mla_runtime,
)]
impl mla_runtime::backend::DecodeBackend for EveryKey {
    decode_body!(common::Bytes);
}

#[test]
fn every_key_reaches_its_field() {
    const EXPECTED: BackendSpec = BackendSpec::new("EVERY_KEY_2", Phase::Decode, Platform::Cuda)
        .with_provider("elsewhere")
        .with_capabilities(&[
            SM90_ALONE,
            CapabilityMatch::Family(10),
            CapabilityMatch::Floor(Capability::new(12, 0)),
        ])
        .with_dtypes(&[DType::F16, DType::BF16])
        .with_dims(Some(&[
            HeadDims::new(128, 64, 128),
            HeadDims::new(192, 64, 256),
        ]))
        .with_cache_dims(Some(&[CacheDims::R1]))
        .with_heads(HeadCounts::Range(1, 128))
        .with_kv_formats(&[
            KvFormat::F16,
            KvFormat::BF16,
            KvFormat::Fp8,
            KvFormat::Fp8DsMla,
        ])
        .with_page_sizes(PageSizes::MultipleOf(16))
        .with_query_len(QueryLen::Ragged)
        .with_max_query_len(Some(8))
        .with_query_format(QueryFormat::Concatenated)
        .with_key_layout(KeyLayout::Packed)
        .with_alignment(16)
        .with_graphs(GraphSupport::Always)
        .with_plans_on_host(true)
        .with_dependent_launch(true)
        .with_lse(LseOutput::Log2)
        .with_lse_precision(LsePrecision::DType)
        .with_quant_output(true)
        .with_sparse(SparseSupport::Optional)
        .with_max_list_width(Some(8192))
        .with_features(FeatureSet::of(&[Feature::Sinks, Feature::Deterministic]))
        .with_priority(Priority {
            by_capability: &[(SM90_ALONE, 100), (CapabilityMatch::Family(10), -50)],
            otherwise: 7,
        });
    assert_eq!(EveryKey::SPEC, EXPECTED);
}

mod inner {
    pub(crate) struct Decode;
}

#[mla_backend(sm = "any", dtypes = "f32,bf16", page_sizes = 64, heads = "16|64", priority = -3)]
impl DecodeBackend for inner::Decode {
    decode_body!(common::Bytes);
}

#[test]
fn defaults_are_those_of_the_phase() {
    let spec = <inner::Decode as DecodeBackend>::SPEC;
    let min = BackendSpec::new("DECODE", Phase::Decode, Platform::Cuda)
        .with_provider(env!("CARGO_PKG_NAME"));
    assert_eq!(
        spec,
        min.with_dtypes(&[DType::F32, DType::BF16])
            .with_kv_formats(&[KvFormat::F32, KvFormat::BF16])
            .with_page_sizes(PageSizes::List(&[64]))
            .with_heads(HeadCounts::List(&[16, 64]))
            .with_priority(Priority::everywhere(-3))
    );
}

#[test]
fn block_in_a_function() {
    struct Local;

    #[mla_backend(sm = "90", dtypes = "bf16", compiled = ANY_GPU)]
    impl DecodeBackend for Local {
        decode_body!(common::Bytes);
    }

    assert_eq!(Local::SPEC.name, "LOCAL");
    assert!(linked().contains(&"LOCAL"));
}

// A `cfg` after the attribute also applies to the attribute's code.
#[mla_backend(sm = "90", dtypes = "bf16")]
#[cfg(any())]
impl DecodeBackend for Missing {}

macro_rules! backend {
    ($ty:ident, $sm:literal, $flag:expr) => {
        struct $ty;

        #[mla_backend(sm = $sm, dtypes = "bf16", compiled = ANY_GPU, requires_r1 = $flag)]
        impl DecodeBackend for $ty {
            decode_body!(common::Bytes);
        }
    };
}

backend!(FromMacro, "80+", true);

#[test]
fn values_may_come_from_a_macro() {
    assert_eq!(FromMacro::SPEC.name, "FROM_MACRO");
    assert_eq!(FromMacro::SPEC.dims, Some(&[HeadDims::R1][..]));
}

const SM80: &[&str] = &["sm_80", "sm_90", "sm_100", "sm_120", "compute_80"];
const SM90: &[&str] = &["sm_90a"];
const RUN_ON: &[Run] = &[Run {
    gpu: "H100",
    capability: Capability::new(9, 0),
    date: "2026-11-22",
    commit: "0123456",
}];

decode_backend! {
    Declared on common::Bytes: sm = "90", dtypes = "bf16", compiled = SM90, run_on = RUN_ON
}

decode_backend! {
    Compiled on common::Bytes: sm = "compiled", dtypes = "bf16", compiled = "SM90 | crate::SM80"
}

#[test]
fn kernel_facts_beside_the_spec() {
    const SM90_FAMILY: CompiledFamily = CompiledFamily {
        name: "sm90",
        targets: SM90,
    };
    const SM80_FAMILY: CompiledFamily = CompiledFamily {
        name: "sm80",
        targets: SM80,
    };
    let declared = KernelFacts {
        families: Some(&[SM90_FAMILY]),
        run_on: Some(RUN_ON),
    };
    assert_eq!(Declared::KERNELS, declared);
    assert_eq!(Declared::ENTRY.kernels, declared);
    assert_eq!(Declared::SPEC.capabilities, [SM90_ALONE]);
    let compiled = KernelFacts {
        families: Some(&[SM90_FAMILY, SM80_FAMILY]),
        run_on: None,
    };
    assert_eq!(Compiled::KERNELS, compiled);
    // PTX for 8.0 runs wherever machine code of these families runs.
    let floor = CapabilityMatch::Floor(Capability::new(8, 0));
    assert_eq!(Compiled::SPEC.capabilities, [floor]);
    assert_eq!(
        <inner::Decode as DecodeBackend>::KERNELS,
        KernelFacts::UNKNOWN
    );
}

// This package lacks the feature, so it is off.
#[allow(unexpected_cfgs)]
mod left_out {
    use super::*;

    /// Everything is left out except the type.
    pub(crate) struct LeftOut;

    #[mla_backend(feature = "sm1000|sm2000", sm = "100", dtypes = "bf16", run_on = RUN_ON)]
    impl NoSuchTrait::DecodeBackend for LeftOut {
        type Device = NoSuchDevice;
    }
}

#[test]
fn absent_backend_same_spec() {
    use mla_runtime::dispatch::{Absent, DecodeMember};

    let spec = BackendSpec::new("LEFT_OUT", Phase::Decode, Platform::Cuda)
        .with_provider(env!("CARGO_PKG_NAME"))
        .with_capabilities(&[SM100])
        .with_dtypes(&[DType::BF16])
        .with_kv_formats(&[KvFormat::BF16]);
    assert_eq!(left_out::LeftOut::SPEC, spec);
    assert_eq!(*left_out::LeftOut::MEMBER.spec(), spec);
    let entry = left_out::LeftOut::ENTRY;
    assert!(!entry.is_implemented());
    let Err(cause) = entry.availability() else {
        panic!("{entry:?} is left out");
    };
    // The file is also compiled in crates with other names.
    let off = concat!("feature `sm1000` of ", env!("CARGO_PKG_NAME"), " is off");
    assert_eq!(cause.to_string(), off);
    assert_eq!(cause.remedy(), "build with `--features sm1000`");
    assert_eq!(entry.kernels.run_on, Some(RUN_ON));
    if cfg!(not(miri)) {
        assert!(linked().contains(&"LEFT_OUT"));
    }
}

fn linked() -> Vec<&'static str> {
    LINKED.iter().map(|entry| entry.spec.name).collect()
}

#[test]
#[cfg_attr(miri, ignore = "the linker section is not there: run without miri")]
fn every_block_is_linked_once() {
    let linked = linked();
    for name in ["FLASH_ATTN", "EVERY_KEY_2", "DECODE", "LOCAL", "FROM_MACRO"] {
        assert_eq!(
            linked.iter().filter(|it| **it == name).count(),
            1,
            "{linked:?}"
        );
    }
    let left_out = LINKED.iter().filter(|entry| !entry.is_implemented());
    assert_eq!(left_out.count(), 1, "{linked:?}");
}

#[test]
fn specs_by_hand_are_checked() {
    let decode = BackendSpec::new("BY_HAND", Phase::Decode, Platform::Cuda);
    let prefill = BackendSpec::new("BY_HAND", Phase::Prefill, Platform::Cuda);
    let heads = HeadCounts::Range(65537, 65538);
    let of_hopper = Priority {
        by_capability: &[(SM90_ALONE, 10)],
        otherwise: 0,
    };
    let rows_of_448 = decode.with_cache_dims(Some(const { &[CacheDims::new(448, 64)] }));
    let no_lse = decode.with_lse(LseOutput::None);
    let on_cpu = decode.with_platform(Platform::Cpu);
    for good in [decode, prefill] {
        assert_eq!(good.checked(), good);
    }
    for (field, bad) in [
        ("name: ", decode.with_name("ALL")),
        ("sm: ", decode.with_capabilities(&[])),
        ("dtypes: ", prefill.with_dtypes(&[])),
        ("heads: ", decode.with_heads(heads)),
        (
            "page_sizes: ",
            decode.with_page_sizes(PageSizes::List(&[0])),
        ),
        ("alignment: ", decode.with_alignment(12)),
        (
            "dims: ",
            prefill.with_dims(Some(const { &[HeadDims::new(0, 64, 128)] })),
        ),
        (
            "cache_dims: ",
            decode.with_cache_dims(Some(const { &[CacheDims::new(0, 64)] })),
        ),
        (
            "cache_dims: ",
            rows_of_448.with_kv_formats(&[KvFormat::Fp8DsMla]),
        ),
        ("kv: ", decode.with_kv_formats(&[KvFormat::F32])),
        ("lse: ", prefill.with_lse(LseOutput::None)),
        ("max_query_len: ", decode.with_max_query_len(Some(8))),
        ("graphs: ", decode.with_graphs(GraphSupport::Always)),
        (
            "lse_precision: ",
            no_lse.with_lse_precision(LsePrecision::DType),
        ),
        (
            "features: ",
            decode.with_features(FeatureSet::of(&[Feature::DenseRequests])),
        ),
        ("priority: ", on_cpu.with_priority(of_hopper)),
    ] {
        let panic = std::panic::catch_unwind(|| bad.checked()).unwrap_err();
        let said = panic.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(said.starts_with(field), "{field}{said}");
    }
}
