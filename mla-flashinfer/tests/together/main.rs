//! Tests of a program with FlashInfer's kernels, cuDNN's and this project's own. Each backend is
//! there once, and all of them give the same results as the CPU. With only one crate's features,
//! the backends of the others are listed as absent.

#![cfg(feature = "gpu")]

// These are parts of the layer's own GPU tests.
#[allow(dead_code, reason = "the layer's own tests use the rest")]
#[path = "../../../tests/gpu/layer/batch.rs"]
mod batch;
#[allow(dead_code, reason = "the layer's own tests use the rest")]
#[path = "../../../tests/gpu/common.rs"]
mod common;
mod misuse;
#[path = "../../../tests/gpu/layer/replays.rs"]
mod replays;
#[allow(dead_code, reason = "the layer's own tests use the rest")]
#[path = "../../../tests/gpu/tensors.rs"]
mod tensors;

use mla_cudnn::library;
use mla_flashinfer as _;
use mla_kernels::Cuda;
use mla_runtime::backend::{SelectedDecode, SelectedPrefill, StepLimits};
use mla_runtime::device::Device as _;
use mla_runtime::layer::{SelectedLayer, Workspace};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use mla_runtime::select::{Explanation, Registry, SelectionRequest};
use mla_runtime::spec::{Capability, Cause, Phase, Problem, Target};
use mla_runtime::tensor::Memory as _;

use batch::{Batch, Case, Distance, Engine};
use common::gpu;

/// The phase, name and provider of each backend.
const BACKENDS: &[(Phase, &str, &str)] = &[
    (Phase::Prefill, "FLASHINFER", "flashinfer"),
    (Phase::Prefill, "CUDNN", "cudnn"),
    (Phase::Prefill, "WGMMA_ATTN", "native"),
    (Phase::Decode, "FLASHINFER_MLA", "flashinfer"),
    (Phase::Decode, "CUTLASS_MLA", "cutlass"),
    (Phase::Decode, "WGMMA_MLA", "native"),
];

fn explain(target: Target) -> Explanation {
    let registry = Registry::linked().expect("a registry without one name twice");
    let request = SelectionRequest::new(target, Problem::new(MlaDims::R1, 128, DType::BF16));
    registry.explain(&request).unwrap()
}

#[test]
fn each_backend_is_there_once() {
    let explanation = explain(Target::dry_run(Capability::new(9, 0)));
    for (phase, name, provider) in BACKENDS {
        let candidates = explanation.candidates(*phase);
        let found: Vec<_> = candidates
            .iter()
            .filter(|candidate| candidate.spec.name == *name)
            .map(|candidate| candidate.spec.provider)
            .collect();
        // The provider of a native backend without a kernel in mla-kernels is its origin.
        let is_native = *provider == "native" && found.len() == 1;
        assert!(is_native || found == [*provider], "{name}: {found:?}");
    }
}

#[test]
fn blackwells_own_kernels_are_chosen_by_name_alone() {
    let target = Target::dry_run(Capability::new(10, 0));
    let registry = Registry::linked().unwrap();
    let problem = Problem::new(MlaDims::R1, 128, DType::BF16);
    let by_order = explain(target);
    let by_name = SelectionRequest::new(target, problem)
        .with_prefill("FLASHINFER")
        .with_decode("CUTLASS_MLA");
    let by_name = registry.explain(&by_name).unwrap();
    // In a build without `sm100`, FLASHINFER runs on Blackwell by fa2, whose PTX has been run.
    let is_of_blackwell = cfg!(feature = "sm100");
    for (phase, name, needs_name, fits) in [
        (Phase::Decode, "CUTLASS_MLA", true, is_of_blackwell),
        (
            Phase::Prefill,
            "FLASHINFER",
            is_of_blackwell,
            is_of_blackwell || has_blackwells_fa2(),
        ),
    ] {
        let selected = by_order.selected(phase).map(|it| it.spec.name);
        assert!(!needs_name || selected != Some(name), "{name}");
        let named = by_name.preferred(phase).unwrap();
        assert_eq!(named.is_valid(), fits, "{name}: {}", named.reasons);
    }
}

/// A build may be told to compile the portable family for fewer GPUs.
fn has_blackwells_fa2() -> bool {
    #[cfg(feature = "sm80")]
    return mla_flashinfer::compiled::SM80
        .iter()
        .any(|target| ["compute_80", "sm_100", "sm_100f"].contains(target));
    #[cfg(not(feature = "sm80"))]
    false
}

/// Returns the prefill and decode backends that this program and this machine have.
fn pairs(gpu: &Cuda) -> Vec<(&'static str, &'static str)> {
    let native = explain(gpu.target());
    let has_native = [(Phase::Prefill, "WGMMA_ATTN"), (Phase::Decode, "WGMMA_MLA")]
        .iter()
        .all(|(phase, name)| {
            let mut candidates = native.candidates(*phase).iter();
            candidates.any(|candidate| candidate.spec.name == *name && candidate.is_valid())
        });
    let mut pairs = vec![("FLASHINFER", "FLASHINFER_MLA")];
    match library() {
        Err(Cause::FeatureOff { .. }) => {}
        library => {
            library.expect("cuDNN");
            pairs.push(("CUDNN", "FLASHINFER_MLA"));
        }
    }
    if has_native {
        pairs.push(("WGMMA_ATTN", "WGMMA_MLA"));
    }
    pairs
}

fn layer(gpu: &Cuda, (prefill, decode): (&str, &str), case: &Case) -> SelectedLayer<Cuda> {
    let config = case.config();
    let request = SelectionRequest::new(gpu.target(), config.problem)
        .with_prefill(prefill)
        .with_decode(decode);
    let selection = Registry::linked().unwrap().select(&request).unwrap();
    selection.layer(gpu, config.softmax_scale).unwrap()
}

/// Makes a layer, its workspace for steps within `limits` with the prepared batch, and the batch's
/// numbers.
fn prepared(
    gpu: &Cuda,
    pair: (&str, &str),
    batch: &Batch,
    limits: &StepLimits,
) -> (SelectedLayer<Cuda>, SelectedWorkspace, Engine<Cuda>) {
    let layer = layer(gpu, pair, &batch.case);
    let mut workspace = layer.workspace(limits).unwrap();
    batch.prepare(&layer, &mut workspace).unwrap();
    (layer, workspace, Engine::new(gpu, batch).unwrap())
}

type SelectedWorkspace = Workspace<SelectedPrefill<Cuda>, SelectedDecode<Cuda>>;

/// Decodes, speculative decodes, extends, prefills with and without context, and padding.
const MIXED: &[(u32, u32)] = &[
    (1, 700),
    (1, 1),
    (9, 9),
    (3, 200),
    (1, 0),
    (70, 500),
    (12, 13),
    (4, 4),
    (300, 900),
    (0, 40),
];

#[test]
#[ignore = "needs a GPU: \
    cargo test --package mla-flashinfer --features sm90,mla-kernels/sm90 --test together -- \
    --include-ignored"]
fn layers_of_other_peoples_kernels_agree_with_the_cpu_and_each_other() {
    let gpu = &*gpu();
    for (heads, dtype, context_rows) in [
        (16, DType::BF16, 4096),
        (16, DType::F16, 512),
        (128, DType::BF16, 4096),
    ] {
        let case = Case {
            dtype,
            kv_format: KvFormat::of(dtype),
            context_rows,
            ..Case::new(heads, MIXED)
        };
        let batch = Batch::new(&case);
        let cpu = batch.on_cpu();
        let mut outcomes = Vec::new();
        for pair in pairs(gpu) {
            let given = batch.run(&layer(gpu, pair, &case)).unwrap();
            assert!(given.cache == cpu.cache, "{pair:?}: the caches differ");
            outcomes.push((pair, given));
        }
        let accepted = Distance::accepted(&case, cpu.chunks);
        for (index, (pair, given)) in outcomes.iter().enumerate() {
            let others = outcomes[..index].iter().map(|(pair, given)| (*pair, given));
            for (other, expected) in others.chain([(("CPU", "CPU"), &cpu)]) {
                let distance = given.distance(expected, &case);
                println!("{heads} heads, {dtype}: {pair:?} from {other:?}: {distance:?}");
                assert!(
                    distance.is_within(&accepted),
                    "{pair:?} from {other:?}: {distance:?}, accepted {accepted:?}, in {case:?}"
                );
            }
        }
    }
}

/// After a capture, the lists of a plan keep their addresses, and `prepare` fills them again.
#[test]
#[ignore = "needs a GPU: \
    cargo test --package mla-flashinfer --features sm90,mla-kernels/sm90 --test together -- \
    --include-ignored"]
fn captured_decodes_are_the_steps_run_at_once() {
    let gpu = &*gpu();
    for (heads, dtype, page_size, query_len) in [
        (16, DType::BF16, 64, 1),
        (128, DType::BF16, 64, 2),
        (16, DType::F16, 16, 3),
    ] {
        let case = Case {
            dtype,
            kv_format: KvFormat::of(dtype),
            page_size,
            ..Case::new(heads, &[])
        };
        let layer = layer(gpu, ("FLASHINFER", "FLASHINFER_MLA"), &case);
        replays::are_the_steps_run_at_once(&layer, &case, query_len);
    }
}

/// Prefills and their first context chunks are planned once per step, so their launches can be
/// captured.
#[test]
#[ignore = "needs a GPU: \
    cargo test --package mla-flashinfer --features sm90,mla-kernels/sm90 --test together -- \
    --include-ignored"]
fn captured_mixed_steps_are_the_step_run_at_once() {
    let gpu = &*gpu();
    for heads in [16, 128] {
        let case = Case::new(heads, MIXED);
        for pair in pairs(gpu) {
            replays::are_the_mixed_step(&layer(gpu, pair, &case), &case);
        }
    }
}

/// A plan made within a capture would be copied at each replay from memory that holds another plan
/// by then.
#[test]
#[ignore = "needs a GPU: \
    cargo test --package mla-flashinfer --features sm90,mla-kernels/sm90 --test together -- \
    --include-ignored"]
fn chunks_that_are_planned_with_their_call_cannot_be_captured() {
    let gpu = &*gpu();
    let case = Case {
        context_rows: 64,
        ..Case::new(16, MIXED)
    };
    let batch = Batch::new(&case);
    assert!(batch.on_cpu().chunks > 8);
    let pair = ("FLASHINFER", "FLASHINFER_MLA");
    let (layer, mut workspace, mut engine) = prepared(gpu, pair, &batch, &case.limits());
    let captured = gpu.capture(|_| engine.forward(&layer, &mut workspace, batch.tokens()));
    let error = captured.err().expect("a refusal").to_string();
    assert!(error.contains("context chunks: given one"), "{error}");
    // The step still runs outside of a capture.
    engine
        .forward(&layer, &mut workspace, batch.tokens())
        .unwrap();
    gpu.synchronize().unwrap();
}
