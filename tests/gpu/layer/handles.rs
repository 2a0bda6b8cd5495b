//! Tests of layers, workspaces and graphs of two streams of one GPU, which nothing orders.

use mla_kernels::decode_graph::{DecodeGraph, DecodeShape};

use super::batch::{Batch, Case, Engine};
use super::replays::{MAX_LEN, decodes, limits};
use super::{MIXED, gpu_layer};
use crate::common::{gpu, message, on_new_stream};

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_layer_refuses_another_stream_by_the_field() {
    let gpu = &*gpu();
    let second = &on_new_stream(gpu);
    let case = Case::new(16, MIXED);
    let batch = Batch::new(&case);
    let (layer, their_layer) = (gpu_layer(gpu, &case), gpu_layer(second, &case));
    let mut workspace = layer.workspace(&case.limits()).unwrap();
    let refused = |field: &str, message: &str| {
        assert!(
            message.starts_with(&format!("{field}: given memory of stream ")),
            "{message}"
        );
    };
    refused(
        "workspace",
        &message(batch.prepare(&their_layer, &mut workspace)),
    );
    batch.prepare(&layer, &mut workspace).unwrap();
    let tokens = batch.tokens();
    let mut engine = Engine::new(gpu, &batch).unwrap();
    let given = message(engine.forward(&their_layer, &mut workspace, tokens));
    refused("workspace", &given);
    for field in ["W_kv_b", "query", "latent", "rope", "cache", "out", "lse"] {
        let mut engine = Engine::new(gpu, &batch).unwrap();
        let theirs = Engine::new(second, &batch).unwrap();
        match field {
            "W_kv_b" => engine.weights = theirs.weights,
            "query" => engine.query = theirs.query,
            "latent" => engine.latent = theirs.latent,
            "rope" => engine.rope = theirs.rope,
            "cache" => engine.cache = theirs.cache,
            "out" => engine.out = theirs.out,
            _ => engine.lse = theirs.lse,
        }
        refused(
            field,
            &message(engine.forward(&layer, &mut workspace, tokens)),
        );
    }
    engine.forward(&layer, &mut workspace, tokens).unwrap();
    assert!(engine.outcome(gpu).unwrap().out == batch.run(&their_layer).unwrap().out);
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_captured_step_refuses_another_stream() {
    let gpu = &*gpu();
    let second = &on_new_stream(gpu);
    let case = Case::new(16, &[]);
    let (layer, their_layer) = (gpu_layer(gpu, &case), gpu_layer(second, &case));
    let limits = limits(8, 1, 64);
    let mut workspace = layer.workspace(&limits).unwrap();
    let batch = decodes(&case, 8, 1, 1);
    let mut engine = Engine::new(gpu, &batch).unwrap();
    let shape = DecodeShape::new(8, 1, MAX_LEN);
    let refused = DecodeGraph::capture(&their_layer, &mut workspace, shape, |_| Ok(()));
    assert!(message(refused).starts_with("workspace: given memory of stream "));
    let mut graph = DecodeGraph::capture(&layer, &mut workspace, shape, |workspace| {
        engine.forward(&layer, workspace, shape.tokens())
    })
    .unwrap();
    let step = batch.step(&workspace).unwrap();
    // SAFETY: everything that was captured lives. The call is refused before anything is launched.
    let refused = unsafe { graph.replay(&their_layer, &mut workspace, &step) };
    assert!(message(refused).starts_with("workspace: given memory of stream "));
}
