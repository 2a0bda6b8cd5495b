//! Tests a sparse layer with its indexer, from latents to outputs.

use fastrand::Rng;
use half::bf16;
use mla_conformance::reference::{
    self, Array, decode_row, hadamard, index_logit, largest, layer_norm, quantise_index,
};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, IndexCall, Indexer, IndexerWorkspace};
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{
    DType, HeadDims, IndexerConfig, KvFormat, MlaDims, ModelConfig, RotaryStyle,
};
use mla_runtime::spec::{Feature, FeatureSet, Problem, QueryLen};
use mla_runtime::tensor::{CacheLayout, CacheMut, TensorMut, TensorRef};

use crate::refusals::{Refused, refused};
use crate::{Tables, random, wide};

pub(crate) type Layer = MlaLayer<CpuPrefill, CpuDecode>;
pub(crate) type Space = Workspace<CpuPrefill, CpuDecode>;

const DIMS: MlaDims = MlaDims::new(128, HeadDims::new(16, 8, 16));
const HEADS: usize = 3;
pub(crate) const RANK: usize = 24;
pub(crate) const WIDTH: usize = 32;
pub(crate) const PAGE: usize = 16;
pub(crate) const PAGES: usize = 24;

pub(crate) fn indexer_config(topk: u32) -> IndexerConfig {
    IndexerConfig::new(4, WIDTH as u32, 8, topk)
}

pub(crate) fn problem() -> Problem {
    Problem::new(DIMS, HEADS as u32, DType::F32)
        .with_sparse(true)
        .with_page_size(PAGE as u32)
        .with_query_len(QueryLen::Ragged)
        .with_features(FeatureSet::of(&[Feature::BatchInvariant]))
}

pub(crate) fn limits() -> StepLimits {
    StepLimits::new(4, 160, 8).with_decode_query_len(160)
}

/// A layer and an indexer, with a workspace of each.
pub(crate) struct Lab {
    config: IndexerConfig,
    pub(crate) layer: Layer,
    pub(crate) indexer: Indexer<Cpu>,
    pub(crate) own: IndexerWorkspace<Cpu>,
    pub(crate) space: Space,
}

impl Lab {
    pub(crate) fn new(config: IndexerConfig) -> Self {
        Self::of(config, problem())
    }

    /// Makes the lab of a problem. If it is not sparse, the indexer has nothing to do.
    fn of(config: IndexerConfig, problem: Problem) -> Self {
        let layer = Layer::of(&Cpu::new(), &LayerConfig::new(problem, 0.2)).unwrap();
        let indexer = Indexer::new(&Cpu::new(), &config, &problem.with_sparse(true)).unwrap();
        Self {
            own: indexer.workspace(&limits()).unwrap(),
            space: layer.workspace(&limits()).unwrap(),
            config,
            layer,
            indexer,
        }
    }

    pub(crate) fn world(&self, seed: u64) -> World {
        World::new(self.config, seed)
    }

    pub(crate) fn prepare(&mut self, world: &World, step: &Step) {
        let requests = step.requests.iter().zip(world.tables.chunks(8));
        let requests: Vec<StepRequest<'_>> = requests
            .map(|(lens, pages)| StepRequest::new(lens.q, lens.kv, pages))
            .collect();
        let (problem, limits) = (&self.layer.config().problem, self.space.limits());
        let step = StepPlan::in_order(problem, limits, 160, 0, &requests).unwrap();
        self.space.prepare(&self.layer, &step).unwrap();
    }

    fn select(&mut self, world: &mut World, step: &Step) -> mla_runtime::Result<()> {
        let mut cache = std::mem::take(&mut world.index_cache);
        let call = world.index_call(step, &mut cache);
        let result = self.indexer.select(&self.space, &mut self.own, call);
        world.index_cache = cache;
        result
    }

    /// Returns the lists of slots, and their width.
    pub(crate) fn lists(&self) -> (Vec<i32>, usize) {
        let lists = self.own.lists(&self.space).unwrap();
        let slots = 0..lists.slots.len();
        (slots.map(|at| lists.slots.at(at)).collect(), lists.width)
    }

    fn attend(&mut self, world: &mut World, step: &Step) -> Vec<f32> {
        let mut out = vec![f32::NAN; step.tokens() * HEADS * 16];
        let mut cache = std::mem::take(&mut world.cache);
        let is_sparse = self.layer.config().problem.sparse;
        let lists = is_sparse.then(|| self.own.lists(&self.space).unwrap());
        let call = world.layer_call(&self.layer, step, &mut cache, &mut out);
        let call = call.with_slot_lists(lists);
        self.layer.forward(&mut self.space, call).unwrap();
        world.cache = cache;
        out
    }

    /// Runs a step in two calls. Returns the lists and the output.
    pub(crate) fn run(&mut self, world: &mut World, step: &Step) -> (Vec<i32>, Vec<f32>) {
        self.prepare(world, step);
        self.select(world, step).unwrap();
        (self.lists().0, self.attend(world, step))
    }

    /// Runs the indexer and the layer in one call.
    pub(crate) fn run_at_once(
        &mut self,
        world: &mut World,
        step: &Step,
    ) -> mla_runtime::Result<Vec<f32>> {
        let mut out = vec![f32::NAN; step.tokens() * HEADS * 16];
        let [mut cache, mut index_cache] =
            [&mut world.cache, &mut world.index_cache].map(std::mem::take);
        let index = world.index_call(step, &mut index_cache);
        let call = world.layer_call(&self.layer, step, &mut cache, &mut out);
        let (layer, space) = (&self.layer, &mut self.space);
        let result = layer.forward_selecting(space, &mut self.own, &self.indexer, index, call);
        (world.cache, world.index_cache) = (cache, index_cache);
        result.map(|()| out)
    }
}

/// Three requests that get their tokens step by step, and the caches of one layer.
#[derive(Clone)]
pub(crate) struct World {
    rng: Rng,
    config: IndexerConfig,
    pub(crate) kv_b: Vec<f32>,
    pub(crate) query_weights: Vec<f32>,
    pub(crate) norm: [Vec<f32>; 2],
    /// Numbers added to the gates of a pool's tokens.
    pub(crate) pool_table: Vec<f32>,
    tables: Vec<i32>,
    pub(crate) lens: [u32; 3],
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
    pub(crate) gates: Vec<f32>,
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
            (&mut self.gates, &other.gates),
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

    /// Returns the request of each token, and the number of positions that it sees.
    pub(crate) fn rows(&self) -> Vec<(usize, usize)> {
        let requests = self.requests.iter().enumerate();
        requests
            .flat_map(|(request, Request { q, kv, .. })| {
                (kv - q + 1..kv + 1).map(move |seen| (request, seen as usize))
            })
            .collect()
    }
}

impl World {
    pub(crate) fn new(config: IndexerConfig, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut tables: Vec<i32> = (0..PAGES as i32).collect();
        rng.shuffle(&mut tables);
        let layout = IndexCacheLayout::contiguous(&config, PAGES, PAGE);
        Self {
            kv_b: random(&mut rng, 128 * HEADS * 32),
            query_weights: random(&mut rng, RANK * 4 * WIDTH),
            norm: [random(&mut rng, WIDTH), random(&mut rng, WIDTH)],
            pool_table: random(&mut rng, config.pool as usize * WIDTH),
            tables,
            lens: [0; 3],
            // Unused slots are NaN.
            cache: vec![u32::MAX; PAGES * PAGE * 136],
            index_cache: vec![u32::MAX; PAGES * layout.page_stride / 4],
            config,
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
            keys: of(WIDTH),
            gates: of(WIDTH).iter().map(|x| 3.0 * x).collect(),
            head_weights: of(4),
            rotary: Tables::new(positions, 8, RotaryStyle::Halves),
        }
    }

    /// Makes the values of all tokens at once, so that they do not depend on the steps.
    pub(crate) fn whole(&mut self, lens: [u32; 3]) -> Step {
        let all = self.step(lens);
        self.lens = [0; 3];
        all
    }

    /// Returns a step of the next tokens of each request, with the values that `all` has for them.
    pub(crate) fn next(&mut self, all: &Step, new: [u32; 3]) -> Step {
        let (mut first, mut rows) = (0, Vec::new());
        for (request, new) in new.into_iter().enumerate() {
            let start = first + self.lens[request] as usize;
            rows.extend(start..start + new as usize);
            first += all.requests[request].q as usize;
        }
        self.step(new).with_rows_of(all, &rows)
    }

    pub(crate) fn index_layout(&self) -> IndexCacheLayout {
        IndexCacheLayout::contiguous(&self.config, PAGES, PAGE)
    }

    pub(crate) fn index_call<'a>(
        &'a self,
        step: &'a Step,
        cache: &'a mut [u32],
    ) -> IndexCall<'a, Cpu> {
        let (tokens, layout) = (step.tokens(), self.index_layout());
        let view = |values, shape| TensorRef::from_slice::<f32>(values, shape).unwrap();
        let pool = self.config.pool as usize;
        let of_pools = || {
            let gates = view(&step.gates, [tokens, 1, WIDTH]);
            [gates, view(&self.pool_table, [1, pool, WIDTH])]
        };
        IndexCall::new(
            [
                view(&step.query_latent, [tokens, 1, RANK]),
                view(&self.query_weights, [1, RANK, 4 * WIDTH]),
            ],
            view(&step.keys, [tokens, 1, WIDTH]),
            [
                view(&self.norm[0], [1, 1, WIDTH]),
                view(&self.norm[1], [1, 1, WIDTH]),
            ],
            view(&step.head_weights, [tokens, 1, 4]),
            IndexCacheMut::new(bytemuck::cast_slice_mut(cache), layout).unwrap(),
        )
        // The view may have any style, because the indexer has its own.
        .with_rotary((self.config.rope > 0).then(|| step.rotary.view()))
        .with_pool((pool > 1).then(of_pools))
    }

    fn layer_call<'a>(
        &'a self,
        layer: &Layer,
        step: &'a Step,
        cache: &'a mut [u32],
        out: &'a mut [f32],
    ) -> LayerCall<'a, Cpu> {
        let tokens = step.tokens();
        let layout = CacheLayout::contiguous(DIMS, KvFormat::F32, PAGES, PAGE);
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

    pub(crate) fn slot(&self, request: usize, position: usize) -> usize {
        self.tables[request * 8 + position / PAGE] as usize * PAGE + position % PAGE
    }
}

/// A prompt, then prompts with context, then decodes and a longer query. The steps cover chunked
/// prefill and decode.
const STEPS: [[u32; 3]; 4] = [[30, 5, 0], [35, 1, 40], [1, 1, 1], [2, 9, 4]];

#[test]
fn full_topk_is_dense() {
    let mut sparse = Lab::new(indexer_config(70));
    let mut dense = Lab::of(indexer_config(70), problem().with_sparse(false));
    let [mut a, mut b] = [sparse.world(3), dense.world(3)];
    for new in STEPS {
        let [step, same] = [a.step(new), b.step(new)];
        let (_, given) = sparse.run(&mut a, &step);
        dense.prepare(&b, &same);
        let expected = dense.attend(&mut b, &same);
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
    let mut lab = Lab::new(indexer_config(topk as u32));
    let mut together = lab.world(5);
    let mut alone = [0; 3].map(|_| lab.world(5));
    for new in STEPS {
        let step = together.step(new);
        let (lists, out) = lab.run(&mut together, &step);
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
            let (own_lists, own_out) = lab.run(world, &step);
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

/// Rounds numbers to bf16.
pub(crate) fn rounded(row: &[f64]) -> Vec<f64> {
    row.iter().map(|x| bf16::from_f64(*x).to_f64()).collect()
}

/// Returns the reference's queries of a token, with their weights. The queries of pools are rounded
/// before and after the Hadamard transform.
pub(crate) fn queries_of(world: &World, step: &Step, token: usize) -> Vec<(Vec<u8>, f64)> {
    let latent = wide(&step.query_latent[token * RANK..][..RANK]);
    (0..4)
        .map(|head| {
            let value = |d: usize| -> f64 {
                let at = |k: usize| k * 4 * WIDTH + head * WIDTH + d;
                let weight = |k: usize| f64::from(world.query_weights[at(k)]);
                (0..RANK).map(|k| latent[k] * weight(k)).sum()
            };
            let mut query: Vec<f64> = (0..WIDTH).map(value).collect();
            match world.config.pool {
                1 => step.rotary.turn(token).apply(&mut query),
                _ => query = rounded(&hadamard(&rounded(&query))),
            }
            let (codes, scale) = quantise_index(&query);
            let weight = f64::from(step.head_weights[token * 4 + head]);
            (codes, weight * scale / 128f64.sqrt())
        })
        .collect()
}

#[test]
fn lists_match_the_reference() {
    let topk = 20;
    let mut lab = Lab::new(indexer_config(topk as u32));
    let mut world = lab.world(4);
    let mut keys: [Keys; 3] = Default::default();
    let (mut lists_compared, mut on_the_edge, mut selective) = (0, 0, 0);
    for new in STEPS {
        let step = world.step(new);
        let (lists, out) = lab.run(&mut world, &step);
        assert_eq!((lab.lists().1, lists.len()), (topk, step.tokens() * topk));
        for (token, (request, seen)) in step.rows().into_iter().enumerate() {
            keys[request].push(key_of(&world, &step, token));
            assert_eq!(keys[request].len(), seen);
            let queries = queries_of(&world, &step, token);
            let logits: Vec<f64> = keys[request]
                .iter()
                .map(|(codes, scale)| index_logit(&queries, codes, *scale))
                .collect();
            let list = &lists[token * topk..(token + 1) * topk];
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
            check_row(&world, &step, list, token, &out);
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
pub(crate) fn check_row(world: &World, step: &Step, list: &[i32], token: usize, out: &[f32]) {
    let bytes: &[u8] = bytemuck::cast_slice(&world.cache);
    let rows: Vec<Vec<f64>> = list
        .iter()
        .filter_map(|slot| usize::try_from(*slot).ok())
        .map(|slot| decode_row(KvFormat::F32, 128, 8, &bytes[slot * 544..][..544], 1.0))
        .collect();
    let query = Array::from_fn([1, HEADS, 24], |_, head, k| {
        step.query[(token * HEADS + head) * 24 + k].into()
    });
    let expected = reference::layer(
        &query,
        &rows,
        &wide(&world.kv_b),
        [16, 8, 16],
        0.2f32.into(),
    );
    let given = wide(&out[token * HEADS * 16..][..HEADS * 16]);
    for (given, expected) in given.iter().zip(&expected.out.data) {
        assert!(
            (given - expected).abs() < 1e-3,
            "{given}, expected {expected}"
        );
    }
}

/// Returns the lists and outputs of each request's tokens, ordered by position. `steps` are the
/// numbers of new tokens.
fn by_position(steps: &[[u32; 3]], topk: u32) -> [Vec<(Vec<usize>, Vec<f32>)>; 3] {
    let mut lab = Lab::new(indexer_config(topk));
    let mut world = lab.world(12);
    let total = [0, 1, 2].map(|request| steps.iter().map(|new| new[request]).sum());
    let all = world.whole(total);
    let mut found: [Vec<_>; 3] = Default::default();
    for new in steps {
        let step = world.next(&all, *new);
        let (lists, out) = lab.run(&mut world, &step);
        for (token, (request, _)) in step.rows().into_iter().enumerate() {
            let slots = lists[token * topk as usize..][..topk as usize].iter();
            let slots = slots.filter_map(|slot| usize::try_from(*slot).ok());
            let row = out[token * HEADS * 16..][..HEADS * 16].to_vec();
            found[request].push((slots.collect(), row));
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
    let mut lab = Lab::new(indexer_config(topk));
    // Layers have their own weights and caches, but the same pages.
    let mut worlds: Vec<World> = (0..12).map(|layer| lab.world(40 + layer)).collect();
    let tables = worlds[0].tables.clone();
    for world in &mut worlds {
        world.tables.clone_from(&tables);
    }
    for new in STEPS {
        let steps: Vec<Step> = worlds.iter_mut().map(|world| world.step(new)).collect();
        lab.prepare(&worlds[0], &steps[0]);
        let mut made: Vec<Vec<i32>> = Vec::new();
        for (at, (world, step)) in worlds.iter_mut().zip(&steps).enumerate() {
            if model.has_indexer(at as u32) {
                lab.select(world, step).unwrap();
            }
            made.push(lab.lists().0);
            let out = lab.attend(world, step);
            let lists = &made[model.list_source(at as u32) as usize];
            for token in 0..step.tokens() {
                let list = &lists[token * topk as usize..][..topk as usize];
                check_row(world, step, list, token, &out);
            }
        }
        // Layers with an indexer make different lists, if there is a choice.
        assert!(made[0] != made[1] && made[2] != made[6] && made[6] != made[10]);
        assert!(made[2] == made[5] && made[6] == made[9] && made[10] == made[11]);
    }
}

#[test]
fn logits_by_parts() {
    let mut lab = Lab::new(indexer_config(9));
    let mut results = Vec::new();
    for rows in [80, 7, 1, 0] {
        let limits = limits().with_logits_bytes(rows * 256 * 4);
        lab.own = lab.indexer.workspace(&limits).unwrap();
        let own = &lab.own;
        assert_eq!(own.rows() as u64, rows.max(1));
        let mut regions = own.plan().regions.iter();
        let logits = regions.find(|region| region.name() == "index_logits");
        assert_eq!(logits.unwrap().bytes, rows.max(1) * 1024);
        assert_eq!(own.allocated_bytes() as u64, own.plan().indexer_bytes);
        let mut world = lab.world(5);
        let lists = STEPS.map(|new| {
            let step = world.step(new);
            lab.run(&mut world, &step).0
        });
        results.push(lists);
    }
    assert!(results.iter().all(|lists| *lists == results[0]));
}

#[test]
fn layers_share_lists() {
    let mut lab = Lab::new(indexer_config(9));
    let [mut first, mut second] = [lab.world(6), lab.world(7)];
    // The block tables are the same, but the weights and caches differ.
    second.tables.clone_from(&first.tables);
    for new in STEPS {
        let [step, other] = [first.step(new), second.step(new)];
        let (lists, _) = lab.run(&mut first, &step);
        let out = lab.attend(&mut second, &other);
        assert_eq!(lab.lists().0, lists);
        for token in 0..other.tokens() {
            let list = &lists[token * 9..(token + 1) * 9];
            check_row(&second, &other, list, token, &out);
        }
    }
}

#[test]
fn one_call_equals_two() {
    let mut lab = Lab::new(indexer_config(9));
    let mut world = lab.world(9);
    for new in STEPS {
        let step = world.step(new);
        lab.prepare(&world, &step);
        let mut at_once = world.clone();
        let out = lab.run_at_once(&mut at_once, &step).unwrap();
        let lists = lab.lists().0;
        assert_eq!(lab.run(&mut world, &step), (lists, out));
        assert_eq!(
            (&world.cache, &world.index_cache),
            (&at_once.cache, &at_once.index_cache)
        );
    }
}

pub(crate) fn refused() -> Refused {
    let mut lab = Lab::new(indexer_config(9));
    let mut world = lab.world(8);
    let step = world.step([3, 1, 0]);
    let own_of = |config, problem| {
        let indexer = Indexer::new(&Cpu::new(), &config, &problem).unwrap();
        indexer.workspace(&limits()).unwrap()
    };
    let unprepared = lab.select(&mut world, &step);
    lab.prepare(&world, &step);
    let unselected = lab.own.lists(&lab.space).map(drop);
    lab.select(&mut world, &step).unwrap();
    lab.prepare(&world, &step);
    let outdated = lab.own.lists(&lab.space).map(drop);

    let mut longer = world.step([3, 1, 0]);
    longer.requests[0].q = 4;
    longer.keys.resize(5 * WIDTH, 0.0);
    longer.query_latent.resize(5 * RANK, 0.0);
    longer.head_weights.resize(5 * 4, 0.0);
    let another_step = lab.select(&mut world, &longer);
    // A call of another step is refused, and then there are no lists.
    lab.select(&mut world, &step).unwrap();
    let longer = world.step([2, 2, 2]);
    let at_once = lab.run_at_once(&mut world, &longer);
    assert!(lab.own.lists(&lab.space).is_err());

    let before = world.index_cache.clone();
    lab.own = own_of(indexer_config(8), problem());
    let another_indexer = lab.select(&mut world, &step);
    // The queries of this workspace have a narrower dtype.
    let mut narrow = problem();
    narrow.dtype = DType::BF16;
    lab.own = own_of(indexer_config(9), narrow);
    let another_layer = lab.select(&mut world, &step);
    lab.own = lab.indexer.workspace(&limits().with_tokens(3)).unwrap();
    let shorter_steps = lab.select(&mut world, &step);
    assert!(world.index_cache == before);
    refused! {
        "indexer: of a problem that is not sparse",
            Indexer::new(&Cpu::new(), &indexer_config(9), &problem().with_sparse(false));
        "indexer: no step is prepared", unprepared;
        "indexer: lists that nobody has made", unselected;
        "indexer: lists of another step", outdated;
        "indexer: tensors of another step", another_step;
        "indexer: tensors of another step, in one call", at_once;
        "indexer: a workspace of another indexer", another_indexer;
        "indexer: a workspace of another layer", another_layer;
        "indexer: a workspace for shorter steps", shorter_steps;
    }
}
