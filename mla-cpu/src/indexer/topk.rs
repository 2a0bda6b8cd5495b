//! Selects exactly the largest logits of each row, as slots.

use rayon::prelude::*;

use super::rows::rows;
use crate::Cpu;
use crate::cache::Pages;
use crate::view::{Elements, typed_mut};
use mla_runtime::indexer::IndexRows;
use mla_runtime::tensor::TensorRef;
use mla_runtime::{Error, Result};

/// The value of the unused entries at the end of a list.
const NONE: i32 = -1;

pub(super) fn select(
    cpu: &Cpu,
    logits: TensorRef<'_, Cpu>,
    of: &IndexRows<'_, Cpu>,
    page_size: usize,
    slots: &mut [u8],
    width: usize,
) -> Result<()> {
    let columns = of.check(&logits)?;
    if page_size == 0 {
        return Err(Error::argument("page_size", 0, "1 and up"));
    }
    let needed = of.check_lists(slots.len(), width)?;
    let to = typed_mut::<i32>("slot lists", &mut slots[..needed])?;
    let (rows, pool) = (rows(of, columns)?, of.pool as usize);
    let pages = Pages::of(&of.batch.block_table, page_size)?;
    // The maximum number of pages whose slots fit 32 bits.
    let max = (1usize << 31) / page_size;
    for row in &rows {
        pages.check(row.request, 0, row.seen, max)?;
    }
    let logits = Elements::<f32>::of("index logits", &logits)?;
    cpu.install(|| {
        to.par_chunks_exact_mut(width.max(1))
            .zip(&rows)
            .enumerate()
            .for_each_init(Scratch::default, |scratch, (token, (to, row))| {
                let (start, pools) = (logits.at(0, token), row.seen / pool);
                let chosen = scratch.largest(&logits.data[start..start + pools], width / pool);
                // The slot is below 2³¹, as the check above ensures.
                let slot = |position| pages.slot(row.request, position) as i32;
                // The tokens of an incomplete pool come after the whole pools.
                let (list, tail) = to.split_at_mut(width / pool * pool);
                let tokens = |chosen: &u32| {
                    let first = *chosen as usize * pool;
                    first..first + pool
                };
                let mut positions = chosen.iter().flat_map(tokens);
                list.fill_with(|| positions.next().map_or(NONE, slot));
                let mut positions = pools * pool..row.seen;
                tail.fill_with(|| positions.next().map_or(NONE, slot));
            });
    });
    Ok(())
}

#[derive(Default)]
struct Scratch {
    ranks: Vec<u32>,
    sorted: Vec<u32>,
    chosen: Vec<u32>,
}

impl Scratch {
    /// Returns the positions of the `count` largest values in ascending order. Of equal values, the
    /// first ones are taken.
    fn largest(&mut self, values: &[f32], count: usize) -> &[u32] {
        self.chosen.clear();
        if values.len() <= count {
            self.chosen.extend(0..values.len() as u32);
            return &self.chosen;
        }
        self.ranks.clear();
        self.ranks.extend(values.iter().map(|value| rank(*value)));
        self.sorted.clone_from(&self.ranks);
        let (_, min, _) = self
            .sorted
            .select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
        let min = *min;
        let above = self.ranks.iter().filter(|rank| **rank > min).count();
        let mut equal = count - above;
        for (position, rank) in self.ranks.iter().enumerate() {
            let take = *rank > min || (*rank == min && equal > 0);
            if take {
                equal -= usize::from(*rank == min);
                self.chosen.push(position as u32);
            }
        }
        &self.chosen
    }
}

/// Maps values to integers in the same order. −0 and +0 give the same integer. NaN gives 0, less
/// than −inf does.
fn rank(value: f32) -> u32 {
    if value.is_nan() {
        return 0;
    }
    // −0 + 0 is +0.
    let bits = (value + 0.0).to_bits();
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_values() {
        let values = [
            f32::NEG_INFINITY,
            f32::MIN,
            -1.0,
            -f32::MIN_POSITIVE,
            -1e-45,
            0.0,
            1e-45,
            1.0,
            f32::MAX,
            f32::INFINITY,
        ];
        assert!(values.is_sorted_by(|a, b| rank(*a) < rank(*b)));
        assert_eq!(rank(-0.0), rank(0.0));
        for nan in [f32::NAN, -f32::NAN] {
            assert!(rank(nan) < rank(f32::NEG_INFINITY));
        }
    }

    #[test]
    fn equal_values_by_position() {
        let mut scratch = Scratch::default();
        let values = [1.0, 3.0, 1.0, -0.0, 1.0, 0.0, f32::NAN];
        assert_eq!(scratch.largest(&values, 2), [0, 1]);
        assert_eq!(scratch.largest(&values, 3), [0, 1, 2]);
        assert_eq!(scratch.largest(&values, 5), [0, 1, 2, 3, 4]);
        assert_eq!(scratch.largest(&values, 6), [0, 1, 2, 3, 4, 5]);
        assert_eq!(scratch.largest(&values, 7), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(scratch.largest(&[f32::NAN, f32::NEG_INFINITY], 1), [1]);
        assert!(scratch.largest(&[], 1).is_empty());
    }
}
