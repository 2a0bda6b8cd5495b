//! The softmax of a tile of scores, and its exponential function.
//!
//! Scores are stored transposed, `[keys, rows]`. A vector register holds the scores of one key and
//! sixteen query rows, so maxima and sums need no shuffles.

use bytemuck::{Pod, Zeroable};
use multiversion::multiversion;

/// The number of query rows in one vector.
pub(crate) const LANES: usize = 16;

/// Computes 2^x for x ≤ 0 with a relative error below 2^−22. The result is 0 below −126, and NaN
/// for NaN.
///
/// x is split as n + f, where n is its nearest integer. A polynomial of degree 6 gives 2^f. It
/// interpolates in the Chebyshev points of [−½, ½], with a relative error of 3e-9, below the
/// rounding of f32. 2^n is written into the exponent's bits.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    // Adding 1.5·2^23 leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x + ROUND;
    let f = x - (shifted - ROUND);
    let mut power = POLYNOMIAL[6];
    power = power * f + POLYNOMIAL[5];
    power = power * f + POLYNOMIAL[4];
    power = power * f + POLYNOMIAL[3];
    power = power * f + POLYNOMIAL[2];
    power = power * f + POLYNOMIAL[1];
    power = power * f + POLYNOMIAL[0];
    // The shift removes the bits of ROUND above the integer.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -126.0 { 0.0 } else { power * scale }
}

// Returns the maximum, or `a` if `b` is NaN. A maximum is thus never NaN. The sum shows a NaN score
// instead.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The coefficients of the polynomial for 2^f, lowest first.
pub(crate) const POLYNOMIAL: [f32; 7] = [
    1.0,
    6.931_472e-1,
    2.402_265e-1,
    5.550_327e-2,
    9.618_057e-3,
    1.340_043e-3,
    1.546_144e-4,
];

/// The running softmax of sixteen rows, in units of log2.
///
/// A NaN among a row's scores makes its sum NaN, and so its output and its log-sum-exp. A sum of 0
/// means that the row has seen nothing. The maximum does not tell this: it is −inf for NaN scores,
/// too.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Running {
    /// The largest score so far; never NaN.
    pub(crate) max: [f32; LANES],
    /// The sum of 2^(score − max); NaN if one of the scores is NaN.
    pub(crate) sum: [f32; LANES],
}

impl Running {
    pub(crate) const EMPTY: Self = Self {
        max: [f32::NEG_INFINITY; LANES],
        sum: [0.0; LANES],
    };
}

/// Replaces the scores of `keys` keys by 2^(scale·score − max), with the scale of each row. From a
/// row's limit on, the result is 0. Returns the factors for the earlier sums and outputs of each
/// row.
///
/// The scores of key `j` are the first sixteen of `scores[j · pitch ..]`.
#[multiversion(targets(
    "x86_64+avx512f+avx512vl+avx512dq+avx512bw+avx2+fma",
    "x86_64+avx2+fma"
))]
pub(crate) fn softmax(
    scores: &mut [f32],
    pitch: usize,
    keys: usize,
    limits: &[u32; LANES],
    scales: &[f32; LANES],
    running: &mut Running,
) -> [f32; LANES] {
    let scores = &mut scores[..(keys.max(1) - 1) * pitch + LANES];
    // Scales are positive, so the largest score is also the largest scaled score.
    let mut max = largest(scores, pitch, keys, limits);
    for lane in 0..LANES {
        max[lane] = larger(running.max[lane], max[lane] * scales[lane]);
    }

    // A row that has no largest score gets the base 0. Its weights are then 2^(−inf − 0) = 0
    // instead of a NaN from −inf − −inf.
    let mut base = [0.0; LANES];
    let mut alpha = [0.0; LANES];
    for lane in 0..LANES {
        base[lane] = if max[lane] == f32::NEG_INFINITY {
            0.0
        } else {
            max[lane]
        };
        alpha[lane] = exp2(running.max[lane] - base[lane]);
    }

    let mut sum = [0.0f32; LANES];
    let rows = scores.chunks_mut(pitch).take(keys);
    for row in rows.filter_map(<[f32]>::first_chunk_mut::<LANES>) {
        for lane in 0..LANES {
            let power = exp2(row[lane] * scales[lane] - base[lane]);
            row[lane] = power;
            sum[lane] += power;
        }
    }
    for lane in 0..LANES {
        running.sum[lane] = running.sum[lane] * alpha[lane] + sum[lane];
    }
    running.max = max;
    alpha
}

// Returns the largest score of each row. Scores of keys that a row does not see become −inf. The
// function is inlined, so that it is compiled for the caller's instructions.
#[inline(always)]
fn largest(scores: &mut [f32], pitch: usize, keys: usize, limits: &[u32; LANES]) -> [f32; LANES] {
    // Keys that every row sees need no mask.
    let seen = limits.iter().fold(u32::MAX, |min, limit| min.min(*limit));
    let seen = (seen as usize).min(keys);
    let mut max = [f32::NEG_INFINITY; LANES];
    let (plain, masked) = scores.split_at_mut((seen * pitch).min(scores.len()));
    // The loops are over arrays instead of slices. Sixteen bounds checks would keep the values out
    // of registers.
    for row in plain
        .chunks(pitch)
        .filter_map(<[f32]>::first_chunk::<LANES>)
    {
        for lane in 0..LANES {
            max[lane] = larger(max[lane], row[lane]);
        }
    }
    let masked = masked.chunks_mut(pitch).take(keys - seen);
    for (key, row) in masked
        .filter_map(<[f32]>::first_chunk_mut::<LANES>)
        .enumerate()
    {
        for lane in 0..LANES {
            if (seen + key) as u32 >= limits[lane] {
                row[lane] = f32::NEG_INFINITY;
            }
            max[lane] = larger(max[lane], row[lane]);
        }
    }
    max
}
