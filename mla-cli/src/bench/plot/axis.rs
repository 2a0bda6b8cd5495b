//! Logarithmic axes with readable labels.

use std::ops::Range;

/// Labels closer than this fraction of an axis would overlap.
const CLOSEST: f64 = 0.055;

/// One axis: its name with its unit, its range, and the values that get a label.
pub(super) struct Axis {
    pub name: String,
    pub range: Range<f64>,
    pub ticks: Vec<f64>,
}

impl Axis {
    /// Makes an axis for chosen values. Each of them gets a label if there is room. The axis must
    /// also contain the values in `within`.
    pub(super) fn chosen(name: &str, values: &[f64], within: &[f64]) -> Self {
        let range = span(values.iter().chain(within));
        let mut ticks: Vec<f64> = values.to_vec();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        Self {
            name: name.to_owned(),
            ticks: apart(&range, ticks),
            range,
        }
    }

    /// Makes an axis for measured values, with labels at round numbers.
    pub(super) fn found(name: &str, values: &[f64]) -> Self {
        let range = span(values.iter());
        Self {
            name: name.to_owned(),
            ticks: apart(&range, round(&range)),
            range,
        }
    }

    /// Adds a label at a value within the axis's range, and removes labels that are too close to
    /// it.
    pub(super) fn with_tick(mut self, value: f64) -> Self {
        let min = closest(&self.range);
        self.ticks.retain(|tick| (tick / value).ln().abs() >= min);
        self.ticks.push(value);
        self.ticks.sort_by(f64::total_cmp);
        self
    }
}

/// Returns a unit in which these times, given in microseconds, have few digits, and the unit's
/// microseconds.
pub(super) fn time_unit(microseconds: &[f64]) -> (&'static str, f64) {
    match microseconds.iter().copied().fold(0.0, f64::max) {
        max if max >= 1e7 => ("s", 1e6),
        max if max >= 1e4 => ("ms", 1e3),
        _ => ("µs", 1.0),
    }
}

/// Returns the range of some positive numbers, with room around them.
fn span<'a>(numbers: impl Iterator<Item = &'a f64> + Clone) -> Range<f64> {
    let min = numbers.clone().copied().fold(f64::INFINITY, f64::min);
    let max = numbers.copied().fold(0.0, f64::max);
    min / 1.5..max * 1.5
}

/// Returns 1, 2 and 5 times powers of ten within a range. If these are too few, all digits and half
/// digits are used.
fn round(range: &Range<f64>) -> Vec<f64> {
    let exponents = range.start.log10().floor() as i32..=range.end.log10().ceil() as i32;
    let multiples = |steps: &[f64]| -> Vec<f64> {
        let values = exponents
            .clone()
            .flat_map(|exponent| steps.iter().map(move |n| n * 10f64.powi(exponent)));
        values.filter(|value| range.contains(value)).collect()
    };
    let coarse = multiples(&[1.0, 2.0, 5.0]);
    if coarse.len() >= 3 {
        return coarse;
    }
    let fine: Vec<f64> = (2..20).map(|half| f64::from(half) / 2.0).collect();
    multiples(&fine)
}

/// Returns the minimum logarithm of the ratio of two labels that do not overlap.
fn closest(range: &Range<f64>) -> f64 {
    CLOSEST * (range.end / range.start).ln()
}

/// Removes ascending values whose labels would overlap. The first value is always kept.
fn apart(range: &Range<f64>, values: Vec<f64>) -> Vec<f64> {
    let min = closest(range);
    let mut kept: Vec<f64> = Vec::new();
    for value in values {
        if kept.last().is_none_or(|last| (value / last).ln() >= min) {
            kept.push(value);
        }
    }
    kept
}

/// Formats a number on an axis, as short as possible.
pub(super) fn tick(value: &f64) -> String {
    let value = (value * 1e4).round() / 1e4;
    match value {
        // People name lengths by powers of two.
        v if v >= 1024.0 && v % 1024.0 == 0.0 => format!("{}k", v / 1024.0),
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v => format!("{v}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_values_have_labels() {
        let axis = Axis::chosen("kv tokens", &[4096.0, 1024.0, 1024.0, 16384.0], &[]);
        assert_eq!(axis.ticks, [1024.0, 4096.0, 16384.0]);
        assert!(axis.range.start < 1024.0 && axis.range.end > 16384.0);
        assert_eq!(
            axis.ticks.iter().map(tick).collect::<Vec<_>>(),
            ["1k", "4k", "16k"]
        );
    }

    #[test]
    fn labels_that_would_run_into_each_other_are_left_out() {
        let many: Vec<f64> = (1..=512).map(f64::from).collect();
        let ticks = Axis::chosen("query tokens", &many, &[]).ticks;
        assert_eq!(ticks[0], 1.0);
        assert!(ticks.len() < 20, "{ticks:?}");
    }

    #[test]
    fn an_axis_of_times_has_more_than_one_label() {
        for (min, max) in [(30.0, 90.0), (210.0, 240.0), (1.0, 1e6)] {
            let ticks = Axis::found("µs", &[min, max]).ticks;
            assert!(ticks.len() >= 2, "{min} to {max}: {ticks:?}");
        }
    }

    #[test]
    fn a_level_has_a_label() {
        // For these ratios, the axis had a label at 0.95 instead of 1.
        let axis = Axis::found("ratio", &[1.016, 1.8]).with_tick(1.0);
        assert!(axis.ticks.contains(&1.0), "{:?}", axis.ticks);
        assert_eq!(apart(&axis.range, axis.ticks.clone()), axis.ticks);
    }

    #[test]
    fn long_times_are_given_in_longer_units() {
        assert_eq!(time_unit(&[3.0, 900.0]), ("µs", 1.0));
        assert_eq!(time_unit(&[3.0, 2e6]), ("ms", 1e3));
        assert_eq!(time_unit(&[2e7]), ("s", 1e6));
    }
}
