//! Batch invariance of dense decode on lengths that span many splits: each request has the bits
//! that it has alone. Conformance has the same topic on short lengths, for every backend that
//! declares the feature.

use mla_conformance::{DecodeCase, Failure, Trial};
use mla_kernels::Cuda;
use mla_kernels::backends::sm80::{MmaMla, MmaMlaScaled};
use mla_runtime::backend::DecodeBackend;
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::spec::{Feature, FeatureSet, Problem, QueryLen};
use rand::RngExt as _;

use crate::common::{gpu, rng};

/// Heads, the maximum of query tokens, and the cache of a problem in bf16.
type Shape = (u32, usize, KvFormat);

/// Compares the requests of random batches with each request alone. Without `batch_invariant`, the
/// problem does not ask for the feature.
fn compare<B: DecodeBackend<Device = Cuda>>(
    device: &Cuda,
    (heads, query, kv): Shape,
    lens: &[usize],
    batch_invariant: bool,
) -> Result<(), Failure> {
    let mut problem = Problem::new(MlaDims::R1, heads, DType::BF16)
        .with_kv_format(kv)
        .with_page_size(64)
        .with_query_len(QueryLen::Ragged);
    if batch_invariant {
        problem = problem.with_features(FeatureSet::of(&[Feature::BatchInvariant]));
    }
    let query_lens = (0..lens.len()).map(|request| 1 + request % query);
    DecodeCase {
        query_lens: query_lens.collect(),
        trial: Trial::AmongOthers(3),
        ..DecodeCase::new(problem, lens)
    }
    .check::<B>(device)
    .map(drop)
}

/// Checks the shapes with few long requests and with many short ones. The same comparison without
/// the feature finds other bits somewhere, so it would find them here.
fn check<B: DecodeBackend<Device = Cuda>>(shapes: &[Shape]) {
    let device = &*gpu();
    let mut rng = rng(47);
    let mut differ = 0;
    for &shape in shapes {
        let (heads, query, kv) = shape;
        // For many rows of the longest context, the f64 reference would take minutes.
        let longest = 32_768 / (heads as usize * query / 16).max(1);
        let long = [63, 4096, 12_289, longest, 1, 12_287, 65, 64].map(|len| len.min(longest));
        let many: Vec<_> = (0..40).map(|_| rng.random_range(0..900)).collect();
        for lens in [&long[..], &many] {
            let requests = lens.len();
            let name = format!("{heads} heads, {query} query tokens, {kv}, {requests} requests");
            let lens: Vec<_> = lens.iter().map(|len| *len.max(&query)).collect();
            if let Err(failure) = compare::<B>(device, shape, &lens, true) {
                panic!("{name}: {failure}");
            }
            match compare::<B>(device, shape, &lens, false) {
                Ok(()) => {}
                Err(Failure::Differs {
                    feature: Feature::BatchInvariant,
                    ..
                }) => differ += 1,
                Err(failure) => panic!("{name}, without the feature: {failure}"),
            }
        }
    }
    assert!(differ > 0, "no launch depends on the batch");
}

#[test]
#[ignore = "needs a GPU: cargo test -r --features sm80 --test gpu -- --ignored invariance"]
fn mma_mla_requests_have_the_bits_that_they_have_alone() {
    check::<MmaMla>(&[
        (16, 1, KvFormat::BF16),
        (20, 2, KvFormat::BF16),
        (128, 1, KvFormat::BF16),
        (64, 1, KvFormat::Fp8),
    ]);
    check::<MmaMlaScaled>(&[(16, 1, KvFormat::Fp8DsMla), (64, 1, KvFormat::Fp8PerToken)]);
}
