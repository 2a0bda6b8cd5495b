//! The query length from which on expanding is faster than absorbing, as measured and as predicted.

use std::collections::{BTreeMap, BTreeSet};

use mla_runtime::plan::crossover::{Machine, crossover};

use super::ceilings::Ceilings;
use super::record::{Basis, Crossover, Row};
use super::settings::{Route, name_of};
use super::work::{Layer, RowPlan, Work};

/// The model of a machine, with the basis of its figures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub machine: Machine,
    pub basis: Basis,
}

impl Known {
    /// A model that counts only multiply-adds, which gives no prediction.
    pub(super) const NOTHING: Self = Self {
        machine: Machine::ARITHMETIC,
        basis: Basis::Nothing,
    };

    /// Returns the figures of a GPU, as stated or as measured. Returns `None` for a CPU.
    pub(super) fn of(machine: Machine, ceilings: Option<&Ceilings>) -> Option<Self> {
        let count = machine.multiprocessors()?;
        let rates = ceilings.map(|it| Machine::gpu(count, it.flop_per_second, it.bytes_per_second));
        Some(Self {
            machine: rates.and_then(Result::ok).unwrap_or(machine),
            basis: Basis::Figures,
        })
    }
}

/// The time absorbed and the time expanded for each query length, if they were measured.
type Points<'a> = BTreeMap<u32, [Option<(f64, &'a Work)>; 2]>;

/// The properties that both curves of a pair share: the number of requests, the kv length, and the
/// other parameters that vary among the rows.
type Pair = (usize, u32, String);

/// Finds the crossover of every pair of curves among the rows.
pub(super) fn find(
    plans: &[RowPlan],
    rows: &[Row],
    mut known: impl FnMut(&Layer) -> Known,
) -> Vec<Crossover> {
    let pairs = pairs(plans, rows).into_iter();
    pairs
        .filter_map(|(pair, points)| of_pair(pair, points, &mut known))
        .collect()
}

/// Returns the points of each pair of curves, in the order of the pairs' properties.
fn pairs<'a>(plans: &'a [RowPlan], rows: &[Row]) -> BTreeMap<Pair, Points<'a>> {
    let value = |row: &Row, name: &String| row.parameters.get(name).cloned();
    let varying: BTreeSet<&String> = rows
        .iter()
        .flat_map(|row| row.parameters.keys())
        .filter(|name| *name != "path")
        .filter(|name| {
            rows.windows(2)
                .any(|pair| value(&pair[0], name) != value(&pair[1], name))
        })
        .collect();
    let mut pairs: BTreeMap<Pair, Points<'_>> = BTreeMap::new();
    for (plan, row) in plans.iter().zip(rows) {
        let Some(path) = row.parameters.get("path") else {
            continue;
        };
        let slot = usize::from(*path != name_of(Route::Absorbed));
        let requests = plan.work.requests();
        let alike = requests.windows(2).all(|pair| pair[0] == pair[1]);
        let Some(first) = requests.first().filter(|_| alike) else {
            continue;
        };
        let others: String = row
            .parameters
            .iter()
            .filter(|(name, _)| varying.contains(name))
            .map(|(name, value)| format!(", {name} {value}"))
            .collect();
        let points = pairs.entry((requests.len(), first.kv, others)).or_default();
        points.entry(first.q).or_default()[slot] = Some((row.us.median, &plan.work));
    }
    pairs
}

/// Returns the measured and the predicted crossover of two curves, or `None` if they share fewer
/// than two query lengths.
fn of_pair(
    (count, kv, others): Pair,
    points: Points<'_>,
    known: &mut impl FnMut(&Layer) -> Known,
) -> Option<Crossover> {
    let both: Vec<(u32, (f64, &Work), f64)> = points
        .into_iter()
        .filter_map(|(q, [absorbed, expanded])| Some((q, absorbed?, expanded?.0)))
        .collect();
    let (Some(&(q, (_, Work::Layer(layer)), _)), true) = (both.first(), both.len() > 1) else {
        return None;
    };
    let Known { machine, basis } = known(layer);
    let problem = layer.config.problem;
    let predict = |machine: &Machine| {
        // A longer query leaves a shorter context.
        let of_query = |q: f64| {
            let context_len = (f64::from(kv) - q).max(0.0) as u32;
            crossover(machine, &problem, false, Some(context_len))
        };
        let length = (0..3).fold(f64::from(q), |length, _| of_query(length));
        Some(length).filter(|length| length.is_finite())
    };
    let points: Vec<_> = both.into_iter().map(|(q, (a, _), e)| (q, a, e)).collect();
    Some(Crossover {
        series: format!("{count} x kv {kv}{others}"),
        measured: meeting(&points),
        points,
        predicted: match basis {
            Basis::Nothing => None,
            _ => predict(&machine),
        },
        basis,
        predicted_by_arithmetic: predict(&Machine::ARITHMETIC),
    })
}

/// Returns the query length at which absorbing becomes the slower path.
///
/// It lies between the last measured length at which absorbing is not slower, and the next one. The
/// curves are straight lines on logarithmic axes, and this is the point where they cross.
fn meeting(points: &[(u32, f64, f64)]) -> Option<f64> {
    let ahead = |&(_, absorbed, expanded): &(u32, f64, f64)| (expanded / absorbed).ln();
    let pairs = points.windows(2).rev();
    pairs
        .filter_map(|pair| {
            let (before, after) = (ahead(&pair[0]), ahead(&pair[1]));
            let (from, to) = (f64::from(pair[0].0), f64::from(pair[1].0));
            (before >= 0.0 && after < 0.0)
                .then(|| from * (to / from).powf(before / (before - after)))
        })
        .next()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Returns the height of a drawn curve, which is a straight line between logarithms.
    fn drawn(from: (f64, f64), to: (f64, f64), at: f64) -> f64 {
        let part = (at / from.0).ln() / (to.0 / from.0).ln();
        from.1.ln() + part * (to.1 / from.1).ln()
    }

    #[test]
    fn the_meeting_lies_on_both_drawn_curves() {
        let (before, after) = ((256, 700.0, 810.0), (512, 1500.0, 1010.0));
        let at = meeting(&[before, after]).unwrap();
        let line = |of: fn((u32, f64, f64)) -> f64| {
            let end = |point: (u32, f64, f64)| (f64::from(point.0), of(point));
            drawn(end(before), end(after), at)
        };
        assert!((line(|point| point.1) - line(|point| point.2)).abs() < 1e-12);
    }

    #[test]
    fn curves_meet_where_their_ratio_is_one() {
        let points = [(1, 1.0, 4.0), (2, 2.0, 4.0), (4, 8.0, 4.0), (8, 16.0, 5.0)];
        // The logarithm is ln 2 on one side and ln ½ on the other, so the crossing is halfway.
        assert_eq!(meeting(&points), Some(2.0 * 2f64.sqrt()));
        assert_eq!(meeting(&points[..2]), None);
        assert_eq!(meeting(&points[2..]), None);
        // Noise at the beginning does not hide the last crossing.
        let noisy = [(1, 5.0, 4.0), (2, 3.0, 4.0), (4, 4.0, 4.0), (8, 16.0, 4.0)];
        assert_eq!(meeting(&noisy), Some(4.0));
    }
}
