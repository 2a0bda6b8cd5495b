//! The common form of all tables and numbers in reports.

use bytesize::ByteSize;
use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle, presets};

// The width of a comfortably readable page, used if the output is no terminal.
const DEFAULT_WIDTH: u16 = 100;

// Lines are only around the header and at the end, since rows can be told apart by their first
// column.
const STYLE: TableStyle = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());

/// Makes a table with these columns, no wider than the terminal.
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

/// Makes a table with these columns, as wide as its content. `of_numbers` are columns of numbers.
#[cfg(feature = "bench")]
pub fn wide_table<'a>(
    columns: impl IntoIterator<Item = &'a str>,
    of_numbers: impl IntoIterator<Item = usize>,
) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(columns);
    numbers(&mut table, of_numbers);
    table
}

/// Makes a cell of a time. The fastest one is marked.
#[cfg(feature = "bench")]
pub fn time_cell(time: f64, is_fastest: bool) -> Cell {
    match is_fastest {
        true => bold(Cell::new(format!("{} *", number(time)))),
        false => Cell::new(format!("{}  ", number(time))),
    }
}

/// Makes a cell bold on a terminal, if the program uses one.
pub(crate) fn bold(cell: Cell) -> Cell {
    #[cfg(feature = "bench")]
    let cell = cell.add_attribute(comfy_table::Attribute::Bold);
    cell
}

/// Aligns columns of numbers by their last digit.
pub fn numbers(table: &mut Table, columns: impl IntoIterator<Item = usize>) {
    for index in columns {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// Formats a number with three significant digits, or more if there are more before the point.
#[cfg(feature = "bench")]
pub fn number(number: f64) -> String {
    match number.abs() {
        n if n >= 99.95 => format!("{number:.0}"),
        n if n >= 9.995 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// Formats a large number with a letter for its thousands.
#[cfg(feature = "bench")]
pub(crate) fn amount(count: f64) -> String {
    match count {
        n if n >= 1e9 => format!("{}G", number(n / 1e9)),
        n if n >= 1e6 => format!("{}M", number(n / 1e6)),
        n if n >= 1e3 => format!("{}k", number(n / 1e3)),
        n => number(n),
    }
}

/// Formats bytes in the unit that suits their number: `1.5 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// Formats a number of things in words: `1 chunk`, `2 chunks`.
pub fn counted(count: impl Into<u64>, thing: &str) -> String {
    match count.into() {
        1 => format!("1 {thing}"),
        count => format!("{count} {thing}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "bench")]
    fn numbers_have_three_digits_that_count() {
        let shown = [0.123, 1.234, 9.996, 12.34, 99.96, 1234.5].map(number);
        assert_eq!(shown, ["0.12", "1.23", "10.0", "12.3", "100", "1234"]);
        assert_eq!(
            [12.0, 1234.0, 5.6e6, 7.8e9].map(amount),
            ["12.0", "1.23k", "5.60M", "7.80G"]
        );
    }

    #[test]
    fn one_thing_is_no_plural() {
        let shown = [0u32, 1, 2].map(|count| counted(count, "chunk"));
        assert_eq!(shown, ["0 chunks", "1 chunk", "2 chunks"]);
    }
}
