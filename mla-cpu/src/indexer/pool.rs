//! Index keys that are shared by several tokens.

use std::collections::HashMap;
use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::quantise::{Finish, Norm, quantise, rows};
use crate::Cpu;
use crate::cache::check_slots;
use crate::view::scalars;
use mla_runtime::Result;
use mla_runtime::indexer::{IndexCacheLayout, IndexKeys};
use mla_runtime::model::IndexerConfig;

/// Writes the keys and gates of new tokens to the tails of their pages. Also writes the keys of the
/// pools that these tokens complete.
pub(super) fn keys(cpu: &Cpu, config: &IndexerConfig, keys: IndexKeys<'_, Cpu>) -> Result<()> {
    let tokens = keys.check(config)?;
    let layout = *keys.cache.layout();
    let slots = scalars("slots", &keys.slots)?;
    let pool = config.pool as usize;
    check_slots(slots, layout.slots().saturating_mul(pool))?;
    // `check` has made sure that they are present.
    let Some([gates, table]) = &keys.pool else {
        return Ok(());
    };
    let norm = Norm::new(&keys.norm, config)?;
    let mut new = rows("index keys", &keys.keys)?;
    cpu.install(|| {
        let rows = new.par_chunks_exact_mut(layout.width);
        rows.for_each(|key| norm.apply(key));
    });
    let pools = Pools {
        layout,
        pool,
        slots,
        tokens: (0..tokens).map(|token| (slots[token], token)).collect(),
        keys: new.iter().map(|x| bf16::from_f32(*x)).collect(),
        gates: rows("index gates", gates)?
            .iter()
            .map(|x| bf16::from_f32(*x))
            .collect(),
        table: rows("index pool table", table)?,
        finish: Finish::new(config, None, tokens)?,
    };
    let bytes = keys.cache.into_bytes();
    let made: Vec<(usize, Vec<u8>, f32)> = cpu.install(|| {
        let all = (0..tokens).into_par_iter();
        all.filter_map(|token| pools.completed_by(token, bytes))
            .collect()
    });
    for (slot, codes, scale) in made {
        bytes[layout.values_at(slot)..][..codes.len()].copy_from_slice(&codes);
        bytes[layout.scale_at(slot)..][..4].copy_from_slice(&scale.to_ne_bytes());
    }
    // If several tokens have the same place in a tail, the last one stays there.
    for (token, slot) in slots.iter().enumerate() {
        if let Ok(slot) = usize::try_from(*slot) {
            let [key, gate] = pools.of_tail(slot);
            let row = pools.row(token);
            bytes[key].copy_from_slice(bytemuck::cast_slice(&pools.keys[row.clone()]));
            bytes[gate].copy_from_slice(bytemuck::cast_slice(&pools.gates[row]));
        }
    }
    Ok(())
}

/// The new tokens of a call, and their places in the cache.
struct Pools<'a> {
    layout: IndexCacheLayout,
    pool: usize,
    slots: &'a [i64],
    /// The token of each slot. The tokens of a pool may be anywhere in the call.
    tokens: HashMap<i64, usize>,
    keys: Vec<bf16>,
    gates: Vec<bf16>,
    table: Vec<f32>,
    finish: Finish<'a>,
}

impl Pools<'_> {
    /// Returns the range of a token's columns.
    fn row(&self, token: usize) -> Range<usize> {
        token * self.layout.width..(token + 1) * self.layout.width
    }

    /// Returns the byte ranges of a token's key and gate in the tail of its page.
    fn of_tail(&self, slot: usize) -> [Range<usize>; 2] {
        let page_size = self.layout.page_size * self.pool;
        let entry = slot % page_size % self.layout.tail;
        let (start, bytes) = (
            self.layout.tail_at(slot / page_size, entry),
            2 * self.layout.width,
        );
        [start..start + bytes, start + bytes..start + 2 * bytes]
    }

    /// Returns the pool that a token completes: its slot, its values and their scale. The earlier
    /// tokens of the pool are either new, too, or in the tail.
    fn completed_by(&self, token: usize, bytes: &[u8]) -> Option<(usize, Vec<u8>, f32)> {
        let slot = usize::try_from(self.slots[token]).ok()?;
        if slot % self.pool != self.pool - 1 {
            return None;
        }
        let width = self.layout.width;
        let (mut keys, mut gates) = (Vec::new(), Vec::new());
        for back in (0..self.pool).rev() {
            if let Some(&new) = self.tokens.get(&((slot - back) as i64)) {
                keys.extend(self.keys[self.row(new)].iter().map(|x| x.to_f32()));
                gates.extend(self.gates[self.row(new)].iter().map(|x| x.to_f32()));
            } else {
                let [key, gate] = self.of_tail(slot - back);
                let number = |pair: &[u8; 2]| bf16::from_ne_bytes(*pair).to_f32();
                keys.extend(bytes[key].as_chunks().0.iter().map(number));
                gates.extend(bytes[gate].as_chunks().0.iter().map(number));
            }
        }
        let mut pooled: Vec<f32> = (0..width)
            .map(|d| {
                let score = |m: usize| gates[m * width + d] + self.table[m * width + d];
                let max = (0..self.pool).map(score).fold(f32::NEG_INFINITY, f32::max);
                let (mut sum, mut all) = (0.0, 0.0);
                for m in 0..self.pool {
                    let weight = (score(m) - max).exp();
                    sum += weight * keys[m * width + d];
                    all += weight;
                }
                sum / all
            })
            .collect();
        self.finish.apply(0, &mut pooled);
        let mut codes = vec![0; width];
        let scale = quantise(&pooled, &mut codes);
        Some((slot / self.pool, codes, scale))
    }
}
