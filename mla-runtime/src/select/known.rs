//! The backends that are known by name. This version may or may not implement them.
//!
//! An engine that asks for `FLASHINFER_MLA` needs a better answer than "no such name". The answer
//! contains the true constraints of that backend, and the crate that implements it or the
//! replacement in mla-kernels. The support matrix is therefore complete and shows its gaps. If a
//! backend of the same name is linked, it takes the place of the known one, by the rules of
//! [`Registry`](crate::select::Registry).
//!
//! # Order
//!
//! If a reference order exists, the priorities follow it. Prefill on generation 10 tries
//! FLASH_ATTN, TRTLLM_RAGGED and FLASHINFER, in this order; elsewhere it tries FLASH_ATTN first.
//! All others follow in the order of the constants below. Decode backends have no reference order,
//! so they follow that order, too.

use crate::backend::Entry;
use crate::model::{DType, HeadDims, KvFormat};
use crate::spec::{
    BackendSpec, CacheDims, Capability, CapabilityMatch, Cause, Feature, FeatureSet, GraphSupport,
    HeadCounts, KeyLayout, LseOutput, LsePrecision, PageSizes, Phase, Platform, Priority,
    QueryFormat, QueryLen, SparseSupport,
};

const HOPPER: CapabilityMatch = CapabilityMatch::Exact(Capability::new(9, 0));
const AMPERE_ON: CapabilityMatch = CapabilityMatch::Floor(Capability::new(8, 0));
const BLACKWELL: CapabilityMatch = CapabilityMatch::Family(10);

// Other head dimensions than R1's, for which some prefill kernels are built.
const GLM_5: HeadDims = HeadDims::new(192, 64, 256);

const fn prefill(name: &'static str, provider: &'static str) -> BackendSpec {
    BackendSpec {
        provider,
        ..BackendSpec::new(name, Phase::Prefill, Platform::Cuda)
    }
}

const fn decode(name: &'static str, provider: &'static str) -> BackendSpec {
    BackendSpec {
        provider,
        ..BackendSpec::new(name, Phase::Decode, Platform::Cuda)
    }
}

/// FlashAttention: version 3 on 9.0, 4 on 10.x, 2 elsewhere.
pub const FLASH_ATTN: BackendSpec = BackendSpec {
    dims: Some(&[
        HeadDims::R1,
        GLM_5,
        HeadDims::new(64, 64, 128),
        HeadDims::new(256, 0, 256),
    ]),
    priority: Priority::everywhere(100),
    ..prefill("FLASH_ATTN", "flash-attention")
}
.checked();

/// FlashInfer's ragged prefill, as mla-flashinfer has it.
pub const FLASHINFER: BackendSpec = BackendSpec {
    capabilities: &[AMPERE_ON],
    dims: Some(&[HeadDims::R1]),
    alignment: 16,
    lse_precision: LsePrecision::DType,
    priority: Priority {
        by_capability: &[(BLACKWELL, 80)],
        otherwise: 90,
    },
    ..prefill("FLASHINFER", "flashinfer")
}
.checked();

/// TensorRT-LLM's ragged prefill.
pub const TRTLLM_RAGGED: BackendSpec = BackendSpec {
    capabilities: &[BLACKWELL],
    dims: Some(&[HeadDims::R1, GLM_5]),
    lse: LseOutput::Log2,
    priority: Priority {
        by_capability: &[(BLACKWELL, 90)],
        otherwise: 80,
    },
    ..prefill("TRTLLM_RAGGED", "tensorrt-llm")
}
.checked();

/// TokenSpeed's prefill.
pub const TOKENSPEED_MLA_PREFILL: BackendSpec = BackendSpec {
    capabilities: &[BLACKWELL],
    dims: Some(&[HeadDims::R1]),
    priority: Priority::everywhere(70),
    ..prefill("TOKENSPEED_MLA", "tokenspeed")
}
.checked();

/// AITER's FlashAttention for AMD GPUs of the MI3xx series.
pub const ROCM_AITER_FA: BackendSpec = BackendSpec {
    platform: Platform::Rocm,
    priority: Priority::everywhere(60),
    ..prefill("ROCM_AITER_FA", "aiter")
}
.checked();

/// cuDNN's attention, as mla-cudnn has it.
pub const CUDNN: BackendSpec = BackendSpec {
    capabilities: &[
        CapabilityMatch::Family(8),
        HOPPER,
        BLACKWELL,
        CapabilityMatch::Family(12),
    ],
    dims: Some(&[HeadDims::R1]),
    alignment: 16,
    features: FeatureSet::of(&[Feature::StridedOutputs]),
    priority: Priority::everywhere(50),
    ..prefill("CUDNN", "cudnn")
}
.checked();

// The name `CUSTOM` is reserved for a third-party backend. Until one is registered, its absence is
// the only reason against it, on every kind of device.
const fn custom(platform: Platform) -> BackendSpec {
    BackendSpec {
        platform,
        dtypes: DType::ALL,
        ..prefill("CUSTOM", "third party")
    }
    .checked()
}

/// FlashMLA's dense kernel, as mla-flashmla has it.
pub const FLASHMLA: BackendSpec = BackendSpec {
    capabilities: &[HOPPER],
    cache_dims: Some(&[CacheDims::R1]),
    page_sizes: PageSizes::List(&[64]),
    query_len: QueryLen::Uniform,
    query_format: QueryFormat::Concatenated,
    alignment: 16,
    graphs: GraphSupport::UniformBatch,
    features: FeatureSet::of(&[Feature::Deterministic]),
    priority: Priority::everywhere(85),
    ..decode("FLASHMLA", "flashmla")
}
.checked();

/// FlashAttention 3 on the rows of the cache.
pub const FLASH_ATTN_MLA: BackendSpec = BackendSpec {
    capabilities: &[HOPPER],
    page_sizes: PageSizes::MultipleOf(16),
    query_len: QueryLen::Ragged,
    graphs: GraphSupport::UniformBatch,
    priority: Priority::everywhere(90),
    ..decode("FLASH_ATTN_MLA", "flash-attention")
}
.checked();

/// FlashInfer's batch decode, as mla-flashinfer has it.
pub const FLASHINFER_MLA: BackendSpec = BackendSpec {
    capabilities: &[AMPERE_ON],
    cache_dims: Some(&[CacheDims::R1]),
    query_len: QueryLen::Ragged,
    alignment: 16,
    graphs: GraphSupport::UniformBatch,
    plans_on_host: true,
    lse_precision: LsePrecision::DType,
    features: FeatureSet::of(&[Feature::StridedOutputs, Feature::SplitCache]),
    priority: Priority::everywhere(80),
    ..decode("FLASHINFER_MLA", "flashinfer")
}
.checked();

/// TokenSpeed's decode.
pub const TOKENSPEED_MLA_DECODE: BackendSpec = BackendSpec {
    capabilities: &[BLACKWELL],
    kv_formats: &[KvFormat::Fp8],
    page_sizes: PageSizes::List(&[32, 64]),
    query_len: QueryLen::Uniform,
    graphs: GraphSupport::UniformBatch,
    lse: LseOutput::Log2,
    priority: Priority::everywhere(70),
    ..decode("TOKENSPEED_MLA", "tokenspeed")
}
.checked();

/// CUTLASS's MLA example kernel, as mla-flashinfer has it. It pads queries to 128 heads.
pub const CUTLASS_MLA: BackendSpec = BackendSpec {
    capabilities: &[BLACKWELL],
    heads: HeadCounts::Range(1, 128),
    cache_dims: Some(&[CacheDims::R1]),
    page_sizes: PageSizes::List(&[16, 32, 64, 128]),
    query_len: QueryLen::Single,
    alignment: 16,
    graphs: GraphSupport::SingleToken,
    features: FeatureSet::of(&[Feature::StridedOutputs]),
    priority: Priority::everywhere(60),
    ..decode("CUTLASS_MLA", "cutlass")
}
.checked();

/// Triton's decode, for every capability.
pub const TRITON_MLA: BackendSpec = BackendSpec {
    kv_formats: &[KvFormat::F16, KvFormat::BF16, KvFormat::Fp8],
    page_sizes: PageSizes::MultipleOf(16),
    query_len: QueryLen::Uniform,
    graphs: GraphSupport::UniformBatch,
    priority: Priority::everywhere(50),
    ..decode("TRITON_MLA", "triton")
}
.checked();

/// FlashMLA's sparse kernel, which pads queries to 64 or 128 heads. Each query token has its own
/// list of slots, so query lengths may differ.
pub const FLASHMLA_SPARSE: BackendSpec = BackendSpec {
    capabilities: &[HOPPER, BLACKWELL],
    dtypes: &[DType::BF16],
    cache_dims: Some(&[CacheDims::R1]),
    heads: HeadCounts::Range(1, 128),
    kv_formats: &[KvFormat::BF16, KvFormat::Fp8DsMla],
    page_sizes: PageSizes::List(&[64]),
    query_len: QueryLen::Ragged,
    graphs: GraphSupport::UniformBatch,
    sparse: SparseSupport::Required,
    priority: Priority::everywhere(40),
    ..decode("FLASHMLA_SPARSE", "flashmla")
}
.checked();

/// FlashInfer's sparse decode.
pub const FLASHINFER_MLA_SPARSE: BackendSpec = BackendSpec {
    capabilities: &[BLACKWELL],
    kv_formats: &[KvFormat::BF16, KvFormat::Fp8],
    page_sizes: PageSizes::MultipleOf(32),
    query_len: QueryLen::Ragged,
    graphs: GraphSupport::UniformBatch,
    lse: LseOutput::Log2,
    sparse: SparseSupport::Required,
    priority: Priority::everywhere(30),
    ..decode("FLASHINFER_MLA_SPARSE", "flashinfer")
}
.checked();

/// FlashAttention-3 with pages of one slot. The list then serves as the block table.
pub const FLASH_ATTN_MLA_SPARSE: BackendSpec = BackendSpec {
    priority: Priority::everywhere(25),
    ..sparse_on_hopper("FLASH_ATTN_MLA_SPARSE", "flash-attention")
}
.checked();

/// FlashInfer's sparse decode on Hopper.
pub const FLASHINFER_MLA_SPARSE_SM90: BackendSpec = BackendSpec {
    priority: Priority::everywhere(20),
    ..sparse_on_hopper("FLASHINFER_MLA_SPARSE_SM90", "flashinfer")
}
.checked();

// Neither of the two returns a log-sum-exp.
const fn sparse_on_hopper(name: &'static str, provider: &'static str) -> BackendSpec {
    BackendSpec {
        capabilities: &[HOPPER],
        cache_dims: Some(&[CacheDims::R1]),
        query_len: QueryLen::Ragged,
        graphs: GraphSupport::UniformBatch,
        lse: LseOutput::None,
        sparse: SparseSupport::Required,
        ..decode(name, provider)
    }
}

/// The prefill backend of the CPU device.
pub const CPU_PREFILL: BackendSpec = BackendSpec {
    key_layout: KeyLayout::Split,
    ..cpu(Phase::Prefill)
}
.checked();

/// The decode backend of the CPU device.
pub const CPU_DECODE: BackendSpec = BackendSpec {
    kv_formats: KvFormat::ALL,
    query_len: QueryLen::Ragged,
    sparse: SparseSupport::Optional,
    features: cpu(Phase::Decode)
        .features
        .with(Feature::DenseRequests)
        .with(Feature::SecondCache)
        .with(Feature::SplitCache)
        .with(Feature::Sinks),
    ..cpu(Phase::Decode)
}
.checked();

const fn cpu(phase: Phase) -> BackendSpec {
    BackendSpec {
        dtypes: DType::ALL,
        quant_output: true,
        features: FeatureSet::of(&[
            Feature::Deterministic,
            Feature::BatchInvariant,
            Feature::NanPropagation,
            Feature::StridedOutputs,
            Feature::NonCausal,
            Feature::QueryScales,
        ]),
        provider: "native",
        ..BackendSpec::new("CPU", phase, Platform::Cpu)
    }
}

const FLASHINFER_CRATE: Cause = Cause::NotLinked("mla-flashinfer");
const CPU_CRATE: Cause = Cause::NotLinked("mla-cpu");
const PYTHON: Cause = Cause::Needs("Python, which compiles its kernels when it runs");
const HOPPER_SPARSE: Cause = Cause::Instead("WGMMA_MLA_SPARSE");

// Makes an entry of each spec, with the cause why this version does not run it.
macro_rules! known {
    ($($spec:expr => $cause:expr,)*) => {
        &[$(Entry::known($spec, || Err($cause))),*]
    };
}

/// Every known backend. A name may occur several times, for different kinds of devices.
pub static KNOWN: &[Entry] = known! {
    FLASH_ATTN => Cause::Instead("WGMMA_ATTN on Hopper, MMA_ATTN on every GPU since Ampere"),
    FLASHINFER => FLASHINFER_CRATE,
    TRTLLM_RAGGED => Cause::Needs("NVIDIA's cubins, which have no source"),
    TOKENSPEED_MLA_PREFILL => PYTHON,
    ROCM_AITER_FA => Cause::NotBuilt,
    CUDNN => Cause::NotLinked("mla-cudnn"),
    custom(Platform::Cuda) => Cause::NotRegistered,
    custom(Platform::Rocm) => Cause::NotRegistered,
    custom(Platform::Cpu) => Cause::NotRegistered,
    FLASHMLA => Cause::NotLinked("mla-flashmla"),
    FLASH_ATTN_MLA => Cause::Instead("WGMMA_MLA"),
    FLASHINFER_MLA => FLASHINFER_CRATE,
    TOKENSPEED_MLA_DECODE => PYTHON,
    CUTLASS_MLA => FLASHINFER_CRATE,
    TRITON_MLA => Cause::Instead("WGMMA_MLA on Hopper, MMA_MLA on every GPU since Ampere"),
    FLASHMLA_SPARSE => Cause::Instead(
        "WGMMA_MLA_SPARSE on Hopper, MMA_MLA_SPARSE on every GPU since Ampere"
    ),
    FLASHINFER_MLA_SPARSE => Cause::Instead("MMA_MLA_SPARSE"),
    FLASH_ATTN_MLA_SPARSE => HOPPER_SPARSE,
    FLASHINFER_MLA_SPARSE_SM90 => HOPPER_SPARSE,
    CPU_PREFILL => CPU_CRATE,
    CPU_DECODE => CPU_CRATE,
};
