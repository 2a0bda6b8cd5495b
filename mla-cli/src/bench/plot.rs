//! Drawings of a result: roofline, time by kv length, crossover; whichever it has the figures for.

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;
use std::path::Path;
use std::sync::Once;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use super::ceilings::Ceilings;
use super::crossover::Crossover;
use super::report::{Report, Row};
use crate::error::CliError;
use crate::figures::number;

const WIDTH: u32 = 1000;
const PANEL: u32 = 560;

/// Okabe and Ito's colours, which people with any colour vision tell apart.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(80, 80, 80),
];

/// More names than that would cover the points.
const MOST_NAMES: usize = 30;

type Area<'a, B> = DrawingArea<B, Shift>;
type Drawn = Result<(), Box<dyn Error + Send + Sync>>;

fn refused(path: &Path, message: impl ToString) -> CliError {
    CliError::File {
        argument: "--plot",
        path: path.to_owned(),
        message: message.to_string(),
    }
}

/// Whether the path names a format that can be drawn, before anything is measured.
pub(super) fn check(path: &Path) -> Result<(), CliError> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(()),
        _ => Err(refused(
            path,
            "accepted: a name that ends with .svg or .png",
        )),
    }
}

/// Writes the drawing.
pub(super) fn draw(path: &Path, report: &Report) -> Result<(), CliError> {
    static FONT: Once = Once::new();
    FONT.call_once(|| {
        // The font is whole; if it were not, drawing text would say so.
        let _ = register_font(
            "sans-serif",
            FontStyle::Normal,
            epaint_default_fonts::UBUNTU_LIGHT,
        );
    });
    let panels = panels(report);
    let size = (WIDTH, PANEL * panels.len() as u32);
    let drawn = match path.extension().and_then(|extension| extension.to_str()) {
        Some("png") => draw_on(BitMapBackend::new(path, size).into_drawing_area(), &panels),
        _ => draw_on(SVGBackend::new(path, size).into_drawing_area(), &panels),
    };
    drawn.map_err(|error| refused(path, error))
}

/// One drawing of several below each other.
enum Panel<'a> {
    Roofline(&'a Ceilings, &'a [Row]),
    Lengths(BTreeMap<String, Vec<(f64, f64)>>),
    Crossover(&'a Crossover),
}

fn panels(report: &Report) -> Vec<Panel<'_>> {
    let mut panels = Vec::new();
    if let Some(ceilings) = &report.ceilings
        && !report.rows.is_empty()
    {
        panels.push(Panel::Roofline(ceilings, &report.rows));
    }
    let mut series: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for row in &report.rows {
        let name = format!(
            "{} x q{} by {}, {} heads",
            row.requests,
            row.max_query_len,
            row.contender,
            row.parameters.get("heads").map_or("", String::as_str)
        );
        let points = series.entry(name).or_default();
        points.push((row.max_kv_len.into(), row.us.median));
    }
    for points in series.values_mut() {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    let curves = |points: &Vec<(f64, f64)>| {
        points.first().map(|point| point.0) < points.last().map(|point| point.0)
    };
    // Single points are worth drawing only where there is nothing else.
    if series.values().any(curves) {
        series.retain(|_, points| curves(points));
        if report.crossovers.is_empty() {
            panels.push(Panel::Lengths(series));
        }
    } else if panels.is_empty() && report.crossovers.is_empty() {
        panels.push(Panel::Lengths(series));
    }
    panels.extend(report.crossovers.iter().map(Panel::Crossover));
    panels
}

fn draw_on<B: DrawingBackend>(root: Area<'_, B>, panels: &[Panel<'_>]) -> Drawn
where
    B::ErrorType: 'static,
{
    root.fill(&WHITE)?;
    for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
        match panel {
            Panel::Roofline(ceilings, rows) => roofline(area, ceilings, rows)?,
            Panel::Lengths(series) => lengths(area, series)?,
            Panel::Crossover(crossover) => paths(area, crossover)?,
        }
    }
    root.present()?;
    Ok(())
}

/// The least and the most of some numbers above 0, with room around them.
fn span(numbers: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let least = numbers.clone().fold(f64::INFINITY, f64::min);
    let most = numbers.fold(0.0, f64::max);
    least / 1.5..most * 1.5
}

/// A number on an axis, as short as it can be.
fn tick(value: &f64) -> String {
    format!("{}", (value * 1e4).round() / 1e4)
}

fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

fn roofline<B: DrawingBackend>(area: &Area<'_, B>, ceilings: &Ceilings, rows: &[Row]) -> Drawn
where
    B::ErrorType: 'static,
{
    let point = |row: &Row| (row.cost.flop / row.cost.bytes, row.tflops);
    let (flop, bytes) = (
        ceilings.flop_per_second / 1e12,
        ceilings.bytes_per_second / 1e12,
    );
    let balance = flop / bytes;
    let x = span(rows.iter().map(|row| point(row).0).chain([balance]));
    let y = span(
        rows.iter()
            .map(|row| point(row).1)
            .chain([flop, flop / 4.0]),
    );
    let mut chart = ChartBuilder::on(area)
        .caption(format!("Roofline: {}", ceilings.device), ("sans-serif", 22))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x.clone().log_scale(), y.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("FLOP per byte")
        .y_desc("TFLOP/s")
        .x_label_formatter(&tick)
        .y_label_formatter(&tick)
        .label_style(("sans-serif", 15))
        .draw()?;
    let roof = [x.start, balance, x.end].map(|at| (at, flop.min(at * bytes)));
    chart
        .draw_series(LineSeries::new(roof, BLACK.stroke_width(2)))?
        .label(format!(
            "{} TFLOP/s, {} GB/s",
            number(flop),
            number(1e3 * bytes)
        ))
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK.stroke_width(2)));
    let mut contenders: Vec<&str> = rows.iter().map(|row| row.contender.as_str()).collect();
    contenders.sort_unstable();
    contenders.dedup();
    for (index, contender) in contenders.iter().enumerate() {
        let of = rows.iter().filter(|row| row.contender == *contender);
        let circles = of.map(|row| Circle::new(point(row), 4, colour(index).filled()));
        chart
            .draw_series(circles)?
            .label(*contender)
            .legend(move |(x, y)| Circle::new((x + 9, y), 4, colour(index).filled()));
    }
    if rows.len() <= MOST_NAMES {
        chart.draw_series(rows.iter().map(|row| {
            let name = Text::new(row.id.clone(), (6, -5), ("sans-serif", 12));
            EmptyElement::at(point(row)) + name
        }))?;
    }
    legend(&mut chart, SeriesLabelPosition::LowerRight)
}

/// Names of what is drawn, on white.
fn legend<'a, B: DrawingBackend + 'a>(
    chart: &mut ChartContext<'a, B, impl CoordTranslate>,
    position: SeriesLabelPosition,
) -> Drawn
where
    B::ErrorType: 'static,
{
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .label_font(("sans-serif", 14))
        .draw()?;
    Ok(())
}

fn lengths<B: DrawingBackend>(
    area: &Area<'_, B>,
    series: &BTreeMap<String, Vec<(f64, f64)>>,
) -> Drawn
where
    B::ErrorType: 'static,
{
    let points = || series.values().flatten();
    let mut chart = ChartBuilder::on(area)
        .caption("Time by kv length", ("sans-serif", 22))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            span(points().map(|point| point.0)).log_scale(),
            span(points().map(|point| point.1)).log_scale(),
        )?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("kv tokens per request")
        .y_desc("µs")
        .x_label_formatter(&tick)
        .y_label_formatter(&tick)
        .label_style(("sans-serif", 15))
        .draw()?;
    for (index, (name, points)) in series.iter().enumerate() {
        curve(&mut chart, name.clone(), points, index)?;
    }
    legend(&mut chart, SeriesLabelPosition::UpperLeft)
}

/// A line through points, in the colour of its number.
fn curve<'a, B: DrawingBackend + 'a, X, Y>(
    chart: &mut ChartContext<'a, B, Cartesian2d<X, Y>>,
    name: String,
    points: &[(f64, f64)],
    index: usize,
) -> Drawn
where
    B::ErrorType: 'static,
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let style = colour(index).stroke_width(2);
    chart
        .draw_series(LineSeries::new(points.iter().copied(), style).point_size(3))?
        .label(name)
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    Ok(())
}

fn paths<B: DrawingBackend>(area: &Area<'_, B>, crossover: &Crossover) -> Drawn
where
    B::ErrorType: 'static,
{
    let points = &crossover.points;
    let lengths = points.iter().map(|point| f64::from(point.0));
    let marks = [crossover.measured, crossover.predicted];
    let x = span(lengths.chain(marks.into_iter().flatten()));
    let y = span(points.iter().flat_map(|point| [point.1, point.2]));
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!("Crossover: {}", crossover.series),
            ("sans-serif", 16),
        )
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x.log_scale(), y.clone().log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("query tokens per request")
        .y_desc("µs")
        .x_label_formatter(&tick)
        .y_label_formatter(&tick)
        .label_style(("sans-serif", 15))
        .draw()?;
    let absorbed: Vec<_> = points
        .iter()
        .map(|point| (point.0.into(), point.1))
        .collect();
    let expanded: Vec<_> = points
        .iter()
        .map(|point| (point.0.into(), point.2))
        .collect();
    curve(&mut chart, "absorbed".to_owned(), &absorbed, 0)?;
    curve(&mut chart, "expanded".to_owned(), &expanded, 1)?;
    for (index, (name, mark)) in ["measured", "predicted"].into_iter().zip(marks).enumerate() {
        if let Some(length) = mark {
            let ends = [(length, y.start), (length, y.end)];
            let name = format!("{name}: {}", number(length));
            curve(&mut chart, name, &ends, index + 2)?;
        }
    }
    legend(&mut chart, SeriesLabelPosition::UpperLeft)
}
