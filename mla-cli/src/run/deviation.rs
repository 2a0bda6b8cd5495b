//! Rows of an output that are compared with a reference: their selection, their errors, and the
//! tolerances.

use std::collections::BTreeSet;
use std::ops::Range;

use fastrand::Rng;
use mla_runtime::model::DType;
use serde::{Deserialize, Deserializer, Serialize};

/// The deviation of rows from their references, as vectors.
#[derive(Clone, Default)]
pub(crate) struct Deviation {
    /// The rows that were compared.
    pub(crate) rows: usize,
    /// The largest difference of an element.
    pub(crate) max_absolute: f64,
    /// The largest |difference| / |reference| of a row.
    pub(crate) max_relative: f64,
    /// The largest difference of a log-sum-exp. Absent if there is none to compare.
    lse: Option<f64>,
    // Sums of squares and of products.
    given: f64,
    expected: f64,
    product: f64,
}

impl Deviation {
    /// Adds a row and its reference. A NaN counts as infinitely far.
    pub(crate) fn add(&mut self, given: &[f64], expected: &[f64]) {
        let pairs = || given.iter().zip(expected);
        let sum = |of: fn(f64, f64) -> f64| -> f64 { pairs().map(|(a, b)| of(*a, *b)).sum() };
        let difference = sum(|a, b| (a - b) * (a - b));
        let reference = sum(|_, b| b * b);
        let relative = match difference {
            0.0 => 0.0,
            difference => (difference / reference).sqrt(),
        };
        self.rows += 1;
        self.max_absolute =
            pairs().fold(self.max_absolute, |max, (a, b)| worst(max, (a - b).abs()));
        self.max_relative = worst(self.max_relative, relative);
        self.given += sum(|a, _| a * a);
        self.expected += reference;
        self.product += sum(|a, b| a * b);
    }

    /// Returns 1 − cos of the angle between all rows, as one vector, and their references, as
    /// another.
    pub(crate) fn cosine_difference(&self) -> f64 {
        worst(
            0.0,
            1.0 - self.product / (self.given * self.expected).sqrt(),
        )
    }

    /// Adds a log-sum-exp and its reference.
    pub(crate) fn add_lse(&mut self, given: f64, expected: f64) {
        let difference = (given - expected).abs();
        self.lse = Some(worst(self.lse.unwrap_or(0.0), difference));
    }

    /// True if every row is within `tolerance` relative to its reference, and all rows together
    /// deviate by no larger angle.
    pub(crate) fn is_within(&self, tolerance: f64) -> bool {
        // 1 − cos α is α²/2 for small α.
        self.max_relative <= tolerance && self.cosine_difference() <= tolerance * tolerance / 2.0
    }

    /// Returns the errors, with this tolerance of the rows.
    pub(crate) fn errors(&self, tolerance: f64) -> Errors {
        Errors {
            rows: self.rows,
            absolute: self.max_absolute,
            relative: self.max_relative,
            cosine_difference: self.cosine_difference(),
            lse: self.lse,
            tolerance,
            pass: self.is_within(tolerance) && self.lse.is_none_or(|lse| lse <= LSE_TOLERANCE),
        }
    }
}

/// Returns the larger number. A NaN counts as infinitely far.
pub(crate) fn worst(so_far: f64, error: f64) -> f64 {
    if error.is_nan() {
        f64::INFINITY
    } else {
        so_far.max(error)
    }
}

/// Chooses different (token, head) pairs, in order: the first, the last, and others at random.
/// There is at least one.
pub(crate) fn choose(
    rng: &mut Rng,
    tokens: &Range<usize>,
    heads: usize,
    count: usize,
) -> Vec<(usize, usize)> {
    let count = count.min(tokens.len().saturating_mul(heads));
    let mut rows = BTreeSet::from([(tokens.start, 0), (tokens.end - 1, heads - 1)]);
    while rows.len() < count {
        rows.insert((rng.usize(tokens.clone()), rng.usize(0..heads)));
    }
    rows.into_iter().collect()
}

/// The errors of sampled rows against the reference.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Errors {
    /// The rows that were compared.
    pub rows: usize,
    /// The largest difference of an element. Results of earlier versions lack it.
    #[serde(default, deserialize_with = "finite_or_infinite")]
    pub absolute: f64,
    /// The largest |difference| / |reference| of a row, as vectors.
    #[serde(deserialize_with = "finite_or_infinite")]
    pub relative: f64,
    /// 1 − cos of the angle between all rows, as one vector, and their references, as another.
    #[serde(deserialize_with = "finite_or_infinite")]
    pub cosine_difference: f64,
    /// The largest difference of a log-sum-exp. Absent if there is none to compare.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lse: Option<f64>,
    /// The maximum for `relative`.
    pub tolerance: f64,
    /// True if all errors are within their tolerances.
    pub pass: bool,
}

/// Reads null as infinity, since JSON cannot write infinity.
fn finite_or_infinite<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
}

/// The tolerance of a log-sum-exp. It comes from sums of hundreds of products, each off by 2⁻²⁴ of
/// the largest.
const LSE_TOLERANCE: f64 = 1e-3;

/// Returns the tolerance of a row's relative error, for a number of roundings to the dtype.
///
/// In f16 and bf16 the errors are those of rounding to u, half the distance from 1 to the next
/// number. In f32, where u is 2⁻²⁴, errors come from sums of hundreds to thousands of terms and
/// from the exponential. Each gives a few hundred u at worst.
pub(crate) fn tolerance(dtype: DType, roundings: f64) -> f64 {
    match dtype {
        DType::BF16 => roundings * 2f64.powi(-9),
        DType::F16 => roundings * 2f64.powi(-12),
        DType::F32 => 40.0 * roundings * 2f64.powi(-24),
    }
}

impl Errors {
    /// Combines the errors of a layer's paths.
    pub fn of_paths(paths: [Option<Self>; 2]) -> Self {
        let paths: Vec<_> = paths.into_iter().flatten().collect();
        let max = |of: fn(&Self) -> f64| paths.iter().map(of).fold(0.0, worst);
        Self {
            rows: paths.iter().map(|path| path.rows).sum(),
            absolute: max(|path| path.absolute),
            relative: max(|path| path.relative),
            cosine_difference: max(|path| path.cosine_difference),
            lse: None,
            tolerance: max(|path| path.tolerance),
            pass: !paths.is_empty() && paths.iter().all(|path| path.pass),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the errors of a row and its log-sum-exp.
    fn errors(given: (&[f64], f64), expected: (&[f64], f64)) -> Errors {
        let mut deviation = Deviation::default();
        deviation.add(given.0, expected.0);
        deviation.add_lse(given.1, expected.1);
        deviation.errors(0.02)
    }

    #[test]
    fn errors_are_those_of_the_definitions() {
        let same = errors((&[3.0, 4.0], 1.0), (&[3.0, 4.0], 1.0));
        assert!(same.pass);
        assert_eq!(
            (same.absolute, same.relative, same.lse),
            (0.0, 0.0, Some(0.0))
        );
        let off = errors((&[3.0, 4.15], 1.0), (&[3.0, 4.0], 1.0));
        assert!((off.absolute - 0.15).abs() < 1e-12 && (off.relative - 0.03).abs() < 1e-12);
        assert!(!off.pass && errors((&[3.0, 4.05], 1.0), (&[3.0, 4.0], 1.0)).pass);
        let turned = errors((&[-4.0, 3.0], 1.0), (&[3.0, 4.0], 1.0));
        assert!((turned.cosine_difference - 1.0).abs() < 1e-12 && !turned.pass);
        assert!(!errors((&[3.0, 4.0], 1.01), (&[3.0, 4.0], 1.0)).pass);
    }

    #[test]
    fn what_is_no_number_never_passes() {
        for given in [[f64::NAN, 1.0], [f64::INFINITY, 1.0], [0.0, 0.0]] {
            assert!(!errors((&given, 0.0), (&[1.0, 1.0], 0.0)).pass, "{given:?}");
        }
        assert!(!errors((&[1.0, 1.0], 0.0), (&[0.0, 0.0], 0.0)).pass);
        assert!(!errors((&[1.0, 1.0], f64::NAN), (&[1.0, 1.0], 0.0)).pass);
    }

    #[test]
    fn rows_are_chosen_once_each_with_the_first_and_the_last() {
        let rows = choose(&mut Rng::with_seed(1), &(5..9), 3, 8);
        assert_eq!((rows.len(), rows[0], rows[7]), (8, (5, 0), (8, 2)));
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]));
        let all = choose(&mut Rng::with_seed(1), &(5..9), 3, 1000);
        assert_eq!(all.len(), 12);
        assert_eq!(choose(&mut Rng::with_seed(1), &(5..6), 1, 9), [(5, 0)]);
    }
}
