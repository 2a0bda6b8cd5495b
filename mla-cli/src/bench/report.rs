//! What a benchmark found out, for programs and for people.

use std::fmt::Write as _;

use bytesize::ByteSize;
use comfy_table::{Attribute, Cell, CellAlignment};
use mla_runtime::batch::Request;
use serde::Serialize;

use super::attention::{Attention, Kind};
use super::check::Errors;
use super::cost::{Ceilings, Cost};
use super::measure::Measured;
use super::statistics::Summary;
use crate::stopwatch::{Conditions, Protocol};
use crate::table::table;

/// The whole result.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) device: String,
    pub(super) protocol: Protocol,
    pub(super) ceilings: Option<Ceilings>,
    pub(super) rows: Vec<Row>,
}

/// One attention by one backend.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) id: String,
    pub(super) kind: &'static str,
    #[serde(rename = "impl")]
    pub(super) backend: String,
    pub(super) heads: u32,
    pub(super) requests: usize,
    pub(super) tokens: usize,
    pub(super) batch: String,
    /// The median, in microseconds and per layer, with everything that a step has to enqueue.
    pub(super) e2e_us: f64,
    /// The same where the schedule exists already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) planned_us: Option<f64>,
    /// All figures of `e2e_us`.
    pub(super) us: Summary,
    pub(super) tokens_per_second: f64,
    pub(super) tflops: f64,
    pub(super) gbps: f64,
    /// The time at the ceilings, relative to the median.
    pub(super) of_limit: Option<f64>,
    pub(super) peak_bytes: Option<u64>,
    pub(super) errors: Errors,
    pub(super) conditions: Conditions,
    pub(super) cost: Cost,
    pub(super) samples_us: Vec<f64>,
}

impl Row {
    pub(super) fn new(
        id: String,
        batch: String,
        attention: &Attention,
        measured: Measured,
        ceilings: Option<Ceilings>,
    ) -> Self {
        let per_layer = 1e6 / attention.layers as f64;
        let samples_us: Vec<f64> = measured.samples.iter().map(|s| s * per_layer).collect();
        let us = Summary::of(&samples_us);
        let (cost, seconds) = (attention.cost(), us.median / 1e6);
        Self {
            id,
            kind: match attention.kind {
                Kind::Decode => "decode",
                Kind::Prefill { .. } => "prefill",
            },
            backend: attention.backend.to_owned(),
            heads: attention.config.problem.heads,
            requests: attention.requests.len(),
            tokens: attention.tokens(),
            batch,
            e2e_us: us.median,
            planned_us: measured.planned.map(|planned| planned.median * per_layer),
            us,
            tokens_per_second: attention.tokens() as f64 / seconds,
            tflops: cost.flop / seconds / 1e12,
            gbps: cost.bytes / seconds / 1e9,
            of_limit: ceilings.map(|ceilings| cost.at(ceilings) / seconds),
            peak_bytes: measured.peak_bytes,
            errors: measured.errors,
            conditions: measured.conditions,
            cost,
            samples_us,
        }
    }
}

impl Report {
    pub(super) fn pass(&self) -> bool {
        self.rows.iter().all(|row| row.errors.pass)
    }

    pub(super) fn describe(&self) -> String {
        let mut table = table([
            "case", "backend", "µs", "spread", "min", "max", "planned", "tokens/s", "TFLOP/s",
            "GB/s", "limit", "memory", "error", "",
        ]);
        // As wide as it has to be: whoever needs less reads the JSON.
        table.set_content_arrangement(comfy_table::ContentArrangement::Disabled);
        for row in &self.rows {
            let wrong = !row.errors.pass;
            let cells = [
                row.id.clone(),
                row.backend.clone(),
                format!("{:.1}", row.us.median),
                format!("{:.1}%", 100.0 * row.us.spread),
                format!("{:.1}", row.us.min),
                format!("{:.1}", row.us.max),
                row.planned_us
                    .map(|us| format!("{us:.1}"))
                    .unwrap_or_default(),
                format!("{:.3e}", row.tokens_per_second),
                format!("{:.1}", row.tflops),
                format!("{:.0}", row.gbps),
                row.of_limit
                    .map(|part| format!("{:.0}%", 100.0 * part))
                    .unwrap_or_default(),
                row.peak_bytes
                    .map(|bytes| ByteSize(bytes).display().iec().to_string())
                    .unwrap_or_default(),
                format!("{:.1e}", row.errors.relative),
                if wrong {
                    "WRONG".to_owned()
                } else {
                    String::new()
                },
            ];
            table.add_row(cells.map(|text| match wrong {
                true => Cell::new(text).add_attribute(Attribute::Bold),
                false => Cell::new(text),
            }));
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let mut text = format!("{}\n", self.device);
        let _ = writeln!(text, "{}", table.trim_fmt());
        text
    }
}

/// Requests of any lengths in few words.
pub(super) fn describe_requests(requests: &[Request]) -> String {
    let total: u64 = requests.iter().map(|r| u64::from(r.kv)).sum();
    let queries: u64 = requests.iter().map(|r| u64::from(r.q)).sum();
    format!(
        "{} requests, {queries} query and {total} kv tokens",
        requests.len()
    )
}
