//! The names for variants of the runtime's enums.
//!
//! A test of the runtime compares these tables with the enums. It fails if a variant is missing
//! here. A missing cache format is even a compile error.

/// A name in an attribute, and its variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Name {
    pub(crate) text: &'static str,
    pub(crate) variant: &'static str,
}

const fn name(text: &'static str, variant: &'static str) -> Name {
    Name { text, variant }
}

/// `dtype::DType`.
pub(crate) const DTYPES: &[Name] = &[name("f32", "F32"), name("f16", "F16"), name("bf16", "BF16")];

/// `kv_format::KvFormat`. The unquantised formats have the names and variants of their dtypes.
pub(crate) const KV_FORMATS: &[Name] = &[
    name("f32", "F32"),
    name("f16", "F16"),
    name("bf16", "BF16"),
    name("fp8", "Fp8"),
    name("fp8_ds_mla", "Fp8DsMla"),
    name("fp8_per_token", "Fp8PerToken"),
];

/// `spec::QueryLen`. Each level includes the levels before it.
pub(crate) const QUERY_LENS: &[Name] =
    &[name("single", "Single"), name("uniform", "Uniform"), RAGGED];

/// Any number of query tokens for each request. Prefill is always ragged.
pub(crate) const RAGGED: Name = name("ragged", "Ragged");

/// `spec::QueryFormat`.
pub(crate) const QUERY_FORMATS: &[Name] =
    &[name("split", "Split"), name("concatenated", "Concatenated")];

/// `spec::KeyLayout`.
pub(crate) const KEY_LAYOUTS: &[Name] = &[name("packed", "Packed"), name("split", "Split")];

/// `spec::GraphSupport`. Each level includes the levels before it.
pub(crate) const GRAPHS: &[Name] = &[
    name("never", "Never"),
    name("single_token", "SingleToken"),
    name("uniform_batch", "UniformBatch"),
    name("always", "Always"),
];

/// `spec::LseOutput`.
pub(crate) const LSES: &[Name] = &[name("none", "None"), name("ln", "Ln"), name("log2", "Log2")];

/// `spec::LsePrecision`.
pub(crate) const LSE_PRECISIONS: &[Name] = &[name("f32", "F32"), name("dtype", "DType")];

/// `spec::SparseSupport`.
pub(crate) const SPARSE: &[Name] = &[
    name("never", "Never"),
    name("optional", "Optional"),
    name("required", "Required"),
];

/// `feature::Feature`.
pub(crate) const FEATURES: &[Name] = &[
    name("sinks", "Sinks"),
    name("deterministic", "Deterministic"),
    name("batch_invariant", "BatchInvariant"),
    name("nan_propagation", "NanPropagation"),
    name("strided_outputs", "StridedOutputs"),
    name("dense_requests", "DenseRequests"),
    name("second_cache", "SecondCache"),
    name("split_cache", "SplitCache"),
    name("non_causal", "NonCausal"),
    name("query_scales", "QueryScales"),
];
