//! Rows that are timed one after another, by the protocol of `mla bench`.

use std::path::Path;

use comfy_table::{Cell, Table};
use mla_cli::parts::{
    Ceilings, CliError, Cost, Progress, Protocol, Stopwatch, Summary, Until, json, number, numbers,
    save, table,
};
use mla_runtime::Result;
use mla_runtime::spec::Platform;
use serde::Serialize;

/// A timed row with its minimum cost.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// The time in seconds.
    pub(crate) time: Summary,
    /// The cost, 0 if it is not known.
    #[serde(flatten)]
    pub(crate) cost: Cost,
}

/// Times rows on a device.
pub(crate) struct Timer<'a, D: Stopwatch> {
    pub(crate) device: &'a D,
    pub(crate) protocol: Protocol,
    flush: D::Buffer,
    pub(crate) rows: Vec<Row>,
    pub(crate) progress: &'a Progress,
}

impl<'a, D: Stopwatch> Timer<'a, D> {
    pub(crate) fn new(
        device: &'a D,
        [samples, warm_up]: [u32; 2],
        progress: &'a Progress,
    ) -> Result<Self> {
        Ok(Self {
            device,
            protocol: Protocol {
                samples: samples as usize,
                warm_up: warm_up as usize,
                cold_cache: true,
                graphs: D::PLATFORM != Platform::Cpu,
            },
            flush: device.allocate(device.flush_bytes())?,
            rows: Vec::new(),
            progress,
        })
    }

    /// Times `work` as a row of this name, and returns its time. It has `flop` operations and
    /// `bytes` of traffic.
    pub(crate) fn time(
        &mut self,
        name: impl Into<String>,
        [flop, bytes]: [f64; 2],
        work: &mut dyn FnMut(&D) -> Result<()>,
    ) -> Result<Summary> {
        let name = name.into();
        self.progress.begin(&format!("timing {name}"));
        let (samples, _) = self.device.time(&self.protocol, &mut self.flush, work)?;
        let time = Summary::of(&samples);
        let cost = Cost { flop, bytes };
        self.rows.push(Row { name, time, cost });
        Ok(time)
    }
}

/// Returns a table with a line for each row. It includes the fraction of the machine's maximum, if
/// this is known.
pub(crate) fn describe(rows: &[Row], ceilings: Option<&Ceilings>) -> Table {
    let mut table = table(["row", "µs", "spread", "TFLOP/s", "GB/s", "limit"]);
    numbers(&mut table, 1..6);
    for row in rows {
        let seconds = row.time.median;
        let rate = |amount: f64, unit: f64| match amount {
            0.0 => String::new(),
            _ => number(amount / seconds / unit),
        };
        let limit = ceilings.map(|it| it.seconds(row.cost) / seconds);
        let limit = limit.filter(|part| *part > 0.0);
        table.add_row([
            Cell::new(&row.name),
            Cell::new(number(seconds * 1e6)),
            Cell::new(format!("{:.1}%", row.time.spread * 100.0)),
            Cell::new(rate(row.cost.flop, 1e12)),
            Cell::new(rate(row.cost.bytes, 1e9)),
            Cell::new(limit.map_or(String::new(), |part| format!("{:.0}%", 100.0 * part))),
        ]);
    }
    table
}

/// Returns a report as text, and true if it is good, after writing its JSON to the file, if there
/// is one.
pub(crate) fn saved(
    path: Option<&Path>,
    report: &impl Serialize,
    text: String,
    good: bool,
) -> std::result::Result<(String, bool), CliError> {
    match path.map_or(Ok(()), |path| save(path, Until::End, &json(report))) {
        Ok(()) => Ok((text, good)),
        Err(error) => Err(error.behind(text)),
    }
}
