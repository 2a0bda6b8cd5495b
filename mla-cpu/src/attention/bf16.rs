//! Attention in bf16: inputs are bf16, products and sums f32. The softmax's weights are rounded to
//! bf16, as every flash attention in bf16 does.
//!
//! Instructions for bf16 add up the products of two neighbouring elements. Some operands are
//! broadcast or read by rows, and need no special layout. Operands that are read by columns must be
//! *paired*: two rows are interleaved.
//!
//! | product | by rows | paired |
//! |---|---|---|
//! | scores [keys, rows] | keys, without a change of layout | queries, once per unit of work |
//! | out [rows, V] | weights, transposed while they are rounded to bf16 | values, once per tile of keys |

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::softmax::{LANES, POLYNOMIAL, Running};
use super::{Engine, KEYS, Rows, Seen, Widths, rescale};
use crate::buffer::Scratch;
use crate::transpose::exchange;
use mla_runtime::Result;

/// The number of query rows in a block.
pub(crate) const BLOCK: usize = 2 * LANES;

/// Rows are padded to a multiple of this number of bf16 elements.
pub(crate) const DEPTH: usize = 32;

/// The products of a bf16 engine: `Q · Kᵀ` and `P · V`.
///
/// # Safety
///
/// A value exists only if the processor has `avx512f,avx512bw,avx512vl,avx512bf16`. An engine calls
/// functions that are compiled for these instructions.
pub(crate) unsafe trait Bf16Products: Copy + Send {
    /// True if keys may be anywhere in memory; false if they must be contiguous.
    const IN_PLACE: bool;

    /// The number of keys that are multiplied together: a divisor of 32.
    const STEP: usize;

    /// Prepares the thread for a unit of work.
    fn begin(self) {}

    /// Arranges queries `[rows, width]` in the layout that [`score`](Self::score) needs. `rows` is
    /// a multiple of 16.
    fn arrange(self, rows: usize, queries: &[bf16], width: usize, to: &mut [bf16]);

    /// Computes scores[..count][..rows] = keys · queries, with scores `[KEYS, BLOCK]`. `count` is a
    /// multiple of `STEP`; `filler` replaces missing keys. The scores are written for 16 rows at a
    /// time, so those of up to 15 rows after the last one may change.
    fn score(
        self,
        keys: Rows<'_, bf16>,
        filler: &[bf16],
        count_rows_width: [usize; 3],
        queries: &[bf16],
        scores: &mut [f32],
    );

    /// Computes out[..rows][..width] += weights[.., ..count] · values. Weights are `[BLOCK, KEYS]`,
    /// and values are paired: `[width / 16][KEYS / 2][16][2]`. `count` must be a multiple of
    /// `STEP`, and `width` a multiple of 32. Weights and outputs are accessed for 16 rows at a
    /// time, so outputs of up to 15 rows after the last one may change.
    fn accumulate(
        self,
        values: &[bf16],
        count_rows_width: [usize; 3],
        weights: &[bf16],
        out: &mut [f32],
    );

    /// Undoes `begin` after a unit of work.
    fn end(self) {}
}

/// An engine with bf16 products and f32 sums.
pub(crate) struct Bf16Engine<P> {
    products: P,
    // The widths before padding.
    widths: Widths,
    // The widths, padded with zeros to whole tiles.
    key_width: usize,
    value_width: usize,
    // The number of keys in the tile after padding, and true if its values are already paired.
    tile: usize,
    paired: bool,
    // Queries, row-major [rows, key_width], and the same paired: [rows / 16][key_width / 2][16][2].
    query_rows: Scratch<bf16>,
    queries: Scratch<bf16>,
    // Keys, [KEYS, key_width].
    keys: Scratch<bf16>,
    // A key of zeros. It pads a tile whose keys are read in place.
    filler: Scratch<bf16>,
    // Values, row-major [KEYS, value_width], and the same paired: [value_width / 16][KEYS /
    // 2][16][2].
    value_rows: Scratch<bf16>,
    values: Scratch<bf16>,
    // Scores, [KEYS, BLOCK].
    scores: Scratch<f32>,
    // Weights, [BLOCK, KEYS].
    weights: Scratch<bf16>,
}

impl<P: Bf16Products> Engine for Bf16Engine<P> {
    type Lane = bf16;
    type Proof = P;

    const BLOCK: usize = BLOCK;

    fn new(products: P, rows: usize, widths: Widths) -> Result<Self> {
        let rows = rows.next_multiple_of(BLOCK);
        let key_width = widths.key.next_multiple_of(DEPTH);
        let value_width = widths.value.next_multiple_of(2 * LANES);
        // Values that are the first part of keys are read in whole tiles of columns. The columns
        // after the last value are not used, but they must be readable.
        let key_width = if widths.shared {
            key_width.max(value_width)
        } else {
            key_width
        };
        Ok(Self {
            products,
            widths,
            key_width,
            value_width,
            tile: 0,
            paired: false,
            query_rows: Scratch::new(rows * key_width)?,
            queries: Scratch::new(rows * key_width)?,
            keys: Scratch::new(KEYS * key_width)?,
            filler: Scratch::new(key_width)?,
            value_rows: Scratch::new(if widths.shared { 0 } else { KEYS * value_width })?,
            values: Scratch::new(KEYS * value_width)?,
            scores: Scratch::new(KEYS * BLOCK)?,
            weights: Scratch::new(BLOCK * KEYS)?,
        })
    }

    fn key_pitch(&self) -> usize {
        self.key_width
    }

    fn value_pitch(&self) -> usize {
        self.value_width
    }

    fn queries(&mut self) -> &mut [bf16] {
        &mut self.query_rows
    }

    fn keys(&mut self) -> &mut [bf16] {
        &mut self.keys
    }

    fn values(&mut self) -> &mut [bf16] {
        &mut self.value_rows
    }

    fn begin(&mut self, rows: usize) {
        self.products.begin();
        let width = self.key_width;
        let from = &self.query_rows[..rows.next_multiple_of(LANES) * width];
        let rows = self.widths.scored(rows);
        self.products.arrange(rows, from, width, &mut self.queries);
    }

    fn in_place(&self) -> bool {
        P::IN_PLACE && (self.key_width, self.value_width) == (self.widths.key, self.widths.value)
    }

    fn tile(&mut self, keys: usize, in_place: bool) {
        self.tile = keys.next_multiple_of(P::STEP);
        self.paired = false;
        if in_place {
            return;
        }
        // The last tile is padded with zeros. A score of 0 gets masked, but a NaN left from another
        // call would reach other rows.
        self.keys[keys * self.key_width..self.tile * self.key_width].fill(bf16::ZERO);
        if !self.widths.shared {
            let part = keys * self.value_width..self.tile * self.value_width;
            self.value_rows[part].fill(bf16::ZERO);
        }
    }

    fn block(
        &mut self,
        in_place: Option<&[&[bf16]]>,
        block: usize,
        seen: Seen<'_>,
        running: &mut [Running],
        out: &mut [f32],
    ) {
        let keys = seen.by_some;
        let padded = keys.next_multiple_of(P::STEP);
        let first = block * BLOCK * self.key_width;
        self.products.score(
            Rows::of(&self.keys, in_place),
            &self.filler,
            [padded, self.widths.scored(seen.rows), self.key_width],
            &self.queries[first..],
            &mut self.scores,
        );
        self.pair_values(in_place);
        let groups = seen.limits.iter().zip(seen.scales).zip(running);
        for (group, ((limits, scales), running)) in groups.enumerate() {
            // SAFETY: `products` proves the instructions that the function is compiled for.
            let alpha = unsafe {
                softmax(
                    &self.scores[group * LANES..],
                    keys,
                    limits,
                    scales,
                    running,
                    &mut self.weights[group * LANES * KEYS..(group + 1) * LANES * KEYS],
                )
            };
            let rows = group * LANES * self.value_width;
            rescale(&alpha, &mut out[rows..], self.value_width);
        }
        // The product includes all keys up to a multiple of `STEP`. If the tile is read in place,
        // the added rows are finite.
        let partly = match in_place {
            Some(_) => 0..0,
            None => seen.by_all..padded,
        };
        let aside = !self.is_finite(partly.clone());
        if aside {
            self.each_not_finite(partly.clone(), |place, _, _, _, _| *place = bf16::ZERO);
        }
        self.products.accumulate(
            &self.values,
            [padded, seen.rows, self.value_width],
            &self.weights,
            out,
        );
        if aside {
            let pitch = self.value_width;
            self.each_not_finite(partly, |place, weights, key, column, value| {
                let weight = |row: usize| weights[row * KEYS + key].to_f32();
                seen.add_value(key, value.to_f32(), weight, &mut out[column..], pitch);
                *place = value;
            });
        }
    }

    fn end(&mut self) {
        self.products.end();
    }
}

impl<P> Bf16Engine<P> {
    // Pairs the tile's values once. This happens after the scores, which multiply one set of keys
    // while the next set is fetched from memory.
    fn pair_values(&mut self, in_place: Option<&[&[bf16]]>) {
        if std::mem::replace(&mut self.paired, true) {
            return;
        }
        let (rows, pitch) = match self.widths.shared {
            true => (&self.keys, self.key_width),
            false => (&self.value_rows, self.value_width),
        };
        let rows = Rows::of(rows, in_place).list(pitch, self.tile, &self.filler);
        // SAFETY: `products` proves the instructions that the function is compiled for.
        unsafe { pair_values(&rows[..self.tile], self.value_width, &mut self.values) };
    }

    // Returns the values as they were loaded, and the distance between their rows.
    fn value_rows(&self) -> (&[bf16], usize) {
        match self.widths.shared {
            true => (&self.keys, self.key_width),
            false => (&self.value_rows, self.value_width),
        }
    }

    // Returns true if all values of these keys are finite.
    fn is_finite(&self, keys: Range<usize>) -> bool {
        let (rows, pitch) = self.value_rows();
        let largest = |row: &[bf16]| {
            let magnitudes = row.iter().map(|value| value.to_bits() & 0x7fff);
            magnitudes.fold(0, u16::max)
        };
        keys.into_iter()
            .all(|key| largest(&rows[key * pitch..][..self.value_width]) < bf16::INFINITY.to_bits())
    }

    // Calls `work` for each value of some keys that is not finite. The arguments are its place
    // among the paired values, the weights, its key, its column, and the value as it was loaded.
    fn each_not_finite(
        &mut self,
        keys: Range<usize>,
        mut work: impl FnMut(&mut bf16, &[bf16], usize, usize, bf16),
    ) {
        // This repeats the body of `value_rows`, because the paired values are borrowed at the same
        // time.
        let (rows, pitch) = match self.widths.shared {
            true => (&self.keys, self.key_width),
            false => (&self.value_rows, self.value_width),
        };
        for key in keys {
            let row = &rows[key * pitch..][..self.value_width];
            for (column, value) in row.iter().enumerate() {
                if !value.is_finite() {
                    let place = &mut self.values[paired_value(key, column)];
                    work(place, &self.weights, key, column, *value);
                }
            }
        }
    }
}

// Loads thirty-two elements into a register.
#[target_feature(enable = "avx512f")]
fn load(from: &[bf16]) -> __m512i {
    let from = &from[..DEPTH];
    // SAFETY: 64 bytes, unaligned.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn store(value: __m512i, to: &mut [bf16]) {
    let to = &mut to[..DEPTH];
    // SAFETY: 64 bytes, unaligned.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
}

// Pairs [16, width] into [width / 2][16][2].
#[target_feature(enable = "avx512f")]
pub(super) fn pair_queries(rows: &[bf16], width: usize, to: &mut [bf16]) {
    for k in (0..width).step_by(DEPTH) {
        let mut block = [_mm512_setzero_si512(); 16];
        for (row, block) in block.iter_mut().enumerate() {
            *block = load(&rows[row * width + k..]);
        }
        exchange(&mut block);
        for (pair, block) in block.into_iter().enumerate() {
            store(block, &mut to[(k / 2 + pair) * 2 * LANES..]);
        }
    }
}

// Pairs `width` columns of the keys' rows into [width / 16][KEYS / 2][16][2].
#[target_feature(enable = "avx512f,avx512bw")]
fn pair_values(rows: &[&[bf16]], width: usize, to: &mut [bf16]) {
    let interleave = |first: i16| {
        let mut index = [0i16; 32];
        for (i, index) in index.iter_mut().enumerate() {
            *index = first + i as i16 / 2 + if i % 2 == 0 { 0 } else { 32 };
        }
        // SAFETY: 64 bytes, unaligned.
        unsafe { _mm512_loadu_si512(index.as_ptr().cast()) }
    };
    let (low, high) = (interleave(0), interleave(16));
    let tile = KEYS * LANES;
    // Columns are the outer loop. Writes are then contiguous, and each cache line of a row is read
    // once.
    for column in (0..width).step_by(2 * LANES) {
        let (first, second) = to[column / LANES * tile..].split_at_mut(tile);
        let pairs = rows.as_chunks().0.iter();
        for (pair, [a, b]) in pairs.enumerate() {
            let (a, b) = (load(&a[column..]), load(&b[column..]));
            let at = pair * 2 * LANES;
            store(_mm512_permutex2var_epi16(a, low, b), &mut first[at..]);
            store(_mm512_permutex2var_epi16(a, high, b), &mut second[at..]);
        }
    }
}

// Returns the index of a value in the output of `pair_values`.
fn paired_value(key: usize, column: usize) -> usize {
    column / LANES * KEYS * LANES + key / 2 * 2 * LANES + column % LANES * 2 + key % 2
}

// Computes `softmax::exp2` with fused multiply-adds, and with an instruction that scales by a power
// of two.
#[target_feature(enable = "avx512f")]
fn exp2(x: __m512) -> __m512 {
    // This order of operands keeps a NaN.
    let x = _mm512_max_ps(_mm512_set1_ps(-200.0), x);
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm512_sub_ps(x, n);
    let mut power = _mm512_set1_ps(POLYNOMIAL[6]);
    for coefficient in POLYNOMIAL[..6].iter().rev() {
        power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(*coefficient));
    }
    _mm512_scalef_ps(power, n)
}

// Computes `softmax::softmax`, but writes the weights as bf16 and transposed: `[16, KEYS]`. The
// keys are padded to a multiple of 32 with weights of 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn softmax(
    scores: &[f32],
    keys: usize,
    limits: &[u32; LANES],
    scales: &[f32; LANES],
    running: &mut Running,
    weights: &mut [bf16],
) -> [f32; LANES] {
    let padded = keys.next_multiple_of(2 * LANES);
    let infinite = _mm512_set1_ps(f32::NEG_INFINITY);
    // SAFETY: each access is to sixteen elements of an array of that length.
    let (limit, factor, before, sum_before) = unsafe {
        (
            _mm512_loadu_si512(limits.as_ptr().cast()),
            _mm512_loadu_ps(scales.as_ptr()),
            _mm512_loadu_ps(running.max.as_ptr()),
            _mm512_loadu_ps(running.sum.as_ptr()),
        )
    };
    let seen = limits.iter().fold(u32::MAX, |min, limit| min.min(*limit));
    let mask = Mask {
        by_all: (seen as usize).min(keys),
        limit,
    };
    // Scales are positive, so the largest score is also the largest scaled score.
    let max = _mm512_mul_ps(largest(scores, padded, mask), factor);
    let max = _mm512_max_ps(before, max);
    // A row that has no largest score gets the base 0. Its weights are then 2^(−inf − 0) = 0
    // instead of a NaN from −inf − −inf.
    let nothing = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(max, infinite);
    let base = _mm512_mask_mov_ps(max, nothing, _mm512_setzero_ps());
    let alpha = exp2(_mm512_sub_ps(before, base));
    let sum = weigh(scores, padded, mask, factor, base, weights);
    let sum = _mm512_fmadd_ps(sum_before, alpha, sum);
    let mut factors = [0.0; LANES];
    // SAFETY: each access is to sixteen elements of an array of that length.
    unsafe {
        _mm512_storeu_ps(running.max.as_mut_ptr(), max);
        _mm512_storeu_ps(running.sum.as_mut_ptr(), sum);
        _mm512_storeu_ps(factors.as_mut_ptr(), alpha);
    }
    factors
}

// The mask of the keys in a tile that each of sixteen rows sees. Both passes over the scores apply
// it, so that the first pass need not write.
#[derive(Clone, Copy)]
struct Mask {
    // The number of keys that every row sees. They need no mask.
    by_all: usize,
    // The number of keys that each row sees.
    limit: __m512i,
}

impl Mask {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn sees(self, key: usize) -> __mmask16 {
        _mm512_cmplt_epu32_mask(_mm512_set1_epi32(key as i32), self.limit)
    }
}

// Returns the largest score of each row among `padded` keys.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest(scores: &[f32], padded: usize, mask: Mask) -> __m512 {
    assert!(scores.len() >= (padded - 1) * BLOCK + LANES);
    let infinite = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut max = [infinite; 4];
    for key in 0..padded {
        // SAFETY: within `scores`, as asserted.
        let mut score = unsafe { _mm512_loadu_ps(scores.as_ptr().add(key * BLOCK)) };
        if key >= mask.by_all {
            score = _mm512_mask_mov_ps(infinite, mask.sees(key), score);
        }
        // This order of operands skips a NaN in the score. The sum shows the NaN.
        max[key % 4] = _mm512_max_ps(score, max[key % 4]);
    }
    let max = [_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3])];
    _mm512_max_ps(max[0], max[1])
}

// Writes the weights 2^(score · factor − base) of `padded` keys, and returns their sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn weigh(
    scores: &[f32],
    padded: usize,
    mask: Mask,
    factor: __m512,
    base: __m512,
    weights: &mut [bf16],
) -> __m512 {
    assert!(padded <= KEYS && scores.len() >= (padded - 1) * BLOCK + LANES);
    assert!(weights.len() >= LANES * KEYS);
    let mut sum = [_mm512_setzero_ps(); 2];
    for key in (0..padded).step_by(2 * LANES) {
        let mut pairs = [_mm512_setzero_si512(); 16];
        for (pair, to) in pairs.iter_mut().enumerate() {
            // SAFETY: within `scores`, as asserted: `padded` is a multiple of the step.
            let (a, b) = unsafe {
                let at = scores.as_ptr().add((key + 2 * pair) * BLOCK);
                (_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(BLOCK)))
            };
            let mut a = exp2(_mm512_fmsub_ps(a, factor, base));
            let mut b = exp2(_mm512_fmsub_ps(b, factor, base));
            if key + 2 * pair + 1 >= mask.by_all {
                a = _mm512_maskz_mov_ps(mask.sees(key + 2 * pair), a);
                b = _mm512_maskz_mov_ps(mask.sees(key + 2 * pair + 1), b);
            }
            sum[0] = _mm512_add_ps(sum[0], a);
            sum[1] = _mm512_add_ps(sum[1], b);
            // Places the two weights of each row side by side.
            let low = _mm512_cvtepu16_epi32(bits(_mm512_cvtneps_pbh(a)));
            let high = _mm512_cvtepu16_epi32(bits(_mm512_cvtneps_pbh(b)));
            *to = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
        }
        exchange(&mut pairs);
        for (row, pairs) in pairs.into_iter().enumerate() {
            store(pairs, &mut weights[row * KEYS + key..]);
        }
    }
    _mm512_add_ps(sum[0], sum[1])
}

fn bits(value: __m256bh) -> __m256i {
    // SAFETY: both types have 256 bits without padding.
    unsafe { std::mem::transmute(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_stays_in_its_row() {
        if !is_x86_feature_detected!("avx512bf16") || !is_x86_feature_detected!("avx512bw") {
            return;
        }
        // Row 0 sees only a NaN. Row 1 sees a NaN and a number. Row 2 sees a number and no NaN.
        let (mut limits, mut scores) = ([2; LANES], [0.5; 32 * BLOCK]);
        limits[..3].copy_from_slice(&[1, 2, 1]);
        scores[0] = f32::NAN;
        scores[BLOCK + 1] = f32::NAN;
        scores[BLOCK + 2] = f32::NAN;
        let mut running = Running::EMPTY;
        let mut weights = vec![bf16::ZERO; LANES * KEYS];
        // SAFETY: the test has detected the instruction sets.
        let factors = unsafe {
            softmax(
                &scores,
                2,
                &limits,
                &[1.0; LANES],
                &mut running,
                &mut weights,
            )
        };
        for (row, is_nan) in [true, true, false, false].into_iter().enumerate() {
            let weights = &weights[row * KEYS..][..2 * LANES];
            assert_eq!(running.sum[row].is_nan(), is_nan, "row {row}");
            assert_eq!(weights.iter().any(|weight| weight.is_nan()), is_nan);
            assert!(!running.max[row].is_nan() && !factors[row].is_nan());
        }
        assert_eq!(running.sum[2..4], [1.0, 2.0]);
        assert_eq!(running.max[0], f32::NEG_INFINITY);
    }

    #[test]
    fn exp2_accuracy() {
        if !is_x86_feature_detected!("avx512f") {
            return;
        }
        for step in 0..200_000 {
            let x = -150.0 * (step as f32 / 200_000.0);
            // SAFETY: the test has detected the instruction set; both types have sixteen elements.
            let got: [f32; 16] = unsafe { std::mem::transmute(exp2(_mm512_set1_ps(x))) };
            let want = f64::from(x).exp2();
            let error = (f64::from(got[0]) - want).abs() / want.max(2f64.powi(-126));
            assert!(error < 2f64.powi(-22), "2^{x}: {} for {want}", got[0]);
        }
        // SAFETY: the test has detected the instruction set.
        let special = unsafe {
            [f32::NEG_INFINITY, f32::NAN].map(|x| _mm512_cvtss_f32(exp2(_mm512_set1_ps(x))))
        };
        assert_eq!(special[0], 0.0);
        assert!(special[1].is_nan());
    }
}
