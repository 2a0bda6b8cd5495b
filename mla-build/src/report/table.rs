//! A report for people to read.

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::{Outcome, Report, short, size};

/// Formats the report as text: the toolkit, a table of the units, a table of the kernels, and the
/// notes.
pub fn table(report: &Report) -> String {
    let mut lines = toolkit(report);
    lines.extend(totals(report));
    lines.push(units_table(report).to_string());
    lines.push(kernels_table(report).to_string());
    for kernel in report.units.iter().flat_map(|unit| &unit.kernels) {
        let warnings = kernel.warnings.iter();
        lines.extend(warnings.map(|it| format!("warning: {}: {it}", short(&kernel.name))));
    }
    lines.extend(report.notes.iter().map(|note| format!("note: {note}")));
    lines.join("\n") + "\n"
}

/// Formats the tools that compiled the library, and their places.
fn toolkit(report: &Report) -> Vec<String> {
    let mut lines = vec![format!(
        "{} {} for {}",
        report.package,
        report.library,
        report.targets.join(", ")
    )];
    lines.extend(report.toolkit.iter().map(|found| {
        let version = found.version.as_deref().unwrap_or("of unknown version");
        let (part, path, place) = (&found.part, found.path.display(), &found.place);
        format!("{part} {version} at {path} (found by {place})")
    }));
    let (compiler, path) = (&report.host_compiler.1, report.host_compiler.0.display());
    lines.push(format!("host compiler {compiler} at {path}"));
    lines.push(format!("cache at {}", report.cache.display()));
    lines
}

/// Formats the time and the size of the whole build.
fn totals(report: &Report) -> [String; 2] {
    let units = format!(
        "{} units: {} cached, {} compiled, {} failed, in {:.1} s; library {}",
        report.units.len(),
        report.count(Outcome::Cached),
        report.count(Outcome::Compiled),
        report.count(Outcome::Failed),
        report.seconds,
        size(report.library_bytes),
    );
    let code = report.device_bytes().into_iter();
    let code: Vec<_> = code
        .map(|(target, bytes)| format!("{target} {}", size(bytes)))
        .collect();
    let compilers = format!(
        "{:.1} s of compilers in all; the 2 largest units at once need {}; code for the GPU: {}",
        report.compile_seconds(),
        size(report.peak_of_largest(2)),
        code.join(", "),
    );
    [units, compilers]
}

fn units_table(report: &Report) -> Table {
    let header = "unit|targets|object|why|compile s|peak|size|device code";
    let rows = report.units.iter().map(|unit| {
        [
            unit.source.clone(),
            unit.targets.join(" "),
            unit.outcome.to_string(),
            unit.reason.clone(),
            format!("{:.1}", unit.compile_seconds),
            size(unit.peak),
            size(unit.object_bytes),
            size(unit.device_bytes.values().sum()),
        ]
    });
    columns(header, 4, rows)
}

fn kernels_table(report: &Report) -> Table {
    let header = "kernel|target|registers|spilled stores|spilled loads|stack|static shared|\
                  barriers";
    let kernels = report.units.iter().flat_map(|unit| &unit.kernels);
    let rows = kernels.map(|kernel| {
        [
            short(&kernel.name).to_owned(),
            kernel.target.clone(),
            kernel.registers.to_string(),
            kernel.spill_stores.to_string(),
            kernel.spill_loads.to_string(),
            kernel.stack.to_string(),
            kernel.shared.to_string(),
            kernel.barriers.to_string(),
        ]
    });
    columns(header, 2, rows)
}

/// Makes a table whose columns from `numbers` on are aligned to the right.
fn columns(header: &str, numbers: usize, rows: impl Iterator<Item = [String; 8]>) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_HORIZONTAL_ONLY)
        .set_header(header.split('|'))
        .add_rows(rows.map(|row| {
            row.into_iter()
                .enumerate()
                .map(move |(at, text)| match at < numbers {
                    true => Cell::new(text),
                    false => Cell::new(text).set_alignment(CellAlignment::Right),
                })
        }));
    table
}
