//! Attention by its formulas, in f64: the reference for every implementation.
//!
//! Nothing here is fast, and nothing is shared with the code that it tests. It is meant to be
//! checked by reading it.

mod cache;
mod indexer;

use std::panic::resume_unwind;
use std::thread;

pub use cache::{decode_e4m3, decode_row, encode_bf16, encode_e4m3, encode_f16, encode_row};
pub use indexer::{Turn, hadamard, index_logit, index_scale, largest, layer_norm, quantise_index};

/// An array of f64 with three axes, row-major: `[tokens, heads, width]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Array {
    /// The extents.
    pub shape: [usize; 3],
    /// The elements.
    pub data: Vec<f64>,
}

impl Array {
    /// Makes an array of zeros.
    pub fn zeros(shape: [usize; 3]) -> Self {
        Self {
            shape,
            data: vec![0.0; shape[0] * shape[1] * shape[2]],
        }
    }

    /// Makes an array whose element `[i, j, k]` is `element(i, j, k)`.
    pub fn from_fn(shape: [usize; 3], mut element: impl FnMut(usize, usize, usize) -> f64) -> Self {
        let mut array = Self::zeros(shape);
        for i in 0..shape[0] {
            for j in 0..shape[1] {
                for k in 0..shape[2] {
                    array.row_mut(i, j)[k] = element(i, j, k);
                }
            }
        }
        array
    }

    /// Returns `[i, j, 0..]`.
    ///
    /// # Panics
    ///
    /// If the indices are out of bounds.
    pub fn row(&self, i: usize, j: usize) -> &[f64] {
        let start = (i * self.shape[1] + j) * self.shape[2];
        &self.data[start..start + self.shape[2]]
    }

    /// Returns `[i, j, 0..]` for writing.
    ///
    /// # Panics
    ///
    /// If the indices are out of bounds.
    pub fn row_mut(&mut self, i: usize, j: usize) -> &mut [f64] {
        let start = (i * self.shape[1] + j) * self.shape[2];
        &mut self.data[start..start + self.shape[2]]
    }
}

/// The result of attention.
#[derive(Clone, PartialEq, Debug)]
pub struct Attended {
    /// Outputs, `[tokens, heads, width]`.
    pub out: Array,
    /// Log-sum-exps, `[tokens][heads]`, with natural logarithms. They are −inf if nothing was
    /// attended to.
    pub lse: Vec<Vec<f64>>,
}

/// Computes attention of one query to some keys.
///
/// The result is Σ e^(scale·q·k) v / Σ e^(scale·q·k), and the logarithm of the denominator. Without
/// keys it is 0 and −inf. A NaN in the query or in a key gives NaN. A NaN in a value gives NaN in
/// its column.
///
/// # Panics
///
/// If a key is not as wide as the query.
pub fn attend(query: &[f64], keys: &[&[f64]], values: &[&[f64]], scale: f64) -> (Vec<f64>, f64) {
    let width = values.first().map_or(0, |value| value.len());
    let scores: Vec<f64> = keys.iter().map(|key| scale * dot(query, key)).collect();
    if scores.iter().all(|score| *score == f64::NEG_INFINITY) {
        return (vec![0.0; width], f64::NEG_INFINITY);
    }
    // The maximum ignores NaN. NaN reaches the result through its weight.
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // Subtracting the largest score from the exponents changes only their range.
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; width];
    for (weight, value) in weights.iter().zip(values) {
        for (out, value) in out.iter_mut().zip(*value) {
            *out += weight / sum * value;
        }
    }
    (out, max + sum.ln())
}

/// Returns the factor by which a sink reduces an output with this log-sum-exp: e^lse / (e^lse +
/// e^sink). It is 1 if nothing was attended to, since the output is then 0.
pub fn left_by_sink(sink: f64, lse: f64) -> f64 {
    match lse == f64::NEG_INFINITY {
        true => 1.0,
        false => 1.0 / (1.0 + (sink - lse).exp()),
    }
}

// A processor computes these eight sums, each of every eighth product, in parallel.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mut sums = [0.0; 8];
    let ((a, last_a), (b, last_b)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(last_a.iter().zip(last_b)) {
        *sum += a * b;
    }
    sums.iter().sum()
}

/// Computes a result for each index below `count`, in several threads if there is much to do.
pub(crate) fn each<T: Send>(
    count: usize,
    much: bool,
    result: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let threads = match much {
        true => thread::available_parallelism().map_or(1, usize::from),
        false => 1,
    };
    let some = count.div_ceil(threads).max(1);
    let of_some = &|first: usize| -> Vec<T> {
        let indices = first..count.min(first + some);
        indices.map(&result).collect()
    };
    if some >= count {
        return of_some(0);
    }
    thread::scope(|scope| {
        let threads = (0..count).step_by(some);
        let threads: Vec<_> = threads
            .map(|first| scope.spawn(move || of_some(first)))
            .collect();
        let results = threads.into_iter().map(thread::ScopedJoinHandle::join);
        results
            .flat_map(|some| some.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Computes attention of queries `[T, H, …]` to the keys and values of each head. The result for a
/// token and head does not depend on other tokens and heads.
fn attended<'a>(
    queries: &Array,
    width: usize,
    scale: f64,
    causal: bool,
    rows: impl Fn(usize) -> [Vec<&'a [f64]>; 2] + Sync,
) -> Attended {
    let [tokens, heads, _] = queries.shape;
    let much = tokens * rows(0)[0].len() > 1024;
    let results = each(tokens * heads, much, |index| {
        let (token, head) = (index / heads, index % heads);
        let [keys, values] = rows(head);
        let seen = match causal {
            true => (keys.len() + token + 1).saturating_sub(tokens),
            false => keys.len(),
        };
        let query = queries.row(token, head);
        attend(query, &keys[..seen], &values[..seen], scale)
    });
    Attended {
        out: Array::from_fn([tokens, heads, width], |token, head, k| {
            // Without values, the result is empty and counts as 0.
            let (out, _) = &results[token * heads + head];
            out.get(k).copied().unwrap_or(0.0)
        }),
        lse: results
            .chunks(heads.max(1))
            .map(|of_token| of_token.iter().map(|(_, lse)| *lse).collect())
            .collect(),
    }
}

/// Computes expanded attention of one request, with queries `[Tq, H, P+R]`, keys `[Tk, H, P+R]` and
/// values `[Tk, H, V]`. If `causal`, the last query sees every key, and each earlier query sees one
/// key less.
///
/// # Panics
///
/// If shapes do not fit.
pub fn expanded(
    queries: &Array,
    keys: &Array,
    values: &Array,
    scale: f64,
    causal: bool,
) -> Attended {
    attended(queries, values.shape[2], scale, causal, |head| {
        [keys, values].map(|array| {
            (0..array.shape[0])
                .map(|row| array.row(row, head))
                .collect()
        })
    })
}

/// Computes absorbed attention of one request, with queries `[T, H, L+R]` and cache rows of L + R
/// values. The first `latent` values of a row are its value. The last query sees every row, and
/// each earlier query sees one row less.
///
/// # Panics
///
/// If shapes do not fit.
pub fn absorbed(queries: &Array, rows: &[Vec<f64>], latent: usize, scale: f64) -> Attended {
    absorbed_as(queries, rows, latent, scale, true)
}

/// Computes absorbed attention in which every query sees every row.
///
/// # Panics
///
/// If shapes do not fit.
pub fn absorbed_non_causal(
    queries: &Array,
    rows: &[Vec<f64>],
    latent: usize,
    scale: f64,
) -> Attended {
    absorbed_as(queries, rows, latent, scale, false)
}

fn absorbed_as(
    queries: &Array,
    rows: &[Vec<f64>],
    latent: usize,
    scale: f64,
    causal: bool,
) -> Attended {
    // All heads share one key head.
    attended(queries, latent, scale, causal, |_| {
        let (keys, values) = rows.iter().map(|row| (&row[..], &row[..latent])).unzip();
        [keys, values]
    })
}

/// Merges the partial results over two sets of keys into one over both. A log-sum-exp of +inf
/// counts as −inf: nothing was attended to.
pub fn merge(a: (&[f64], f64), b: (&[f64], f64)) -> (Vec<f64>, f64) {
    let partials = [a, b].map(|(out, lse)| {
        let empty = lse == f64::INFINITY;
        (out, if empty { f64::NEG_INFINITY } else { lse })
    });
    let mut out = vec![0.0; a.0.len()];
    if partials.iter().all(|(_, lse)| *lse == f64::NEG_INFINITY) {
        return (out, f64::NEG_INFINITY);
    }
    // If one number is NaN, the maximum is the other one.
    let max = partials[0].1.max(partials[1].1);
    let sum: f64 = partials.iter().map(|(_, lse)| (lse - max).exp()).sum();
    for (partial, lse) in partials {
        // A result that attended to nothing may have any output.
        if lse == f64::NEG_INFINITY {
            continue;
        }
        let weight = (lse - max).exp() / sum;
        for (out, value) in out.iter_mut().zip(partial) {
            *out += weight * value;
        }
    }
    (out, max + sum.ln())
}

/// Applies `W_kv_b` to latents: `[k_nope | v] = c · W_kv_b`.
///
/// `weight` is `[L, H·(P+V)]`, row-major. The result is keys `[T, H, P+R]` and values `[T, H, V]`.
/// Each row's rotary part is repeated for every head.
///
/// # Panics
///
/// If lengths do not fit.
pub fn expand(
    rows: &[Vec<f64>],
    weight: &[f64],
    heads: usize,
    [nope, rope, v]: [usize; 3],
) -> (Array, Array) {
    let columns = heads * (nope + v);
    let latent = weight.len().checked_div(columns).unwrap_or(0);
    let project = |row: usize, column: usize| -> f64 {
        (0..latent)
            .map(|k| rows[row][k] * weight[k * columns + column])
            .sum()
    };
    let keys = Array::from_fn([rows.len(), heads, nope + rope], |row, head, k| {
        if k < nope {
            project(row, head * (nope + v) + k)
        } else {
            rows[row][latent + k - nope]
        }
    });
    let values = Array::from_fn([rows.len(), heads, v], |row, head, k| {
        project(row, head * (nope + v) + nope + k)
    });
    (keys, values)
}

/// Computes the whole layer for one request, from the queries of its new tokens `[T, H, P+R]` and
/// the cache rows of all its tokens, including the new ones.
///
/// # Panics
///
/// If shapes do not fit.
pub fn layer(
    queries: &Array,
    rows: &[Vec<f64>],
    weight: &[f64],
    dims: [usize; 3],
    scale: f64,
) -> Attended {
    let (keys, values) = expand(rows, weight, queries.shape[1], dims);
    expanded(queries, &keys, &values, scale, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_to_two_keys() {
        let (keys, values) = ([[1.0, 0.0], [0.0, 2.0]], [[1.0], [5.0]]);
        let (out, lse) = attend(
            &[0.5, 1.0],
            &[&keys[0], &keys[1]],
            &[&values[0], &values[1]],
            2.0,
        );
        let (a, b) = (1f64.exp(), 4f64.exp());
        assert!((out[0] - (a + 5.0 * b) / (a + b)).abs() < 1e-12);
        assert!((lse - (a + b).ln()).abs() < 1e-12);
    }

    #[test]
    fn merging_halves_gives_the_whole() {
        let keys: Vec<Vec<f64>> = (0..6).map(|i| vec![f64::from(i) * 0.3, 1.0]).collect();
        let values: Vec<Vec<f64>> = (0..6).map(|i| vec![f64::from(i * i)]).collect();
        let partial = |range: std::ops::Range<usize>| {
            let k: Vec<&[f64]> = keys[range.clone()].iter().map(Vec::as_slice).collect();
            let v: Vec<&[f64]> = values[range].iter().map(Vec::as_slice).collect();
            attend(&[1.0, -0.5], &k, &v, 1.5)
        };
        let (a, b, whole) = (partial(0..2), partial(2..6), partial(0..6));
        let merged = merge((&a.0, a.1), (&b.0, b.1));
        assert!((merged.0[0] - whole.0[0]).abs() < 1e-12);
        assert!((merged.1 - whole.1).abs() < 1e-12);
        let nothing = (&[f64::NAN][..], f64::INFINITY);
        assert_eq!(merge(nothing, nothing), (vec![0.0], f64::NEG_INFINITY));
        assert_eq!(merge((&a.0, a.1), nothing), a);
    }

    #[test]
    fn absorbed_equals_expanded() {
        let (l, [p, r, v], heads) = (5, [3, 2, 4], 2);
        let mut seed = 1u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as f64 / f64::from(1u32 << 31) - 0.5
        };
        let rows: Vec<Vec<f64>> = (0..7)
            .map(|_| (0..l + r).map(|_| random()).collect())
            .collect();
        let weight: Vec<f64> = (0..l * heads * (p + v)).map(|_| random()).collect();
        let queries = Array::from_fn([3, heads, p + r], |_, _, _| random());
        let w = |k: usize, head: usize, column: usize| {
            weight[k * heads * (p + v) + head * (p + v) + column]
        };

        let latent = Array::from_fn([3, heads, l + r], |t, h, k| {
            if k < l {
                (0..p).map(|c| queries.row(t, h)[c] * w(k, h, c)).sum()
            } else {
                queries.row(t, h)[p + k - l]
            }
        });
        let absorbed = absorbed(&latent, &rows, l, 0.7);
        let layer = layer(&queries, &rows, &weight, [p, r, v], 0.7);
        for t in 0..3 {
            for h in 0..heads {
                for c in 0..v {
                    let projected: f64 = (0..l)
                        .map(|k| absorbed.out.row(t, h)[k] * w(k, h, p + c))
                        .sum();
                    assert!((projected - layer.out.row(t, h)[c]).abs() < 1e-12);
                }
                assert!((absorbed.lse[t][h] - layer.lse[t][h]).abs() < 1e-12);
            }
        }
    }
}
