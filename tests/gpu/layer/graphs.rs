//! Compares captured decode steps with the same steps run directly.

use mla_kernels::decode_graph::{DecodeGraph, DecodeShape};
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::tensor::Memory;

use super::allocations::count;
use super::batch::{Batch, Case, Engine};
use super::replays::{self, MAX_LEN, decodes, limits};
use super::{MIXED, gpu_layer};
use crate::common::gpu;

/// Checks that every step's output, log-sum-exp and cache equal those of the same padded step run
/// directly, for any number of requests, lengths, pages and slots. Also checks that padding gives
/// zeros.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
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
        replays::are_the_steps_run_at_once(&gpu_layer(gpu, &case), &case, query_len);
    }
}

/// Checks that prefills and chunks of their context can be captured as well, as long as the lengths
/// stay the same.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
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
        replays::are_the_mixed_step(&gpu_layer(gpu, &case), &case);
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_replay_allocates_nothing_and_refuses_by_name() {
    let gpu = &*gpu();
    let case = Case::new(16, &[]);
    let layer = gpu_layer(gpu, &case);
    let limits = limits(8, 1, 64);
    let mut workspace = layer.workspace(&limits).unwrap();
    let mut other = layer.workspace(&limits).unwrap();
    // Steps that are too large for the graph are planned for a larger workspace.
    let more = layer.workspace(&replays::limits(9, 2, 64)).unwrap();
    let batch = decodes(&case, 8, 1, 1);
    let mut engine = Engine::new(gpu, &batch).unwrap();
    let shape = DecodeShape::new(8, 1, MAX_LEN);
    let mut graph = DecodeGraph::capture(&layer, &mut workspace, shape, |workspace| {
        engine.forward(&layer, workspace, shape.tokens())
    })
    .unwrap();
    let step = batch.step(&workspace).unwrap().with_max_len(Some(MAX_LEN));
    // SAFETY: everything that was captured lives, and the cache has the batch's pages.
    let mut replay = || unsafe { graph.replay(&layer, &mut workspace, &step) }.unwrap();
    // The first replay looks up functions in the driver's library.
    replay();
    let allocations = count(|| {
        for _ in 0..3 {
            replay();
        }
    });
    assert_eq!(allocations, 0);
    gpu.synchronize().unwrap();

    let mut refuse = |workspace: &mut _, batch: &Batch| {
        let step = batch.step(&more).unwrap();
        // SAFETY: everything that was captured lives. The call is refused before anything is
        // launched.
        let refused = unsafe { graph.replay(&layer, workspace, &step) };
        refused.unwrap_err().to_string()
    };
    assert!(refuse(&mut other, &batch).starts_with("workspace: given number "));
    assert_eq!(
        refuse(&mut workspace, &decodes(&case, 9, 1, 1)),
        "requests: given 9, accepted at most 8, for which the graph was captured"
    );
    assert_eq!(
        refuse(&mut workspace, &decodes(&case, 2, 2, 1)),
        "requests.new_tokens: given 2 of the step's request 0, accepted 1, for which the graph was \
         captured"
    );
    let longer = Case {
        requests: vec![(1, MAX_LEN + 1)],
        threshold: 1,
        ..case.clone()
    };
    assert_eq!(
        refuse(&mut workspace, &Batch::new(&longer)),
        "requests.total: given 1501 of the step's request 0, accepted at most 1500, for which the \
         graph was captured"
    );
    for (shape, message) in [
        (
            DecodeShape::new(9, 1, MAX_LEN),
            "shape.requests: given 9, accepted 1 to limits.requests = 8",
        ),
        (
            DecodeShape::new(1, 2, MAX_LEN),
            "shape.query_len: given 2, accepted 1 to limits.decode_query_len = 1",
        ),
        (
            DecodeShape::new(8, 1, 1 << 20),
            "shape.max_len: given 1048576, accepted at most 1536 tokens, which the workspace's \
             block table has room for",
        ),
    ] {
        let error = DecodeGraph::capture(&layer, &mut workspace, shape, |_| Ok(())).err();
        assert_eq!(error.expect("refused").to_string(), message);
    }
}
