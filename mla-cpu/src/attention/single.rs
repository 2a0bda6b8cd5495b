//! Attention in f32, for inputs of every dtype.

use super::softmax::{LANES, Running, softmax};
use super::{Engine, KEYS, MAX_BLOCK, Rows, Seen, Widths, rescale};
use crate::buffer::Scratch;
use crate::gemm::product_f32;
use mla_runtime::Result;

/// The products of an f32 engine. A value proves that the processor has their instructions.
pub(crate) trait SingleProducts: Copy + Send {
    /// True if keys may be anywhere in memory; false if they must be contiguous.
    const IN_PLACE: bool;

    /// Arranges queries `[rows, width]` in the layout that [`score`](Self::score) needs. The
    /// buffers have room for a multiple of 16 rows.
    fn arrange(self, rows: usize, queries: &[f32], width: usize, to: &mut [f32]);

    /// Computes scores[..count][..rows] = keys · queries, with scores `[KEYS, MAX_BLOCK]`. Rows are
    /// rounded up to a multiple of 16. The scores of the added rows, and those of keys from `count`
    /// on, may be overwritten.
    fn score(
        self,
        keys: Rows<'_, f32>,
        count_rows_width: [usize; 3],
        queries: &[f32],
        scores: &mut [f32],
    );

    /// Computes out[..rows][..width] += weightsᵀ · values, with weights `[KEYS, MAX_BLOCK]`. Only
    /// the first `count` keys are used. Rows of values are `pitch` elements apart. Rows are rounded
    /// up to a multiple of 16, and the weights and outputs of the added rows may be overwritten.
    fn accumulate(
        self,
        values: Rows<'_, f32>,
        pitch: usize,
        count_rows_width: [usize; 3],
        weights: &[f32],
        out: &mut [f32],
    );
}

/// The products of the `gemm` crate, for every processor.
///
/// The crate sums small products in another order: those with at most 256 results, with one row, or
/// with an inner dimension of at most two. A row's result would then depend on the number of other
/// rows. The constants below therefore set the minimum size of a product. The added rows and keys
/// are 0 or are not read.
#[derive(Clone, Copy)]
pub(crate) struct Gemm;

impl Gemm {
    /// The minimum number of keys in a product for scores. With `LANES` rows there are then more
    /// than 256 scores.
    const MIN_SCORED_KEYS: usize = 256 / LANES + 1;
    const MIN_ROWS: usize = 2;
    const MIN_KEYS: usize = 3;
    /// The number of columns of values that are copied at a time. The last copy may have one more,
    /// so that no copy has a single column.
    const STRIP: usize = 64;

    /// Adds the products of fewer keys than `MIN_KEYS`, padded to that number with keys of 0.
    fn accumulate_few(
        values: &[f32],
        pitch: usize,
        [count, rows, width]: [usize; 3],
        weights: &[f32],
        out: &mut [f32],
    ) {
        let mut padded = [0.0; Self::MIN_KEYS * MAX_BLOCK];
        padded[..count * MAX_BLOCK].copy_from_slice(&weights[..count * MAX_BLOCK]);
        let mut begin = 0;
        while begin < width {
            let left = width - begin;
            let columns = if left <= Self::STRIP + 1 {
                left
            } else {
                Self::STRIP
            };
            let mut strip = [0.0; Self::MIN_KEYS * (Self::STRIP + 1)];
            for (key, to) in strip.chunks_exact_mut(columns).take(count).enumerate() {
                to.copy_from_slice(&values[key * pitch + begin..][..columns]);
            }
            product_f32(
                [rows, columns, Self::MIN_KEYS],
                &mut out[begin..],
                (1, width),
                true,
                &padded,
                (MAX_BLOCK, 1),
                &strip,
                (1, columns),
            );
            begin += columns;
        }
    }
}

impl SingleProducts for Gemm {
    const IN_PLACE: bool = false;

    fn arrange(self, _: usize, queries: &[f32], _: usize, to: &mut [f32]) {
        to[..queries.len()].copy_from_slice(queries);
    }

    fn score(
        self,
        keys: Rows<'_, f32>,
        [count, rows, width]: [usize; 3],
        queries: &[f32],
        scores: &mut [f32],
    ) {
        let count = count.max(Self::MIN_SCORED_KEYS);
        product_f32(
            [count, rows.next_multiple_of(LANES), width],
            scores,
            (1, MAX_BLOCK),
            false,
            keys.loaded(),
            (1, width),
            queries,
            (width, 1),
        );
    }

    fn accumulate(
        self,
        values: Rows<'_, f32>,
        pitch: usize,
        [count, rows, width]: [usize; 3],
        weights: &[f32],
        out: &mut [f32],
    ) {
        let rows = rows.max(Self::MIN_ROWS);
        if count < Self::MIN_KEYS {
            let size = [count, rows, width];
            return Self::accumulate_few(values.loaded(), pitch, size, weights, out);
        }
        product_f32(
            [rows, width, count],
            out,
            (1, width),
            true,
            weights,
            (MAX_BLOCK, 1),
            values.loaded(),
            (1, pitch),
        );
    }
}

/// An engine with f32 products and sums.
pub(crate) struct F32Engine<P> {
    products: P,
    widths: Widths,
    // Queries, row-major and in the layout of the products.
    query_rows: Scratch<f32>,
    queries: Scratch<f32>,
    keys: Scratch<f32>,
    values: Scratch<f32>,
    scores: Scratch<f32>,
    // Values that are left out of a product: those of keys that only some rows see. There are fewer
    // of these keys than rows.
    aside: Scratch<f32>,
}

impl<P: SingleProducts> Engine for F32Engine<P> {
    type Lane = f32;
    type Proof = P;

    // The number of score vectors in the largest kernel sets the size of a block.
    const BLOCK: usize = MAX_BLOCK;

    fn new(products: P, rows: usize, widths: Widths) -> Result<Self> {
        let queries = rows.next_multiple_of(Self::BLOCK) * widths.key;
        Ok(Self {
            products,
            widths,
            query_rows: Scratch::new(queries)?,
            queries: Scratch::new(queries)?,
            keys: Scratch::new(KEYS * widths.key)?,
            values: Scratch::new(if widths.shared {
                0
            } else {
                KEYS * widths.value
            })?,
            scores: Scratch::new(KEYS * Self::BLOCK)?,
            aside: Scratch::new(Self::BLOCK * widths.value)?,
        })
    }

    fn key_pitch(&self) -> usize {
        self.widths.key
    }

    fn value_pitch(&self) -> usize {
        self.widths.value
    }

    fn queries(&mut self) -> &mut [f32] {
        &mut self.query_rows
    }

    fn keys(&mut self) -> &mut [f32] {
        &mut self.keys
    }

    fn values(&mut self) -> &mut [f32] {
        &mut self.values
    }

    fn begin(&mut self, rows: usize) {
        let width = self.widths.key;
        let from = &self.query_rows[..rows.next_multiple_of(LANES) * width];
        let rows = self.widths.scored(rows);
        self.products.arrange(rows, from, width, &mut self.queries);
    }

    fn in_place(&self) -> bool {
        P::IN_PLACE
    }

    fn tile(&mut self, _: usize, _: bool) {}

    fn block(
        &mut self,
        in_place: Option<&[&[f32]]>,
        block: usize,
        seen: Seen<'_>,
        running: &mut [Running],
        out: &mut [f32],
    ) {
        let Widths {
            key, value, shared, ..
        } = self.widths;
        let keys = seen.by_some;
        self.products.score(
            Rows::of(&self.keys, in_place),
            [keys, self.widths.scored(seen.rows), key],
            &self.queries[block * Self::BLOCK * key..],
            &mut self.scores,
        );
        let groups = seen.limits.iter().zip(seen.scales).zip(running);
        for (group, ((limits, scales), running)) in groups.enumerate() {
            let scores = &mut self.scores[group * LANES..];
            let alpha = softmax(scores, Self::BLOCK, keys, limits, scales, running);
            rescale(&alpha, &mut out[group * LANES * value..], value);
        }
        let (values, pitch) = if shared {
            (&mut *self.keys, key)
        } else {
            (&mut *self.values, value)
        };
        let partly = seen.by_all..keys;
        let finite = |key: usize| all_finite(&values[key * pitch..][..value]);
        let aside = !partly.clone().all(finite);
        if aside {
            for (index, key) in partly.clone().enumerate() {
                let row = &mut values[key * pitch..][..value];
                self.aside[index * value..][..value].copy_from_slice(row);
                row.iter_mut()
                    .filter(|value| !value.is_finite())
                    .for_each(|value| *value = 0.0);
            }
        }
        self.products.accumulate(
            Rows::of(values, in_place),
            pitch,
            [keys, seen.rows, value],
            &self.scores,
            out,
        );
        if aside {
            for (index, key) in partly.enumerate() {
                let row = &self.aside[index * value..][..value];
                for (column, x) in row.iter().enumerate().filter(|(_, x)| !x.is_finite()) {
                    let weight = |row: usize| self.scores[key * Self::BLOCK + row];
                    seen.add_value(key, *x, weight, &mut out[column..], value);
                }
                values[key * pitch..][..value].copy_from_slice(row);
            }
        }
    }
}

// Compares the bits as integers. This vectorises, since it does not depend on an order of
// additions.
fn all_finite(values: &[f32]) -> bool {
    let bits = values.iter().map(|value| value.abs().to_bits());
    bits.fold(0, u32::max) < f32::INFINITY.to_bits()
}
