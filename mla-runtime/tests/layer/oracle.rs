//! Attention in f64, computed only from the bytes of the cache and the definition.

use mla_conformance::reference::{self, decode_row};
use mla_runtime::model::{KvFormat, MlaDims};

/// The L + R values of a cache row.
pub(crate) fn row(format: KvFormat, dims: MlaDims, scale: f32, bytes: &[u8]) -> Vec<f64> {
    let (latent, rope) = (dims.latent as usize, dims.head.rope as usize);
    decode_row(format, latent, rope, bytes, scale.into())
}

/// The result of one head for one query token: V values and the log-sum-exp.
///
/// `query` has P + R values, and each row has L + R. `w_kv_b` is the head's part, `[L, P+V]`.
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
    // A key is c · W_UK, so q · k = (W_UK · q) · c. One product thus serves all rows.
    let absorbed: Vec<f64> = (0..latent)
        .map(|l| (0..nope).map(|p| query[p] * w_kv_b[l * width + p]).sum())
        .collect();
    let query = [&absorbed, &query[nope..]].concat();
    let values: Vec<&[f64]> = rows.iter().map(|row| &row[..latent]).collect();
    let (mean, lse) = reference::attend(&query, rows, &values, scale);
    let out = (0..v)
        .map(|j| {
            (0..latent)
                .map(|l| mean[l] * w_kv_b[l * width + nope + j])
                .sum()
        })
        .collect();
    (out, lse)
}
