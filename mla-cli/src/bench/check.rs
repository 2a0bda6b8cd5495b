//! The check of an output: its errors, and their tolerances.

use mla_runtime::model::DType;
use serde::{Deserialize, Deserializer, Serialize};

use crate::deviation::{Deviation, worst};
use crate::run::reference;

/// One head's output for one token: the row and its log-sum-exp, as a backend gave them and as they
/// are in f64.
pub struct Row {
    pub given: (Vec<f64>, f64),
    pub expected: (Vec<f64>, f64),
}

/// The errors of sampled rows against the reference.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Errors {
    /// The rows that were compared.
    pub rows: usize,
    /// The largest |difference| / |reference| of a row, as vectors.
    #[serde(deserialize_with = "finite_or_infinite")]
    pub relative: f64,
    /// 1 − cos of the angle between all rows and their references, as one vector each.
    #[serde(deserialize_with = "finite_or_infinite")]
    pub cosine_difference: f64,
    /// The largest difference of a log-sum-exp; absent where there is none to compare.
    pub lse: Option<f64>,
    /// The maximum for `relative`.
    pub tolerance: f64,
    /// True if all errors are within their tolerances.
    pub pass: bool,
}

/// JSON has no infinity, and writes null instead.
fn finite_or_infinite<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
}

/// The tolerance of a log-sum-exp: it comes from sums of hundreds of products, each off by 2⁻²⁴ of
/// the largest.
const LSE_TOLERANCE: f64 = 1e-3;

/// The tolerance of a row's relative error. Weights, values and the output are each rounded to the
/// dtype once, at random from key to key, and the worst of many rows is a few times the typical
/// one. In f32 sums of thousands of terms and the exponential count instead.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 10.0 * 2f64.powi(-9),
        DType::F16 => 10.0 * 2f64.powi(-12),
        DType::F32 => 400.0 * 2f64.powi(-24),
    }
}

impl Errors {
    pub fn of(rows: &[Row], dtype: DType) -> Self {
        let (mut deviation, mut lse) = (Deviation::default(), 0.0);
        for row in rows {
            deviation.add(&row.given.0, &row.expected.0);
            lse = worst(lse, (row.given.1 - row.expected.1).abs());
        }
        let tolerance = tolerance(dtype);
        Self {
            rows: deviation.rows,
            relative: deviation.max_relative,
            cosine_difference: deviation.cosine_difference(),
            lse: Some(lse),
            tolerance,
            pass: deviation.is_within(tolerance) && lse <= LSE_TOLERANCE,
        }
    }

    /// The errors of a layer's paths together.
    pub fn of_paths(paths: [Option<reference::Errors>; 2]) -> Self {
        let paths: Vec<_> = paths.into_iter().flatten().collect();
        let most = |of: fn(&reference::Errors) -> f64| paths.iter().map(of).fold(0.0, worst);
        Self {
            rows: paths.iter().map(|path| path.samples).sum(),
            relative: most(|path| path.max_relative),
            cosine_difference: most(|path| path.cosine_difference),
            lse: None,
            tolerance: most(|path| path.tolerance),
            pass: !paths.is_empty() && paths.iter().all(|path| path.pass),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(given: (&[f64], f64), expected: (&[f64], f64)) -> Errors {
        let row = Row {
            given: (given.0.to_vec(), given.1),
            expected: (expected.0.to_vec(), expected.1),
        };
        Errors::of(&[row], DType::BF16)
    }

    #[test]
    fn errors_are_those_of_the_definitions() {
        let same = errors((&[3.0, 4.0], 1.0), (&[3.0, 4.0], 1.0));
        assert!(same.pass);
        assert_eq!((same.relative, same.lse), (0.0, Some(0.0)));
        let off = errors((&[3.0, 4.1], 1.0), (&[3.0, 4.0], 1.0));
        assert!((off.relative - 0.02).abs() < 1e-12);
        let turned = errors((&[-4.0, 3.0], 1.0), (&[3.0, 4.0], 1.0));
        assert!((turned.cosine_difference - 1.0).abs() < 1e-12 && !turned.pass);
        assert!(!errors((&[3.0, 4.0], 1.01), (&[3.0, 4.0], 1.0)).pass);
    }

    #[test]
    fn what_is_no_number_never_passes() {
        for given in [[f64::NAN, 1.0], [f64::INFINITY, 1.0], [0.0, 0.0]] {
            assert!(!errors((&given, 0.0), (&[1.0, 1.0], 0.0)).pass, "{given:?}");
        }
        assert!(!errors((&[1.0, 1.0], f64::NAN), (&[1.0, 1.0], 0.0)).pass);
    }
}
