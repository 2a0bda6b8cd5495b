//! A report for people.

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::{Outcome, Report, short, size};

/// The report as text: the toolkit, a table of the units, a table of the kernels, and the notes.
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

/// The tools that compiled the library, and their places.
fn toolkit(report: &Report) -> Vec<String> {
    let mut lines = vec![format!(
        "{} {} for {}",
        report.package,
        report.library,
        report.targets.join(", ")
    )];
    lines.extend(report.toolkit.iter().map(|found| {
        let version = found.version.as_deref().unwrap_or("of unknown version");
        format!(
            "{} {version} at {} (found by {})",
            found.part,
            found.path.display(),
            found.place
        )
    }));
    let (compiler, path) = (&report.host_compiler.1, report.host_compiler.0.display());
    lines.push(format!("host compiler {compiler} at {path}"));
    lines.push(format!("cache at {}", report.cache.display()));
    lines
}

/// The time and the size of the whole build.
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
    let code: Vec<_> = report
        .device_bytes()
        .into_iter()
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
    let mut table = started(&[
        "unit",
        "targets",
        "object",
        "why",
        "compile s",
        "peak",
        "size",
        "device code",
    ]);
    for unit in &report.units {
        table.add_row(vec![
            Cell::new(&unit.source),
            Cell::new(unit.targets.join(" ")),
            Cell::new(unit.outcome),
            Cell::new(&unit.reason),
            right(format!("{:.1}", unit.compile_seconds)),
            right(size(unit.peak)),
            right(size(unit.object_bytes)),
            right(size(unit.device_bytes.values().sum())),
        ]);
    }
    table
}

fn kernels_table(report: &Report) -> Table {
    let mut table = started(&[
        "kernel",
        "target",
        "registers",
        "spilled stores",
        "spilled loads",
        "stack",
        "static shared",
        "barriers",
    ]);
    for kernel in report.units.iter().flat_map(|unit| &unit.kernels) {
        table.add_row(vec![
            Cell::new(short(&kernel.name)),
            Cell::new(&kernel.target),
            right(kernel.registers),
            right(kernel.spill_stores),
            right(kernel.spill_loads),
            right(kernel.stack),
            right(kernel.shared),
            right(kernel.barriers),
        ]);
    }
    table
}

fn started(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_HORIZONTAL_ONLY)
        .set_header(header);
    table
}

fn right(value: impl ToString) -> Cell {
    Cell::new(value.to_string()).set_alignment(CellAlignment::Right)
}
