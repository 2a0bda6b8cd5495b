//! Mistakes of engines, and orders of calls that do not occur in tests of a single step. The engine
//! gets an error that names the field, or the bits of a correct call.

use std::sync::Arc;

use mla_kernels::Cuda;
use mla_kernels::device::Buffer;
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBatch, DecodeCall, DecodeStage, LayerConfig, Output, Query, SelectedDecode, StepLimits,
};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::select::Registry;
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheRef, Layout, Memory as _, TensorMut, TensorRef,
};

use crate::batch::{Batch, Case, Engine};
use crate::common::gpu;
use crate::{MIXED, layer, pairs, prepared};

/// The same number of requests as in MIXED, with other lengths. Most are longer.
const OTHER: &[(u32, u32)] = &[
    (1, 350),
    (2, 1300),
    (200, 200),
    (333, 1500),
    (5, 5),
    (1, 0),
    (40, 777),
    (2, 3),
    (8, 8),
    (0, 12),
];

/// Prepares another step in between. It writes other plans, makes cuDNN build further plans, and
/// gives cuDNN a larger workspace.
#[test]
#[ignore = "needs a GPU: \
    cargo test --package mla-flashinfer --features sm90,mla-kernels/sm90 --test together -- \
    --include-ignored"]
fn a_captured_mixed_step_is_replayed_after_another_step() {
    let gpu = &*gpu();
    let (case, other) = (Case::new(16, MIXED), Case::new(16, OTHER));
    for pair in pairs(gpu) {
        let (batch, between) = (Batch::new(&case), Batch::new(&other));
        let (layer, mut workspace, mut engine) = prepared(gpu, pair, &batch, &other.limits());
        engine
            .forward(&layer, &mut workspace, batch.tokens())
            .unwrap();
        let expected = engine.outcome(gpu).unwrap();
        let graph = gpu
            .capture(|_| engine.forward(&layer, &mut workspace, batch.tokens()))
            .unwrap();

        for _ in 0..2 {
            between.prepare(&layer, &mut workspace).unwrap();
            let mut others = Engine::new(gpu, &between).unwrap();
            others
                .forward(&layer, &mut workspace, between.tokens())
                .unwrap();

            engine.load(gpu, &batch).unwrap();
            batch.prepare(&layer, &mut workspace).unwrap();
            // SAFETY: layer, workspace and tensors live, and only this stream uses them.
            unsafe { graph.replay() }.unwrap();
            assert!(engine.outcome(gpu).unwrap() == expected, "{pair:?}");
        }
    }
}

/// Each layer has its own workspace, while all share what FlashInfer and cuDNN keep for the whole
/// program.
#[test]
#[ignore = "needs a GPU: \
    cargo test --package mla-flashinfer --features sm90,mla-kernels/sm90 --test together -- \
    --include-ignored"]
fn two_streams_give_what_each_gives_alone() {
    let gpu = &*gpu();
    let second = Cuda::on_stream(gpu.stream().context().new_stream().unwrap()).unwrap();
    assert!(!Arc::ptr_eq(gpu.stream(), second.stream()));
    for pair in pairs(gpu) {
        let mut sides: Vec<_> = [(gpu, MIXED), (&second, OTHER)]
            .into_iter()
            .map(|(device, requests)| {
                let case = Case::new(16, requests);
                let batch = Batch::new(&case);
                let layer = layer(device, pair, &case);
                let workspace = layer.workspace(&case.limits()).unwrap();
                let alone = batch.run(&layer).unwrap();
                let engine = Engine::new(device, &batch).unwrap();
                (batch, layer, workspace, engine, alone)
            })
            .collect();
        // The two sides alternate without waiting.
        for _ in 0..3 {
            for (batch, layer, workspace, engine, _) in &mut sides {
                batch.prepare(layer, workspace).unwrap();
                engine.forward(layer, workspace, batch.tokens()).unwrap();
            }
        }
        for (_, layer, _, engine, alone) in &sides {
            let given = engine.outcome(layer.device()).unwrap();
            assert!(given.out == alone.out && given.lse == alone.lse, "{pair:?}");
        }
    }
}

/// cuDNN would allocate in a capture, and the plan of a refused step would be missing from then on.
#[test]
#[ignore = "needs a GPU: \
    cargo test --package mla-flashinfer --features sm90,mla-kernels/sm90 --test together -- \
    --include-ignored"]
fn a_plan_of_cudnn_is_not_built_within_a_capture() {
    let gpu = &*gpu();
    let pair = ("CUDNN", "FLASHINFER_MLA");
    if !pairs(gpu).contains(&pair) {
        return;
    }
    let case = Case::new(16, MIXED);
    let batch = Batch::new(&case);
    let expected = batch.run(&layer(gpu, pair, &case)).unwrap();
    let (layer, mut workspace, mut engine) = prepared(gpu, pair, &batch, &case.limits());
    let captured = gpu.capture(|_| engine.forward(&layer, &mut workspace, batch.tokens()));
    let error = captured.err().expect("a refusal").to_string();
    assert!(
        error.contains("plan of CUDNN: given one that is built within a capture"),
        "{error}"
    );
    engine.load(gpu, &batch).unwrap();
    engine
        .forward(&layer, &mut workspace, batch.tokens())
        .unwrap();
    assert!(engine.outcome(gpu).unwrap().out == expected.out);
}

/// FLASHINFER_MLA's lists name rows of the block table, so they are valid for one batch only.
#[test]
#[ignore = "needs a GPU: \
    cargo test --package mla-flashinfer --features sm90,mla-kernels/sm90 --test together -- \
    --include-ignored"]
fn a_decode_is_of_the_batch_that_was_prepared() {
    let mut decode = Decode::new(&gpu());
    let refused = |done: Result<()>| done.expect_err("a refusal").to_string();
    let prepared = "2 query tokens of 2 requests with at most 2 pages";
    // The backend has no prepared batch.
    let error = refused(decode.run([2, 2], 2));
    assert!(
        error.contains("accepted a batch that was prepared"),
        "{error}"
    );
    decode.prepare(&[1, 1], &[128, 0], 2).unwrap();
    decode.run([2, 2], 2).unwrap();
    // The same tokens are in other rows of the table.
    for (requests, max_pages) in [(1, 2), (2, 1), (1, 4)] {
        let error = refused(decode.run([2, requests], max_pages));
        assert!(
            error.starts_with("batch: given 2 query tokens of") && error.contains(prepared),
            "{error}"
        );
    }
    // These lengths exceed a request's row of the table, and 32 bits.
    for longest in [129, u32::MAX] {
        let error = refused(decode.prepare(&[1, 1], &[1, longest], 2));
        assert_eq!(
            error,
            format!("host lengths: given {longest}, accepted at most 2 pages of 64")
        );
        // The previous plan is gone, too.
        let error = refused(decode.run([2, 2], 2));
        assert!(
            error.contains("accepted a batch that was prepared"),
            "{error}"
        );
    }
    let error = refused(decode.prepare(&[1], &[1, 1], 2));
    assert_eq!(error, "host query lengths: given 1, accepted 2");
    let error = refused(decode.prepare(&[1 << 31, 1], &[1, 1], 2));
    assert!(
        error.starts_with("query tokens: given 2147483648"),
        "{error}"
    );
    // The batch has more query tiles than FlashInfer's lists have room for.
    let error = refused(decode.prepare(&[1 << 24, 1], &[1, 1], 2));
    assert!(error.contains("query tiles and splits"), "{error}");
    decode.prepare(&[1, 1], &[64, 65], 2).unwrap();
    decode.run([2, 2], 2).unwrap();
}

/// A backend with 16 heads, a cache of four pages, and two query tokens.
struct Decode {
    gpu: Cuda,
    backend: SelectedDecode<Cuda>,
    state: <SelectedDecode<Cuda> as DecodeStage>::State,
    plan: <SelectedDecode<Cuda> as DecodeStage>::Metadata,
    /// Zeros, which serve as queries, cache, lengths and tables. They name page 0, which exists.
    zeros: Buffer,
    out: Buffer,
}

impl Decode {
    const HEADS: usize = 16;

    fn new(gpu: &Cuda) -> Self {
        let problem = Problem::new(MlaDims::R1, Self::HEADS as u32, DType::BF16)
            .with_page_size(64)
            .with_query_len(QueryLen::Ragged);
        let config = LayerConfig::new(problem, 0.07);
        let registry = Registry::linked().unwrap();
        let backend = registry
            .instantiate_decode("FLASHINFER_MLA", gpu, &config)
            .unwrap();
        let limits = StepLimits::new(2, 2, 2).with_decode_query_len(2);
        Self {
            state: backend.state(gpu, &limits).unwrap(),
            plan: backend.metadata(gpu, &limits).unwrap(),
            backend,
            zeros: gpu.allocate(4 * 64 * 576 * 2).unwrap(),
            out: gpu.allocate(2 * Self::HEADS * 512 * 2).unwrap(),
            gpu: gpu.clone(),
        }
    }

    fn batch(zeros: &Buffer, requests: usize, max_pages: usize) -> Result<DecodeBatch<'_, Cuda>> {
        let integers = |len| ArrayRef::new(Cuda::bytes(zeros), len);
        Ok(DecodeBatch::new(
            BlockTable::new(integers(requests * max_pages)?, requests, max_pages)?,
            (integers(requests)?, 64 * max_pages),
            (integers(requests + 1)?, 2),
        ))
    }

    fn prepare(&mut self, query_lens: &[u32], seq_lens: &[u32], max_pages: usize) -> Result<()> {
        let batch =
            Self::batch(&self.zeros, seq_lens.len(), max_pages)?.with_host(query_lens, seq_lens);
        self.backend
            .prepare(&self.gpu, &batch, &mut self.state, &mut self.plan)
    }

    fn run(&mut self, [tokens, requests]: [usize; 2], max_pages: usize) -> Result<()> {
        let layout = |width| Layout::contiguous(DType::BF16, [tokens, Self::HEADS, width]);
        let query = |width| TensorRef::new(Cuda::bytes(&self.zeros), layout(width));
        let cache = CacheLayout::contiguous(MlaDims::R1, KvFormat::BF16, 4, 64);
        let call = DecodeCall::new(
            Query::Split {
                latent: query(512)?,
                rope: query(64)?,
            },
            CacheRef::new(Cuda::bytes(&self.zeros), cache)?,
            Self::batch(&self.zeros, requests, max_pages)?,
            Output::Plain(TensorMut::new(Cuda::bytes_mut(&mut self.out), layout(512))?),
        );
        // SAFETY: zeros are valid lengths and pages for every table and cache. The plan replaces
        // the starts. A batch with other numbers than the prepared one is refused.
        unsafe {
            self.backend
                .decode(&self.gpu, call, &mut self.state, &self.plan)?;
        }
        self.gpu.synchronize()
    }
}
