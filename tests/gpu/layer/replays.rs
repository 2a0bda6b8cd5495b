//! Results that a captured step has to give, with any backends.

use mla_kernels::Cuda;
use mla_kernels::decode_graph::{DecodeGraph, DecodeShape};
use mla_runtime::backend::{DecodeStage, PrefillStage, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::layer::MlaLayer;
use mla_runtime::plan::slots::SKIPPED;
use rand::RngExt as _;

use super::batch::{Batch, Case, Engine};
use crate::common::rng;

pub(crate) const MAX_LEN: u32 = 1500;

/// Returns limits for steps of any of the tests' batches.
pub(crate) fn limits(requests: usize, query_len: u32, page_size: u32) -> StepLimits {
    StepLimits::new(
        requests,
        requests * query_len as usize,
        MAX_LEN.div_ceil(page_size) as usize,
    )
    .with_decode_query_len(query_len as usize)
}

/// Makes a step of decodes in a cache of a fixed size.
pub(crate) fn decodes(case: &Case, requests: usize, query_len: u32, seed: u64) -> Batch {
    let mut rng = rng(seed);
    let lens = (0..requests).map(|_| (query_len, rng.random_range(query_len..=MAX_LEN)));
    let mut batch = Batch::new(&Case {
        requests: lens.collect(),
        threshold: query_len,
        seed,
        ..case.clone()
    });
    batch.enlarge_cache(requests.max(40), MAX_LEN);
    batch
}

/// Returns the batch with padding after it, up to `requests` requests.
pub(crate) fn padded(batch: &Batch, requests: usize, query_len: u32) -> Batch {
    let mut padded = batch.clone();
    let tokens = requests * query_len as usize;
    let extend = |bytes: &mut Vec<u8>| {
        let row = bytes.len() / batch.tokens();
        // Padding has inputs, too, which have no effect.
        bytes.resize(tokens * row, 0x3c);
    };
    extend(&mut padded.query);
    extend(&mut padded.latent);
    extend(&mut padded.rope);
    let padding = Request::new(query_len, 0);
    padded.requests.resize(requests, padding);
    padded.slots.resize(tokens, SKIPPED);
    padded.tables.resize(requests * padded.max_pages, i32::MAX);
    padded
}

/// Captures steps of `query_len` tokens and replays them with other lengths, pages and slots.
pub(crate) fn are_the_steps_run_at_once<P, D>(layer: &MlaLayer<P, D>, case: &Case, query_len: u32)
where
    P: PrefillStage<Device = Cuda>,
    D: DecodeStage<Device = Cuda>,
{
    let gpu = layer.device();
    let sizes = [1, 4, 24, 40];
    let max = sizes[3];
    let largest = decodes(case, max, query_len, 99);
    let limits = limits(max, query_len, case.page_size);
    let mut workspace = layer.workspace(&limits).unwrap();
    let mut eager_workspace = layer.workspace(&limits).unwrap();
    let mut engine = Engine::new(gpu, &largest).unwrap();
    let record =
        |workspace: &mut _, shape: DecodeShape| engine.forward(layer, workspace, shape.tokens());
    let mut graphs =
        DecodeGraph::capture_sizes(layer, &mut workspace, &sizes, query_len, MAX_LEN, record)
            .unwrap();
    assert!(DecodeGraph::for_requests(&mut graphs, 41).is_none());
    for (step, requests) in [40, 1, 3, 17, 24, 25, 2, 40, 4].into_iter().enumerate() {
        // The weights stay those of the capture.
        let mut batch = decodes(case, requests, query_len, step as u64);
        batch.weights.clone_from(&largest.weights);
        let graph = DecodeGraph::for_requests(&mut graphs, requests).unwrap();
        let shape = graph.shape();
        let (tokens, all) = (batch.tokens(), shape.tokens());
        let at_once = padded(&batch, shape.requests, query_len);
        let mut eager = Engine::new(gpu, &at_once).unwrap();
        let step_at_once = at_once.step(&eager_workspace).unwrap();
        let step_at_once = step_at_once.with_max_len(Some(MAX_LEN));
        eager_workspace.prepare(layer, &step_at_once).unwrap();
        eager.forward(layer, &mut eager_workspace, all).unwrap();
        let expected = eager.outcome(gpu).unwrap();

        // The graph pads the step by itself.
        engine.load(gpu, &at_once).unwrap();
        let plan = batch.step(&workspace).unwrap();
        // SAFETY: the layer, the workspace and the engine's tensors live, and the cache has every
        // page that a batch names.
        unsafe { graph.replay(layer, &mut workspace, &plan) }.unwrap();
        let given = engine.outcome(gpu).unwrap();

        let row = case.dims.head.v as usize * 2 * case.heads as usize;
        assert!(given.out[..all * row] == expected.out[..], "step {step}");
        let padding = &given.out[tokens * row..all * row];
        assert!(padding.iter().all(|byte| *byte == 0), "step {step}");
        let lses = 4 * all * case.heads as usize;
        assert!(given.lse[..lses] == expected.lse[..], "step {step}");
        for (token, lse) in given.lse[..lses].chunks(4).enumerate() {
            let lse = f32::from_le_bytes(lse.try_into().unwrap());
            let is_padding = token % all >= tokens;
            assert_eq!(lse == f32::NEG_INFINITY, is_padding, "step {step}");
        }
        assert!(given.cache == expected.cache, "step {step}");
    }
}

/// Captures the case's own step and replays it twice.
pub(crate) fn are_the_mixed_step<P, D>(layer: &MlaLayer<P, D>, case: &Case)
where
    P: PrefillStage<Device = Cuda>,
    D: DecodeStage<Device = Cuda>,
{
    let gpu = layer.device();
    let batch = Batch::new(case);
    let mut workspace = layer.workspace(&case.limits()).unwrap();
    batch.prepare(layer, &mut workspace).unwrap();
    let tokens = batch.tokens();
    let mut eager = Engine::new(gpu, &batch).unwrap();
    eager.forward(layer, &mut workspace, tokens).unwrap();
    let expected = eager.outcome(gpu).unwrap();

    let mut engine = Engine::new(gpu, &batch).unwrap();
    let graph = gpu
        .capture(|_| engine.forward(layer, &mut workspace, tokens))
        .unwrap();
    // Capturing has not run anything yet.
    assert!(engine.outcome(gpu).unwrap().out != expected.out);
    for _ in 0..2 {
        // SAFETY: layer, workspace and tensors live, and only this stream uses them.
        unsafe { graph.replay() }.unwrap();
        assert!(engine.outcome(gpu).unwrap() == expected, "{case:?}");
    }
}
