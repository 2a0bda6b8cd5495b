//! The result of a benchmark as text for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, Table};

use super::record::{Report, Row};
use crate::device::stopwatch::Conditions;
use crate::table::{amount, counted, number, size, table};

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
        let cache = if self.protocol.cold_cache {
            "cold"
        } else {
            "warm"
        };
        let graphs = if self.protocol.graphs {
            ", each one replay of a graph"
        } else {
            ""
        };
        let _ = writeln!(
            text,
            "Medians of {samples} with {cache} caches{graphs}. The spread is the range of the \
             middle half; * is\nthe fastest of its case. The error is the largest of {} rows \
             against attention in f64.",
            self.rows
                .iter()
                .map(|row| row.errors.rows)
                .max()
                .unwrap_or(0)
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
        let mut table = table([
            "case", "backend", "µs", "mean", "spread", "min", "max", "tokens/s", "TFLOP/s", "GB/s",
            "limit", "memory", "error",
        ]);
        // The table has the width that it needs. The JSON has the same figures without a table.
        table.set_content_arrangement(ContentArrangement::Disabled);
        let mut last = None;
        for row in &self.rows {
            let best = is_best(&self.rows, row);
            let first = last.replace(&row.id) != Some(&row.id);
            let mut cells = vec![
                if first { row.id.clone() } else { String::new() },
                row.contender.clone(),
                format!(
                    "{}{}",
                    number(row.us.median),
                    if best { " *" } else { "  " }
                ),
                number(row.us.mean),
                format!("{:.1}%", 100.0 * row.us.spread),
                number(row.us.min),
                number(row.us.max),
                amount(row.tokens_per_second),
                number(row.tflops),
                number(row.gbps),
                row.of_limit
                    .map(|part| format!("{:.0}%", 100.0 * part))
                    .unwrap_or_default(),
                row.peak_bytes.map(size).unwrap_or_default(),
            ];
            cells.push(match row.errors.pass {
                true => format!("{:.1e}", row.errors.relative),
                false => format!("WRONG {:.1e}", row.errors.relative),
            });
            let strong = best || !row.errors.pass;
            table.add_row(cells.into_iter().map(|text| match strong {
                true => Cell::new(text).add_attribute(Attribute::Bold),
                false => Cell::new(text),
            }));
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
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
    let mut table = table(["µs"]);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(std::iter::once("µs").chain(contenders.iter().copied()));
    for case in cases {
        let cells = contenders.iter().map(|contender| {
            let row = rows
                .iter()
                .find(|row| row.id == case && row.contender == *contender);
            match row {
                None => Cell::new(""),
                Some(row) if !row.errors.pass => Cell::new("WRONG"),
                Some(row) if is_best(rows, row) => {
                    Cell::new(format!("{} *", number(row.us.median))).add_attribute(Attribute::Bold)
                }
                Some(row) => Cell::new(format!("{}  ", number(row.us.median))),
            }
        });
        table.add_row(std::iter::once(Cell::new(case)).chain(cells));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    Some(table)
}
