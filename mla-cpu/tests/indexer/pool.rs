//! Compares pooled index keys with f64, step by step.

use fastrand::Rng;
use mla_conformance::reference::{decode_e4m3, hadamard, index_logit, largest, layer_norm};
use mla_cpu::Cpu;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, IndexDevice as _, IndexKeys, Indexer};
use mla_runtime::model::IndexerConfig;
use mla_runtime::tensor::{ArrayRef, TensorRef};

use crate::layer::{
    Lab, PAGE, Step, WIDTH, World, check_row, indexer_config, problem, queries_of, rounded,
};
use crate::refusals::{Refused, refused};
use crate::{random, wide};

const POOL: usize = 4;
const TOPK: usize = 16;
const LIST: usize = TOPK + POOL - 1;
/// The final lengths of the requests.
const LENS: [u32; 3] = [70, 61, 0];

fn config() -> IndexerConfig {
    let config = indexer_config(TOPK as u32).with_rope(0);
    let pooled = config.with_pool(POOL as u32).with_tail(8);
    pooled.with_hadamard(true)
}

/// Returns a pool's values by the reference before they are quantised. `all` has the tokens of all
/// requests.
fn pool_of(world: &World, all: &Step, request: usize, pool: usize) -> Vec<f64> {
    let first = request * LENS[0] as usize + pool * POOL;
    let rows = |of: &[f32]| -> Vec<Vec<f64>> {
        let rows = of[first * WIDTH..][..POOL * WIDTH].chunks(WIDTH);
        rows.map(wide).collect()
    };
    let [weight, bias] = [&world.norm[0], &world.norm[1]].map(|row| wide(row));
    let norm = |key: &Vec<f64>| rounded(&layer_norm(key, &weight, &bias, 1e-6));
    let keys: Vec<_> = rows(&all.keys).iter().map(norm).collect();
    let gates: Vec<_> = rows(&all.gates).iter().map(|row| rounded(row)).collect();
    let pooled: Vec<f64> = (0..WIDTH)
        .map(|d| {
            let score = |m: usize| gates[m][d] + f64::from(world.pool_table[m * WIDTH + d]);
            let weights: Vec<f64> = (0..POOL).map(|m| score(m).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let parts = weights.iter().zip(&keys);
            parts.map(|(weight, key)| weight / sum * key[d]).sum()
        })
        .collect();
    rounded(&hadamard(&rounded(&pooled)))
}

/// Returns the stored values of a pool: codes and their scale.
fn stored(world: &World, request: usize, pool: usize) -> (Vec<u8>, f64) {
    let layout = world.index_layout();
    let bytes: &[u8] = bytemuck::cast_slice(&world.index_cache);
    let slot = world.slot(request, pool * POOL) / POOL;
    let scale = bytes[layout.scale_at(slot)..][..4].try_into().unwrap();
    let codes = bytes[layout.values_at(slot)..][..WIDTH].to_vec();
    (codes, f32::from_ne_bytes(scale).into())
}

/// Returns the request and the number of each whole pool.
fn pools() -> impl Iterator<Item = (usize, usize)> {
    let requests = LENS.into_iter().enumerate();
    requests.flat_map(|(request, len)| (0..len as usize / POOL).map(move |pool| (request, pool)))
}

/// Returns the list of a token that sees `seen` positions, from the reference and the stored pools.
fn list_of(world: &World, request: usize, seen: usize, queries: &[(Vec<u8>, f64)]) -> Vec<i32> {
    let logits: Vec<f64> = (0..seen / POOL)
        .map(|pool| {
            let (codes, scale) = stored(world, request, pool);
            index_logit(queries, &codes, scale)
        })
        .collect();
    let slot = |position| world.slot(request, position) as i32;
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

/// Returns the new tokens of steps after which the requests have their final lengths. The sizes
/// repeat.
fn steps(sizes: &[u32]) -> Vec<[u32; 3]> {
    let (mut left, mut steps) = (LENS, Vec::new());
    for size in sizes.iter().cycle() {
        let new = [left[0].min(*size), left[1].min(size + 1), 0];
        if new == [0; 3] {
            break;
        }
        left = [left[0] - new[0], left[1] - new[1], 0];
        steps.push(new);
    }
    steps
}

#[test]
fn pools_lists_and_outputs_match_the_reference() {
    for (sizes, at_once) in [
        (&[25, 1, 30, 2][..], false),
        (&[1], true),
        (&[70], true),
        (&[7], false),
    ] {
        let mut lab = Lab::new(config());
        let mut world = lab.world(5);
        let all = world.whole(LENS);
        let (mut lists_compared, mut on_the_edge) = (0, 0);
        for new in steps(sizes) {
            let step = world.next(&all, new);
            let out = if at_once {
                lab.prepare(&world, &step);
                lab.run_at_once(&mut world, &step).unwrap()
            } else {
                lab.run(&mut world, &step).1
            };
            let (lists, width) = lab.lists();
            assert_eq!((width, lists.len()), (LIST, step.tokens() * LIST));
            for (token, (request, seen)) in step.rows().into_iter().enumerate() {
                let list = &lists[token * LIST..(token + 1) * LIST];
                let expected = list_of(&world, request, seen, &queries_of(&world, &step, token));
                // The last pool must match exactly. The choice of whole pools may depend on
                // rounding, so only their number is compared.
                assert_eq!(list[TOPK..], expected[TOPK..]);
                let count = |list: &[i32]| list.iter().filter(|slot| **slot >= 0).count();
                assert_eq!(count(list), count(&expected));
                lists_compared += 1;
                on_the_edge += usize::from(list != expected);
                check_row(&world, &step, list, token, &out);
            }
        }
        assert!(
            on_the_edge * 50 <= lists_compared,
            "{on_the_edge} of {lists_compared}"
        );
        for (request, pool) in pools() {
            let (codes, scale) = stored(&world, request, pool);
            for (code, want) in codes.iter().zip(pool_of(&world, &all, request, pool)) {
                let given = decode_e4m3(*code) * scale;
                // The tolerance is half of a step of e4m3, and more where bf16 may round
                // differently.
                let near = (given - want).abs() <= want.abs() / 14.0 + scale / 500.0;
                assert!(near, "pool {pool} of {request}: {given}, not {want}");
            }
        }
    }
}

/// Pools have the same bits for any division into steps, and rejected drafts leave no trace.
#[test]
fn steps_and_drafts_change_nothing() {
    let run = |sizes: &[u32], drafts: u32| -> Vec<(Vec<u8>, f64)> {
        let mut lab = Lab::new(config());
        let mut world = lab.world(5);
        let all = world.whole(LENS);
        for new in steps(sizes) {
            let step = world.next(&all, new);
            lab.run(&mut world, &step);
            if drafts > 0 {
                // Drafts have values of their own. The last ones come after the last pools.
                let lens = world.lens;
                let rejected = world.step([drafts, drafts, 0]);
                lab.run(&mut world, &rejected);
                world.lens = lens;
            }
        }
        pools()
            .map(|(request, pool)| stored(&world, request, pool))
            .collect()
    };
    let expected = run(&[70], 0);
    for (sizes, drafts) in [
        (&[1][..], 0),
        (&[3, 1], 0),
        (&[1], 4),
        (&[2, 1], 3),
        (&[13], 4),
    ] {
        assert!(
            run(sizes, drafts) == expected,
            "{sizes:?} with {drafts} drafts"
        );
    }
}

/// The tokens of a pool may be anywhere in a call: parts of a prompt may be separate requests.
#[test]
fn tokens_of_a_pool_stand_anywhere() {
    let mut rng = Rng::with_seed(8);
    let layout = IndexCacheLayout::contiguous(&config(), 2, PAGE);
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

pub(crate) fn refused() -> Refused {
    let pooled = config();
    let numbers = [1.0f32; POOL * WIDTH];
    let write = |tail: u32, table: Option<usize>| {
        let layout = IndexCacheLayout::contiguous(&pooled, 1, PAGE).with_tail(tail as usize);
        let mut cache = vec![0u32; layout.page_stride / 4];
        let cache = IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout).unwrap();
        let rows = |count: usize| {
            TensorRef::from_slice::<f32>(&numbers[..count * WIDTH], [1, count, WIDTH]).unwrap()
        };
        let keys = IndexKeys::new(rows(1), [rows(1); 2], ArrayRef::from_slice(&[0]), cache)
            .with_pool(table.map(|count| [rows(1), rows(count)]));
        Cpu::new().write_index_keys(&pooled, keys)
    };
    refused! {
        "pools: lists of no whole pools", pooled.with_topk(18).check();
        "pools: rotary keys", pooled.with_rope(8).check();
        "pools: tails of no whole pools", pooled.with_tail(6).check();
        "pools: a tail without pools", pooled.with_pool(1).check();
        "pools: pages of no whole pools",
            Indexer::new(&Cpu::new(), &pooled, &problem().with_page_size(18));
        "pools: no gates", write(8, None);
        "pools: a table of fewer tokens", write(8, Some(3));
        "pools: a cache of shorter tails", write(4, Some(4));
    }
}
