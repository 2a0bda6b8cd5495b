//! The README's picture shows what a table of BENCHMARKS.md says. `cargo xtask goldens --bless`
//! draws it anew.

use std::{env, fmt::Write as _, fs, path::Path};

/// Cases of the table by their names there, and in the picture.
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

/// Factors of our time with a line and a number.
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

/// The table's first row: the names of its columns, then its rows, all without the marks of the
/// fastest.
fn table(page: &str) -> Vec<Vec<String>> {
    let lines = page
        .lines()
        .skip_while(|line| *line != "## Attention on the GPU");
    let rows = lines
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'));
    let cells = |row: &str| {
        let cells = row.trim_matches('|').split('|');
        cells
            .map(|cell| cell.trim().trim_end_matches(" *").to_owned())
            .collect()
    };
    rows.map(cells).collect()
}

/// The times of peers in a case, as factors of ours.
fn factors(table: &[Vec<String>], case: &str) -> Vec<(usize, f64)> {
    let column = |name: &str| table[0].iter().position(|it| it == name).unwrap();
    let row = table.iter().find(|row| row[0] == case && row[1] == "e2e");
    let row = row.unwrap_or_else(|| panic!("{case} is no row of the table"));
    let time = |name| row[column(name)].parse::<f64>().ok();
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

fn picture(table: &[Vec<String>]) -> String {
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
        for (peer, factor) in factors(table, case) {
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
fn the_picture_is_drawn_from_the_table() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = fs::read_to_string(root.join("BENCHMARKS.md")).unwrap();
    let picture = picture(&table(&page));
    let path = root.join("docs/benchmarks/peers-h200.svg");
    if env::var_os("MLA_BLESS").is_some() {
        fs::write(&path, &picture).unwrap();
    }
    assert!(
        fs::read_to_string(&path).is_ok_and(|drawn| drawn == picture),
        "docs/benchmarks/peers-h200.svg is stale: `cargo xtask goldens --bless` draws it anew"
    );
}
