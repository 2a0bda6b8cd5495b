//! Checks that index keys and queries follow the formulas and are rounded once.

use fastrand::Rng;
use half::bf16;
use mla_conformance::reference::{decode_e4m3, hadamard, index_scale, layer_norm};
use mla_cpu::Cpu;
use mla_runtime::indexer::{
    IndexCacheLayout, IndexCacheMut, IndexDevice as _, IndexKeys, IndexQueries,
};
use mla_runtime::model::{IndexerConfig, RotaryStyle};
use mla_runtime::tensor::{ArrayRef, TensorMut, TensorRef};

use crate::refusals::{Refused, refused};
use crate::{Tables, random, wide};

const BASE: IndexerConfig = IndexerConfig::new(6, 128, 64, 32);

fn configs() -> impl Iterator<Item = IndexerConfig> {
    let styles = [RotaryStyle::Halves, RotaryStyle::Interleaved];
    styles.into_iter().flat_map(|rotary| {
        [false, true].map(|hadamard| BASE.with_rotary(rotary).with_hadamard(hadamard))
    })
}

/// Asserts that codes and their scale are a row that was rounded once. Each value must be within
/// half the distance to the next code. A few 2⁻²⁴ of the largest value are allowed for the earlier
/// rounding in f32.
fn check(row: &[f64], codes: &[u8], scale: f64) {
    let largest = row.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    let exact = index_scale(row);
    // At the edge of a power of two, the neighbouring scale is also allowed.
    let edge = (largest / 448.0 / exact - 1.0).abs() < 1e-5
        || (largest / 448.0 / scale - 1.0).abs() < 1e-5;
    assert!(scale == exact || edge, "scale {scale}, expected {exact}");
    for (x, code) in row.iter().zip(codes) {
        let half = (x.abs() / 16.0).max(scale / 1024.0);
        let difference = (decode_e4m3(*code) * scale - x).abs();
        assert!(
            difference <= half + 4e-6 * largest,
            "{x}: off by {difference}, at most {half}"
        );
    }
}

#[test]
fn keys_into_their_slots() {
    let mut rng = Rng::with_seed(7);
    let (tokens, width) = (37, 128);
    for (case, config) in configs().enumerate() {
        let keys = random(&mut rng, tokens * width);
        let narrow: Vec<bf16> = keys.iter().map(|x| bf16::from_f32(*x)).collect();
        let weight = random(&mut rng, width);
        let bias: Vec<bf16> = random(&mut rng, width)
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        let mut slots: Vec<i64> = (0..128).collect();
        rng.shuffle(&mut slots);
        slots.truncate(tokens);
        slots[5] = -1;
        let positions = (0..tokens).map(|_| rng.i64(0..900)).collect();
        let tables = Tables::new(positions, 64, config.rotary);
        // There is a gap between pages.
        let layout = IndexCacheLayout::contiguous(&BASE, 2, 64).with_page_stride(8448 + 64 * case);
        let mut cache = vec![0xffu8; 2 * layout.page_stride + 8];
        let start = cache.as_ptr().align_offset(4);
        let cache = &mut cache[start..];
        let bf16_keys = case % 2 == 1;
        Cpu::new()
            .write_index_keys(
                &config,
                IndexKeys::new(
                    match bf16_keys {
                        true => TensorRef::from_slice(&narrow, [tokens, 1, width]).unwrap(),
                        false => TensorRef::from_slice(&keys, [tokens, 1, width]).unwrap(),
                    },
                    [
                        TensorRef::from_slice(&weight, [1, 1, width]).unwrap(),
                        TensorRef::from_slice(&bias, [1, 1, width]).unwrap(),
                    ],
                    ArrayRef::from_slice(&slots),
                    IndexCacheMut::new(&mut *cache, layout).unwrap(),
                )
                .with_rotary(tables.view()),
            )
            .unwrap();
        let bias: Vec<f64> = bias.iter().map(|x| x.to_f64()).collect();
        let mut untouched = vec![true; cache.len()];
        for (token, slot) in slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(*slot) else {
                continue;
            };
            let given: Vec<f64> = match bf16_keys {
                true => narrow[token * width..][..width]
                    .iter()
                    .map(|x| x.to_f64())
                    .collect(),
                false => wide(&keys[token * width..][..width]),
            };
            let mut row = layer_norm(&given, &wide(&weight), &bias, 1e-6);
            tables.turn(token).apply(&mut row);
            let row = if config.hadamard { hadamard(&row) } else { row };
            // The expected layout of a page: first all values, then all scales.
            let (page, offset) = (slot / 64, slot % 64);
            let values = page * layout.page_stride + offset * 128;
            let scale = page * layout.page_stride + 8192 + offset * 4;
            let bytes: [u8; 4] = cache[scale..scale + 4].try_into().unwrap();
            check(
                &row,
                &cache[values..values + 128],
                f32::from_ne_bytes(bytes).into(),
            );
            untouched[values..values + 128].fill(false);
            untouched[scale..scale + 4].fill(false);
        }
        for (byte, untouched) in cache.iter().zip(untouched) {
            assert!(!untouched || *byte == 0xff);
        }
    }
}

#[test]
fn queries_and_scales() {
    let mut rng = Rng::with_seed(8);
    let (tokens, heads, width) = (9, 6, 128);
    for config in configs() {
        let mut queries = random(&mut rng, tokens * heads * width);
        // One head has only zeros, and one has large values.
        queries[..width].fill(0.0);
        queries[width..2 * width].iter_mut().for_each(|x| *x *= 1e4);
        let weights = random(&mut rng, tokens * heads);
        let positions = (0..tokens).map(|_| rng.i64(0..900)).collect();
        let tables = Tables::new(positions, 64, config.rotary);
        let mut values = vec![0u8; tokens * heads * width];
        let mut scaled = vec![f32::NAN; tokens * heads];
        Cpu::new()
            .quantise_index_queries(
                &config,
                IndexQueries::new(
                    [
                        TensorRef::from_slice(&queries, [tokens, heads, width]).unwrap(),
                        TensorRef::from_slice(&weights, [tokens, 1, heads]).unwrap(),
                    ],
                    &mut values[..],
                    TensorMut::from_slice(&mut scaled, [tokens, 1, heads]).unwrap(),
                )
                .with_rotary(tables.view()),
            )
            .unwrap();
        for at in 0..tokens * heads {
            let mut row = wide(&queries[at * width..][..width]);
            tables.turn(at / heads).apply(&mut row);
            let row = if config.hadamard { hadamard(&row) } else { row };
            // The factor is heads^-½ · 128^-½ · scale · weight.
            let factor = f64::from(weights[at]) / (6.0f64 * 128.0).sqrt();
            let scale = f64::from(scaled[at]) / factor;
            let exact = 2f64.powi(scale.log2().round() as i32);
            assert!((scale / exact - 1.0).abs() < 1e-6, "{scale}");
            check(&row, &values[at * width..][..width], exact);
        }
    }
}

#[test]
fn without_a_rotation_nothing_turns() {
    let config = IndexerConfig::new(1, 8, 4, 1);
    let queries = [1.0f32, -2.0, 3.0, 4.0, 0.5, 448.0, 0.0, -0.25];
    let (mut values, mut scaled) = ([0u8; 8], [0.0f32]);
    Cpu::new()
        .quantise_index_queries(
            &config,
            IndexQueries::new(
                [
                    TensorRef::from_slice(&queries, [1, 1, 8]).unwrap(),
                    TensorRef::from_slice(&[3.0f32], [1, 1, 1]).unwrap(),
                ],
                &mut values[..],
                TensorMut::from_slice(&mut scaled, [1, 1, 1]).unwrap(),
            ),
        )
        .unwrap();
    assert_eq!(values.map(decode_e4m3), queries.map(f64::from));
    assert_eq!(scaled, [3.0 * (1.0 / 8f64.sqrt()) as f32]);
}

pub(crate) fn refused() -> Refused {
    let config = IndexerConfig::new(2, 8, 4, 4).with_rotary(RotaryStyle::Interleaved);
    let layout = IndexCacheLayout::contiguous(&config, 1, 4);
    let (keys, ones) = ([1.0f32; 16], [1.0f32; 8]);
    let tables = Tables::new(vec![0, 1], 4, RotaryStyle::Interleaved);
    let halves = Tables::new(vec![0, 1], 4, RotaryStyle::Halves);
    let narrow = layout.with_width(4);
    let write = |keys: &[f32], width: usize, slots: &[i64], tables: &Tables, layout| {
        let mut cache = vec![0u32; 12];
        let cache = IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout).unwrap();
        let ones = TensorRef::from_slice(&ones, [1, 1, 8]).unwrap();
        let keys = TensorRef::from_slice(keys, [2, 1, width]).unwrap();
        let keys = IndexKeys::new(keys, [ones; 2], ArrayRef::from_slice(slots), cache);
        Cpu::new().write_index_keys(&config, keys.with_rotary(tables.view()))
    };
    refused! {
        "keys: narrower than the indexer's", write(&keys[..12], 6, &[0, 1], &tables, layout);
        "keys: slots for fewer tokens", write(&keys, 8, &[0], &tables, layout);
        "keys: a slot past the cache", write(&keys, 8, &[0, 4], &tables, layout);
        "keys: one slot twice", write(&keys, 8, &[3, 3], &tables, layout);
        "keys: another rotary style", write(&keys, 8, &[0, 1], &halves, layout);
        "keys: a cache of narrower keys", write(&keys, 8, &[0, 1], &tables, narrow);
    }
}
