//! The backends of architectures that this build leaves out: their names and constraints stay, with the
//! feature that would compile them as the reason why they cannot run.

#[cfg(not(feature = "sm90"))]
use mla_runtime::availability::Cause;
use mla_runtime::capability::{Capability, CapabilityMatch, Platform};
use mla_runtime::dims::HeadDims;
#[cfg(not(feature = "sm90"))]
use mla_runtime::dispatch::Absent;
use mla_runtime::feature::{Feature, FeatureSet};
use mla_runtime::kv_format::KvFormat;
use mla_runtime::spec::{
    BackendSpec, CacheDims, GraphSupport, HeadCounts, PageSizes, Phase, Priority, QueryLen,
};

/// What the attribute writes for `FlashMla`.
const FLASHMLA: BackendSpec = BackendSpec {
    capabilities: &[CapabilityMatch::Exact(Capability::new(9, 0))],
    cache_dims: Some(&[CacheDims::R1]),
    heads: HeadCounts::Range(1, 128),
    kv_formats: &[KvFormat::F16, KvFormat::BF16, KvFormat::Fp8],
    page_sizes: PageSizes::MultipleOf(16),
    query_len: QueryLen::Ragged,
    graphs: GraphSupport::Always,
    features: FeatureSet::of(&[Feature::Deterministic]),
    priority: Priority::everywhere(100),
    ..BackendSpec::new("FLASHMLA", Phase::Decode, Platform::Cuda)
}
.checked();

/// What the attribute writes for `FlashAttn`.
const FLASH_ATTN: BackendSpec = BackendSpec {
    capabilities: &[CapabilityMatch::Exact(Capability::new(9, 0))],
    dims: Some(&[
        HeadDims::R1,
        HeadDims::new(192, 64, 256),
        HeadDims::new(64, 32, 64),
    ]),
    graphs: GraphSupport::Always,
    features: FeatureSet::of(&[Feature::Deterministic]),
    priority: Priority::everywhere(100),
    ..BackendSpec::new("FLASH_ATTN", Phase::Prefill, Platform::Cuda)
}
.checked();

/// `FlashMla`, which is left out.
#[cfg(not(feature = "sm90"))]
pub enum NoFlashMla {}

#[cfg(not(feature = "sm90"))]
impl Absent for NoFlashMla {
    const SPEC: BackendSpec = FLASHMLA;
    const CAUSE: Cause = Cause::FeatureOff("sm90");
}

/// `FlashAttn`, which is left out.
#[cfg(not(feature = "sm90"))]
pub enum NoFlashAttn {}

#[cfg(not(feature = "sm90"))]
impl Absent for NoFlashAttn {
    const SPEC: BackendSpec = FLASH_ATTN;
    const CAUSE: Cause = Cause::FeatureOff("sm90");
}

#[cfg(not(any(feature = "sm90", miri)))]
mod entries {
    use mla_runtime::backend::{Entry, LINKED};
    use mla_runtime::dispatch::Absent;
    use mla_runtime::private::linkme;

    #[linkme::distributed_slice(LINKED)]
    #[linkme(crate = linkme)]
    static FLASHMLA: Entry = super::NoFlashMla::ENTRY;

    #[linkme::distributed_slice(LINKED)]
    #[linkme(crate = linkme)]
    static FLASH_ATTN: Entry = super::NoFlashAttn::ENTRY;
}

// With the feature on, the two ways to write a spec can be compared.
#[cfg(all(test, feature = "sm90"))]
mod tests {
    use mla_runtime::backend::{DecodeBackend, PrefillBackend};

    use crate::backends::sm90::FlashAttn;
    use crate::backends::sm90::FlashMla;

    #[test]
    fn specs_are_those_of_the_backends() {
        assert_eq!(super::FLASHMLA, FlashMla::SPEC);
        assert_eq!(super::FLASH_ATTN, FlashAttn::SPEC);
    }
}
