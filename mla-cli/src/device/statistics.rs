//! Statistics of samples.

use serde::{Deserialize, Serialize};

/// Distance from the median, in median absolute deviations, from which on samples are outliers. For
/// normally distributed samples that is five standard deviations.
const OUTLIER: f64 = 7.4;

/// Statistics of samples.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Summary {
    pub median: f64,
    pub mean: f64,
    /// The range of the middle half of the samples, relative to the median.
    pub spread: f64,
    pub min: f64,
    pub max: f64,
    pub outliers: usize,
}

impl Summary {
    /// Summarises samples, of which there must be at least one.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median = quantile(&sorted, 0.5);
        let mut deviations: Vec<f64> = sorted.iter().map(|x| (x - median).abs()).collect();
        deviations.sort_by(f64::total_cmp);
        // Clocks have a limited resolution, so differences below a thousandth of the median do not
        // count.
        let scale = quantile(&deviations, 0.5).max(1e-3 * median);
        let outlying = |x: &&f64| (**x - median).abs() > OUTLIER * scale;
        Self {
            median,
            mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
            spread: (quantile(&sorted, 0.75) - quantile(&sorted, 0.25)) / median,
            min: sorted.first().copied().unwrap_or(f64::NAN),
            max: sorted.last().copied().unwrap_or(f64::NAN),
            outliers: sorted.iter().filter(outlying).count(),
        }
    }
}

/// Returns the value below which a part of the sorted samples lies, interpolated between
/// neighbours.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = part * last as f64;
    let below = place as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_those_of_the_definitions() {
        let summary = Summary::of(&[4.0, 1.0, 2.0, 3.0, 5.0]);
        assert_eq!((summary.median, summary.mean), (3.0, 3.0));
        assert_eq!((summary.min, summary.max, summary.outliers), (1.0, 5.0, 0));
        assert_eq!(summary.spread, 2.0 / 3.0);
        assert_eq!(Summary::of(&[1.0, 2.0, 3.0, 8.0]).median, 2.5);
        let one = Summary::of(&[7.0]);
        assert_eq!(
            (one.median, one.mean, one.spread, one.outliers),
            (7.0, 7.0, 0.0, 0)
        );
    }

    #[test]
    fn what_is_far_from_the_rest_is_an_outlier() {
        let mut samples = vec![10.0, 10.1, 9.9, 10.05, 9.95, 10.02, 9.98];
        assert_eq!(Summary::of(&samples).outliers, 0);
        samples.extend([12.0, 30.0]);
        assert_eq!(Summary::of(&samples).outliers, 2);
    }
}
