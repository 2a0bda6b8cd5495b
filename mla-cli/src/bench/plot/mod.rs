//! Drawings of a result: roofline, time by the varying parameter, and crossover. Each is drawn if
//! the result has the figures for it.

mod axis;
mod chart;
mod panels;

use std::error::Error;
use std::path::Path;
use std::sync::Once;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use self::chart::Chart;
use super::files::replace;
use super::record::Report;
use crate::error::CliError;

const WIDTH: u32 = 1200;

type Area<'a, B> = DrawingArea<B, Shift>;
type Drawn = Result<(), Box<dyn Error + Send + Sync>>;

fn refused(path: &Path, message: impl ToString) -> CliError {
    CliError::file("--plot", path, message)
}

/// Checks that the path names a format that can be drawn, before anything is measured.
pub(crate) fn check(path: &Path) -> Result<(), CliError> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(()),
        _ => Err(refused(
            path,
            "accepted: a name that ends with .svg or .png",
        )),
    }
}

/// Points by group over two logarithmic axes, and a level to compare them with.
pub struct Scatter {
    pub caption: String,
    pub x: String,
    pub y: String,
    pub level: (String, f64),
    pub series: Vec<(String, Vec<(f64, f64)>)>,
}

/// Writes the drawing of a report.
pub(crate) fn draw(path: &Path, report: &Report) -> Result<(), CliError> {
    draw_charts(path, &panels::of(report))
}

/// Writes the drawing of a report's roofline and of further points.
pub fn draw_with(path: &Path, report: &Report, scatters: &[Scatter]) -> Result<(), CliError> {
    let scatters = scatters.iter().map(panels::scatter);
    let charts: Vec<Chart> = panels::roofline_of(report)
        .into_iter()
        .chain(scatters)
        .collect();
    draw_charts(path, &charts)
}

fn draw_charts(path: &Path, charts: &[Chart]) -> Result<(), CliError> {
    let size = (WIDTH, charts.iter().map(Chart::height).sum());
    let extension = path.extension().and_then(|extension| extension.to_str());
    let drawn = replace(path, |path| match extension {
        Some("png") => draw_on(BitMapBackend::new(path, size).into_drawing_area(), charts),
        _ => draw_on(SVGBackend::new(path, size).into_drawing_area(), charts),
    });
    drawn.map_err(|error| refused(path, format!("cannot be drawn: {error}")))
}

fn load_font() {
    static FONT: Once = Once::new();
    FONT.call_once(|| {
        // The font is complete. If it were not, drawing text would fail.
        let _ = register_font(
            "sans-serif",
            FontStyle::Normal,
            epaint_default_fonts::UBUNTU_LIGHT,
        );
    });
}

/// Draws the charts, one below the other.
fn draw_on<B: DrawingBackend>(root: Area<'_, B>, charts: &[Chart]) -> Drawn
where
    B::ErrorType: 'static,
{
    load_font();
    root.fill(&WHITE)?;
    let mut rest = root.clone();
    for chart in charts {
        let (area, below) = rest.split_vertically(chart.height());
        chart.draw(&area)?;
        rest = below;
    }
    root.present()?;
    Ok(())
}
