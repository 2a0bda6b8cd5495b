//! Checks that a request gives the same bits in any batch as alone. The backends run the cases of
//! the conformance suite, and the whole layer runs random batches through the plan of a step.
//!
//! ```sh
//! cargo test --release -p mla-cpu --test invariance -- --ignored    # 10 000 batches each
//! ```

mod common;

use std::collections::BTreeSet;

use common::Random;
use half::bf16;
use mla_conformance::{DecodeCase, PrefillCase, Trial};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::device::Device as _;
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{Element, HeadDims, KvFormat, MlaDims};
use mla_runtime::spec::{Feature, FeatureSet, Problem, QueryLen};
use mla_runtime::tensor::{ArrayRef, CacheLayout, CacheMut, LseMut, TensorMut, TensorRef};

const DIMS: MlaDims = MlaDims::new(64, HeadDims::new(24, 16, 32));
const HEADS: usize = 3;
const PAGE: usize = 16;

/// The number of batches in tests that always run, and in those that run only on command.
const FEW: u32 = 200;
const MANY: u32 = 10_000;

fn problem<T: Element>(features: &[Feature]) -> Problem {
    Problem::new(DIMS, HEADS as u32, T::DTYPE)
        .with_page_size(PAGE as u32)
        .with_query_len(QueryLen::Ragged)
        .with_features(FeatureSet::of(features))
}

fn ways() -> [Cpu; 2] {
    [Cpu::new(), Cpu::new().portable()]
}

fn backends(batches: u32) {
    let problem = problem::<bf16>(&[Feature::BatchInvariant]);
    let decode = DecodeCase {
        query_lens: vec![1, 1, 4, 1, 3, 1, 0, 2, 1, 1],
        trial: Trial::AmongOthers(batches),
        ..DecodeCase::new(problem, &[1, 15, 64, 700, 1500, 4700, 9, 257, 0, 130])
    };
    let prefill = PrefillCase {
        key_lens: vec![1, 70, 300, 40, 700, 0, 5],
        trial: Trial::AmongOthers(batches),
        ..PrefillCase::new(problem, &[1, 70, 33, 40, 150, 3, 2])
    };
    for cpu in ways() {
        decode.check::<CpuDecode>(&cpu).unwrap();
        prefill.check::<CpuPrefill>(&cpu).unwrap();
    }
}

#[test]
fn backends_in_random_batches() {
    backends(FEW);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p mla-cpu --test invariance -- --ignored"]
fn backends_in_many_random_batches() {
    backends(MANY);
}

/// The numbers of new tokens and of all tokens of each request. Some requests have one new token,
/// with their keys in one split or in several. Others have a few new tokens, as drafts do. One
/// prompt is longer than a block of a GEMM has rows. Contexts of 256 and 257 tokens fill the
/// workspace's rows for contexts, or exceed them by one.
const REQUESTS: [[usize; 2]; 14] = [
    [1, 1],
    [1, 700],
    [1, 4700],
    [1, 513],
    [4, 1500],
    [3, 3],
    [40, 40],
    [129, 129],
    [33, 300],
    [70, 1100],
    [20, 276],
    [20, 277],
    [5, 21],
    [65, 129],
];

const LIMITS: StepLimits = StepLimits::new(16, 500, 4800 / PAGE)
    .with_decode_query_len(4)
    .with_context_rows(256);

/// The values of one request.
struct Request<T> {
    new: usize,
    latents: Vec<T>,
    rope: Vec<T>,
    queries: Vec<T>,
}

impl<T: Element> Request<T> {
    fn new([new, total]: [usize; 2], seed: u64) -> Self {
        let mut random = Random(seed);
        let [latent, rope, qk] = [DIMS.latent, DIMS.head.rope, DIMS.head.qk()].map(|n| n as usize);
        Self {
            new,
            latents: random.fill(total * latent),
            rope: random.fill(total * rope),
            queries: random.fill(new * HEADS * qk),
        }
    }

    fn total(&self) -> usize {
        self.latents.len() / DIMS.latent as usize
    }

    fn context(&self) -> usize {
        self.total() - self.new
    }

    fn pages(&self) -> usize {
        self.total().div_ceil(PAGE)
    }
}

struct World<T> {
    layer: MlaLayer<CpuPrefill, CpuDecode>,
    workspace: Workspace<CpuPrefill, CpuDecode>,
    weights: Vec<T>,
    requests: Vec<Request<T>>,
    random: fastrand::Rng,
}

/// A request's output, its log-sum-exp and its rows of the cache.
type Bits = Vec<u8>;

impl<T: Element> World<T> {
    fn new(cpu: &Cpu, features: &[Feature]) -> Self {
        let scale = 1.0 / (DIMS.head.qk() as f32).sqrt();
        let config = LayerConfig::new(problem::<T>(features), scale);
        let layer = MlaLayer::of(cpu, &config).unwrap();
        let requests = REQUESTS.into_iter().zip(1..);
        Self {
            workspace: layer.workspace(&LIMITS).unwrap(),
            layer,
            weights: Random(99).fill(DIMS.latent as usize * HEADS * DIMS.head.kv_b() as usize),
            requests: requests
                .map(|(lens, seed)| Request::new(lens, seed))
                .collect(),
            random: fastrand::Rng::with_seed(1),
        }
    }

    fn alone(&mut self) -> Vec<Bits> {
        (0..self.requests.len())
            .map(|request| self.step(&[request]).remove(0))
            .collect()
    }

    /// Runs some of the requests in this order, in arbitrary pages. Returns the bits of each.
    fn step(&mut self, batch: &[usize]) -> Vec<Bits> {
        let Self {
            layer,
            workspace,
            weights,
            requests,
            random,
        } = self;
        let device = layer.device().clone();
        let batch: Vec<&Request<T>> = batch.iter().map(|number| &requests[*number]).collect();
        let count = batch.iter().map(|request| request.pages()).sum::<usize>() + 2;
        let mut free: Vec<i32> = (0..count as i32).collect();
        random.shuffle(&mut free);
        let tables: Vec<Vec<i32>> = batch
            .iter()
            .map(|request| free.split_off(free.len() - request.pages()))
            .collect();
        let layout = CacheLayout::contiguous(DIMS, KvFormat::of(T::DTYPE), count, PAGE);
        let mut cache = vec![0xffu8; count * layout.page_stride];
        for (request, table) in batch.iter().zip(&tables) {
            write_context(&device, request, table, &mut cache, layout);
        }

        let given: Vec<_> = batch
            .iter()
            .zip(&tables)
            .map(|(request, table)| {
                StepRequest::new(request.new as u32, request.total() as u32, table)
            })
            .collect();
        let mut step = StepPlan::new(workspace, &given).unwrap();
        let decodes = batch
            .iter()
            .all(|request| request.new != 3 && request.new != 4);
        if decodes && batch.iter().any(|request| request.new == 1) {
            let padding = random.usize(0..=16 - batch.len());
            step = step.padded_to(batch.len() + padding).unwrap();
        }
        if random.bool() {
            step = step.with_max_len(Some(random.u32(1..4800)));
        }
        workspace.prepare(layer, &step).unwrap();

        let tokens = step.tokens();
        let [v, qk] = [DIMS.head.v, DIMS.head.qk()].map(|n| n as usize);
        let (latent, rope) = (DIMS.latent as usize, DIMS.head.rope as usize);
        let mut queries = vec![T::from_f32(0.0); tokens * HEADS * qk];
        let mut latents = vec![T::from_f32(0.0); tokens * latent];
        let mut ropes = vec![T::from_f32(0.0); tokens * rope];
        for (number, request) in batch.iter().enumerate() {
            let rows = step.rows(number);
            queries[rows.start * HEADS * qk..rows.end * HEADS * qk]
                .copy_from_slice(&request.queries);
            let context = request.context();
            latents[rows.start * latent..rows.end * latent]
                .copy_from_slice(&request.latents[context * latent..]);
            ropes[rows.start * rope..rows.end * rope]
                .copy_from_slice(&request.rope[context * rope..]);
        }
        let mut out = vec![T::from_f32(f32::NAN); tokens * HEADS * v];
        let mut lse = vec![f32::NAN; HEADS * tokens];
        let kv_b = HEADS * DIMS.head.kv_b() as usize;
        let weights = TensorRef::from_slice(weights, [1, kv_b, latent]).unwrap();
        let call = LayerCall::new(
            Weights::from_checkpoint(weights, layer.config()).unwrap(),
            TensorRef::from_slice(&queries, [tokens, HEADS, qk]).unwrap(),
            [
                TensorRef::from_slice(&latents, [tokens, 1, latent]).unwrap(),
                TensorRef::from_slice(&ropes, [tokens, 1, rope]).unwrap(),
            ],
            CacheMut::new(&mut cache[..], layout).unwrap(),
            TensorMut::from_slice(&mut out, [tokens, HEADS, v]).unwrap(),
        );
        let call = call.with_lse(Some(LseMut::from_slice(&mut lse, HEADS, tokens).unwrap()));
        layer.forward(workspace, call).unwrap();

        let of_request = |number: usize| {
            let rows = step.rows(number);
            let mut bits: Bits =
                bytemuck::cast_slice(&out[rows.start * HEADS * v..rows.end * HEADS * v]).to_vec();
            for head in lse.chunks_exact(tokens) {
                bits.extend_from_slice(bytemuck::cast_slice(&head[rows.clone()]));
            }
            let request = batch[number];
            for position in request.context()..request.total() {
                let page = tables[number][position / PAGE] as usize;
                let row = page * layout.page_stride + position % PAGE * layout.row_stride;
                bits.extend_from_slice(&cache[row..row + layout.row_bytes()]);
            }
            bits
        };
        (0..batch.len()).map(of_request).collect()
    }

    /// Returns some requests in any order, at most the number that fits a step.
    fn some(&mut self) -> Vec<usize> {
        let mut numbers: Vec<usize> = (0..self.requests.len()).collect();
        self.random.shuffle(&mut numbers);
        numbers.truncate(self.random.usize(1..=numbers.len()));
        numbers
    }
}

fn write_context<T: Element>(
    device: &Cpu,
    request: &Request<T>,
    table: &[i32],
    cache: &mut [u8],
    layout: CacheLayout,
) {
    let count = request.context();
    let (latent, rope) = (DIMS.latent as usize, DIMS.head.rope as usize);
    let slot = |position: usize| table[position / PAGE] as i64 * PAGE as i64;
    let slots: Vec<i64> = (0..count).map(|at| slot(at) + (at % PAGE) as i64).collect();
    device
        .write_cache(
            TensorRef::from_slice(&request.latents[..count * latent], [count, 1, latent]).unwrap(),
            TensorRef::from_slice(&request.rope[..count * rope], [count, 1, rope]).unwrap(),
            ArrayRef::from_slice(&slots),
            CacheMut::new(cache, layout).unwrap(),
        )
        .unwrap();
}

/// Runs random batches. Returns the requests whose bits in some batch differ from those alone.
fn differing<T: Element>(cpu: &Cpu, features: &[Feature], batches: u32) -> BTreeSet<usize> {
    let mut world = World::<T>::new(cpu, features);
    let alone = world.alone();
    let mut differing = BTreeSet::new();
    for _ in 0..batches {
        let batch = world.some();
        let bits = world.step(&batch);
        let pairs = batch.into_iter().zip(bits);
        differing.extend(
            pairs
                .filter(|(at, bits)| alone[*at] != *bits)
                .map(|(at, _)| at),
        );
    }
    differing
}

fn layers(batches: u32) {
    let mode = [Feature::BatchInvariant];
    for cpu in ways() {
        let of_bf16 = differing::<bf16>(&cpu, &mode, batches);
        assert!(of_bf16.is_empty(), "bf16: requests {of_bf16:?}");
        let of_f32 = differing::<f32>(&cpu, &mode, batches);
        assert!(of_f32.is_empty(), "f32: requests {of_f32:?}");
    }
}

#[test]
fn layers_in_random_batches() {
    layers(FEW / 4);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p mla-cpu --test invariance -- --ignored"]
fn layers_in_many_random_batches() {
    layers(MANY / 4);
}

/// The control experiment. Without the feature, the cuts of a context depend on the other requests.
#[test]
fn free_layers_differ() {
    let differing = differing::<bf16>(&Cpu::new(), &[], 20);
    assert!(!differing.is_empty());
}

#[test]
fn refused_by_name() {
    let config = LayerConfig::new(
        problem::<f32>(&[Feature::BatchInvariant]).with_query_len(QueryLen::Uniform),
        0.1,
    );
    let refused = MlaLayer::<CpuPrefill, CpuDecode>::of(&Cpu::new(), &config).map(drop);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "query_len: given uniform, accepted single or ragged, as the batch_invariant layer has no \
         path for the batch's most frequent length"
    );
}
