//! Logits. For every key: the weighted sum of its products with the index heads, where negative
//! products count as zero.

use multiversion::multiversion;
use rayon::prelude::*;

use super::rows::{Row, rows};
use crate::cache::Pages;
use crate::view::{Elements, typed_mut};
use crate::{Cpu, fp8};
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, IndexRows};
use mla_runtime::model::IndexerConfig;
use mla_runtime::tensor::{TensorMut, TensorRef};
use mla_runtime::{Error, Result};

/// The number of keys that are multiplied at a time, one in each lane of a vector. The order of a
/// key's sums does not depend on its lane, so equal keys have equal logits.
const LANES: usize = 32;

/// The number of heads that are multiplied at a time.
const HEADS: usize = 4;

/// The number of positions per task.
const KEYS_PER_TASK: usize = 1024;

pub(super) fn logits(
    cpu: &Cpu,
    config: &IndexerConfig,
    values: &[u8],
    weights: &TensorRef<'_, Cpu>,
    cache: &IndexCacheMut<'_, Cpu>,
    of: &IndexRows<'_, Cpu>,
    logits: TensorMut<'_, Cpu>,
) -> Result<()> {
    let columns = of.check(&logits.as_ref())?;
    let layout = *cache.layout();
    if layout.width != config.width as usize {
        let given = format!("keys of {} values", layout.width);
        let accepted = format!("{}, as index_head_dim says", config.width);
        return Err(Error::argument("index cache", given, accepted));
    }
    of.check_queries(config, values.len(), weights)?;
    let rows = rows(of, columns)?;
    let pages = Pages::of(&of.batch.block_table, layout.page_size)?;
    let pool = of.pool as usize;
    for Row { request, seen } in &rows {
        pages.check(*request, 0, seen / pool, layout.pages)?;
    }
    let [heads, width] = [config.heads, config.width].map(|n| n as usize);
    let weights = Elements::<f32>::of("scaled head weights", weights)?;
    let bytes = cache.bytes();
    let stride = logits.layout().strides[1].max(columns).max(1);
    let to = typed_mut::<f32>("index logits", logits.into_bytes())?;
    cpu.install(|| {
        to.par_chunks_mut(stride)
            .zip(&rows)
            .enumerate()
            .try_for_each(|(token, (to, row))| {
                let values = &values[token * heads * width..][..heads * width];
                let mut query = vec![0.0f32; heads * width];
                for (to, code) in query.iter_mut().zip(values) {
                    *to = fp8::decode(*code);
                }
                let mut head_weights = vec![0.0f32; heads];
                weights.read_row(token, 0, &mut head_weights);
                to[..row.seen / pool]
                    .par_chunks_mut(KEYS_PER_TASK)
                    .enumerate()
                    .for_each_init(
                        || Tile::new(width),
                        |tile, (task, to)| {
                            for (part, to) in to.chunks_mut(LANES).enumerate() {
                                let first = task * KEYS_PER_TASK + part * LANES;
                                tile.load(
                                    &layout,
                                    bytes,
                                    (first..first + to.len())
                                        .map(|position| pages.slot(row.request, position)),
                                );
                                score(&query, &head_weights, tile, to);
                            }
                        },
                    );
                Ok(())
            })
    })
}

/// A transposed tile of keys, `[width][LANES]`, and their scales.
struct Tile {
    keys: Vec<[f32; LANES]>,
    scales: [f32; LANES],
}

impl Tile {
    fn new(width: usize) -> Self {
        Self {
            keys: vec![[0.0; LANES]; width],
            scales: [0.0; LANES],
        }
    }

    fn load(
        &mut self,
        layout: &IndexCacheLayout,
        bytes: &[u8],
        slots: impl Iterator<Item = usize>,
    ) {
        for (lane, slot) in slots.enumerate() {
            let values = &bytes[layout.values_at(slot)..][..layout.width];
            for (to, code) in self.keys.iter_mut().zip(values) {
                to[lane] = fp8::decode(*code);
            }
            let scale = &bytes[layout.scale_at(slot)..][..4];
            self.scales[lane] = f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]);
        }
    }
}

/// Computes the logits of the first keys of a tile. Products are rounded before they are added, on
/// every processor.
#[multiversion(targets(
    "x86_64+avx512f+avx512vl+avx512dq+avx512bw+avx2+fma",
    "x86_64+avx2+fma"
))]
fn score(query: &[f32], weights: &[f32], tile: &Tile, to: &mut [f32]) {
    let width = tile.keys.len();
    let mut sum = [0.0f32; LANES];
    for (queries, weights) in query.chunks(HEADS * width).zip(weights.chunks(HEADS)) {
        let mut products = [[0.0f32; LANES]; HEADS];
        if weights.len() == HEADS {
            for (d, key) in tile.keys.iter().enumerate() {
                for (head, products) in products.iter_mut().enumerate() {
                    let query = queries[head * width + d];
                    for (product, key) in products.iter_mut().zip(key) {
                        *product += query * key;
                    }
                }
            }
        } else {
            for (query, products) in queries.chunks_exact(width).zip(&mut products) {
                for (query, key) in query.iter().zip(&tile.keys) {
                    for (product, key) in products.iter_mut().zip(key) {
                        *product += query * key;
                    }
                }
            }
        }
        for (products, weight) in products.iter().zip(weights) {
            for (sum, product) in sum.iter_mut().zip(products) {
                // This comparison lets a NaN pass.
                let above = if *product < 0.0 { 0.0 } else { *product };
                *sum += weight * above;
            }
        }
    }
    for ((to, sum), scale) in to.iter_mut().zip(&sum).zip(&tile.scales) {
        *to = sum * scale;
    }
}
