//! The charts for which a report has the figures.

use std::collections::{BTreeMap, BTreeSet};

use super::Scatter;
use super::axis::{Axis, time_unit};
use super::chart::{Chart, Curve, Form};
use crate::bench::ceilings::Ceilings;
use crate::bench::record::{Crossover, Report, Row};
use crate::table::{counted, number};

/// More names than this would cover the points.
const MAX_NAMES: usize = 30;

/// Returns the charts of a report, in the order in which they are drawn.
pub(super) fn of(report: &Report) -> Vec<Chart> {
    let mut charts = Vec::from_iter(roofline_of(report));
    // Single points are drawn only if there is nothing else.
    if report.crossovers.is_empty() {
        let times = times(&report.rows);
        let any_curve = times.curves.iter().any(|curve| curve.points.len() > 1);
        if any_curve || charts.is_empty() {
            charts.push(times);
        }
    }
    charts.extend(report.crossovers.iter().map(crossover));
    charts
}

/// Returns the roofline, if ceilings are known.
pub(super) fn roofline_of(report: &Report) -> Option<Chart> {
    let ceilings = report.ceilings.as_ref()?;
    (!report.rows.is_empty()).then(|| roofline(ceilings, &report.rows))
}

/// Returns a chart of points by group, with the level across.
pub(super) fn scatter(scatter: &Scatter) -> Chart {
    let points = || scatter.series.iter().flat_map(|(_, points)| points);
    let xs: Vec<f64> = points().map(|point| point.0).collect();
    let (name, level) = &scatter.level;
    let ys: Vec<f64> = points().map(|point| point.1).chain([*level]).collect();
    let x = Axis::found(&scatter.x, &xs);
    let y = Axis::found(&scatter.y, &ys).with_tick(*level);
    let mut curves: Vec<Curve> = scatter
        .series
        .iter()
        .map(|(name, points)| Curve::new(name.clone(), points.clone(), Form::Points))
        .collect();
    curves.push(Curve::new(
        name.clone(),
        vec![(x.range.start, *level), (x.range.end, *level)],
        Form::Line,
    ));
    Chart::new(&scatter.caption, x, y, curves)
}

fn roofline(ceilings: &Ceilings, rows: &[Row]) -> Chart {
    let point = |row: &Row| (row.cost.flop / row.cost.bytes, row.tflops);
    let flop = ceilings.flop_per_second / 1e12;
    let bytes = ceilings.bytes_per_second / 1e12;
    let balance = flop / bytes;
    let intensities: Vec<f64> = rows
        .iter()
        .map(|row| point(row).0)
        .chain([balance])
        .collect();
    let reached: Vec<f64> = rows.iter().map(|row| point(row).1).collect();
    let x = Axis::found("FLOP per byte", &intensities);
    let y = Axis::found("TFLOP/s", &[&reached[..], &[flop, flop / 4.0]].concat());
    let ends = [x.range.start, balance, x.range.end];
    let mut curves = vec![Curve::new(
        format!("{} TFLOP/s, {} GB/s", number(flop), number(1e3 * bytes)),
        ends.map(|at| (at, flop.min(at * bytes).max(y.range.start)))
            .to_vec(),
        Form::Line,
    )];
    let contenders: BTreeSet<&str> = rows.iter().map(|row| row.contender.as_str()).collect();
    curves.extend(contenders.into_iter().map(|contender| {
        Curve::new(
            contender.to_owned(),
            rows.iter()
                .filter(|row| row.contender == contender)
                .map(point)
                .collect(),
            Form::Points,
        )
    }));
    let named = rows.iter().filter(|_| rows.len() <= MAX_NAMES);
    let mut chart = Chart::new(format!("Roofline: {}", ceilings.device), x, y, curves);
    chart.names = named.map(|row| (point(row), row.id.clone())).collect();
    chart
}

/// A size of a batch that may become the x axis.
#[derive(Clone, Copy)]
struct Size {
    axis: &'static str,
    caption: &'static str,
    of: fn(&Row) -> usize,
    name: fn(usize) -> String,
}

const QUERY_AXIS: &str = "query tokens per request";

/// The sizes. If several have the same number of values, the first one becomes the axis.
const SIZES: [Size; 3] = [
    Size {
        axis: "kv tokens per request",
        caption: "Time by kv length",
        of: |row| row.max_kv_len as usize,
        name: |size| format!("kv {size}"),
    },
    Size {
        axis: QUERY_AXIS,
        caption: "Time by query length",
        of: |row| row.max_query_len as usize,
        name: |size| format!("q {size}"),
    },
    Size {
        axis: "requests",
        caption: "Time by number of requests",
        of: |row| row.requests,
        name: |size| counted(size as u64, "request"),
    },
];

/// Returns a function that names a row's curve by its contender and the other parameters that vary.
fn naming<'a>(rows: &'a [Row], others: &'a [Size]) -> impl Fn(&Row) -> String + use<'a> {
    let parameters: BTreeSet<&String> = rows.iter().flat_map(|row| row.parameters.keys()).collect();
    let varying: Vec<&String> = parameters
        .into_iter()
        .filter(|name| {
            let of = |row: &Row| row.parameters.get(*name).cloned();
            rows.windows(2).any(|pair| of(&pair[0]) != of(&pair[1]))
        })
        .collect();
    move |row: &Row| {
        let mut parts = vec![row.contender.clone()];
        parts.extend(others.iter().map(|size| (size.name)((size.of)(row))));
        for name in &varying {
            let value = row.parameters.get(*name);
            let value = value.filter(|value| !row.contender.contains(&format!("{name}={value}")));
            parts.extend(value.map(|value| format!("{name} {value}")));
        }
        parts.join(", ")
    }
}

/// Returns a chart of time over the size with the most values, with a curve for each combination of
/// the other parameters that vary.
fn times(rows: &[Row]) -> Chart {
    let values = |size: &Size| rows.iter().map(size.of).collect::<BTreeSet<_>>().len();
    // The order is reversed, since `max_by_key` would take the last of equal sizes.
    let places = (0..SIZES.len()).rev();
    let x = places.max_by_key(|at| values(&SIZES[*at])).unwrap_or(0);
    let x = SIZES[x];
    // A size that follows from x does not name a curve: the query length of a fresh prompt is its
    // kv length.
    let differs = |size: &Size| {
        let of_x: BTreeMap<usize, usize> =
            rows.iter().map(|it| ((x.of)(it), (size.of)(it))).collect();
        rows.iter().any(|row| of_x[&(x.of)(row)] != (size.of)(row))
    };
    let others: Vec<Size> = SIZES.into_iter().filter(differs).collect();
    let name = naming(rows, &others);
    let medians: Vec<f64> = rows.iter().map(|row| row.us.median).collect();
    let (unit, microseconds) = time_unit(&medians);
    // The curves are in the order of the rows, which is that of their numbers.
    let mut series: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for row in rows {
        let (name, point) = (
            name(row),
            ((x.of)(row) as f64, row.us.median / microseconds),
        );
        match series.iter_mut().find(|(of, _)| *of == name) {
            Some((_, points)) => points.push(point),
            None => series.push((name, vec![point])),
        }
    }
    let mut curves: Vec<Curve> = series
        .into_iter()
        .map(|(name, mut points)| {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Curve::new(name, points, Form::Both)
        })
        .collect();
    curves.sort_by_key(|curve| std::cmp::Reverse(curve.points.len()));
    let xs: Vec<f64> = rows.iter().map(|row| (x.of)(row) as f64).collect();
    let ys: Vec<f64> = medians.iter().map(|us| us / microseconds).collect();
    let axis = Axis::chosen(x.axis, &xs, &[]);
    Chart::new(x.caption, axis, Axis::found(unit, &ys), curves)
}

fn crossover(crossover: &Crossover) -> Chart {
    let points = &crossover.points;
    let times: Vec<f64> = points.iter().flat_map(|point| [point.1, point.2]).collect();
    let (unit, microseconds) = time_unit(&times);
    let marks = [
        ("measured", crossover.measured),
        ("predicted", crossover.predicted),
    ];
    let marks: Vec<(&str, f64)> = marks
        .into_iter()
        .filter_map(|(name, mark)| Some((name, mark?)))
        .collect();
    let lengths: Vec<f64> = points.iter().map(|point| point.0.into()).collect();
    let met: Vec<f64> = marks.iter().map(|mark| mark.1).collect();
    let x = Axis::chosen(QUERY_AXIS, &lengths, &met);
    let times: Vec<f64> = times.iter().map(|us| us / microseconds).collect();
    let y = Axis::found(unit, &times);
    let path = |name: &str, time: fn(&(u32, f64, f64)) -> f64| {
        Curve::new(
            name.to_owned(),
            points
                .iter()
                .map(|point| (point.0.into(), time(point) / microseconds))
                .collect(),
            Form::Both,
        )
    };
    let mut curves = vec![
        path("absorbed", |point| point.1),
        path("expanded", |point| point.2),
    ];
    curves.extend(marks.into_iter().map(|(name, length)| {
        Curve::new(
            format!("{name}: {}", number(length)),
            vec![(length, y.range.start), (length, y.range.end)],
            Form::Line,
        )
    }));
    Chart::new(format!("Crossover: {}", crossover.series), x, y, curves)
}
