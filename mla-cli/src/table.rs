//! The common form of all tables.

use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle, presets};

// The width if the output is no terminal: that of a page of text that is comfortable to read.
const DEFAULT_WIDTH: u16 = 100;

// Lines around the header and at the end: rows are told apart by their first column.
pub(crate) const STYLE: TableStyle = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());

/// A table with these columns, no wider than the terminal.
pub fn table<const N: usize>(columns: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_style(STYLE)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(columns);
    let terminal = terminal_size::terminal_size_of(std::io::stdout()).map(|(width, _)| width.0);
    table.set_width(terminal.unwrap_or(DEFAULT_WIDTH));
    table
}

/// A cell that stands out on a terminal, if the command is one that knows terminals.
pub(crate) fn bold(cell: Cell) -> Cell {
    #[cfg(feature = "bench")]
    let cell = cell.add_attribute(comfy_table::Attribute::Bold);
    cell
}

/// Aligns a column of numbers by their last digit.
pub fn numbers(table: &mut Table, columns: impl IntoIterator<Item = usize>) {
    for index in columns {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}
