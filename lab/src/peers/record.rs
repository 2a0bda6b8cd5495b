//! Tables with the conditions of their measurement, in the form of docs/benchmarks.

use comfy_table::{Cell, Row, Table};
use mla_cli::parts::Report;
use serde_json::{Value, json};

/// Returns the record of a table: the report's GPU, driver, date, commit and command, and then the
/// cells, one row per line.
pub(crate) fn of(report: &Report, table: &Table) -> String {
    let environment = &report.environment;
    let (machine, versions) = (&environment.machine, &environment.versions);
    let changed = match versions.git_dirty.as_str() {
        "true" => " with changes",
        _ => "",
    };
    let arguments = environment.command.iter().skip(1);
    let arguments: Vec<&str> = arguments.map(String::as_str).collect();
    let features = match versions.features.join(",") {
        none if none.is_empty() => none,
        some => format!("--features {some} "),
    };
    let fields = [
        ("card", json!(report.device)),
        ("driver", json!(machine.gpu_driver)),
        ("date", json!(environment.time.split('T').next())),
        (
            "commit",
            json!(versions.git_commit.get(..7).unwrap_or_default().to_owned() + changed),
        ),
        (
            "command",
            json!(format!(
                "cargo run --release -p mla-lab {features}-- {}",
                arguments.join(" ")
            )),
        ),
        ("columns", table.header().map_or(Value::Null, cells)),
    ];
    let fields = fields.map(|(name, value)| format!("  \"{name}\": {value},\n"));
    let rows: Vec<String> = table
        .row_iter()
        .map(|row| format!("    {}", cells(row)))
        .collect();
    format!(
        "{{\n{}  \"rows\": [\n{}\n  ]\n}}\n",
        fields.concat(),
        rows.join(",\n")
    )
}

fn cells(row: &Row) -> Value {
    row.cell_iter()
        .map(Cell::content)
        .map(|it| it.trim().to_owned())
        .collect()
}
