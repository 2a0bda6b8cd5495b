//! The result of a benchmark as text for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{Cell, Table};

use super::record::{Report, Row};
use crate::device::stopwatch::Conditions;
use crate::table::{amount, bold, counted, number, size, time_cell, wide_table};

/// Maximum number of outliers that are listed one by one.
const MAX_NOTES: usize = 5;

impl Report {
    pub fn describe(&self) -> String {
        let mut text = format!("{}\n", self.device);
        if let Some(ceilings) = &self.ceilings {
            let _ = writeln!(text, "{ceilings}");
        }
        let _ = writeln!(text, "\n{}", self.rows_table().trim_fmt());
        let samples = counted(self.protocol.samples as u64, "sample");
        let cache = match self.protocol.cold_cache {
            true => "cold",
            false => "warm",
        };
        let graphs = match self.protocol.graphs {
            true => ", each one replay of a graph",
            false => "",
        };
        let checked = self.rows.iter().map(|row| row.errors.rows).max();
        let _ = writeln!(
            text,
            "Medians of {samples} with {cache} caches{graphs}. The spread is the range of the \
             middle half; * is\nthe fastest of its case. The error is the largest of {} rows \
             against attention in f64.",
            checked.unwrap_or(0)
        );
        if self.ceilings.is_none() {
            text += "No ceilings are known for this device: measure them with cargo lab ceilings, \
                     and give them with\n--ceilings.\n";
        }
        for note in self.notes() {
            let _ = writeln!(text, "{note}");
        }
        if let Some(table) = comparison(&self.rows) {
            let _ = writeln!(text, "\n{}", table.trim_fmt());
        }
        for crossover in &self.crossovers {
            let _ = writeln!(text, "\n{crossover}");
        }
        text
    }

    fn rows_table(&self) -> Table {
        let columns = [
            "case", "backend", "µs", "mean", "spread", "min", "max", "tokens/s", "TFLOP/s", "GB/s",
            "limit", "memory", "error",
        ];
        let mut table = wide_table(columns, 2..columns.len());
        let mut last = None;
        for row in &self.rows {
            let best = is_best(&self.rows, row);
            let first = last.replace(&row.id) != Some(&row.id);
            let limit = row.of_limit.map(|part| format!("{:.0}%", 100.0 * part));
            let cells = [
                Cell::new(if first { row.id.as_str() } else { "" }),
                Cell::new(&row.contender),
                time_cell(row.us.median, best),
                Cell::new(number(row.us.mean)),
                Cell::new(format!("{:.1}%", 100.0 * row.us.spread)),
                Cell::new(number(row.us.min)),
                Cell::new(number(row.us.max)),
                Cell::new(amount(row.tokens_per_second)),
                Cell::new(number(row.tflops)),
                Cell::new(number(row.gbps)),
                Cell::new(limit.unwrap_or_default()),
                Cell::new(row.peak_bytes.map(size).unwrap_or_default()),
                Cell::new(match row.errors.pass {
                    true => format!("{:.1e}", row.errors.relative),
                    false => format!("WRONG {:.1e}", row.errors.relative),
                }),
            ];
            table.add_row(match best || !row.errors.pass {
                true => cells.map(bold),
                false => cells,
            });
        }
        table
    }

    /// Returns warnings to read before trusting a row.
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let named = |row: &Row| format!("{} by {}", row.id, row.contender);
        for row in &self.rows {
            if !row.errors.pass {
                notes.push(format!(
                    "{}: WRONG: error {:.1e}, accepted {:.1e}",
                    named(row),
                    row.errors.relative,
                    row.errors.tolerance
                ));
            }
        }
        let outlying: Vec<&Row> = self.rows.iter().filter(|row| row.us.outliers > 0).collect();
        for row in outlying.iter().take(MAX_NOTES) {
            notes.push(format!(
                "{}: {} of {} samples are far from the median, up to {} µs",
                named(row),
                row.us.outliers,
                row.samples_us.len(),
                number(row.us.max)
            ));
        }
        if outlying.len() > MAX_NOTES {
            notes.push(format!(
                "{} more rows have samples far from their medians; the JSON has them all.",
                outlying.len() - MAX_NOTES
            ));
        }
        let conditions = || self.rows.iter().map(|row| &row.conditions);
        let range = |of: fn(&Conditions) -> Option<f64>, unit: &str| {
            let values: Vec<f64> = conditions().filter_map(of).collect();
            let min = values.iter().copied().reduce(f64::min)?;
            let max = values.iter().copied().reduce(f64::max)?;
            Some(format!("{min:.0} to {max:.0} {unit}"))
        };
        let state: Vec<String> = [
            range(|now| now.clock_mhz, "MHz"),
            range(|now| now.temperature_celsius, "°C"),
            range(|now| now.power_watts, "W"),
        ]
        .into_iter()
        .flatten()
        .collect();
        if !state.is_empty() {
            notes.push(format!("Device: {}.", state.join(", ")));
        }
        let mut limited: BTreeMap<&str, usize> = BTreeMap::new();
        for reason in conditions().filter_map(|now| now.throttled.as_deref()) {
            *limited.entry(reason).or_default() += usize::from(!reason.is_empty());
        }
        for (reason, rows) in limited.into_iter().filter(|(_, rows)| *rows > 0) {
            notes.push(format!("The clock was held down in {rows} rows: {reason}."));
        }
        notes
    }
}

/// True if a row is right and the fastest of at least two of its case.
fn is_best(rows: &[Row], row: &Row) -> bool {
    let rivals = || {
        rows.iter()
            .filter(|other| other.id == row.id && other.kind == row.kind)
    };
    row.errors.pass
        && rivals().count() > 1
        && rivals().all(|other| !other.errors.pass || other.us.median >= row.us.median)
}

/// Makes a table of cases against contenders, if there are several of both.
pub(crate) fn comparison(rows: &[Row]) -> Option<Table> {
    let mut contenders: Vec<&str> = Vec::new();
    let mut cases: Vec<&str> = Vec::new();
    for row in rows {
        if !contenders.contains(&row.contender.as_str()) {
            contenders.push(&row.contender);
        }
        if !cases.contains(&row.id.as_str()) {
            cases.push(&row.id);
        }
    }
    let compared = |case: &&&str| rows.iter().filter(|row| row.id == **case).count() > 1;
    if contenders.len() < 2 || cases.iter().filter(compared).count() < 2 {
        return None;
    }
    let columns = std::iter::once("µs").chain(contenders.iter().copied());
    let mut table = wide_table(columns, 1..=contenders.len());
    for case in cases {
        let cells = contenders.iter().map(|contender| {
            let mut rows_of = rows.iter();
            match rows_of.find(|row| row.id == case && row.contender == *contender) {
                None => Cell::new(""),
                Some(row) if !row.errors.pass => Cell::new("WRONG"),
                Some(row) => time_cell(row.us.median, is_best(rows, row)),
            }
        });
        table.add_row(std::iter::once(Cell::new(case)).chain(cells));
    }
    Some(table)
}
