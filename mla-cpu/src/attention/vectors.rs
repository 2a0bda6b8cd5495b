//! The products of attention in AVX-512's registers, for f32 and for pairs of bf16.
//!
//! An *entry* is one lane's operand. It is an f32, or two bf16 that are adjacent along the inner
//! dimension and whose products are added up. The two kinds of arithmetic therefore have the same
//! layout in memory and differ by one instruction:
//!
//! | product | broadcast | vectors of sixteen |
//! |---|---|---|
//! | scores [keys, rows] | keys, without a change of layout | queries, `[rows / 16][steps][16]` |
//! | out [rows, V] | weights | values |
//!
//! In a remainder of at most eight query rows, each row takes two lanes: one for the even steps and
//! one for the odd steps. Two steps are then broadcast at a time.
//!
//! Sums stay in registers. Up to 24 of the 32 hold sums, so that enough independent additions are
//! in flight.

use std::arch::x86_64::*;
use std::sync::OnceLock;

use half::bf16;

use super::bf16::{BLOCK, Bf16Products, pair_queries};
use super::single::SingleProducts;
use super::softmax::LANES;
use super::{KEYS, MAX_BLOCK, Rows};
use crate::transpose::transpose;

// The number of keys whose values stay in the first-level cache while all rows are multiplied by
// them.
const KEPT: usize = 128;

// The numbers of rows, and of registers of columns, that are summed at a time.
const ROWS: usize = 8;
// The number of rows if each takes two lanes.
const HALF: usize = LANES / 2;
const COLUMNS: usize = 3;

// Returns the number of groups of sixteen rows to multiply, and true if the remaining rows take two
// lanes each. They do if there are one to eight of them and `steps` is a multiple of sixteen.
fn sixteens(rows: usize, steps: usize) -> (usize, bool) {
    let half = (1..=HALF).contains(&(rows % LANES)) && steps.is_multiple_of(LANES);
    match half {
        true => (rows / LANES, true),
        false => (rows.div_ceil(LANES), false),
    }
}

// The two products of one kind of arithmetic. `$add(sum, a, b)` computes sum + a · b in each lane.
macro_rules! products {
    ($module:ident, $lane:ty, $features:literal, $add:expr) => {
        mod $module {
            use super::*;

            // The number of elements in an entry.
            const WIDE: usize = size_of::<u32>() / size_of::<$lane>();

            /// Computes scores[key][row] = keys · queries. `queries` are `groups` times
            /// `[steps][16]`. The scores of key `j` begin at `scores[j * pitch]`.
            #[target_feature(enable = $features)]
            pub(super) fn score(
                keys: &[&[$lane]],
                steps: usize,
                queries: &[$lane],
                groups: usize,
                scores: &mut [f32],
                pitch: usize,
            ) {
                let Some(last) = keys.len().checked_sub(1) else {
                    return;
                };
                assert!(keys.iter().all(|key| key.len() >= steps * WIDE));
                assert!(queries.len() >= groups * steps * LANES * WIDE);
                assert!(scores.len() >= last * pitch + groups * LANES);
                // SAFETY: every key has `steps` entries, there are `groups` times as many vectors
                // of queries, and `scores` holds `groups` vectors for every key.
                unsafe {
                    let queries = queries.as_ptr().cast();
                    match groups {
                        0 => {}
                        1 => sum_scores::<1, 16, 8>(keys, steps, queries, scores, pitch),
                        2 => sum_scores::<2, 8, 4>(keys, steps, queries, scores, pitch),
                        3 => sum_scores::<3, 6, 2>(keys, steps, queries, scores, pitch),
                        4 => sum_scores::<4, 4, 2>(keys, steps, queries, scores, pitch),
                        _ => unreachable!("a block has at most four groups of rows"),
                    }
                }
            }

            /// Arranges queries `[8, width]` for `score_half`: `[steps / 2][8][2]`.
            pub(super) fn arrange_half(queries: &[$lane], width: usize, to: &mut [$lane]) {
                const TWO: usize = 2 * WIDE;
                for (row, query) in queries.chunks_exact(width).take(HALF).enumerate() {
                    for (step, two) in query.as_chunks::<TWO>().0.iter().enumerate() {
                        to[(step * HALF + row) * TWO..][..TWO].copy_from_slice(two);
                    }
                }
            }

            /// Computes `score` for eight rows in the layout of `arrange_half`. `steps` is a
            /// multiple of 16.
            #[target_feature(enable = $features)]
            pub(super) fn score_half(
                keys: &[&[$lane]],
                steps: usize,
                queries: &[$lane],
                scores: &mut [f32],
                pitch: usize,
            ) {
                const K: usize = 16;
                const U: usize = 8;
                assert!(steps.is_multiple_of(LANES));
                assert!(keys.iter().all(|key| key.len() >= steps * WIDE));
                assert!(queries.len() >= steps * HALF * WIDE);
                let queries = queries.as_ptr().cast::<f32>();
                for first in (0..keys.len()).step_by(K) {
                    // Missing keys repeat the last one. Their scores are not written.
                    let key = |at: usize| keys[at.min(keys.len() - 1)].as_ptr().cast::<u32>();
                    let now: [*const u32; K] = std::array::from_fn(|i| key(first + i));
                    let next: [*const u32; K] = std::array::from_fn(|i| key(first + K + i));
                    let mut sums = [_mm512_setzero_ps(); K];
                    for step in (0..steps).step_by(2 * U) {
                        // SAFETY: every key has `steps` entries, a multiple of sixteen, and the
                        // queries have half that number of registers. A prefetch takes any address.
                        unsafe {
                            for next in next {
                                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(step).cast());
                            }
                            let vectors: [__m512; U] = std::array::from_fn(|u| {
                                _mm512_loadu_ps(queries.add((step / 2 + u) * LANES))
                            });
                            for (key, sum) in now.iter().zip(&mut sums) {
                                for (u, vector) in vectors.iter().enumerate() {
                                    let two = key.add(step + 2 * u).cast::<i64>();
                                    let two = _mm512_set1_epi64(two.read_unaligned());
                                    *sum = $add(*sum, _mm512_castsi512_ps(two), *vector);
                                }
                            }
                        }
                    }
                    for (i, sum) in sums.iter().enumerate().take(keys.len() - first) {
                        let both = _mm512_add_ps(*sum, _mm512_permute_ps::<0b10_11_00_01>(*sum));
                        let rows = _mm512_maskz_compress_ps(0x5555, both);
                        let to = &mut scores[(first + i) * pitch..][..HALF];
                        // SAFETY: eight elements.
                        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), _mm512_castps512_ps256(rows)) };
                    }
                }
            }

            // Sums the products of `K` keys and `G` groups at a time. The address of a key is
            // looked up every `U` steps.
            #[target_feature(enable = $features)]
            unsafe fn sum_scores<const G: usize, const K: usize, const U: usize>(
                keys: &[&[$lane]],
                steps: usize,
                queries: *const u32,
                scores: &mut [f32],
                pitch: usize,
            ) {
                for first in (0..keys.len()).step_by(K) {
                    let count = K.min(keys.len() - first);
                    // Missing keys repeat the last one. Their scores are not written.
                    let key = |at: usize| keys[at.min(keys.len() - 1)].as_ptr().cast();
                    let now: [*const u32; K] = std::array::from_fn(|i| key(first + i));
                    let next: [*const u32; K] = std::array::from_fn(|i| key(first + K + i));
                    let mut sums = [[_mm512_setzero_ps(); G]; K];
                    let mut step = 0;
                    while step < steps {
                        let end = steps.min(step + LANES);
                        // SAFETY: `step + U` and `step + 1` are at most `steps`. A prefetch takes
                        // any address.
                        unsafe {
                            // Prefetches a line of each of the next keys, which are still in
                            // memory.
                            for next in next {
                                let line = next.wrapping_add(step);
                                _mm_prefetch::<_MM_HINT_T0>(line.cast());
                            }
                            while step + U <= end {
                                add_scores::<G, K, U>(&now, step, queries, steps, &mut sums);
                                step += U;
                            }
                            while step < end {
                                add_scores::<G, K, 1>(&now, step, queries, steps, &mut sums);
                                step += 1;
                            }
                        }
                    }
                    for (i, sums) in sums.iter().enumerate().take(count) {
                        for (group, sum) in sums.iter().enumerate() {
                            let at = (first + i) * pitch + group * LANES;
                            let to = &mut scores[at..at + LANES];
                            // SAFETY: sixteen elements.
                            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), *sum) };
                        }
                    }
                }
            }

            // SAFETY of the caller: `keys` have `step + U` entries, and `queries` has `G · steps`
            // vectors; `steps` is at least `step + U`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add_scores<const G: usize, const K: usize, const U: usize>(
                keys: &[*const u32; K],
                step: usize,
                queries: *const u32,
                steps: usize,
                sums: &mut [[__m512; G]; K],
            ) {
                // SAFETY: this function's own contract, above.
                unsafe {
                    let mut vectors = [[_mm512_setzero_ps(); G]; U];
                    for (u, vectors) in vectors.iter_mut().enumerate() {
                        for (group, vector) in vectors.iter_mut().enumerate() {
                            let at = (group * steps + step + u) * LANES;
                            *vector = _mm512_loadu_ps(queries.add(at).cast());
                        }
                    }
                    for (key, sums) in keys.iter().zip(sums) {
                        for (u, vectors) in vectors.iter().enumerate() {
                            let entry =
                                _mm512_set1_ps(f32::from_bits(key.add(step + u).read_unaligned()));
                            for (sum, vector) in sums.iter_mut().zip(vectors) {
                                *sum = $add(*sum, entry, *vector);
                            }
                        }
                    }
                }
            }

            /// Computes out[row][..width] += weights · values. The weight of step `s` and row `r`
            /// is `weights[s * STEP + r * ROW]`. Column `c` of step `s` is `values[s][c / 16 *
            /// VECTOR + c % 16]`.
            #[target_feature(enable = $features)]
            pub(super) fn accumulate<const STEP: usize, const ROW: usize, const VECTOR: usize>(
                weights: &[$lane],
                rows: usize,
                values: &[&[$lane]],
                width: usize,
                out: &mut [f32],
            ) {
                let (Some(last), true) = (values.len().checked_sub(1), width > 0) else {
                    return;
                };
                assert!(rows.is_multiple_of(ROWS) && rows > 0);
                assert!(weights.len() >= (last * STEP + (rows - 1) * ROW + 1) * WIDE);
                let end = (width - 1) / LANES * VECTOR + (width - 1) % LANES;
                assert!(values.iter().all(|value| value.len() >= (end + 1) * WIDE));
                assert!(out.len() >= rows * width);
                for (part, values) in values.chunks(KEPT).enumerate() {
                    let weights = &weights[part * KEPT * STEP * WIDE..];
                    for column in (0..width).step_by(COLUMNS * LANES) {
                        let columns = width - column;
                        for row in (0..rows).step_by(ROWS) {
                            let weights = &weights[row * ROW * WIDE..];
                            let out = &mut out[row * width + column..];
                            // SAFETY: there are `ROWS` more rows of weights and of `out`, and each
                            // has the registers of columns that are accessed, the last of them
                            // masked.
                            unsafe {
                                match columns.div_ceil(LANES) {
                                    1 => sum_values::<STEP, ROW, VECTOR, 1>(
                                        weights, values, column, columns, out, width,
                                    ),
                                    2 => sum_values::<STEP, ROW, VECTOR, 2>(
                                        weights, values, column, columns, out, width,
                                    ),
                                    _ => sum_values::<STEP, ROW, VECTOR, COLUMNS>(
                                        weights, values, column, columns, out, width,
                                    ),
                                }
                            }
                        }
                    }
                }
            }

            // Sums `ROWS` rows by `C` registers of columns, beginning at `column`. `columns` is the
            // number of columns from there on.
            #[target_feature(enable = $features)]
            unsafe fn sum_values<
                const STEP: usize,
                const ROW: usize,
                const VECTOR: usize,
                const C: usize,
            >(
                weights: &[$lane],
                values: &[&[$lane]],
                column: usize,
                columns: usize,
                out: &mut [f32],
                pitch: usize,
            ) {
                let masks: [__mmask16; C] = std::array::from_fn(|c| {
                    let left = columns - c * LANES;
                    if left < LANES { (1 << left) - 1 } else { !0 }
                });
                let mut sums = [[_mm512_setzero_ps(); C]; ROWS];
                let (weights, first) = (weights.as_ptr().cast::<u32>(), column / LANES * VECTOR);
                // SAFETY: this function's own contract, above; masked lanes are not touched.
                unsafe {
                    let out = out.as_mut_ptr();
                    for (row, sums) in sums.iter_mut().enumerate() {
                        for (c, sum) in sums.iter_mut().enumerate() {
                            let from = out.add(row * pitch + c * LANES);
                            *sum = _mm512_maskz_loadu_ps(masks[c], from);
                        }
                    }
                    for (step, value) in values.iter().enumerate() {
                        let from = value.as_ptr().cast::<u32>().add(first);
                        let value: [__m512; C] = std::array::from_fn(|c| {
                            _mm512_maskz_loadu_ps(masks[c], from.add(c * VECTOR).cast())
                        });
                        let weight = weights.add(step * STEP);
                        for (row, sums) in sums.iter_mut().enumerate() {
                            let entry = weight.add(row * ROW).read_unaligned();
                            let entry = _mm512_set1_ps(f32::from_bits(entry));
                            for (sum, value) in sums.iter_mut().zip(&value) {
                                *sum = $add(*sum, entry, *value);
                            }
                        }
                    }
                    for (row, sums) in sums.iter().enumerate() {
                        for (c, sum) in sums.iter().enumerate() {
                            let to = out.add(row * pitch + c * LANES);
                            _mm512_mask_storeu_ps(to, masks[c], *sum);
                        }
                    }
                }
            }
        }
    };
}

products!(singles, f32, "avx512f", |sum, a, b| _mm512_fmadd_ps(
    a, b, sum
));

products!(pairs, bf16, "avx512f,avx512bf16", |sum, a, b| {
    // Both types have the same 512 bits.
    let bits = |x: __m512| std::mem::transmute::<__m512, __m512bh>(x);
    _mm512_dpbf16_ps(sum, bits(a), bits(b))
});

/// A proof that the processor has AVX-512F.
#[derive(Clone, Copy)]
pub(crate) struct Vectors(());

impl Vectors {
    pub(crate) fn new() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }
}

impl SingleProducts for Vectors {
    const IN_PLACE: bool = true;

    fn arrange(self, rows: usize, queries: &[f32], width: usize, to: &mut [f32]) {
        if width == 0 {
            return;
        }
        let (group, (whole, half)) = (LANES * width, sixteens(rows, width));
        let groups = queries.chunks(group).zip(to.chunks_mut(group));
        for (index, (from, to)) in groups.enumerate() {
            match half && index == whole {
                true => singles::arrange_half(from, width, to),
                false => transpose([LANES, width], from, width, to, LANES),
            }
        }
    }

    fn score(
        self,
        keys: Rows<'_, f32>,
        [count, rows, width]: [usize; 3],
        queries: &[f32],
        scores: &mut [f32],
    ) {
        let list = keys.list(width, count, &[]);
        let (list, (whole, half)) = (&list[..count], sixteens(rows, width));
        // SAFETY: `self` proves the instructions.
        unsafe {
            singles::score(list, width, queries, whole, scores, MAX_BLOCK);
            if half {
                let queries = &queries[whole * LANES * width..];
                let scores = &mut scores[whole * LANES..];
                singles::score_half(list, width, queries, scores, MAX_BLOCK);
            }
        }
    }

    fn accumulate(
        self,
        values: Rows<'_, f32>,
        pitch: usize,
        [count, rows, width]: [usize; 3],
        weights: &[f32],
        out: &mut [f32],
    ) {
        let list = values.list(pitch, count, &[]);
        let (list, rows) = (&list[..count], rows.next_multiple_of(ROWS));
        // SAFETY: `self` proves the instructions.
        unsafe { singles::accumulate::<MAX_BLOCK, 1, LANES>(weights, rows, list, width, out) };
    }
}

/// A proof that the processor can multiply pairs of bf16, and has the instructions around that.
#[derive(Clone, Copy)]
pub(crate) struct PairVectors(());

impl PairVectors {
    pub(crate) fn new() -> Option<Self> {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        AVAILABLE.get_or_init(Self::detect).then_some(Self(()))
    }

    /// Returns true if the processor has the instructions that a bf16 engine needs, including those
    /// around the products.
    pub(crate) fn detect() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16")
    }
}

// SAFETY: `new` detects the instructions.
unsafe impl Bf16Products for PairVectors {
    const IN_PLACE: bool = true;
    const STEP: usize = 2;

    fn arrange(self, rows: usize, queries: &[bf16], width: usize, to: &mut [bf16]) {
        if width == 0 {
            return;
        }
        let (group, (whole, half)) = (LANES * width, sixteens(rows, width / 2));
        let groups = queries.chunks(group).zip(to.chunks_mut(group));
        for (index, (from, to)) in groups.enumerate() {
            match half && index == whole {
                true => pairs::arrange_half(from, width, to),
                // SAFETY: `self` proves the instructions.
                false => unsafe { pair_queries(from, width, to) },
            }
        }
    }

    fn score(
        self,
        keys: Rows<'_, bf16>,
        filler: &[bf16],
        [count, rows, width]: [usize; 3],
        queries: &[bf16],
        scores: &mut [f32],
    ) {
        let list = keys.list(width, count, filler);
        let (list, steps) = (&list[..count], width / 2);
        let (whole, half) = sixteens(rows, steps);
        // SAFETY: `self` proves the instructions.
        unsafe {
            pairs::score(list, steps, queries, whole, scores, BLOCK);
            if half {
                let queries = &queries[whole * LANES * width..];
                pairs::score_half(list, steps, queries, &mut scores[whole * LANES..], BLOCK);
            }
        }
    }

    fn accumulate(
        self,
        values: &[bf16],
        [count, rows, width]: [usize; 3],
        weights: &[bf16],
        out: &mut [f32],
    ) {
        const STEPS: usize = KEYS / 2;
        let (steps, rows) = (count / 2, rows.next_multiple_of(ROWS));
        let list: [&[bf16]; STEPS] = std::array::from_fn(|step| &values[step * 2 * LANES..]);
        let list = &list[..steps];
        // SAFETY: `self` proves the instructions.
        unsafe {
            pairs::accumulate::<1, STEPS, { STEPS * LANES }>(weights, rows, list, width, out)
        };
    }
}
