//! The lightning indexer: keys, queries, logits, and the selection by logits.

use super::cache::{decode_e4m3, encode_e4m3};
use super::dot;
use mla_runtime::model::RotaryStyle;

/// The rotation of one token, as the cosine and sine of each pair's angle.
#[derive(Clone, PartialEq, Debug)]
pub struct Turn {
    /// The style, which says which elements form a pair.
    pub style: RotaryStyle,
    /// `(cos, sin)` of each pair.
    pub pairs: Vec<(f64, f64)>,
}

impl Turn {
    /// Rotates the first 2 · pairs elements.
    pub fn apply(&self, row: &mut [f64]) {
        let half = self.pairs.len();
        for (pair, (cos, sin)) in self.pairs.iter().enumerate() {
            let (i, j) = match self.style {
                RotaryStyle::Interleaved => (2 * pair, 2 * pair + 1),
                RotaryStyle::Halves => (pair, pair + half),
            };
            (row[i], row[j]) = (row[i] * cos - row[j] * sin, row[j] * cos + row[i] * sin);
        }
    }
}

/// Computes (x − mean) / √(variance + epsilon) · weight + bias.
pub fn layer_norm(row: &[f64], weight: &[f64], bias: &[f64], epsilon: f64) -> Vec<f64> {
    let count = row.len() as f64;
    let mean = row.iter().sum::<f64>() / count;
    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    row.iter()
        .zip(weight.iter().zip(bias))
        .map(|(x, (weight, bias))| (x - mean) / (variance + epsilon).sqrt() * weight + bias)
        .collect()
}

/// Computes the Hadamard transform divided by √n: element i of the result is Σ_j (−1)^popcount(i &
/// j) x_j / √n.
pub fn hadamard(row: &[f64]) -> Vec<f64> {
    let sign = |i: usize, j: usize| {
        if (i & j).count_ones().is_multiple_of(2) {
            1.0
        } else {
            -1.0
        }
    };
    (0..row.len())
        .map(|i| {
            let terms = row.iter().enumerate().map(|(j, x)| sign(i, j) * x);
            terms.sum::<f64>() / (row.len() as f64).sqrt()
        })
        .collect()
}

/// Returns the scale of an index key or query. It is the smallest power of two that is not below
/// max(|x|, 1e-4) / 448.
pub fn index_scale(row: &[f64]) -> f64 {
    let largest = row.iter().fold(1e-4, |max: f64, x| max.max(x.abs()));
    let mut scale = 2f64.powi(-60);
    while scale < largest / 448.0 {
        scale *= 2.0;
    }
    scale
}

/// Returns the e4m3 codes of a row, and their scale.
pub fn quantise_index(row: &[f64]) -> (Vec<u8>, f64) {
    let scale = index_scale(row);
    (row.iter().map(|x| encode_e4m3(x / scale)).collect(), scale)
}

/// Computes the logit of one key: scale · Σ weight · relu(query · key), summed over the heads.
/// Queries and the key are e4m3 codes.
///
/// # Panics
///
/// If widths differ.
pub fn index_logit(queries: &[(Vec<u8>, f64)], key: &[u8], scale: f64) -> f64 {
    let key: Vec<f64> = key.iter().map(|code| decode_e4m3(*code)).collect();
    let heads = queries.iter().map(|(query, weight)| {
        let query: Vec<f64> = query.iter().map(|code| decode_e4m3(*code)).collect();
        weight * dot(&query, &key).max(0.0)
    });
    scale * heads.sum::<f64>()
}

/// Returns the positions of the `count` largest values in ascending order. Of equal values, the
/// first ones count. NaN ranks below −inf.
pub fn largest(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // A stable sort keeps equal values in their order.
    order.sort_by(|a, b| {
        let [a, b] = [values[*a], values[*b]];
        match (a.is_nan(), b.is_nan()) {
            (true, true) => std::cmp::Ordering::Equal,
            (true, false) => std::cmp::Ordering::Greater,
            (false, true) => std::cmp::Ordering::Less,
            (false, false) => b.partial_cmp(&a).unwrap_or(std::cmp::Ordering::Equal),
        }
    });
    order.truncate(count);
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hand_computed_values() {
        let row = [1.0, 2.0, 3.0, 6.0];
        // The mean is 3 and the variance 3.5.
        let normed = layer_norm(&row, &[1.0, 2.0, 1.0, 1.0], &[0.0, 0.0, 5.0, 0.0], 0.5);
        assert_eq!(normed, [-1.0, -1.0, 5.0, 1.5]);
        assert_eq!(hadamard(&row), [6.0, -2.0, -3.0, 1.0]);
        assert_eq!(hadamard(&hadamard(&row)), row);
        assert_eq!(index_scale(&[448.0, -1.0]), 1.0);
        assert_eq!(index_scale(&[-449.0]), 2.0);
        assert_eq!(index_scale(&[0.0]), 2f64.powi(-22));
        assert_eq!(largest(&[1.0, f64::NAN, 2.0, 1.0, 1.0], 3), [0, 2, 3]);
        assert_eq!(largest(&[f64::NAN, f64::NEG_INFINITY], 1), [1]);
        for (style, expected) in [
            (RotaryStyle::Interleaved, [-2.0, 1.0, 3.0, 6.0]),
            (RotaryStyle::Halves, [-3.0, 2.0, 1.0, 6.0]),
        ] {
            let mut turned = row;
            let pairs = vec![(0.0, 1.0), (1.0, 0.0)];
            Turn { style, pairs }.apply(&mut turned);
            assert_eq!(turned, expected);
        }
    }

    #[test]
    fn logits_clamp_at_zero() {
        let (one, two) = (encode_e4m3(1.0), encode_e4m3(2.0));
        let minus = encode_e4m3(-1.0);
        let queries = [(vec![one, two], 0.5), (vec![minus, minus], 100.0)];
        assert_eq!(index_logit(&queries, &[one, one], 4.0), 6.0);
    }
}
