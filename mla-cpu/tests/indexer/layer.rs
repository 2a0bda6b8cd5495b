//! Tests a sparse layer with its indexer, from latents to outputs.

use fastrand::Rng;
use mla_conformance::reference::{
    Array, absorbed, decode_row, index_logit, largest, layer_norm, quantise_index,
};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, IndexCall, Indexer, IndexerWorkspace};
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{DType, HeadDims, IndexerConfig, MlaDims, ModelConfig, RotaryStyle};
use mla_runtime::spec::{Feature, FeatureSet, Problem, QueryLen};
use mla_runtime::tensor::{CacheLayout, CacheMut, TensorMut, TensorRef};

use crate::{Tables, random, wide};

pub(crate) type Layer = MlaLayer<CpuPrefill, CpuDecode>;
pub(crate) type Space = Workspace<CpuPrefill, CpuDecode>;

const DIMS: MlaDims = MlaDims::new(128, HeadDims::new(16, 8, 16));
const HEADS: usize = 3;
pub(crate) const RANK: usize = 24;
pub(crate) const PAGE: usize = 16;
pub(crate) const PAGES: usize = 24;

pub(crate) fn indexer_config(topk: u32) -> IndexerConfig {
    IndexerConfig::new(4, 32, 8, topk)
}

pub(crate) fn layer(sparse: bool) -> Layer {
    let config = LayerConfig::new(
        Problem::new(DIMS, HEADS as u32, DType::F32)
            .with_sparse(sparse)
            .with_page_size(PAGE as u32)
            .with_query_len(QueryLen::Ragged)
            .with_features(FeatureSet::of(&[Feature::BatchInvariant])),
        0.2,
    );
    MlaLayer::of(&Cpu::new(), &config).unwrap()
}

pub(crate) fn limits() -> StepLimits {
    StepLimits::new(4, 80, 8).with_decode_query_len(80)
}

/// Three requests that get their tokens step by step, and the caches of one layer.
pub(crate) struct World {
    rng: Rng,
    pub(crate) kv_b: Vec<f32>,
    pub(crate) query_weights: Vec<f32>,
    pub(crate) norm: [Vec<f32>; 2],
    tables: Vec<i32>,
    lens: [u32; 3],
    cache: Vec<u32>,
    pub(crate) index_cache: Vec<u32>,
}

/// The tensors of one step.
pub(crate) struct Step {
    requests: Vec<Request>,
    query: Vec<f32>,
    latent: Vec<f32>,
    rope: Vec<f32>,
    pub(crate) query_latent: Vec<f32>,
    pub(crate) keys: Vec<f32>,
    pub(crate) head_weights: Vec<f32>,
    rotary: Tables,
}

impl Step {
    /// Returns the same step, with the values of some tokens from another one.
    fn with_rows_of(mut self, other: &Self, rows: &[usize]) -> Self {
        for (own, other) in [
            (&mut self.query, &other.query),
            (&mut self.latent, &other.latent),
            (&mut self.rope, &other.rope),
            (&mut self.query_latent, &other.query_latent),
            (&mut self.keys, &other.keys),
            (&mut self.head_weights, &other.head_weights),
        ] {
            let width = own.len() / rows.len();
            for (row, from) in own.chunks_mut(width).zip(rows) {
                row.copy_from_slice(&other[from * width..][..width]);
            }
        }
        self
    }

    pub(crate) fn tokens(&self) -> usize {
        self.requests.iter().map(|r| r.q as usize).sum()
    }
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut tables: Vec<i32> = (0..PAGES as i32).collect();
        rng.shuffle(&mut tables);
        Self {
            kv_b: random(&mut rng, 128 * HEADS * 32),
            query_weights: random(&mut rng, RANK * 4 * 32),
            norm: [random(&mut rng, 32), random(&mut rng, 32)],
            tables,
            lens: [0; 3],
            // Unused slots are NaN.
            cache: vec![u32::MAX; PAGES * PAGE * 136],
            index_cache: vec![u32::MAX; PAGES * PAGE * 36 / 4],
            rng,
        }
    }

    pub(crate) fn step(&mut self, new: [u32; 3]) -> Step {
        let mut positions = Vec::new();
        let mut requests = Vec::new();
        for (len, q) in self.lens.iter_mut().zip(new) {
            positions.extend(i64::from(*len)..i64::from(*len + q));
            *len += q;
            requests.push(Request::new(q, *len));
        }
        let tokens = positions.len();
        let mut of = |width| random(&mut self.rng, tokens * width);
        Step {
            requests,
            query: of(HEADS * 24),
            latent: of(128),
            rope: of(8),
            query_latent: of(RANK),
            keys: of(32),
            head_weights: of(4),
            rotary: Tables::new(positions, 8, RotaryStyle::Halves),
        }
    }

    fn index_layout(&self) -> IndexCacheLayout {
        IndexCacheLayout::contiguous(&indexer_config(1), PAGES, PAGE)
    }

    pub(crate) fn prepare(&self, layer: &Layer, workspace: &mut Space, step: &Step) {
        let requests = step.requests.iter().zip(self.tables.chunks(8));
        let requests: Vec<StepRequest<'_>> = requests
            .map(|(lens, pages)| StepRequest::new(lens.q, lens.kv, pages))
            .collect();
        let (problem, limits) = (&layer.config().problem, workspace.limits());
        let step = StepPlan::in_order(problem, limits, 80, 0, &requests).unwrap();
        workspace.prepare(layer, &step).unwrap();
    }

    pub(crate) fn index_call<'a>(
        &'a self,
        step: &'a Step,
        cache: &'a mut [u32],
    ) -> IndexCall<'a, Cpu> {
        let (tokens, layout) = (step.tokens(), self.index_layout());
        let view = |values, shape| TensorRef::from_slice::<f32>(values, shape).unwrap();
        IndexCall::new(
            [
                view(&step.query_latent, [tokens, 1, RANK]),
                view(&self.query_weights, [1, RANK, 128]),
            ],
            view(&step.keys, [tokens, 1, 32]),
            [
                view(&self.norm[0], [1, 1, 32]),
                view(&self.norm[1], [1, 1, 32]),
            ],
            view(&step.head_weights, [tokens, 1, 4]),
            IndexCacheMut::new(bytemuck::cast_slice_mut(cache), layout).unwrap(),
        )
        // The view may have any style, because the indexer has its own.
        .with_rotary(step.rotary.view())
    }

    fn layer_call<'a>(
        &'a self,
        layer: &Layer,
        step: &'a Step,
        cache: &'a mut [u32],
        out: &'a mut [f32],
    ) -> LayerCall<'a, Cpu> {
        let tokens = step.tokens();
        let layout = CacheLayout::contiguous(DIMS, layer.config().problem.kv_format, PAGES, PAGE);
        let view = |values, shape| TensorRef::from_slice::<f32>(values, shape).unwrap();
        let kv_b = view(&self.kv_b, [1, 128, HEADS * 32]);
        LayerCall::new(
            Weights::from_transposed(kv_b, layer.config()).unwrap(),
            view(&step.query, [tokens, HEADS, 24]),
            [
                view(&step.latent, [tokens, 1, 128]),
                view(&step.rope, [tokens, 1, 8]),
            ],
            CacheMut::new(bytemuck::cast_slice_mut(cache), layout).unwrap(),
            TensorMut::from_slice(out, [tokens, HEADS, 16]).unwrap(),
        )
    }

    fn select(
        &mut self,
        indexer: &Indexer<Cpu>,
        workspace: &Space,
        own: &mut IndexerWorkspace<Cpu>,
        step: &Step,
    ) -> mla_runtime::Result<()> {
        let mut cache = std::mem::take(&mut self.index_cache);
        let result = indexer.select(workspace, own, self.index_call(step, &mut cache));
        self.index_cache = cache;
        result
    }

    fn attend(
        &mut self,
        layer: &Layer,
        workspace: &mut Space,
        lists: Option<&IndexerWorkspace<Cpu>>,
        step: &Step,
    ) -> Vec<f32> {
        let mut out = vec![f32::NAN; step.tokens() * HEADS * 16];
        let mut cache = std::mem::take(&mut self.cache);
        let slot_lists = lists.map(|own| own.lists(workspace).unwrap());
        let call = self
            .layer_call(layer, step, &mut cache, &mut out)
            .with_slot_lists(slot_lists);
        layer.forward(workspace, call).unwrap();
        self.cache = cache;
        out
    }

    /// Runs indexer and layer in one call, on copies of the caches. Returns the output and both
    /// caches afterwards.
    fn both(
        &self,
        layer: &Layer,
        indexer: &Indexer<Cpu>,
        workspace: &mut Space,
        own: &mut IndexerWorkspace<Cpu>,
        step: &Step,
    ) -> mla_runtime::Result<(Vec<f32>, Vec<u32>, Vec<u32>)> {
        let mut out = vec![f32::NAN; step.tokens() * HEADS * 16];
        let (mut cache, mut index_cache) = (self.cache.clone(), self.index_cache.clone());
        let index = self.index_call(step, &mut index_cache);
        let call = self.layer_call(layer, step, &mut cache, &mut out);
        layer.forward_selecting(workspace, own, indexer, index, call)?;
        Ok((out, cache, index_cache))
    }

    fn slot(&self, request: usize, position: usize) -> usize {
        self.tables[request * 8 + position / PAGE] as usize * PAGE + position % PAGE
    }
}

pub(crate) fn lists_of(own: &IndexerWorkspace<Cpu>, workspace: &Space) -> (Vec<i32>, usize) {
    let lists = own.lists(workspace).unwrap();
    let slots = (0..lists.slots.len())
        .map(|at| lists.slots.at(at))
        .collect();
    (slots, lists.width)
}

/// A sparse layer, an indexer with lists of `topk` slots, and a workspace of each.
fn selecting(topk: u32) -> (Layer, Indexer<Cpu>, IndexerWorkspace<Cpu>, Space) {
    let layer = layer(true);
    let indexer = Indexer::new(&Cpu::new(), &indexer_config(topk), &layer.config().problem);
    let indexer = indexer.unwrap();
    let own = indexer.workspace(&limits()).unwrap();
    let space = layer.workspace(&limits()).unwrap();
    (layer, indexer, own, space)
}

/// A prompt, then prompts with context, then decodes and a longer query. The steps cover chunked
/// prefill and decode.
const STEPS: [[u32; 3]; 4] = [[30, 5, 0], [35, 1, 40], [1, 1, 1], [2, 9, 4]];

#[test]
fn full_topk_is_dense() {
    let (sparse, indexer, mut own, mut sparse_space) = selecting(70);
    let dense = layer(false);
    let mut dense_space = dense.workspace(&limits()).unwrap();
    let [mut a, mut b] = [World::new(3), World::new(3)];
    for new in STEPS {
        let [step, same] = [a.step(new), b.step(new)];
        a.prepare(&sparse, &mut sparse_space, &step);
        a.select(&indexer, &sparse_space, &mut own, &step).unwrap();
        let given = a.attend(&sparse, &mut sparse_space, Some(&own), &step);
        b.prepare(&dense, &mut dense_space, &same);
        let expected = b.attend(&dense, &mut dense_space, None, &same);
        assert_eq!(given.len(), expected.len());
        for (given, expected) in given.iter().zip(&expected) {
            assert!(
                (given - expected).abs() < 1e-4,
                "{given}, expected {expected}"
            );
        }
        assert_eq!(a.cache, b.cache);
    }
}

#[test]
fn each_request_has_the_bits_that_it_has_alone() {
    let topk = 20;
    let (sparse, indexer, mut own, mut space) = selecting(topk as u32);
    let mut run = |world: &mut World, step: &Step| {
        world.prepare(&sparse, &mut space, step);
        world.select(&indexer, &space, &mut own, step).unwrap();
        let lists = lists_of(&own, &space).0;
        (lists, world.attend(&sparse, &mut space, Some(&own), step))
    };
    let mut together = World::new(5);
    let mut alone = [0; 3].map(|_| World::new(5));
    for new in STEPS {
        let step = together.step(new);
        let (lists, out) = run(&mut together, &step);
        let mut end = 0;
        for (request, world) in alone.iter_mut().enumerate() {
            let rows: Vec<usize> = (end..end + new[request] as usize).collect();
            let (first, count) = (end, rows.len());
            end += count;
            if count == 0 {
                continue;
            }
            let mut own_tokens = [0; 3];
            own_tokens[request] = new[request];
            let step = world.step(own_tokens).with_rows_of(&step, &rows);
            let (own_lists, own_out) = run(world, &step);
            assert_eq!(own_lists, lists[first * topk..end * topk]);
            assert_eq!(own_out, out[first * HEADS * 16..end * HEADS * 16]);
        }
    }
}

/// The index keys of one request by the reference, as codes and scales.
type Keys = Vec<(Vec<u8>, f64)>;

fn key_of(world: &World, step: &Step, token: usize) -> (Vec<u8>, f64) {
    let row = wide(&step.keys[token * 32..][..32]);
    let [weight, bias] = [&world.norm[0], &world.norm[1]].map(|row| wide(row));
    let mut key = layer_norm(&row, &weight, &bias, 1e-6);
    step.rotary.turn(token).apply(&mut key);
    quantise_index(&key)
}

/// Returns the reference's queries of a token, with their weights.
fn queries_of(world: &World, step: &Step, token: usize) -> Vec<(Vec<u8>, f64)> {
    let latent = wide(&step.query_latent[token * RANK..][..RANK]);
    (0..4)
        .map(|head| {
            let mut query: Vec<f64> = (0..32)
                .map(|d| {
                    let weight = |k: usize| f64::from(world.query_weights[k * 128 + head * 32 + d]);
                    (0..RANK).map(|k| latent[k] * weight(k)).sum()
                })
                .collect();
            step.rotary.turn(token).apply(&mut query);
            let (codes, scale) = quantise_index(&query);
            let weight = f64::from(step.head_weights[token * 4 + head]);
            (codes, weight * scale / 128f64.sqrt())
        })
        .collect()
}

#[test]
fn lists_match_the_reference() {
    let topk = 20;
    let (sparse, indexer, mut own, mut space) = selecting(topk as u32);
    let mut world = World::new(4);
    let mut keys: [Keys; 3] = Default::default();
    let (mut lists_compared, mut on_the_edge, mut selective) = (0, 0, 0);
    for new in STEPS {
        let step = world.step(new);
        world.prepare(&sparse, &mut space, &step);
        world.select(&indexer, &space, &mut own, &step).unwrap();
        let (lists, width) = lists_of(&own, &space);
        assert_eq!((width, lists.len()), (topk, step.tokens() * topk));
        let out = world.attend(&sparse, &mut space, Some(&own), &step);

        let mut token = 0;
        for (request, keys) in keys.iter_mut().enumerate() {
            let Request { q, kv, .. } = step.requests[request];
            keys.extend((token..token + q as usize).map(|token| key_of(&world, &step, token)));
            assert_eq!(keys.len(), kv as usize);
            for own in 0..q as usize {
                let seen = (kv - q) as usize + own + 1;
                let queries = queries_of(&world, &step, token);
                let logits: Vec<f64> = keys[..seen]
                    .iter()
                    .map(|(codes, scale)| index_logit(&queries, codes, *scale))
                    .collect();
                let list: Vec<i32> = lists[token * topk..(token + 1) * topk].to_vec();
                let chosen = largest(&logits, topk);
                let mut expected: Vec<i32> = chosen
                    .iter()
                    .map(|position| world.slot(request, *position) as i32)
                    .collect();
                expected.resize(topk, -1);
                lists_compared += 1;
                selective += usize::from(seen > topk);
                if list != expected {
                    // Differences must be explained by one e4m3 rounding that f32 decides
                    // otherwise. That is 2⁻⁴ of a product, so at most 2⁻⁴ of the largest logit.
                    on_the_edge += 1;
                    let min = chosen.iter().map(|at| logits[*at]).fold(f64::MAX, f64::min);
                    let max = logits.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
                    for (position, logit) in logits.iter().enumerate() {
                        let slot = world.slot(request, position) as i32;
                        if list.contains(&slot) != expected.contains(&slot) {
                            assert!((logit - min).abs() <= max / 16.0, "{logit}, {min}");
                        }
                    }
                }
                check_row(&world, &sparse, &step, &list, token, &out);
                token += 1;
            }
        }
    }
    // Nearly all lists are the same, and most of them leave something out.
    assert!(
        on_the_edge * 50 <= lists_compared,
        "{on_the_edge} of {lists_compared}"
    );
    assert!(
        selective * 2 > lists_compared,
        "{selective} of {lists_compared}"
    );
}

/// Checks that one token's output is attention in f64 to the rows of its list.
fn check_row(world: &World, layer: &Layer, step: &Step, list: &[i32], token: usize, out: &[f32]) {
    let bytes: &[u8] = bytemuck::cast_slice(&world.cache);
    let format = layer.config().problem.kv_format;
    let rows: Vec<Vec<f64>> = list
        .iter()
        .filter_map(|slot| usize::try_from(*slot).ok())
        .map(|slot| decode_row(format, 128, 8, &bytes[slot * 544..][..544], 1.0))
        .collect();
    for head in 0..HEADS {
        let query = wide(&step.query[(token * HEADS + head) * 24..][..24]);
        let weight =
            |l: usize, column: usize| f64::from(world.kv_b[l * HEADS * 32 + head * 32 + column]);
        let latent = Array::from_fn([1, 1, 136], |_, _, k| match k {
            0..128 => (0..16).map(|p| query[p] * weight(k, p)).sum(),
            _ => query[16 + k - 128],
        });
        let attended = absorbed(&latent, &rows, 128, 0.2f32.into());
        for v in 0..16 {
            let expected: f64 = (0..128)
                .map(|l| attended.out.row(0, 0)[l] * weight(l, 16 + v))
                .sum();
            let given = f64::from(out[(token * HEADS + head) * 16 + v]);
            assert!(
                (given - expected).abs() < 1e-3,
                "{given}, expected {expected}"
            );
        }
    }
}

/// Returns the lists and outputs of each request's tokens, ordered by position. `steps` are the
/// numbers of new tokens.
fn by_position(steps: &[[u32; 3]], topk: u32) -> [Vec<(Vec<usize>, Vec<f32>)>; 3] {
    let (sparse, indexer, mut own, mut space) = selecting(topk);
    let mut world = World::new(12);
    let total: [u32; 3] = [0, 1, 2].map(|request| steps.iter().map(|new| new[request]).sum());
    // The values of all tokens are made at once, so that they do not depend on the steps.
    let all = world.step(total);
    world.lens = [0; 3];
    let first = [0, total[0], total[0] + total[1]].map(|token| token as usize);
    let mut found: [Vec<_>; 3] = Default::default();
    for new in steps {
        let rows: Vec<usize> = (0..3)
            .flat_map(|request| {
                let start = first[request] + world.lens[request] as usize;
                start..start + new[request] as usize
            })
            .collect();
        let step = world.step(*new).with_rows_of(&all, &rows);
        world.prepare(&sparse, &mut space, &step);
        world.select(&indexer, &space, &mut own, &step).unwrap();
        let (lists, width) = lists_of(&own, &space);
        let out = world.attend(&sparse, &mut space, Some(&own), &step);
        let mut token = 0;
        for (request, found) in found.iter_mut().enumerate() {
            for _ in 0..new[request] {
                let slots = lists[token * width..][..width].iter();
                let slots = slots.filter_map(|slot| usize::try_from(*slot).ok());
                let row = out[token * HEADS * 16..][..HEADS * 16].to_vec();
                found.push((slots.collect(), row));
                token += 1;
            }
        }
    }
    found
}

#[test]
fn chunked_prompts() {
    let topk = 11;
    let whole = by_position(&[[30, 9, 37]], topk);
    let chunked = by_position(&[[7, 9, 1], [16, 0, 35], [1, 0, 1], [6, 0, 0]], topk);
    let mut selective = 0;
    for (whole, chunked) in whole.iter().flatten().zip(chunked.iter().flatten()) {
        assert_eq!(whole.0, chunked.0);
        selective += usize::from(whole.0.len() == topk as usize);
        for (a, b) in whole.1.iter().zip(&chunked.1) {
            assert!((a - b).abs() < 1e-4, "{a}, in one step {b}");
        }
    }
    assert_eq!(chunked.map(|request| request.len()), [30, 9, 37]);
    assert!(selective > 40, "{selective}");
}

/// Tests GLM-5.2's pattern of layers, most of which share lists.
#[test]
fn lists_follow_the_layer_pattern() {
    let topk = 9;
    let model = ModelConfig::preset("glm-5.2").unwrap();
    let makes: Vec<u32> = (0..12).filter(|layer| model.has_indexer(*layer)).collect();
    assert_eq!(makes, [0, 1, 2, 6, 10]);
    let (sparse, indexer, mut own, mut space) = selecting(topk);
    // Layers have their own weights and caches, but the same pages.
    let mut worlds: Vec<World> = (0..12).map(|layer| World::new(40 + layer)).collect();
    let tables = worlds[0].tables.clone();
    for world in &mut worlds {
        world.tables.clone_from(&tables);
    }
    for new in STEPS {
        let steps: Vec<Step> = worlds.iter_mut().map(|world| world.step(new)).collect();
        worlds[0].prepare(&sparse, &mut space, &steps[0]);
        let mut made: Vec<Vec<i32>> = Vec::new();
        for (at, (world, step)) in worlds.iter_mut().zip(&steps).enumerate() {
            if model.has_indexer(at as u32) {
                world.select(&indexer, &space, &mut own, step).unwrap();
            }
            made.push(lists_of(&own, &space).0);
            let out = world.attend(&sparse, &mut space, Some(&own), step);
            let lists = &made[model.list_source(at as u32) as usize];
            for token in 0..step.tokens() {
                let list = &lists[token * topk as usize..][..topk as usize];
                check_row(world, &sparse, step, list, token, &out);
            }
        }
        // Layers with an indexer make different lists, if there is a choice.
        assert!(made[0] != made[1] && made[2] != made[6] && made[6] != made[10]);
        assert!(made[2] == made[5] && made[6] == made[9] && made[10] == made[11]);
    }
}

#[test]
fn logits_by_parts() {
    let sparse = layer(true);
    let indexer = Indexer::new(&Cpu::new(), &indexer_config(9), &sparse.config().problem).unwrap();
    let mut results = Vec::new();
    for rows in [80, 7, 1, 0] {
        let limits = limits().with_logits_bytes(rows * 256 * 4);
        let mut own = indexer.workspace(&limits).unwrap();
        assert_eq!(own.rows() as u64, rows.max(1));
        let mut regions = own.plan().regions.iter();
        let logits = regions.find(|region| region.name() == "index_logits");
        assert_eq!(logits.unwrap().bytes, rows.max(1) * 1024);
        assert_eq!(own.allocated_bytes() as u64, own.plan().indexer_bytes);
        let mut space = sparse.workspace(&self::limits()).unwrap();
        let mut world = World::new(5);
        let mut lists = Vec::new();
        for new in STEPS {
            let step = world.step(new);
            world.prepare(&sparse, &mut space, &step);
            world.select(&indexer, &space, &mut own, &step).unwrap();
            lists.push(lists_of(&own, &space).0);
        }
        results.push(lists);
    }
    assert!(results.iter().all(|lists| *lists == results[0]));
}

#[test]
fn layers_share_lists() {
    let (sparse, indexer, mut own, mut space) = selecting(9);
    let [mut first, mut second] = [World::new(6), World::new(7)];
    // The block tables are the same, but the weights and caches differ.
    second.tables.clone_from(&first.tables);
    for new in STEPS {
        let [step, other] = [first.step(new), second.step(new)];
        first.prepare(&sparse, &mut space, &step);
        first.select(&indexer, &space, &mut own, &step).unwrap();
        let lists = lists_of(&own, &space).0;
        first.attend(&sparse, &mut space, Some(&own), &step);
        let out = second.attend(&sparse, &mut space, Some(&own), &other);
        assert_eq!(lists_of(&own, &space).0, lists);
        for token in 0..other.tokens() {
            let list = &lists[token * 9..(token + 1) * 9];
            check_row(&second, &sparse, &other, list, token, &out);
        }
    }
}

#[test]
fn one_call_equals_two() {
    let (sparse, indexer, mut own, mut space) = selecting(9);
    let mut world = World::new(9);
    for new in STEPS {
        let step = world.step(new);
        world.prepare(&sparse, &mut space, &step);
        let (out, cache, index_cache) = world
            .both(&sparse, &indexer, &mut space, &mut own, &step)
            .unwrap();
        let lists = lists_of(&own, &space).0;
        world.select(&indexer, &space, &mut own, &step).unwrap();
        assert_eq!(lists_of(&own, &space).0, lists);
        assert_eq!(world.attend(&sparse, &mut space, Some(&own), &step), out);
        assert_eq!((&world.cache, &world.index_cache), (&cache, &index_cache));
    }
    // A call of another step is refused, and then there are no lists.
    let longer = world.step([2, 2, 2]);
    let refused = world.both(&sparse, &indexer, &mut space, &mut own, &longer);
    let message = refused.unwrap_err().to_string();
    assert!(
        message.starts_with("query: given f32 [6, 3, 24]"),
        "{message}"
    );
    assert!(own.lists(&space).is_err());
}

#[test]
fn refusals_name_the_field() {
    let (dense, cpu) = (layer(false), Cpu::new());
    let error = |error: mla_runtime::Error| error.to_string();
    let refused = Indexer::new(&cpu, &indexer_config(9), &dense.config().problem);
    assert_eq!(
        error(refused.err().unwrap()),
        "problem.sparse: given false, accepted true: an indexer makes the lists of a sparse layer"
    );
    let (sparse, indexer, mut own, mut space) = selecting(9);
    let mut world = World::new(8);
    let step = world.step([3, 1, 0]);

    // The workspace has no prepared step.
    let refused = world.select(&indexer, &space, &mut own, &step);
    assert_eq!(
        error(refused.unwrap_err()),
        "workspace: given one without a prepared step, accepted one whose last `prepare` succeeded"
    );
    world.prepare(&sparse, &mut space, &step);
    assert_eq!(
        error(own.lists(&space).err().unwrap()),
        "slot_lists: given none, accepted those of the prepared step: a layer with an indexer \
         selects first"
    );
    // The lists are those of another step.
    world.select(&indexer, &space, &mut own, &step).unwrap();
    own.lists(&space).unwrap();
    world.prepare(&sparse, &mut space, &step);
    assert_eq!(
        error(own.lists(&space).err().unwrap()),
        "slot_lists: given those of another step, accepted those of the prepared step: a layer \
         with an indexer selects first"
    );
    // The workspace belongs to another indexer.
    let other = Indexer::new(&cpu, &indexer_config(8), &sparse.config().problem).unwrap();
    let mut foreign = other.workspace(&limits()).unwrap();
    let refused = world.select(&indexer, &space, &mut foreign, &step);
    assert_eq!(
        error(refused.unwrap_err()),
        "indexer workspace: given one for 4 index heads of 32 values, 8 of them rotary, lists of \
         8, accepted 4 index heads of 32 values, 8 of them rotary, lists of 9"
    );
    // The workspace belongs to an indexer of another layer, whose queries have a narrower dtype.
    let mut problem = sparse.config().problem;
    problem.dtype = DType::BF16;
    let narrow = Indexer::new(&cpu, &indexer_config(9), &problem).unwrap();
    let mut foreign = narrow.workspace(&limits()).unwrap();
    let before = world.index_cache.clone();
    let refused = world.select(&indexer, &space, &mut foreign, &step);
    assert_eq!(
        error(refused.unwrap_err()),
        "indexer workspace: given one for queries in bf16, accepted one for queries in f32"
    );
    assert!(world.index_cache == before);
    // The indexer's workspace is for shorter steps.
    let short = limits().with_tokens(3);
    let mut small = indexer.workspace(&short).unwrap();
    let refused = world.select(&indexer, &space, &mut small, &step);
    assert_eq!(
        error(refused.unwrap_err()),
        "new tokens: given 4, accepted at most the indexer workspace's limit of 3"
    );
    // The tensors belong to another step.
    let mut longer = world.step([3, 1, 0]);
    longer.requests[0].q = 4;
    longer.keys.resize(5 * 32, 0.0);
    longer.query_latent.resize(5 * RANK, 0.0);
    longer.head_weights.resize(5 * 4, 0.0);
    let refused = world.select(&indexer, &space, &mut own, &longer);
    assert_eq!(
        error(refused.unwrap_err()),
        "query latent: given f32 [5, 1, 24] strides [24, 24, 1], accepted f32 [4, 1, 24]"
    );
}
