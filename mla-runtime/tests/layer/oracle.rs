//! Attention in f64, from the bytes of the cache and the definition alone.

use half::{bf16, f16};
use mla_runtime::dims::MlaDims;
use mla_runtime::kv_format::KvFormat;

/// The value of an e4m3 byte: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no
/// infinities, and all ones is NaN.
pub(crate) fn e4m3(byte: u8) -> f64 {
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    if byte & 0x7f == 0x7f {
        return f64::NAN;
    }
    sign * match exponent {
        0 => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// The L + R values of a cache row.
pub(crate) fn row(format: KvFormat, dims: MlaDims, scale: f32, bytes: &[u8]) -> Vec<f64> {
    let two = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    let four = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    match format {
        KvFormat::F32 => bytes.chunks(4).map(|b| f64::from(four(b))).collect(),
        KvFormat::F16 => bytes
            .chunks(2)
            .map(|b| f16::from_bits(two(b)).to_f64())
            .collect(),
        KvFormat::BF16 => bytes
            .chunks(2)
            .map(|b| bf16::from_bits(two(b)).to_f64())
            .collect(),
        KvFormat::Fp8 => bytes.iter().map(|b| e4m3(*b) * f64::from(scale)).collect(),
        KvFormat::Fp8DsMla => {
            let latent = dims.latent as usize;
            let (values, rest) = bytes.split_at(latent);
            let (scales, rope) = rest.split_at(4 * latent / 128);
            values
                .iter()
                .enumerate()
                .map(|(at, b)| e4m3(*b) * f64::from(four(&scales[4 * (at / 128)..])))
                .chain(rope.chunks(2).map(|b| bf16::from_bits(two(b)).to_f64()))
                .collect()
        }
    }
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
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
    let mut mean = vec![0.0; latent];
    for (score, row) in scores.iter().zip(rows) {
        let weight = (score - most).exp() / sum;
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
    (out, most + sum.ln())
}
