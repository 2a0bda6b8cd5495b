//! Makes every allocation, upload and launch of a step fail once. The steps after it must be right.

use mla_kernels::Cuda;
use mla_kernels::decode_graph::{DecodeGraph, DecodeShape};
use mla_kernels::device::faults::Operation;

use super::batch::{Batch, Case, Engine, Outcome};
use super::replays::{MAX_LEN, decodes, limits};
use super::{GpuLayer, MIXED, gpu_layer};
use crate::common::gpu;

/// Returns the number of operations of this kind that `work` does.
fn count(gpu: &Cuda, operation: Operation, work: impl FnOnce()) -> u64 {
    let before = gpu.operations(operation);
    work();
    gpu.operations(operation) - before
}

fn is_asked_for(error: &mla_runtime::Error) -> bool {
    error.to_string().contains("a failure that was asked for")
}

/// A second layer of the model on the same device, with its own memory.
struct Bystander<'a> {
    layer: GpuLayer,
    batch: &'a Batch,
    expected: Outcome,
}

impl Bystander<'_> {
    fn is_right(&self) -> bool {
        self.batch.run(&self.layer).unwrap() == self.expected
    }
}

#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90,faults --test gpu -- --ignored faults"]
fn a_step_that_fails_anywhere_leaves_the_next_one_right() {
    let gpu = &*gpu();
    for case in [
        Case {
            context_rows: 128,
            ..Case::new(16, MIXED)
        },
        Case::new(128, &[(1, 700), (1, 900), (2, 300)]),
    ] {
        let batch = Batch::new(&case);
        let other = Batch::new(&Case {
            seed: 2,
            ..Case::new(16, &[(1, 500), (40, 90)])
        });
        let layer = gpu_layer(gpu, &case);
        let their_layer = gpu_layer(gpu, &other.case);
        let bystander = Bystander {
            expected: other.run(&their_layer).unwrap(),
            layer: their_layer,
            batch: &other,
        };
        let expected = batch.run(&layer).unwrap();
        let mut workspace = layer.workspace(&case.limits()).unwrap();
        let mut engine = Engine::new(gpu, &batch).unwrap();
        let tokens = batch.tokens();
        let mut step = |engine: &mut Engine<Cuda>| {
            batch.prepare(&layer, &mut workspace)?;
            engine.forward(&layer, &mut workspace, tokens)
        };
        for operation in [Operation::Upload, Operation::Launch] {
            engine.load(gpu, &batch).unwrap();
            let all = count(gpu, operation, || step(&mut engine).unwrap());
            assert!(all > 0, "{operation:?}");
            for failing in 1..=all {
                gpu.fail(operation, failing);
                let refused = step(&mut engine).unwrap_err();
                assert!(is_asked_for(&refused), "{refused}");
                engine.load(gpu, &batch).unwrap();
                step(&mut engine).unwrap();
                let given = engine.outcome(gpu).unwrap();
                given.is_that_of(&expected, (operation, failing, &case));
                if failing % 4 == 1 {
                    assert!(bystander.is_right(), "{operation:?} {failing} of {all}");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90,faults --test gpu -- --ignored faults"]
fn a_workspace_or_layer_that_cannot_be_made_gives_back_what_it_took() {
    let gpu = &*gpu();
    let case = Case::new(16, MIXED);
    let batch = Batch::new(&case);
    let layer = gpu_layer(gpu, &case);
    let expected = batch.run(&layer).unwrap();
    let before = gpu.allocated_bytes();
    for operation in [Operation::Allocation, Operation::Launch] {
        let make = || layer.workspace(&case.limits());
        let all = count(gpu, operation, || drop(make().unwrap()));
        assert!(all > 0, "{operation:?}");
        for failing in 1..=all {
            gpu.fail(operation, failing);
            let refused = make().map(drop).unwrap_err();
            assert!(is_asked_for(&refused), "{refused}");
            assert_eq!(
                gpu.allocated_bytes(),
                before,
                "{operation:?} {failing} of {all}"
            );
            assert!(batch.run(&layer).unwrap() == expected);
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: \
            cargo test -r --features sm90,faults --test gpu -- --ignored faults"]
fn a_capture_or_replay_that_fails_leaves_the_next_one_right() {
    let gpu = &*gpu();
    let case = Case::new(16, &[]);
    let layer = gpu_layer(gpu, &case);
    let mut workspace = layer.workspace(&limits(8, 1, 64)).unwrap();
    let batch = decodes(&case, 8, 1, 1);
    let mut engine = Engine::new(gpu, &batch).unwrap();
    let shape = DecodeShape::new(8, 1, MAX_LEN);
    let step = batch.step(&workspace).unwrap().with_max_len(Some(MAX_LEN));
    workspace.prepare(&layer, &step).unwrap();
    engine
        .forward(&layer, &mut workspace, shape.tokens())
        .unwrap();
    let expected = engine.outcome(gpu).unwrap();
    let mut capture = |engine: &mut Engine<Cuda>| {
        DecodeGraph::capture(&layer, &mut workspace, shape, |workspace| {
            engine.forward(&layer, workspace, shape.tokens())
        })
    };
    for operation in [Operation::Upload, Operation::Launch] {
        let all = count(gpu, operation, || drop(capture(&mut engine).unwrap()));
        for failing in 1..=all {
            gpu.fail(operation, failing);
            let refused = capture(&mut engine).map(drop).unwrap_err();
            assert!(is_asked_for(&refused), "{refused}");
        }
    }
    let mut graph = capture(&mut engine).unwrap();
    let uploads = count(gpu, Operation::Upload, || {
        // SAFETY: everything that was captured lives, and the cache has the batch's pages.
        unsafe { graph.replay(&layer, &mut workspace, &step) }.unwrap();
    });
    for failing in 1..=uploads {
        gpu.fail(Operation::Upload, failing);
        // SAFETY: everything that was captured lives, and the cache has the batch's pages.
        let refused = unsafe { graph.replay(&layer, &mut workspace, &step) };
        assert!(is_asked_for(&refused.unwrap_err()));
        engine.load(gpu, &batch).unwrap();
        // SAFETY: everything that was captured lives, and the cache has the batch's pages.
        unsafe { graph.replay(&layer, &mut workspace, &step) }.unwrap();
        let given = engine.outcome(gpu).unwrap();
        given.is_that_of(&expected, ("upload", failing));
    }
}
