//! The records of docs/benchmarks are the source of the tables in BENCHMARKS.md, and of the
//! README's picture and numbers. `cargo xtask goldens --bless` renders tables and picture again.

use std::{env, fmt::Write as _, fs, path::Path};

use serde_json::Value;

const FOLDER: &str = "docs/benchmarks/";

fn path(file: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file)
}

fn read(file: &str) -> String {
    fs::read_to_string(path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Checks that a file has this text, or writes the text if asked to.
fn hold(file: &str, text: &str) {
    if env::var_os("MLA_BLESS").is_some() {
        fs::write(path(file), text).unwrap();
    }
    assert!(
        read(file) == text,
        "{file} is stale: `cargo xtask goldens --bless` writes it anew"
    );
}

/// A table, with the conditions of its measurement.
struct Record(Value);

impl Record {
    fn new(name: &str) -> Self {
        let record = serde_json::from_str(&read(&format!("{FOLDER}{name}")));
        Self(record.unwrap_or_else(|error| panic!("{name}: {error}")))
    }

    fn text(&self, field: &str) -> &str {
        let text = self.0[field].as_str();
        text.unwrap_or_else(|| panic!("{field}: no text in {}", self.0))
    }

    fn columns(&self) -> Vec<&str> {
        strings(&self.0["columns"])
    }

    fn rows(&self) -> Vec<Vec<&str>> {
        let rows = self.0["rows"].as_array().unwrap().iter();
        rows.map(strings).collect()
    }

    fn column(&self, name: &str) -> usize {
        self.columns().iter().position(|it| *it == name).unwrap()
    }

    /// Returns the GPU, driver, date and commit, with the file.
    fn measurement(&self, name: &str) -> String {
        let driver = self.0["driver"].as_str();
        let driver = driver.map_or(String::new(), |driver| format!(", driver {driver}"));
        let [card, date, commit] = ["card", "date", "commit"].map(|field| self.text(field));
        format!("{card}{driver}, {date}, commit {commit} ([record]({FOLDER}{name})):\n")
    }

    /// Returns the table in Markdown. Columns of numbers are aligned to the right.
    fn table(&self) -> String {
        let (columns, rows) = (self.columns(), self.rows());
        let is_number = |cell: &str| cell.starts_with(|it: char| it.is_ascii_digit());
        let line = |cells: &[&str]| format!("| {} |\n", cells.join(" | "));
        let mut text = line(&columns);
        for at in 0..columns.len() {
            let mut cells = rows.iter().map(|row| row[at]);
            let is_right = cells.all(|it| is_number(it) || matches!(it, "" | "–"));
            text += if is_right { "|---:" } else { "|---" };
        }
        text += "|\n";
        for row in rows {
            assert_eq!(row.len(), columns.len(), "{row:?}");
            text += &line(&row);
        }
        text
    }
}

fn strings(list: &Value) -> Vec<&str> {
    let list = list.as_array().unwrap().iter();
    list.map(|it| it.as_str().unwrap()).collect()
}

/// Breaks a command for a shell into lines of at most 100 columns, before options.
fn broken(command: &str) -> String {
    let mut options = command.split(" -");
    let mut text = options.next().unwrap().to_owned();
    let mut column = text.len();
    for option in options {
        if column + option.len() > 96 {
            text += " \\\n   ";
            column = 3;
        }
        text += " -";
        text += option;
        column += 2 + option.len();
    }
    text
}

/// Returns the page with its tables, rendered from the records that their markers name. A command
/// is placed above the first of the successive tables that it measured.
fn rendered(page: &str) -> String {
    let (begin, end) = (format!("<!-- {FOLDER}"), "<!-- end -->");
    let mut parts = page.split(&begin);
    let mut text = parts.next().unwrap().to_owned();
    let mut command = String::new();
    for part in parts {
        let (name, rest) = part.split_once(" -->\n").unwrap();
        let (_, behind) = rest.split_once(end).unwrap();
        let record = Record::new(name);
        let _ = writeln!(text, "{begin}{name} -->\n");
        if record.text("command") != command {
            command = record.text("command").to_owned();
            let _ = writeln!(text, "```text\n{}\n```\n", broken(&command));
        }
        let _ = writeln!(text, "{}\n{}", record.measurement(name), record.table());
        text += end;
        text += behind;
    }
    text
}

/// Returns the geometric mean of the last column for rows of one kind. The first number in each
/// cell counts.
fn mean(record: &Record, is_of_kind: impl Fn(&[&str]) -> bool) -> (usize, f64) {
    let rows = record.rows();
    let rows = rows.iter().filter(|row| is_of_kind(row));
    let logarithm = |row: &Vec<&str>| {
        let ratio = row.last().unwrap().split(' ').next().unwrap();
        ratio.parse::<f64>().unwrap().ln()
    };
    let logarithms: Vec<f64> = rows.map(logarithm).collect();
    let sum: f64 = logarithms.iter().sum();
    (logarithms.len(), (sum / logarithms.len() as f64).exp())
}

#[test]
fn tables_are_rendered_from_records() {
    let page = read("BENCHMARKS.md");
    let pieces = page.split("<!-- end -->");
    let own = pieces.map(|part| part.split("<!-- docs/").next().unwrap());
    for line in own.flat_map(str::lines) {
        assert!(!line.starts_with('|'), "no record has the table of {line}");
    }
    hold("BENCHMARKS.md", &rendered(&page));
    for entry in fs::read_dir(path(FOLDER)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(
            page.contains(&name) || name == PICTURE,
            "{name} is shown nowhere"
        );
    }
}

#[test]
fn the_front_page_has_the_means_of_records() {
    let page = read("README.md").replace('\n', " ");
    let (hopper, sparse) = (Record::new(HOPPER), Record::new("sparse-h200.json"));
    let dense =
        |kind: &'static str| move |row: &[&str]| row[0].starts_with(kind) && row[1] == "e2e";
    let is_sparse_decode = |row: &[&str]| !row[0].starts_with("sp-");
    for (name, (cases, mean)) in [
        ("decode", mean(&hopper, dense("d-"))),
        ("sparse decode", mean(&sparse, is_sparse_decode)),
        ("prefill", mean(&hopper, dense("p-"))),
    ] {
        let said = [" as fast", ""].map(|words| format!("{name} **{mean:.2}×**{words} ({cases}"));
        assert!(said.iter().any(|it| page.contains(it)), "{said:?}");
    }
}

/// The record that the picture shows, and the picture's file.
const HOPPER: &str = "hopper-h200.json";
const PICTURE: &str = "peers-h200.svg";

/// Cases with their names in the table and in the picture.
const CASES: &[(&str, &str)] = &[
    ("d-b128-h128-8k", "decode 128 × 8k, 128 heads"),
    ("d-b32-h128-4k", "decode 32 × 4k, 128 heads"),
    ("d-b8-h128-8k", "decode 8 × 8k, 128 heads"),
    ("d-b128-h16-4k", "decode 128 × 4k, 16 heads"),
    ("d-b128-h16-1k", "decode 128 × 1k, 16 heads"),
    ("d-b1-h16-8k", "decode 1 × 8k, 16 heads"),
    ("d-b1-h128-32k", "decode 1 × 32k, 128 heads"),
    ("d-mix4-h16-s4", "drafts of 4, mixed, 16 heads"),
    ("p-h128-1x2k", "prefill 1 × 2k, 128 heads"),
    ("p-h128-1x8k", "prefill 1 × 8k, 128 heads"),
    ("p-h128-16x512", "prefill 16 × 512, 128 heads"),
    ("p-h16-1x16k", "prefill 1 × 16k, 16 heads"),
];

/// Peers by their columns, with their names and the shapes of their marks.
const PEERS: &[(&str, &str, Mark)] = &[
    ("fa3", "FlashAttention-3", Mark::Square),
    ("flashmla", "FlashMLA", Mark::Diamond),
    ("cudnn", "cuDNN", Mark::Triangle),
];

/// Multiples of our time that get a line and a number.
const TICKS: &[f64] = &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0];

const WIDTH: f64 = 760.0;
const LEFT: f64 = 210.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 66.0;
const ROW: f64 = 20.0;

const STYLE: &str = "\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.line { stroke: #d0d7de }
.ours { stroke: #1a7f37; stroke-width: 2 }
.ours-text { fill: #1a7f37; font-weight: 600 }
.fa3 { fill: #0969da } .flashmla { fill: #bc4c00 } .cudnn { fill: #8250df }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .line { stroke: #444c56 }
.ours { stroke: #3fb950 } .ours-text { fill: #3fb950 }
.fa3 { fill: #58a6ff } .flashmla { fill: #f0883e } .cudnn { fill: #bc8cff }
}
";

#[derive(Clone, Copy)]
enum Mark {
    Square,
    Diamond,
    Triangle,
}

impl Mark {
    fn points(self, x: f64, y: f64) -> String {
        let corners: &[(f64, f64)] = match self {
            Self::Square => &[(-4.5, -4.5), (4.5, -4.5), (4.5, 4.5), (-4.5, 4.5)],
            Self::Diamond => &[(-6.0, 0.0), (0.0, -6.0), (6.0, 0.0), (0.0, 6.0)],
            Self::Triangle => &[(-5.5, 4.5), (0.0, -5.5), (5.5, 4.5)],
        };
        let corners = corners
            .iter()
            .map(|(dx, dy)| format!("{:.1},{:.1}", x + dx, y + dy));
        corners.collect::<Vec<_>>().join(" ")
    }
}

/// Returns the times of peers in a case, as multiples of ours.
fn factors(record: &Record, case: &str) -> Vec<(usize, f64)> {
    let rows = record.rows();
    let row = rows.iter().find(|row| row[0] == case && row[1] == "e2e");
    let row = row.unwrap_or_else(|| panic!("{case} is no row of the table"));
    let time = |name| {
        let cell = row[record.column(name)].trim_end_matches(" *");
        cell.parse::<f64>().ok()
    };
    let ours = time("ours").unwrap();
    let peers = PEERS.iter().enumerate();
    peers
        .filter_map(|(index, (column, ..))| Some((index, time(column)? / ours)))
        .collect()
}

fn x(factor: f64) -> f64 {
    let share = factor.ln() / TICKS[TICKS.len() - 1].ln();
    LEFT + share * (WIDTH - LEFT - RIGHT)
}

fn picture(record: &Record) -> String {
    let bottom = TOP + ROW * CASES.len() as f64;
    let height = bottom + 34.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"Times of other libraries divided by ours\">\n<style>\n{STYLE}</style>\n"
    );
    let mut legend = LEFT;
    for (class, name, mark) in PEERS {
        let points = mark.points(legend, 16.0);
        let _ = writeln!(svg, "<polygon class=\"{class}\" points=\"{points}\"/>");
        let _ = writeln!(svg, "<text x=\"{}\" y=\"20\">{name}</text>", legend + 11.0);
        legend += 150.0;
    }
    for tick in TICKS {
        let (at, is_ours) = (x(*tick), *tick == 1.0);
        let class = if is_ours { "ours" } else { "line" };
        let _ = writeln!(
            svg,
            "<line class=\"{class}\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>"
        );
        let (class, text) = match is_ours {
            true => (" class=\"ours-text\"", "ours = 1".to_owned()),
            false => ("", format!("{tick}")),
        };
        let _ = writeln!(
            svg,
            "<text{class} x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
            TOP - 10.0
        );
    }
    for (index, (case, name)) in CASES.iter().enumerate() {
        let y = TOP + ROW * (index as f64 + 0.5);
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            LEFT - 24.0,
            y + 4.0
        );
        for (peer, factor) in factors(record, case) {
            assert!(
                factor <= TICKS[TICKS.len() - 1],
                "{case}: {factor} is outside"
            );
            let (class, peer, mark) = PEERS[peer];
            let points = mark.points(x(factor), y);
            let _ = writeln!(
                svg,
                "<polygon class=\"{class}\" points=\"{points}\"><title>{name}: {peer} takes \
                 {factor:.2} of our time</title></polygon>"
            );
        }
    }
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"{}\">time divided by ours, on one H200: further right is \
         slower</text>\n</svg>",
        bottom + 24.0
    );
    svg
}

#[test]
fn the_picture_is_drawn_from_a_record() {
    hold(
        &format!("{FOLDER}{PICTURE}"),
        &picture(&Record::new(HOPPER)),
    );
}
