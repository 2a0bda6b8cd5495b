//! Speed relative to the best peer by region. A region is a range of query tiles and a range of
//! context lengths.

use std::collections::BTreeMap;

use comfy_table::Table;

use mla_cli::parts::{Case, CaseKind, Scatter};

/// Query rows of a tile. In decode these are tokens and heads, in prefill the tokens of each head.
const TILE_ROWS: u64 = 128;

/// The maximum number of query tiles of each region. An H100 or H200 has 132 SMs.
const TILES: [u64; 5] = [32, 65, 132, 396, u64::MAX];

/// The maximum number of context tokens of a request in each region.
const CONTEXT: [u32; 6] = [0, 2048, 8192, 32768, 65536, u32::MAX];

/// A case, with the best peer's time divided by ours.
#[derive(Clone, Copy)]
pub(crate) struct Point {
    kind: &'static str,
    tiles: u64,
    context: u32,
    ratio: f64,
}

impl Point {
    pub(crate) fn new(case: &Case, ratio: f64) -> Self {
        let heads = u64::from(case.heads);
        let tiles = |q: u32| match case.kind {
            CaseKind::Decode | CaseKind::Sparse { .. } | CaseKind::Layer => {
                (u64::from(q) * heads).div_ceil(TILE_ROWS)
            }
            CaseKind::Prefill { .. } => u64::from(q).div_ceil(TILE_ROWS) * heads,
        };
        let context = |q: u32, kv: u32| match case.kind {
            CaseKind::Prefill { causal: true } | CaseKind::Layer => kv - q,
            CaseKind::Prefill { causal: false } | CaseKind::Decode => kv,
            CaseKind::Sparse { lists, .. } => kv.min(lists.valid),
        };
        let requests = || case.requests.iter();
        Self {
            kind: match case.kind {
                CaseKind::Decode => "Decode",
                CaseKind::Sparse { .. } => "Sparse",
                CaseKind::Prefill { .. } => "Prefill",
                CaseKind::Layer => "Layer",
            },
            tiles: requests().map(|r| tiles(r.q)).sum(),
            context: requests().map(|r| context(r.q, r.kv)).max().unwrap_or(0),
            ratio,
        }
    }
}

/// Formats a length as people name it.
fn length(tokens: u32) -> String {
    match tokens {
        0..1024 => tokens.to_string(),
        _ => format!("{}k", tokens / 1024),
    }
}

fn tile_regions() -> Vec<String> {
    let min = |at: usize| if at == 0 { 1 } else { TILES[at - 1] + 1 };
    let name = |(at, max): (usize, &u64)| match *max {
        u64::MAX => format!("{} and more", min(at)),
        max => format!("{} to {max}", min(at)),
    };
    TILES.iter().enumerate().map(name).collect()
}

fn context_regions() -> Vec<String> {
    let name = |(at, max): (usize, &u32)| match *max {
        0 => "no context".to_owned(),
        u32::MAX => format!("more than {}", length(CONTEXT[at - 1])),
        max => format!("up to {}", length(max)),
    };
    CONTEXT.iter().enumerate().map(name).collect()
}

/// Returns the index of the first bound that the number does not exceed.
fn region<T: PartialOrd + Copy>(bounds: &[T], number: T) -> usize {
    bounds.iter().take_while(|max| number > **max).count()
}

fn kinds(points: &[Point]) -> Vec<&'static str> {
    let mut kinds: Vec<&'static str> = points.iter().map(|point| point.kind).collect();
    kinds.dedup();
    kinds
}

/// Returns the geometric mean and the minimum.
pub(crate) fn mean_and_min(ratios: &[f64]) -> (f64, f64) {
    let mean = ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64;
    let min = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    (mean.exp(), min)
}

/// Returns the regions of each kind of attention, with the geometric mean and minimum of their
/// ratios.
pub(crate) fn table(points: &[Point]) -> Table {
    let (rows, columns) = (tile_regions(), context_regions());
    let mut cells: BTreeMap<(&str, usize, usize), Vec<f64>> = BTreeMap::new();
    for point in points {
        let (tiles, context) = (region(&TILES, point.tiles), region(&CONTEXT, point.context));
        let ratios = cells.entry((point.kind, tiles, context)).or_default();
        ratios.push(point.ratio);
    }
    let is_used = |at: &usize| cells.keys().any(|place| place.2 == *at);
    let used: Vec<usize> = (0..columns.len()).filter(is_used).collect();
    let mut table = Table::new();
    let header = used.iter().map(|at| columns[*at].as_str());
    table.set_header(["attention", "query tiles"].into_iter().chain(header));
    for kind in kinds(points) {
        for (row, name) in rows.iter().enumerate() {
            let cell = |at: &usize| {
                cells
                    .get(&(kind, row, *at))
                    .map_or(String::new(), |ratios| {
                        let (mean, min) = mean_and_min(ratios);
                        format!("{mean:.2}, {min:.2} ({})", ratios.len())
                    })
            };
            let line: Vec<String> = used.iter().map(cell).collect();
            if line.iter().any(|cell| !cell.is_empty()) {
                table.add_row([kind.to_owned(), name.clone()].into_iter().chain(line));
            }
        }
    }
    table
}

/// Returns a drawing for each kind of attention: ratios over query tiles, with a colour for each
/// region of context.
pub(crate) fn scatters(points: &[Point]) -> Vec<Scatter> {
    let names = context_regions();
    let of_kind = |kind: &str| {
        let mut series: BTreeMap<usize, Vec<(f64, f64)>> = BTreeMap::new();
        for point in points.iter().filter(|point| point.kind == kind) {
            let place = (point.tiles as f64, point.ratio);
            let at = region(&CONTEXT, point.context);
            series.entry(at).or_default().push(place);
        }
        Scatter {
            caption: format!("{kind}: the best peer's time divided by ours, by context"),
            x: "query tiles of 128 rows".to_owned(),
            y: "ratio".to_owned(),
            level: ("as fast".to_owned(), 1.0),
            series: series
                .into_iter()
                .map(|(at, points)| (names[at].clone(), points))
                .collect(),
        }
    };
    kinds(points).into_iter().map(of_kind).collect()
}

#[cfg(test)]
mod tests {
    use comfy_table::{Cell, Row};
    use mla_runtime::batch::Request;
    use mla_runtime::model::{DType, MlaDims};

    use super::*;

    fn case(heads: u32, kind: CaseKind, requests: &[(u32, u32)]) -> Case {
        Case {
            id: String::new(),
            heads,
            dtype: DType::BF16,
            dims: MlaDims::R1,
            requests: requests
                .iter()
                .map(|&(q, kv)| Request::new(q, kv))
                .collect(),
            kind,
        }
    }

    #[test]
    fn cases_fall_into_the_region_of_their_tiles_and_context() {
        let place = |case: &Case| {
            let point = Point::new(case, 1.0);
            (point.tiles, point.context)
        };
        let chunk = CaseKind::Prefill { causal: false };
        let prompt = CaseKind::Prefill { causal: true };
        // Each head has a tile, and 200 tokens have two.
        assert_eq!(place(&case(8, chunk, &[(16, 32768)])), (8, 32768));
        assert_eq!(place(&case(8, prompt, &[(200, 200), (1, 1)])), (24, 0));
        // The heads of a token share a tile.
        assert_eq!(place(&case(48, CaseKind::Decode, &[(4, 256); 3])), (6, 256));
        assert_eq!(region(&TILES, 65), 1);
        assert_eq!(region(&TILES, 66), 2);
        assert_eq!(region(&CONTEXT, 0), 0);
        assert_eq!(region(&CONTEXT, 32769), 4);
        assert_eq!(tile_regions()[0], "1 to 32");
        assert_eq!(tile_regions()[4], "397 and more");
        assert_eq!(context_regions()[1], "up to 2k");
        assert_eq!(context_regions()[5], "more than 64k");
    }

    #[test]
    fn a_region_has_its_geometric_mean_and_its_minimum() {
        let chunk = CaseKind::Prefill { causal: false };
        let few = case(8, chunk, &[(16, 32768)]);
        let many = case(128, chunk, &[(512, 2048)]);
        let points = [
            Point::new(&few, 0.5),
            Point::new(&few, 2.0),
            Point::new(&many, 1.25),
        ];
        let table = table(&points);
        let texts = |row: &Row| -> Vec<String> { row.cell_iter().map(Cell::content).collect() };
        let header = texts(table.header().unwrap());
        assert_eq!(
            header,
            ["attention", "query tiles", "up to 2k", "up to 32k"]
        );
        let rows: Vec<_> = table.row_iter().map(texts).collect();
        assert_eq!(rows[0], ["Prefill", "1 to 32", "", "1.00, 0.50 (2)"]);
        assert_eq!(rows[1], ["Prefill", "397 and more", "1.25, 1.25 (1)", ""]);
        let scatters = scatters(&points);
        assert_eq!(scatters[0].series.len(), 2);
        assert_eq!(scatters[0].series[0].1, [(512.0, 1.25)]);
    }
}
