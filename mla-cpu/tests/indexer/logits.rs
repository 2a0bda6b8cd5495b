//! Checks that logits follow the formula for the stored keys.

use fastrand::Rng;
use mla_conformance::reference::{decode_e4m3, index_logit};
use mla_cpu::Cpu;
use mla_runtime::backend::DecodeBatch;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, IndexDevice as _, IndexRows};
use mla_runtime::model::{DType, IndexerConfig};
use mla_runtime::tensor::{ArrayRef, BlockTable, Layout, TensorMut, TensorRef};

use crate::refusals::{Refused, refused};
use crate::{Batch, random};

/// The bits of a NaN that no logit can be.
const UNTOUCHED: u32 = 0x7fc1_2345;

struct World {
    config: IndexerConfig,
    batch: Batch,
    layout: IndexCacheLayout,
    /// The cache as words, so that it is aligned.
    cache: Vec<u32>,
    queries: Vec<u8>,
    weights: Vec<f32>,
}

// Returns random codes other than NaN.
fn codes(rng: &mut Rng, count: usize) -> Vec<u8> {
    let code = |_| rng.u8(0..127) | rng.u8(0..2) << 7;
    (0..count).map(code).collect()
}

impl World {
    fn new(
        config: IndexerConfig,
        requests: &[(usize, usize)],
        page_size: usize,
        seed: u64,
    ) -> Self {
        let mut rng = Rng::with_seed(seed);
        let batch = Batch::new(&mut rng, requests, page_size);
        let layout = IndexCacheLayout::contiguous(&config, batch.pages, page_size);
        // Unused slots are NaN.
        let mut cache = vec![u32::MAX; batch.pages * layout.page_stride / 4];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut cache);
        for (request, len) in batch.lens.iter().enumerate() {
            for position in 0..*len as usize {
                let slot = batch.slot(request, position);
                let key = codes(&mut rng, layout.width);
                bytes[layout.values_at(slot)..][..layout.width].copy_from_slice(&key);
                // Scales need not be powers of two.
                let scale = 0.01 + rng.f32();
                bytes[layout.scale_at(slot)..][..4].copy_from_slice(&scale.to_ne_bytes());
            }
        }
        let tokens = batch.tokens();
        let heads = config.heads as usize;
        Self {
            queries: codes(&mut rng, tokens * heads * layout.width),
            weights: random(&mut rng, tokens * heads),
            config,
            batch,
            layout,
            cache,
        }
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.cache)
    }

    fn logits(&self, tokens: std::ops::Range<usize>, columns: usize, stride: usize) -> Vec<f32> {
        let [heads, width] = [self.config.heads, self.config.width].map(|n| n as usize);
        let rows = tokens.len();
        let mut logits = vec![f32::from_bits(UNTOUCHED); rows * stride];
        let values = &self.queries[tokens.start * heads * width..tokens.end * heads * width];
        let weights = &self.weights[tokens.start * heads..tokens.end * heads];
        let layout = Layout {
            strides: [rows * stride, stride, 1],
            ..Layout::contiguous(mla_runtime::model::DType::F32, [1, rows, columns])
        };
        let mut cache = self.cache.clone();
        Cpu::new()
            .index_logits(
                &self.config,
                values,
                TensorRef::from_slice(weights, [rows, 1, heads]).unwrap(),
                &IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), self.layout).unwrap(),
                &self.batch.view(tokens),
                TensorMut::new(bytemuck::cast_slice_mut(&mut logits), layout).unwrap(),
            )
            .unwrap();
        logits
    }

    /// Compares logits with f64. The entries of keys that are not seen must keep their earlier
    /// bits.
    fn check(&self) {
        let [heads, width] = [self.config.heads, self.config.width].map(|n| n as usize);
        let columns = self.batch.longest();
        let stride = columns + 5;
        let logits = self.logits(0..self.batch.tokens(), columns, stride);
        for (token, (request, seen)) in self.batch.rows().into_iter().enumerate() {
            let row = &logits[token * stride..(token + 1) * stride];
            let queries: Vec<(Vec<u8>, f64)> = (0..heads)
                .map(|head| {
                    let at = token * heads + head;
                    let query = self.queries[at * width..(at + 1) * width].to_vec();
                    (query, f64::from(self.weights[at]))
                })
                .collect();
            for (position, logit) in row.iter().enumerate() {
                if position >= seen {
                    assert_eq!(logit.to_bits(), UNTOUCHED);
                    continue;
                }
                let slot = self.batch.slot(request, position);
                let key = &self.bytes()[self.layout.values_at(slot)..][..width];
                let at = self.layout.scale_at(slot);
                let scale: [u8; 4] = self.bytes()[at..at + 4].try_into().unwrap();
                let scale = f64::from(f32::from_ne_bytes(scale));
                let expected = index_logit(&queries, key, scale);
                // The rounding error of each sum is at most 2⁻²⁴ of the magnitudes that are added
                // up.
                let max: f64 = queries
                    .iter()
                    .map(|(query, weight)| {
                        let products = query.iter().zip(key);
                        let sum: f64 = products
                            .map(|(q, k)| (decode_e4m3(*q) * decode_e4m3(*k)).abs())
                            .sum();
                        sum * weight.abs()
                    })
                    .sum();
                let tolerance = (width + heads + 4) as f64 * 2f64.powi(-24) * max * scale;
                let difference = (f64::from(*logit) - expected).abs();
                assert!(difference <= tolerance, "{logit}, expected {expected}");
            }
        }
    }
}

#[test]
fn logits_are_what_the_formula_gives() {
    let requests = [(1, 70), (3, 33), (1, 1), (0, 5), (2, 2), (2, 0), (5, 131)];
    World::new(IndexerConfig::DEEPSEEK_V3_2, &requests, 64, 1).check();
    World::new(IndexerConfig::GLM_5, &requests, 16, 2).check();
    for (heads, width) in [(1, 4), (3, 20), (5, 36)] {
        let config = IndexerConfig::new(heads, width, 2, 8);
        World::new(config, &requests, 4, 3).check();
    }
}

#[test]
fn parts_equal_the_whole() {
    let world = World::new(IndexerConfig::GLM_5, &[(4, 90), (1, 40), (6, 66)], 64, 4);
    let whole = world.logits(0..11, 90, 90);
    for part in [0..3, 3..5, 2..11, 5..5] {
        let logits = world.logits(part.clone(), 90, 90);
        let expected = &whole[part.start * 90..part.end * 90];
        assert!(
            logits
                .iter()
                .zip(expected)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
    }
}

#[test]
fn equal_keys_have_equal_logits() {
    let mut world = World::new(IndexerConfig::DEEPSEEK_V3_2, &[(1, 300)], 64, 5);
    let layout = world.layout;
    let slots: Vec<usize> = (0..300)
        .map(|position| world.batch.slot(0, position))
        .collect();
    let first = world.bytes()[layout.values_at(slots[0])..][..128].to_vec();
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut world.cache);
    for slot in slots {
        bytes[layout.values_at(slot)..][..128].copy_from_slice(&first);
        bytes[layout.scale_at(slot)..][..4].copy_from_slice(&0.3f32.to_ne_bytes());
    }
    let logits = world.logits(0..1, 300, 300);
    assert!(
        logits
            .iter()
            .all(|logit| logit.to_bits() == logits[0].to_bits())
    );
}

pub(crate) fn refused() -> Refused {
    let world = World::new(IndexerConfig::GLM_5, &[(1, 90)], 64, 6);
    let (config, layout) = (IndexerConfig::GLM_5, world.layout);
    let compute = |config: IndexerConfig, layout, columns: usize, entry: Option<i32>| {
        let (mut logits, mut cache) = (vec![0.0f32; columns], world.cache.clone());
        let mut batch = Batch::new(&mut Rng::with_seed(1), &[(1, 90)], 64);
        batch.tables[1] = entry.unwrap_or(batch.tables[1]);
        Cpu::new().index_logits(
            &config,
            &world.queries[..],
            TensorRef::from_slice(&world.weights, [1, 1, 32]).unwrap(),
            &IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout).unwrap(),
            &batch.view(0..1),
            TensorMut::from_slice(&mut logits, [1, 1, columns]).unwrap(),
        )
    };
    // A GPU kernel would read beyond the end of arrays that are too short.
    let check = |requests: usize, lens: &[i32], starts: &[i32]| {
        let mut logits = vec![0.0f32; 90];
        let logits = TensorMut::<Cpu>::from_slice(&mut logits, [1, 1, 90]).unwrap();
        let table = BlockTable::new(ArrayRef::from_slice(&[0, 1][..2 * requests]), requests, 2);
        let batch = DecodeBatch::new(
            table.unwrap(),
            (ArrayRef::from_slice(lens), 90),
            (ArrayRef::from_slice(starts), 1),
        );
        IndexRows::new(batch, 0..1).check(&logits.as_ref())
    };
    refused! {
        "logits: fewer columns than positions", compute(config, layout, 89, None);
        "logits: queries of fewer heads",
            compute(IndexerConfig::DEEPSEEK_V3_2, layout, 90, None);
        "logits: a cache of narrower keys", compute(config, layout.with_width(64), 90, None);
        "logits: a page past the cache", compute(config, layout, 90, Some(99));
        "logits: no lengths", check(1, &[], &[0, 1]);
        "logits: starts without an end", check(1, &[90], &[0]);
        "logits: no requests", check(0, &[], &[0]);
    }
}

#[test]
fn no_rows_of_any_width() {
    // Memory without bytes may begin at any address.
    let (cpu, config) = (Cpu::new(), IndexerConfig::new(4, 32, 8, 9));
    let cache = IndexCacheLayout::contiguous(&config, 0, 16);
    let (none, starts) = (ArrayRef::from_slice(&[]), ArrayRef::from_slice(&[0]));
    let table = BlockTable::new(none, 0, 2).unwrap();
    let rows = IndexRows::new(DecodeBatch::new(table, (none, 8), (starts, 1)), 0..0);
    for columns in [8, 1 << 62, usize::MAX] {
        let layout = |shape| Layout::contiguous(DType::F32, shape);
        let weights = TensorRef::<Cpu>::new(&[], layout([0, 1, 4])).unwrap();
        let cache = IndexCacheMut::<Cpu>::new(&mut [], cache).unwrap();
        let logits = TensorMut::<Cpu>::new(&mut [], layout([1, 0, columns])).unwrap();
        cpu.index_logits(&config, &[], weights, &cache, &rows, logits)
            .unwrap();
        let logits = TensorRef::<Cpu>::new(&[], layout([1, 0, columns])).unwrap();
        cpu.select_slots(logits, &rows, 16, &mut [], columns)
            .unwrap();
    }
    // Without heads, queries may have any width.
    let config = IndexerConfig::new(0, u32::MAX, 8, 9);
    let cache = IndexCacheLayout::contiguous(&config, 0, 16);
    let table = BlockTable::new(none, 1, 0).unwrap();
    let (lens, starts) = (ArrayRef::from_slice(&[0]), ArrayRef::from_slice(&[0, 1]));
    let rows = IndexRows::new(DecodeBatch::new(table, (lens, 0), (starts, 1)), 0..1);
    let layout = |shape| Layout::contiguous(DType::F32, shape);
    let weights = TensorRef::<Cpu>::new(&[], layout([1, 1, 0])).unwrap();
    let cache = IndexCacheMut::<Cpu>::new(&mut [], cache).unwrap();
    let logits = TensorMut::<Cpu>::new(&mut [], layout([1, 1, 0])).unwrap();
    let refused = cpu.index_logits(&config, &[], weights, &cache, &rows, logits);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "index_n_heads: given 0, accepted 1 and up"
    );
}
