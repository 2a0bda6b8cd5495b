//! Compares pooled index keys with f64, step by step.

use fastrand::Rng;
use half::bf16;
use mla_conformance::reference::{
    Array, absorbed, decode_e4m3, decode_row, hadamard, index_logit, largest, layer_norm,
    quantise_index,
};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::indexer::{
    IndexCacheLayout, IndexCacheMut, IndexCall, IndexDevice as _, IndexKeys, Indexer,
    IndexerWorkspace,
};
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::{DType, HeadDims, IndexerConfig, MlaDims};
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{ArrayRef, CacheLayout, CacheMut, TensorMut, TensorRef};

use crate::{random, wide};

const DIMS: MlaDims = MlaDims::new(64, HeadDims::new(16, 0, 16));
const HEADS: usize = 2;
const RANK: usize = 24;
const PAGE: usize = 16;
/// The number of pages per request. There are two requests.
const PAGES: usize = 6;
const WIDTH: usize = 32;
const INDEX_HEADS: usize = 4;
const POOL: usize = 4;
const TOPK: usize = 16;
const LIST: usize = TOPK + POOL - 1;

fn config() -> IndexerConfig {
    let config = IndexerConfig::new(INDEX_HEADS as u32, WIDTH as u32, 0, TOPK as u32);
    let pooled = config.with_pool(POOL as u32).with_tail(8);
    pooled.with_hadamard(true)
}

fn problem() -> Problem {
    Problem::new(DIMS, HEADS as u32, DType::F32)
        .with_sparse(true)
        .with_page_size(PAGE as u32)
        .with_query_len(QueryLen::Ragged)
}

/// The values of one token.
#[derive(Clone)]
struct Token {
    query: Vec<f32>,
    latent: Vec<f32>,
    query_latent: Vec<f32>,
    key: Vec<f32>,
    gate: Vec<f32>,
    head_weights: Vec<f32>,
}

/// The new tokens of a step: the earlier length of each request, and its number of new tokens.
/// Rejected drafts have values of their own.
#[derive(Clone, Copy)]
struct Brought {
    from: [usize; 2],
    new: [usize; 2],
    drafts: bool,
}

/// The tokens of both requests, the layer, and its caches.
struct World {
    layer: MlaLayer<CpuPrefill, CpuDecode>,
    indexer: Indexer<Cpu>,
    own: IndexerWorkspace<Cpu>,
    space: Workspace<CpuPrefill, CpuDecode>,
    tokens: [Vec<Token>; 2],
    drafts: [Vec<Token>; 2],
    kv_b: Vec<f32>,
    query_weights: Vec<f32>,
    norm: [Vec<f32>; 2],
    table: Vec<f32>,
    pages: Vec<i32>,
    cache: Vec<u32>,
    index_cache: Vec<u32>,
}

impl World {
    fn new() -> Self {
        let mut rng = Rng::with_seed(5);
        let mut tokens = || {
            let mut token = || Token {
                query: random(&mut rng, HEADS * 16),
                latent: random(&mut rng, 64),
                query_latent: random(&mut rng, RANK),
                key: random(&mut rng, WIDTH),
                gate: random(&mut rng, WIDTH).iter().map(|x| 3.0 * x).collect(),
                head_weights: random(&mut rng, INDEX_HEADS),
            };
            let mut of_request = || (0..PAGES * PAGE).map(|_| token()).collect();
            [of_request(), of_request()]
        };
        let (tokens, drafts) = (tokens(), tokens());
        let layer = MlaLayer::of(&Cpu::new(), &LayerConfig::new(problem(), 0.2)).unwrap();
        let limits = StepLimits::new(2, 160, PAGES).with_decode_query_len(160);
        let indexer = Indexer::new(&Cpu::new(), &config(), &problem()).unwrap();
        let mut pages: Vec<i32> = (0..2 * PAGES as i32 + 1).collect();
        rng.shuffle(&mut pages);
        Self {
            own: indexer.workspace(&limits).unwrap(),
            space: layer.workspace(&limits).unwrap(),
            layer,
            indexer,
            tokens,
            drafts,
            kv_b: random(&mut rng, 64 * HEADS * 32),
            query_weights: random(&mut rng, RANK * INDEX_HEADS * WIDTH),
            norm: [random(&mut rng, WIDTH), random(&mut rng, WIDTH)],
            table: random(&mut rng, POOL * WIDTH),
            // Unused slots are NaN.
            cache: vec![u32::MAX; pages.len() * PAGE * 64],
            index_cache: vec![
                u32::MAX;
                Self::index_layout(pages.len()).page_stride * pages.len() / 4
            ],
            pages,
        }
    }

    fn index_layout(pages: usize) -> IndexCacheLayout {
        IndexCacheLayout::contiguous(&config(), pages, PAGE)
    }

    fn slot(&self, request: usize, position: usize) -> usize {
        self.pages[request * PAGES + position / PAGE] as usize * PAGE + position % PAGE
    }

    /// Adds tokens in one call or in two. Returns the lists of the tokens and the outputs.
    fn bring(&mut self, brought: Brought, in_one: bool) -> (Vec<i32>, Vec<f32>) {
        let Brought { from, new, drafts } = brought;
        let of = if drafts { &self.drafts } else { &self.tokens };
        let rows: Vec<&Token> = (0..2)
            .flat_map(|request| &of[request][from[request]..from[request] + new[request]])
            .collect();
        let count = rows.len();
        let flat = |part: fn(&Token) -> &Vec<f32>| -> Vec<f32> {
            rows.iter().flat_map(|row| part(row)).copied().collect()
        };
        let [query, latent, query_latent, keys, gates, head_weights] = [
            flat(|row| &row.query),
            flat(|row| &row.latent),
            flat(|row| &row.query_latent),
            flat(|row| &row.key),
            flat(|row| &row.gate),
            flat(|row| &row.head_weights),
        ];
        let requests = self.pages.chunks(PAGES).take(2).enumerate();
        let requests: Vec<StepRequest<'_>> = requests
            .map(|(request, pages)| {
                let (q, kv) = (new[request], from[request] + new[request]);
                StepRequest::new(q as u32, kv as u32, pages)
            })
            .collect();
        let step = StepPlan::in_order(&problem(), self.space.limits(), 160, 0, &requests).unwrap();
        self.space.prepare(&self.layer, &step).unwrap();
        let view = |values, shape| TensorRef::from_slice::<f32>(values, shape).unwrap();
        let layout = Self::index_layout(self.pages.len());
        let index = IndexCall::new(
            [
                view(&query_latent, [count, 1, RANK]),
                view(&self.query_weights, [1, RANK, INDEX_HEADS * WIDTH]),
            ],
            view(&keys, [count, 1, WIDTH]),
            [
                view(&self.norm[0], [1, 1, WIDTH]),
                view(&self.norm[1], [1, 1, WIDTH]),
            ],
            view(&head_weights, [count, 1, INDEX_HEADS]),
            IndexCacheMut::new(bytemuck::cast_slice_mut(&mut self.index_cache), layout).unwrap(),
        )
        .with_pool([
            view(&gates, [count, 1, WIDTH]),
            view(&self.table, [1, POOL, WIDTH]),
        ]);
        let mut out = vec![f32::NAN; count * HEADS * 16];
        let format = self.layer.config().problem.kv_format;
        let layout = CacheLayout::contiguous(DIMS, format, self.pages.len(), PAGE);
        let call = LayerCall::new(
            Weights::from_transposed(view(&self.kv_b, [1, 64, HEADS * 32]), self.layer.config())
                .unwrap(),
            view(&query, [count, HEADS, 16]),
            [view(&latent, [count, 1, 64]), view(&[], [count, 1, 0])],
            CacheMut::new(bytemuck::cast_slice_mut(&mut self.cache), layout).unwrap(),
            TensorMut::from_slice(&mut out, [count, HEADS, 16]).unwrap(),
        );
        let (layer, space, own) = (&self.layer, &mut self.space, &mut self.own);
        if in_one {
            layer
                .forward_selecting(space, own, &self.indexer, index, call)
                .unwrap();
        } else {
            self.indexer.select(space, own, index).unwrap();
            let call = call.with_slot_lists(Some(own.lists(space).unwrap()));
            layer.forward(space, call).unwrap();
        }
        let lists = own.lists(space).unwrap();
        assert_eq!((lists.width, lists.slots.len()), (LIST, count * LIST));
        (
            (0..count * LIST).map(|at| lists.slots.at(at)).collect(),
            out,
        )
    }

    /// The values of a pool by the reference, before they are quantised.
    fn pool(&self, request: usize, pool: usize) -> Vec<f64> {
        let rounded =
            |row: &[f64]| -> Vec<f64> { row.iter().map(|x| bf16::from_f64(*x).to_f64()).collect() };
        let [weight, bias] = [&self.norm[0], &self.norm[1]].map(|row| wide(row));
        let tokens = &self.tokens[request][pool * POOL..(pool + 1) * POOL];
        let keys = tokens
            .iter()
            .map(|token| layer_norm(&wide(&token.key), &weight, &bias, 1e-6));
        let keys: Vec<_> = keys.map(|key| rounded(&key)).collect();
        let gates: Vec<_> = tokens
            .iter()
            .map(|token| rounded(&wide(&token.gate)))
            .collect();
        let pooled: Vec<f64> = (0..WIDTH)
            .map(|d| {
                let score = |m: usize| gates[m][d] + f64::from(self.table[m * WIDTH + d]);
                let weights: Vec<f64> = (0..POOL).map(|m| score(m).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let parts = weights.iter().zip(&keys);
                parts.map(|(weight, key)| weight / sum * key[d]).sum()
            })
            .collect();
        rounded(&hadamard(&rounded(&pooled)))
    }

    /// The stored values of a pool: codes and their scale.
    fn stored(&self, request: usize, pool: usize) -> (Vec<u8>, f64) {
        let layout = Self::index_layout(self.pages.len());
        let bytes: &[u8] = bytemuck::cast_slice(&self.index_cache);
        let slot = self.slot(request, pool * POOL) / POOL;
        let scale = bytes[layout.scale_at(slot)..][..4].try_into().unwrap();
        let codes = bytes[layout.values_at(slot)..][..WIDTH].to_vec();
        (codes, f32::from_ne_bytes(scale).into())
    }

    fn queries(&self, token: &Token) -> Vec<(Vec<u8>, f64)> {
        let latent = wide(&token.query_latent);
        let rounded = |x: f64| bf16::from_f64(x).to_f64();
        (0..INDEX_HEADS)
            .map(|head| {
                let value = |d: usize| -> f64 {
                    let at = |k: usize| k * INDEX_HEADS * WIDTH + head * WIDTH + d;
                    let weight = |k: usize| f64::from(self.query_weights[at(k)]);
                    (0..RANK).map(|k| latent[k] * weight(k)).sum()
                };
                let query: Vec<f64> = (0..WIDTH).map(|d| rounded(value(d))).collect();
                let query: Vec<f64> = hadamard(&query).into_iter().map(rounded).collect();
                let (codes, scale) = quantise_index(&query);
                let factor = scale / ((INDEX_HEADS * WIDTH) as f64).sqrt();
                (codes, f64::from(token.head_weights[head]) * factor)
            })
            .collect()
    }

    /// The list of a token that sees `seen` positions, from the reference and the stored pools.
    fn list(&self, request: usize, seen: usize, token: &Token) -> Vec<i32> {
        let queries = self.queries(token);
        let logits: Vec<f64> = (0..seen / POOL)
            .map(|pool| {
                let (codes, scale) = self.stored(request, pool);
                index_logit(&queries, &codes, scale)
            })
            .collect();
        let slot = |position| self.slot(request, position) as i32;
        let chosen = largest(&logits, TOPK / POOL);
        let tokens = chosen
            .iter()
            .flat_map(|pool| pool * POOL..(pool + 1) * POOL);
        let mut list: Vec<i32> = tokens.map(slot).collect();
        list.resize(TOPK, -1);
        list.extend((seen / POOL * POOL..seen).map(slot));
        list.resize(LIST, -1);
        list
    }

    /// Checks that a token's output is attention in f64 to the rows of its list.
    fn check_row(&self, token: &Token, list: &[i32], out: &[f32]) {
        let bytes: &[u8] = bytemuck::cast_slice(&self.cache);
        let format = self.layer.config().problem.kv_format;
        let rows: Vec<Vec<f64>> = list
            .iter()
            .filter_map(|slot| usize::try_from(*slot).ok())
            .map(|slot| decode_row(format, 64, 0, &bytes[slot * 256..][..256], 1.0))
            .collect();
        for head in 0..HEADS {
            let query = wide(&token.query[head * 16..][..16]);
            let weight =
                |l: usize, column: usize| f64::from(self.kv_b[l * HEADS * 32 + head * 32 + column]);
            let latent = Array::from_fn([1, 1, 64], |_, _, k| {
                (0..16).map(|p| query[p] * weight(k, p)).sum()
            });
            let attended = absorbed(&latent, &rows, 64, 0.2f32.into());
            for v in 0..16 {
                let parts = (0..64).map(|l| attended.out.row(0, 0)[l] * weight(l, 16 + v));
                let (given, expected) = (f64::from(out[head * 16 + v]), parts.sum::<f64>());
                assert!(
                    (given - expected).abs() < 1e-3,
                    "{given}, expected {expected}"
                );
            }
        }
    }
}

/// Steps that add tokens to both requests until they have 70 and 61 tokens. The sizes repeat.
fn steps(sizes: &[usize]) -> Vec<Brought> {
    let (mut from, mut steps) = ([0; 2], Vec::new());
    for size in sizes.iter().cycle() {
        let new = [(70 - from[0]).min(*size), (61 - from[1]).min(size + 1)];
        if new == [0; 2] {
            return steps;
        }
        let drafts = false;
        steps.push(Brought { from, new, drafts });
        from = [from[0] + new[0], from[1] + new[1]];
    }
    steps
}

#[test]
fn pools_lists_and_outputs_match_the_reference() {
    for (sizes, in_one) in [
        (&[25, 1, 30, 2][..], false),
        (&[1], true),
        (&[70], true),
        (&[7], false),
    ] {
        let mut world = World::new();
        let (mut lists_compared, mut on_the_edge) = (0, 0);
        for step in steps(sizes) {
            let (lists, out) = world.bring(step, in_one);
            let mut row = 0;
            for request in 0..2 {
                for position in step.from[request]..step.from[request] + step.new[request] {
                    let token = &world.tokens[request][position];
                    let list = &lists[row * LIST..(row + 1) * LIST];
                    let expected = world.list(request, position + 1, token);
                    // The last pool must match exactly. The choice of whole pools may depend on
                    // rounding, so only their number is compared.
                    assert_eq!(list[TOPK..], expected[TOPK..]);
                    let count = |list: &[i32]| list.iter().filter(|slot| **slot >= 0).count();
                    assert_eq!(count(list), count(&expected));
                    lists_compared += 1;
                    on_the_edge += usize::from(list != expected);
                    world.check_row(token, list, &out[row * HEADS * 16..]);
                    row += 1;
                }
            }
        }
        assert!(
            on_the_edge * 50 <= lists_compared,
            "{on_the_edge} of {lists_compared}"
        );
        for (request, len) in [(0, 70), (1, 61)] {
            for pool in 0..len / POOL {
                let (codes, scale) = world.stored(request, pool);
                for (code, want) in codes.iter().zip(world.pool(request, pool)) {
                    let given = decode_e4m3(*code) * scale;
                    // The tolerance is half of a step of e4m3, and more where bf16 may round
                    // differently.
                    let near = (given - want).abs() <= want.abs() / 14.0 + scale / 500.0;
                    assert!(near, "pool {pool} of {request}: {given}, not {want}");
                }
            }
        }
    }
}

/// Pools have the same bits for any division into steps, and rejected drafts leave no trace.
#[test]
fn steps_and_drafts_change_nothing() {
    let pools = |world: &World| -> Vec<(Vec<u8>, f64)> {
        let all = [(0, 70), (1, 61)].into_iter();
        all.flat_map(|(request, len)| (0..len / POOL).map(move |pool| (request, pool)))
            .map(|(request, pool)| world.stored(request, pool))
            .collect()
    };
    let mut whole = World::new();
    whole.bring(steps(&[70])[0], false);
    let expected = pools(&whole);
    for (sizes, drafts) in [
        (&[1][..], 0),
        (&[3, 1], 0),
        (&[1], 4),
        (&[2, 1], 3),
        (&[13], 4),
    ] {
        let mut world = World::new();
        for step in steps(sizes) {
            world.bring(step, false);
            let from = [0, 1].map(|request| step.from[request] + step.new[request]);
            if drafts > 0 {
                world.bring(
                    Brought {
                        from,
                        new: [drafts; 2],
                        drafts: true,
                    },
                    true,
                );
            }
        }
        // The last drafts come after the last pools.
        assert!(pools(&world) == expected, "{sizes:?} with {drafts} drafts");
    }
}

/// The tokens of a pool may be anywhere in a call: parts of a prompt may be separate requests.
#[test]
fn tokens_of_a_pool_stand_anywhere() {
    let mut rng = Rng::with_seed(8);
    let layout = World::index_layout(2);
    let [keys, gates] = [0; 2].map(|_| random(&mut rng, 5 * WIDTH));
    let (table, norm) = (random(&mut rng, POOL * WIDTH), [1.0f32; WIDTH]);
    let written = |order: [usize; 5]| {
        // The tokens are a whole pool of the first page, and one token of the second.
        let slots = order.map(|token| [0, 1, 2, 3, PAGE as i64][token]);
        let rows = |of: &[f32]| -> Vec<f32> {
            let rows = order.iter().flat_map(|token| &of[token * WIDTH..][..WIDTH]);
            rows.copied().collect()
        };
        let (keys, gates) = (rows(&keys), rows(&gates));
        let view = |of, shape| TensorRef::from_slice::<f32>(of, shape).unwrap();
        let mut cache = vec![0u32; 2 * layout.page_stride / 4];
        let to = IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout).unwrap();
        let norm = view(&norm, [1, 1, WIDTH]);
        let slots = ArrayRef::from_slice(&slots);
        let keys = IndexKeys::new(view(&keys, [5, 1, WIDTH]), [norm, norm], slots, to)
            .with_pool([view(&gates, [5, 1, WIDTH]), view(&table, [1, POOL, WIDTH])]);
        Cpu::new().write_index_keys(&config(), keys).unwrap();
        let bytes: &[u8] = bytemuck::cast_slice(&cache);
        let scale = bytes[layout.scale_at(0)..][..4].to_vec();
        (bytes[layout.values_at(0)..][..WIDTH].to_vec(), scale)
    };
    let expected = written([0, 1, 2, 3, 4]);
    assert_eq!(written([0, 1, 4, 2, 3]), expected);
    assert_eq!(written([2, 3, 4, 0, 1]), expected);
}

#[test]
fn what_no_pool_can_be() {
    let pooled = config();
    let of = |config: IndexerConfig| config.check().unwrap_err().to_string();
    assert_eq!(
        of(pooled.with_topk(18)),
        "index_topk: given 18, accepted a multiple of index_kpool, 4"
    );
    assert_eq!(
        of(pooled.with_rope(8)),
        "index rope: given 8, accepted 0: keys that are pooled have no rotary part"
    );
    assert_eq!(
        of(pooled.with_tail(6)),
        "index tail: given 6, accepted a multiple of index_kpool, 4, up to 65536"
    );
    assert_eq!(
        of(pooled.with_pool(1)),
        "index tail: given 8, accepted 0 without pools"
    );
    let odd = problem().with_page_size(18);
    let refused = Indexer::new(&Cpu::new(), &config(), &odd).err().unwrap();
    assert_eq!(
        refused.to_string(),
        "page_size: given 18, accepted a multiple of index_kpool, 4"
    );
}

#[test]
fn gates_and_tails_belong_to_pools() {
    let layout = World::index_layout(1);
    let numbers = [1.0f32; POOL * WIDTH];
    let refused = |layout: IndexCacheLayout, table: Option<usize>| {
        let mut cache = vec![0u32; layout.page_stride / 4];
        let cache = IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout).unwrap();
        let rows = |count: usize| {
            TensorRef::from_slice::<f32>(&numbers[..count * WIDTH], [1, count, WIDTH]).unwrap()
        };
        let slots = ArrayRef::from_slice(&[0]);
        let keys = IndexKeys::new(rows(1), [rows(1), rows(1)], slots, cache)
            .with_pool(table.map(|count| [rows(1), rows(count)]));
        let error = Cpu::new().write_index_keys(&config(), keys).unwrap_err();
        error.to_string()
    };
    assert_eq!(
        refused(layout, None),
        "index gates: given absent, accepted present with pools alone: index_kpool is 4"
    );
    assert_eq!(
        refused(layout, Some(3)),
        "index pool table: given f32 [1, 3, 32] strides [96, 32, 1], accepted f32 [1, 4, 32]"
    );
    assert_eq!(
        refused(layout.with_tail(4), Some(4)),
        "index cache: given tails of 4, accepted 8, as the indexer has them"
    );
}
