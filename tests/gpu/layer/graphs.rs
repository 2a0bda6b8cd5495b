//! Captured decode steps against the same steps run at once.

use mla_kernels::decode_graph::{DecodeGraph, DecodeGraphs, DecodeShape};
use mla_runtime::backend::StepLimits;
use mla_runtime::batch::Request;
use mla_runtime::device::Memory;
use mla_runtime::dtype::DType;
use mla_runtime::kv_format::KvFormat;
use mla_runtime::plan::slots::SKIPPED;
use rand::RngExt as _;

use super::MIXED;
use super::allocations::count;
use super::batch::{Batch, Case, Engine, gpu_layer};
use crate::common::{gpu, rng};

const MAX_LEN: u32 = 1500;

/// Room for steps of any of the tests' batches.
fn limits(requests: usize, query_len: u32, page_size: u32) -> StepLimits {
    StepLimits::new(
        requests,
        requests * query_len as usize,
        MAX_LEN.div_ceil(page_size) as usize,
    )
    .with_decode_query_len(query_len as usize)
}

/// A step of decodes whose cache is as large as that of any other.
fn decodes(case: &Case, requests: usize, query_len: u32, seed: u64) -> Batch {
    let mut rng = rng(seed);
    let lens = (0..requests).map(|_| (query_len, rng.random_range(query_len..=MAX_LEN)));
    let mut batch = Batch::new(&Case {
        requests: lens.collect(),
        threshold: query_len,
        seed,
        ..case.clone()
    });
    let most = largest(case, requests.max(40)) * batch.cache_layout.page_stride;
    assert!(batch.cache.len() <= most);
    batch.cache.resize(most, 0xff);
    batch.cache_layout.pages = most / batch.cache_layout.page_stride;
    batch
}

fn largest(case: &Case, requests: usize) -> usize {
    requests * MAX_LEN.div_ceil(case.page_size) as usize + 3
}

/// The batch with padding behind it, up to so many requests.
fn padded(batch: &Batch, requests: usize, query_len: u32) -> Batch {
    let mut padded = batch.clone();
    let tokens = requests * query_len as usize;
    let extend = |bytes: &mut Vec<u8>| {
        let row = bytes.len() / batch.tokens();
        // Padding has inputs too, and whatever they are they give nothing.
        bytes.resize(tokens * row, 0x3c);
    };
    extend(&mut padded.query);
    extend(&mut padded.latent);
    extend(&mut padded.rope);
    let padding = Request {
        q: query_len,
        kv: 0,
    };
    padded.requests.resize(requests, padding);
    padded.slots.resize(tokens, SKIPPED);
    padded.tables.resize(requests * padded.max_pages, i32::MAX);
    padded
}

/// Every step's output, log-sum-exp and cache are those of the same padded step run at once, whatever the
/// number of requests, their lengths, pages and slots; and padding gives zeros.
#[test]
#[ignore = "needs a Hopper GPU: cargo test --release --features sm90 --test gpu -- --include-ignored layer"]
fn replays_are_the_steps_run_at_once() {
    let gpu = &*gpu();
    for (heads, dtype, kv_format, page_size, query_len) in [
        (16, DType::BF16, KvFormat::BF16, 64, 1),
        (128, DType::BF16, KvFormat::BF16, 64, 2),
        (16, DType::F16, KvFormat::F16, 16, 3),
        (16, DType::BF16, KvFormat::Fp8, 64, 1),
    ] {
        let case = Case {
            dtype,
            kv_format,
            page_size,
            ..Case::new(heads, &[])
        };
        let layer = gpu_layer(gpu, &case);
        let sizes = [1, 4, 24, 40];
        let most = sizes[3];
        let largest = decodes(&case, most, query_len, 99);
        let limits = limits(most, query_len, page_size);
        let mut workspace = layer.workspace(&limits).unwrap();
        let mut eager_workspace = layer.workspace(&limits).unwrap();
        let mut engine = Engine::new(gpu, &largest).unwrap();
        let record = |workspace: &mut _, shape: DecodeShape| {
            engine.forward(&layer, workspace, shape.tokens())
        };
        let mut graphs =
            DecodeGraphs::capture(&layer, &mut workspace, &sizes, query_len, MAX_LEN, record)
                .unwrap();
        assert!(graphs.for_requests(41).is_none());
        for (step, requests) in [40, 1, 3, 17, 24, 25, 2, 40, 4].into_iter().enumerate() {
            // The weights stay those of the capture.
            let mut batch = decodes(&case, requests, query_len, step as u64);
            batch.weights.clone_from(&largest.weights);
            let graph = graphs.for_requests(requests).unwrap();
            let shape = graph.shape();
            let (tokens, all) = (batch.tokens(), shape.tokens());
            let at_once = padded(&batch, shape.requests, query_len);
            let mut eager = Engine::new(gpu, &at_once).unwrap();
            eager_workspace.prepare(&layer, &at_once.step()).unwrap();
            eager.forward(&layer, &mut eager_workspace, all).unwrap();
            let expected = eager.outcome(gpu).unwrap();

            // The graph pads the step by itself.
            engine.load(gpu, &at_once).unwrap();
            // SAFETY: the layer, the workspace and the engine's tensors live, and the cache has as many
            // pages as any batch names.
            unsafe { graph.replay(&layer, &mut workspace, &batch.step()) }.unwrap();
            let given = engine.outcome(gpu).unwrap();

            let row = case.dims.head.v as usize * 2 * heads as usize;
            assert!(given.out[..all * row] == expected.out[..], "step {step}");
            let padding = &given.out[tokens * row..all * row];
            assert!(padding.iter().all(|byte| *byte == 0), "step {step}");
            let lses = 4 * all * heads as usize;
            assert!(given.lse[..lses] == expected.lse[..], "step {step}");
            for (token, lse) in given.lse[..lses].chunks(4).enumerate() {
                let lse = f32::from_le_bytes(lse.try_into().unwrap());
                let is_padding = token % all >= tokens;
                assert_eq!(lse == f32::NEG_INFINITY, is_padding, "step {step}");
            }
            assert!(given.cache == expected.cache, "step {step}");
        }
    }
}

/// Prefills and chunks of their context can be captured as well, for as long as the lengths stay.
#[test]
#[ignore = "needs a Hopper GPU: cargo test --release --features sm90 --test gpu -- --include-ignored layer"]
fn a_captured_mixed_step_is_the_step_run_at_once() {
    let gpu = &*gpu();
    for (heads, kv_format, context_rows) in [
        (16, KvFormat::BF16, 128),
        (16, KvFormat::Fp8, 4096),
        (128, KvFormat::BF16, 4096),
    ] {
        let case = Case {
            kv_format,
            context_rows,
            ..Case::new(heads, MIXED)
        };
        let batch = Batch::new(&case);
        let layer = gpu_layer(gpu, &case);
        let mut workspace = layer.workspace(&case.limits()).unwrap();
        workspace.prepare(&layer, &batch.step()).unwrap();
        let tokens = batch.tokens();
        let mut eager = Engine::new(gpu, &batch).unwrap();
        eager.forward(&layer, &mut workspace, tokens).unwrap();
        let expected = eager.outcome(gpu).unwrap();

        let mut engine = Engine::new(gpu, &batch).unwrap();
        let graph = gpu
            .capture(|_| engine.forward(&layer, &mut workspace, tokens))
            .unwrap();
        // Nothing has run yet.
        assert!(engine.outcome(gpu).unwrap().out != expected.out);
        for _ in 0..2 {
            // SAFETY: layer, workspace and tensors live, and only this stream uses them.
            unsafe { graph.replay() }.unwrap();
            assert!(engine.outcome(gpu).unwrap() == expected, "{case:?}");
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test --release --features sm90 --test gpu -- --include-ignored layer"]
fn a_replay_allocates_nothing_and_refuses_by_name() {
    let gpu = &*gpu();
    let case = Case::new(16, &[]);
    let layer = gpu_layer(gpu, &case);
    let limits = limits(8, 1, 64);
    let mut workspace = layer.workspace(&limits).unwrap();
    let mut other = layer.workspace(&limits).unwrap();
    let batch = decodes(&case, 8, 1, 1);
    let mut engine = Engine::new(gpu, &batch).unwrap();
    let shape = DecodeShape {
        requests: 8,
        query_len: 1,
        max_len: MAX_LEN,
    };
    let mut graph = DecodeGraph::capture(&layer, &mut workspace, shape, |workspace| {
        engine.forward(&layer, workspace, shape.tokens())
    })
    .unwrap();
    let step = batch.step();
    // SAFETY: everything that was captured lives, and the cache has the batch's pages.
    let mut replay = || unsafe { graph.replay(&layer, &mut workspace, &step) }.unwrap();
    // Whatever is looked up in the driver's library for the first time.
    replay();
    let allocations = count(|| {
        for _ in 0..3 {
            replay();
        }
    });
    assert_eq!(allocations, 0);
    gpu.synchronize().unwrap();

    // SAFETY: as above; these are refused before anything is launched.
    let mut refuse = |workspace: &mut _, batch: &Batch| unsafe {
        graph
            .replay(&layer, workspace, &batch.step())
            .unwrap_err()
            .to_string()
    };
    assert!(refuse(&mut other, &batch).starts_with("workspace: given WorkspaceId("));
    assert_eq!(
        refuse(&mut workspace, &decodes(&case, 9, 1, 1)),
        "requests: given 9, accepted at most 8, for which the graph was captured"
    );
    assert_eq!(
        refuse(&mut workspace, &decodes(&case, 2, 2, 1)),
        "requests.q: given 2 of request 0, accepted 1, for which the graph was captured"
    );
    let mut longer = batch.clone();
    longer.requests[3].kv = MAX_LEN + 1;
    assert!(
        refuse(&mut workspace, &longer)
            .starts_with("requests.kv: given 1501 of request 3, accepted at most ")
    );
    for (shape, message) in [
        (
            DecodeShape {
                requests: 9,
                ..shape
            },
            "shape.requests: given 9, accepted at most limits.requests = 8",
        ),
        (
            DecodeShape {
                requests: 1,
                query_len: 2,
                ..shape
            },
            "shape.query_len: given 2, accepted at most limits.decode_query_len = 1",
        ),
        (
            DecodeShape {
                max_len: 1 << 20,
                ..shape
            },
            "shape.max_len: given 1048576, accepted at most 1536 tokens, which the workspace's \
             block table has room for",
        ),
    ] {
        let error = DecodeGraph::capture(&layer, &mut workspace, shape, |_| Ok(())).err();
        assert_eq!(error.expect("refused").to_string(), message);
    }
}
