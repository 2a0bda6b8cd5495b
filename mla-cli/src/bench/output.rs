//! The files that a benchmark writes.

use std::path::PathBuf;

use super::files::{Until, check_files, save};
use super::plot;
use super::record::{Report, Row};
use crate::args::json;
use crate::error::CliError;

#[derive(clap::Args, Clone, Default)]
pub struct OutputArgs {
    /// File with the machine's ceilings, as `cargo lab ceilings` wrote it [default: the known
    /// ones].
    #[arg(long, value_name = "FILE")]
    pub ceilings: Option<PathBuf>,
    /// File for all results, including samples. It is written again after each row.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// File with a line per row. The line is added as soon as the row is measured.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// File for the drawings that apply: roofline, time by the varying parameter, and crossover.
    #[arg(long, value_name = "FILE.svg|FILE.png")]
    pub plot: Option<PathBuf>,
}

impl OutputArgs {
    /// Refuses files that cannot be written, before anything is measured.
    pub fn check(&self) -> Result<(), CliError> {
        if let Some(path) = &self.plot {
            plot::check(path)?;
        }
        check_files([&self.json, &self.csv, &self.plot])
    }

    /// Writes every file of a finished run.
    pub fn write(&self, report: &Report) -> Result<(), CliError> {
        self.write_rows(report, Until::End)?;
        match &self.plot {
            Some(path) => plot::draw(path, report),
            None => Ok(()),
        }
    }

    /// Writes the files that contain rows.
    pub fn write_rows(&self, report: &Report, until: Until) -> Result<(), CliError> {
        if let Some(path) = &self.json {
            save(path, until, &json(report))?;
        }
        match &self.csv {
            Some(path) => save(path, until, &csv(&report.rows)?),
            None => Ok(()),
        }
    }
}

/// Returns the columns of a CSV file before those of the parameters, with their values for a row.
fn cells(row: &Row) -> [(&'static str, String); 23] {
    fn optional(value: Option<impl ToString>) -> String {
        value.map(|value| value.to_string()).unwrap_or_default()
    }
    let (us, errors, conditions) = (&row.us, &row.errors, &row.conditions);
    [
        ("case", row.id.clone()),
        ("kind", row.kind.clone()),
        ("backend", row.contender.clone()),
        ("batch", row.batch.clone()),
        ("requests", row.requests.to_string()),
        ("tokens", row.tokens.to_string()),
        ("median_us", us.median.to_string()),
        ("planned_us", optional(row.planned_us)),
        ("mean_us", us.mean.to_string()),
        ("spread", us.spread.to_string()),
        ("min_us", us.min.to_string()),
        ("max_us", us.max.to_string()),
        ("outliers", us.outliers.to_string()),
        ("tokens_per_second", row.tokens_per_second.to_string()),
        ("tflops", row.tflops.to_string()),
        ("gbps", row.gbps.to_string()),
        ("of_limit", optional(row.of_limit)),
        ("peak_bytes", optional(row.peak_bytes)),
        ("error", errors.relative.to_string()),
        ("tolerance", errors.tolerance.to_string()),
        ("pass", errors.pass.to_string()),
        ("clock_mhz", optional(conditions.clock_mhz)),
        (
            "temperature_celsius",
            optional(conditions.temperature_celsius),
        ),
    ]
}

/// Formats a line per row, without the samples.
fn csv(rows: &[Row]) -> Result<String, CliError> {
    let mut names: Vec<&String> = rows.iter().flat_map(|row| row.parameters.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let failed = |error: csv::Error| CliError::Output(error.into());
    for (index, row) in rows.iter().enumerate() {
        let (columns, values): (Vec<_>, Vec<_>) = cells(row).into_iter().unzip();
        if index == 0 {
            let header = columns
                .into_iter()
                .chain(names.iter().map(|name| name.as_str()));
            writer.write_record(header).map_err(failed)?;
        }
        let parameters = names
            .iter()
            .map(|name| row.parameters.get(*name).cloned().unwrap_or_default());
        writer
            .write_record(values.into_iter().chain(parameters))
            .map_err(failed)?;
    }
    let bytes = writer
        .into_inner()
        .map_err(|error| CliError::Output(error.into_error()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
