//! Attention in f64, from the bytes of the cache and the definition alone.

use mla_conformance::reference::decode_row;
use mla_runtime::model::{KvFormat, MlaDims};

/// The L + R values of a cache row.
pub(crate) fn row(format: KvFormat, dims: MlaDims, scale: f32, bytes: &[u8]) -> Vec<f64> {
    let (latent, rope) = (dims.latent as usize, dims.head.rope as usize);
    decode_row(format, latent, rope, bytes, scale.into())
}

/// One head's result for one query token: V values and the log-sum-exp.
///
/// `query` has P + R values and each row L + R; `w_kv_b` is the head's part, `[L, P+V]`.
pub(crate) fn attend(
    dims: MlaDims,
    scale: f64,
    query: &[f64],
    w_kv_b: &[f64],
    rows: &[&[f64]],
) -> (Vec<f64>, f64) {
    let latent = dims.latent as usize;
    let (nope, v) = (dims.head.nope as usize, dims.head.v as usize);
    let width = nope + v;
    if rows.is_empty() {
        return (vec![0.0; v], f64::NEG_INFINITY);
    }
    // A key is c · W_UK, so q · k = (W_UK · q) · c: one product for all rows.
    let absorbed: Vec<f64> = (0..latent)
        .map(|l| (0..nope).map(|p| query[p] * w_kv_b[l * width + p]).sum())
        .collect();
    let scores: Vec<f64> = rows
        .iter()
        .map(|row| {
            let own: f64 = absorbed.iter().zip(*row).map(|(a, b)| a * b).sum();
            let rope: f64 = query[nope..]
                .iter()
                .zip(&row[latent..])
                .map(|(a, b)| a * b)
                .sum();
            scale * (own + rope)
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    let mut mean = vec![0.0; latent];
    for (score, row) in scores.iter().zip(rows) {
        let weight = (score - max).exp() / sum;
        for (mean, value) in mean.iter_mut().zip(*row) {
            *mean += weight * value;
        }
    }
    let out = (0..v)
        .map(|j| {
            (0..latent)
                .map(|l| mean[l] * w_kv_b[l * width + nope + j])
                .sum()
        })
        .collect();
    (out, max + sum.ln())
}
