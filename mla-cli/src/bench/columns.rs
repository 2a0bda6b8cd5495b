//! A result as a CSV file.

use super::row::Row;
use crate::error::CliError;

/// The columns of a CSV file before the parameters'.
const COLUMNS: [&str; 23] = [
    "case",
    "kind",
    "backend",
    "batch",
    "requests",
    "tokens",
    "median_us",
    "planned_us",
    "mean_us",
    "spread",
    "min_us",
    "max_us",
    "outliers",
    "tokens_per_second",
    "tflops",
    "gbps",
    "of_limit",
    "peak_bytes",
    "error",
    "tolerance",
    "pass",
    "clock_mhz",
    "temperature_celsius",
];

/// The values of the columns for a row.
fn cells(row: &Row) -> [String; COLUMNS.len()] {
    fn optional(value: Option<impl ToString>) -> String {
        value.map(|value| value.to_string()).unwrap_or_default()
    }
    [
        row.id.clone(),
        row.kind.clone(),
        row.contender.clone(),
        row.batch.clone(),
        row.requests.to_string(),
        row.tokens.to_string(),
        row.us.median.to_string(),
        optional(row.planned_us),
        row.us.mean.to_string(),
        row.us.spread.to_string(),
        row.us.min.to_string(),
        row.us.max.to_string(),
        row.us.outliers.to_string(),
        row.tokens_per_second.to_string(),
        row.tflops.to_string(),
        row.gbps.to_string(),
        optional(row.of_limit),
        optional(row.peak_bytes),
        row.errors.relative.to_string(),
        row.errors.tolerance.to_string(),
        row.errors.pass.to_string(),
        optional(row.conditions.clock_mhz),
        optional(row.conditions.temperature_celsius),
    ]
}

/// A line per row, without the samples.
pub(super) fn csv(rows: &[Row]) -> Result<String, CliError> {
    let mut names: Vec<&String> = rows.iter().flat_map(|row| row.parameters.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let failed = |error: csv::Error| CliError::Output(error.into());
    let header = COLUMNS.into_iter();
    writer
        .write_record(header.chain(names.iter().map(|name| name.as_str())))
        .map_err(failed)?;
    for row in rows {
        let parameters = names
            .iter()
            .map(|name| row.parameters.get(*name).cloned().unwrap_or_default());
        writer
            .write_record(cells(row).into_iter().chain(parameters))
            .map_err(failed)?;
    }
    let bytes = writer
        .into_inner()
        .map_err(|error| CliError::Output(error.into_error()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
