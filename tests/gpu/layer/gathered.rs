//! Tests of cache formats that only the gather of context reads, which are quantised. The decode
//! backend has nothing to do.

use mla_kernels::Cuda;
use mla_kernels::backends::sm90::WgmmaAttn;
use mla_runtime::backend::{DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, StepLimits};
use mla_runtime::layer::MlaLayer;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::{BackendSpec, Feature, FeatureSet, Phase, Platform, QueryLen};
use mla_runtime::{Error, Result};

use super::batch::{Batch, Case, Distance};
use crate::common::gpu;

/// Placeholder for a decode backend. A step without decodes never calls it.
pub(super) struct NoDecode;

impl DecodeBackend for NoDecode {
    type Device = Cuda;
    type State = ();
    type Metadata = ();

    const SPEC: BackendSpec = BackendSpec::new("NO_DECODE", Phase::Decode, Platform::Cuda)
        .with_query_len(QueryLen::Ragged)
        .with_features(FeatureSet::of(&[Feature::BatchInvariant]))
        .with_kv_formats(KvFormat::ALL);

    fn new(_: &Cuda, _: &LayerConfig) -> Result<Self> {
        Ok(Self)
    }

    fn state(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn metadata(&self, _: &Cuda, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn prepare(&self, _: &Cuda, _: &DecodeBatch<'_, Cuda>, (): &mut (), (): &mut ()) -> Result<()> {
        Err(Error::argument("decode", "a step with decodes", "none"))
    }

    unsafe fn decode(&self, _: &Cuda, _: DecodeCall<'_, Cuda>, (): &mut (), (): &()) -> Result<()> {
        Err(Error::argument("decode", "a step with decodes", "none"))
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn context_of_every_cache_format_agrees_with_the_cpu() {
    let gpu = &*gpu();
    for dtype in [DType::BF16, DType::F16] {
        let quantised = [KvFormat::Fp8, KvFormat::Fp8DsMla, KvFormat::Fp8PerToken];
        for kv_format in [KvFormat::of(dtype)].into_iter().chain(quantised) {
            for context_rows in [64, 320, 4096] {
                let case = Case {
                    dtype,
                    kv_format,
                    threshold: 0,
                    context_rows,
                    ..Case::new(16, &[(1, 300), (65, 640), (3, 200), (128, 128), (2, 2)])
                };
                let layer: MlaLayer<WgmmaAttn, NoDecode> =
                    MlaLayer::of(gpu, &case.config()).unwrap();
                let batch = Batch::new(&case);
                let (given, expected) = (batch.run(&layer).unwrap(), batch.on_cpu());
                assert!(given.cache == expected.cache, "{dtype} {kv_format}");
                assert_eq!(given.absorbed_tokens, 0);
                let distance = given.distance(&expected, &case);
                let accepted = Distance::accepted(&case, given.chunks);
                assert!(
                    distance.worst <= accepted.worst && distance.lse <= accepted.lse,
                    "{dtype} {kv_format} {context_rows}: {distance:?}"
                );
            }
        }
    }
}
