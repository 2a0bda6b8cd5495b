//! Compares the whole layer on a Hopper GPU with the layer on the CPU device.
//!
//! Under compute-sanitizer's racecheck, `parts` runs to its end, and all reports concern cuBLAS's
//! own `nvjet` kernels. Those cannot be excluded, since with `--kernel-name-exclude` the sanitizer
//! fails with a hardware exception. Racecheck does not finish the concurrent test, but memcheck
//! does.

mod allocations;
mod batch;
#[cfg(feature = "faults")]
mod faults;
mod gathered;
mod graphs;
mod handles;
mod invariance;
mod parts;
mod places;
mod products;
mod replays;
mod rotation;
mod rows;
mod sparse;
#[cfg(feature = "nccl")]
mod two_gpus;

use mla_kernels::Cuda;
use mla_kernels::backends::sm90::{WgmmaAttn, WgmmaMla, WgmmaMlaNarrow, WgmmaMlaPerToken};
use mla_runtime::backend::{DecodeBackend, DecodeStage, PrefillBackend, PrefillStage, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::layer::{MlaLayer, Workspace};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};
use rand::RngExt as _;

use self::batch::{Batch, Case, Distance, Engine};
use crate::common::{gpu, message, on_new_stream, rng};
use crate::tensors::pick;

/// Decodes, speculative decodes, extends and prefills, some of them ragged, and padding.
const MIXED: &[(u32, u32)] = &[
    (1, 700),
    (1, 1),
    (9, 9),
    (3, 200),
    (1, 64),
    (1, 0),
    (70, 500),
    (12, 13),
    (4, 4),
    (300, 900),
    (0, 40),
];

/// A layer on the GPU with this build's own backends.
type GpuLayer = MlaLayer<WgmmaAttn, WgmmaMla>;
type GpuWorkspace = Workspace<WgmmaAttn, WgmmaMla>;

fn gpu_layer(device: &Cuda, case: &Case) -> GpuLayer {
    MlaLayer::of(device, &case.config()).unwrap()
}

/// Makes a case's batch, a layer with a workspace prepared for it, and an engine's tensors.
fn prepared(gpu: &Cuda, case: &Case) -> (Batch, GpuLayer, GpuWorkspace, Engine<Cuda>) {
    let (batch, layer) = (Batch::new(case), gpu_layer(gpu, case));
    let mut workspace = layer.workspace(&case.limits()).unwrap();
    batch.prepare(&layer, &mut workspace).unwrap();
    let engine = Engine::new(gpu, &batch).unwrap();
    (batch, layer, workspace, engine)
}

/// Runs a case on both devices, and fails if the results are too far apart.
fn check(gpu: &Cuda, case: &Case) -> Distance {
    agrees(&gpu_layer(gpu, case), case)
}

/// The same of any layer.
fn agrees<P, D>(layer: &MlaLayer<P, D>, case: &Case) -> Distance
where
    P: PrefillStage,
    D: DecodeStage<Device = P::Device>,
{
    let batch = Batch::new(case);
    let expected = batch.on_cpu();
    let given = batch.run(layer).unwrap();
    assert_eq!(
        (given.absorbed_tokens, given.chunks),
        (expected.absorbed_tokens, expected.chunks)
    );
    assert!(given.cache == expected.cache, "the caches differ: {case:?}");
    let distance = given.distance(&expected, case);
    let accepted = Distance::accepted(case, given.chunks);
    assert!(
        distance.is_within(&accepted),
        "{distance:?}, accepted {accepted:?}, in {case:?}"
    );
    distance
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_mixed_batch_agrees_with_the_cpu() {
    let gpu = &*gpu();
    for heads in [16, 128] {
        println!("{heads} heads: {:?}", check(gpu, &Case::new(heads, MIXED)));
    }
}

/// Runs layers of MiniCPM3, Mistral-Small-4 and GLM-5.3-Flash, whose heads the prefill kernels
/// take, too.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_mixed_batch_of_narrow_rows_agrees_with_the_cpu() {
    let gpu = &*gpu();
    for (latent, head, heads) in [
        (256, HeadDims::new(64, 32, 64), 40),
        (256, HeadDims::new(64, 64, 128), 32),
        (512, HeadDims::new(256, 0, 256), 8),
    ] {
        for split_cache in [false, true] {
            let case = Case {
                dims: MlaDims::new(latent, head),
                // Without rotary keys, there is nothing to split off.
                split_cache: split_cache && head.rope > 0,
                ..Case::new(heads, MIXED)
            };
            let layer: MlaLayer<WgmmaAttn, WgmmaMlaNarrow> =
                MlaLayer::of(gpu, &case.config()).unwrap();
            println!("{:?}", agrees(&layer, &case));
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_mixed_batch_with_a_scale_for_each_token_agrees_with_the_cpu() {
    let gpu = &*gpu();
    for (heads, dtype) in [(16, DType::BF16), (128, DType::F16)] {
        let case = Case {
            dtype,
            kv_format: KvFormat::Fp8PerToken,
            ..Case::new(heads, MIXED)
        };
        let layer: MlaLayer<WgmmaAttn, WgmmaMlaPerToken> =
            MlaLayer::of(gpu, &case.config()).unwrap();
        println!("{:?}", agrees(&layer, &case));
    }
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn random_batches_agree_with_the_cpu() {
    let gpu = &*gpu();
    let mut rng = rng(7);
    let mut max = Distance::default();
    for seed in 0..40 {
        let dtype = pick(&mut rng, &[DType::BF16, DType::F16]);
        let page_size = pick(&mut rng, &[16, 64, 128]);
        let count = rng.random_range(1..9);
        let requests: Vec<(u32, u32)> = (0..count)
            .map(|_| {
                let q = pick(&mut rng, &[0, 1, 1, 1, 2, 5, 8, 17, 64, 130]);
                let context = match rng.random_range(0..5) {
                    0 => 0,
                    1 => 1,
                    _ => rng.random_range(0..700),
                };
                (q, q + context)
            })
            .collect();
        // Chunks range from a page to the whole context.
        let tiny = page_size as usize;
        let context_rows = pick(&mut rng, &[tiny, 3 * tiny, 512, 8192]);
        let head = pick(&mut rng, &[HeadDims::R1, HeadDims::new(192, 64, 256)]);
        let case = Case {
            dims: MlaDims::new(512, head),
            dtype,
            kv_format: pick(&mut rng, &[KvFormat::of(dtype), KvFormat::Fp8]),
            page_size,
            threshold: pick(&mut rng, &[0, 1, 4, 8]),
            context_rows,
            split_cache: rng.random_bool(0.3),
            seed,
            ..Case::new(pick(&mut rng, &[1, 3, 8, 16, 40, 64]), &requests)
        };
        let distance = check(gpu, &case);
        max.worst = max.worst.max(distance.worst);
        max.mean = max.mean.max(distance.mean);
        max.lse = max.lse.max(distance.lse);
    }
    println!("{max:?}");
}

/// Checks that a request that grows token by token gives the same results as one prefill.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn two_hundred_decode_steps_equal_a_prefill() {
    const STEPS: u32 = 200;
    let gpu = &*gpu();
    let case = Case {
        context_rows: 128,
        ..Case::new(16, &[(STEPS, STEPS), (STEPS, STEPS)])
    };
    let whole = Batch::new(&case);
    let layer = gpu_layer(gpu, &case);
    let prefill = whole.run(&layer).unwrap();
    let mut workspace = layer.workspace(&case.limits()).unwrap();
    let mut engine = Engine::new(gpu, &whole).unwrap();
    let mut step = whole.clone();
    let (tokens, heads) = (whole.tokens(), case.heads as usize);
    let mut decoded = prefill.clone();
    decoded.out.fill(0xff);
    decoded.lse.fill(0xff);
    for at in 0..STEPS as usize {
        // Step `at` has token number `at` of both requests.
        let pick = |bytes: &[u8]| -> Vec<u8> {
            let row = bytes.len() / tokens;
            [at, STEPS as usize + at]
                .iter()
                .flat_map(|token| &bytes[token * row..(token + 1) * row])
                .copied()
                .collect()
        };
        step.query = pick(&whole.query);
        step.latent = pick(&whole.latent);
        step.rope = pick(&whole.rope);
        step.requests = vec![Request::new(1, at as u32 + 1); 2];
        step.slots = vec![whole.slots[at], whole.slots[STEPS as usize + at]];
        if at > 0 {
            step.cache = engine.outcome(gpu).unwrap().cache;
        }
        engine.load(gpu, &step).unwrap();
        step.prepare(&layer, &mut workspace).unwrap();
        assert_eq!(workspace.absorbed_tokens(), 2);
        engine.forward(&layer, &mut workspace, 2).unwrap();
        let outcome = engine.outcome(gpu).unwrap();
        let row = heads * case.dims.head.v as usize * 2;
        for (request, token) in [at, STEPS as usize + at].into_iter().enumerate() {
            decoded.out[token * row..(token + 1) * row]
                .copy_from_slice(&outcome.out[request * row..(request + 1) * row]);
            for head in 0..heads {
                let (to, from) = (4 * (head * tokens + token), 4 * (head * 2 + request));
                decoded.lse[to..to + 4].copy_from_slice(&outcome.lse[from..from + 4]);
            }
        }
        decoded.cache = outcome.cache;
    }
    assert!(decoded.cache == prefill.cache, "the caches differ");
    let distance = decoded.distance(&prefill, &case);
    println!("{distance:?}");
    // The two paths round in different places. They differ by about 2.5 u, as each does from exact
    // attention.
    let u = 2f64.powi(-9);
    assert!(
        distance.worst < 12.0 * u && distance.mean < 4.0 * u && distance.lse < 12.0 * u,
        "{distance:?}"
    );
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn plan_equals_allocation() {
    let gpu = &*gpu();
    for (context_rows, threshold, heads) in [(64, 0, 16), (4096, 4, 16), (8192, 8, 128)] {
        let case = Case {
            context_rows,
            threshold,
            ..Case::new(heads, MIXED)
        };
        let layer = gpu_layer(gpu, &case);
        let before = gpu.allocated_bytes();
        let workspace = layer.workspace(&case.limits()).unwrap();
        let allocated = gpu.allocated_bytes() - before;
        let plan = workspace.plan();
        let limits = case.limits();
        let backends = [
            DecodeBackend::workspace_bytes(layer.decode(), gpu, &limits).unwrap(),
            PrefillBackend::workspace_bytes(layer.prefill(), gpu, &limits).unwrap(),
        ];
        // The plan rounds every region up to 256 bytes. The backends' sizes are already multiples
        // of that.
        assert_eq!(backends.map(|bytes| bytes % 256), [0, 0]);
        assert_eq!(plan.backend_bytes, backends.iter().sum::<u64>());
        assert_eq!(allocated, plan.total_bytes, "{case:?}");
        drop(workspace);
        assert_eq!(gpu.allocated_bytes(), before);
    }
}

/// Checks that two layers of one model share a workspace, and that two engines with their own
/// streams share the GPU.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn layers_and_streams_keep_apart() {
    let first = &*gpu();
    let second = on_new_stream(first);
    let cases = [
        Case::new(16, MIXED),
        Case {
            seed: 2,
            context_rows: 128,
            ..Case::new(16, &[(1, 900), (1, 300), (40, 700), (2, 77)])
        },
    ];
    let batches = cases.each_ref().map(Batch::new);
    // The second layer has other weights and queries, and the same requests.
    let mut other = batches[0].clone();
    let reversed: Vec<u8> = other.weights.chunks(2).rev().flatten().copied().collect();
    other.weights = reversed;
    let layer: GpuLayer = gpu_layer(first, &cases[0]);
    let alone = [
        batches[0].run(&layer).unwrap(),
        other.run(&layer).unwrap(),
        batches[1].run(&gpu_layer(&second, &cases[1])).unwrap(),
    ];
    assert!(alone[0].out != alone[1].out);

    std::thread::scope(|scope| {
        let model = scope.spawn(|| {
            let layers = [gpu_layer(first, &cases[0]), gpu_layer(first, &cases[0])];
            let mut workspace = layers[0].workspace(&cases[0].limits()).unwrap();
            batches[0].prepare(&layers[1], &mut workspace).unwrap();
            let mut engines = [&batches[0], &other].map(|b| Engine::new(first, b).unwrap());
            for _ in 0..50 {
                for (layer, engine) in layers.iter().zip(&mut engines) {
                    engine
                        .forward(layer, &mut workspace, batches[0].tokens())
                        .unwrap();
                }
            }
            engines.map(|engine| engine.outcome(first).unwrap())
        });
        let engine = scope.spawn(|| {
            let layer = gpu_layer(&second, &cases[1]);
            let mut workspace = layer.workspace(&cases[1].limits()).unwrap();
            batches[1].prepare(&layer, &mut workspace).unwrap();
            let mut engine = Engine::new(&second, &batches[1]).unwrap();
            for _ in 0..100 {
                engine
                    .forward(&layer, &mut workspace, batches[1].tokens())
                    .unwrap();
            }
            engine.outcome(&second).unwrap()
        });
        let together = model.join().unwrap();
        let together = together.into_iter().chain([engine.join().unwrap()]);
        for (at, (given, expected)) in together.zip(&alone).enumerate() {
            given.is_that_of(expected, &cases[at / 2]);
        }
    });
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn limits_that_the_kernel_does_not_take_are_refused_by_a_plan() {
    let gpu = &*gpu();
    let layer = gpu_layer(gpu, &Case::new(16, &[]));
    for (limits, expected) in [
        (
            StepLimits::new(1025, 1025, 4),
            "limits.requests: given 1025, accepted 1..=1024",
        ),
        (
            StepLimits::new(1, 1, 1 << 24),
            "limits.pages_per_request: given 16777216, accepted at most 2^29 tokens per request \
             (max_pages * page_size)",
        ),
    ] {
        assert_eq!(message(layer.memory_plan(&limits, 1, 1)), expected);
        assert_eq!(message(layer.workspace(&limits)), expected);
    }
}
