//! Compares the CPU device's indexer with the f64 reference. `refusals.txt` has the errors of
//! refused cases: `BLESS=1 cargo test -p mla-cpu --test indexer` writes it anew.

mod attack;
mod far;
mod layer;
mod logits;
mod pool;
mod quantise;
#[path = "../common/refusals.rs"]
mod refusals;
mod topk;

use fastrand::Rng;
use mla_conformance::reference::Turn;
use mla_cpu::Cpu;
use mla_runtime::backend::DecodeBatch;
use mla_runtime::indexer::IndexRows;
use mla_runtime::model::RotaryStyle;
use mla_runtime::tensor::{ArrayRef, BlockTable, Rotary, TensorRef};

#[test]
fn refusals_name_the_field() {
    let cases = [
        quantise::refused(),
        logits::refused(),
        topk::refused(),
        layer::refused(),
        pool::refused(),
    ];
    refusals::compare("indexer/refusals.txt", cases.into_iter().flatten());
}

/// Numbers from −1 to 1.
fn random(rng: &mut Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| 2.0 * rng.f32() - 1.0).collect()
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|x| f64::from(*x)).collect()
}

/// Requests on scattered pages, as the host knows them.
struct Batch {
    starts: Vec<i32>,
    lens: Vec<i32>,
    tables: Vec<i32>,
    max_pages: usize,
    page_size: usize,
    pages: usize,
}

impl Batch {
    /// Makes a batch of requests `(new tokens, all tokens)`, with a few more pages than they need.
    /// Unused entries of the table hold arbitrary numbers.
    fn new(rng: &mut Rng, requests: &[(usize, usize)], page_size: usize) -> Self {
        let needed = |kv: usize| kv.div_ceil(page_size);
        let pages = requests.iter().map(|(_, kv)| needed(*kv)).sum::<usize>() + 3;
        let max_pages = requests.iter().map(|(_, kv)| needed(*kv)).max().unwrap() + 1;
        let mut free: Vec<i32> = (0..pages as i32).collect();
        rng.shuffle(&mut free);
        let (mut tables, mut starts) = (Vec::new(), vec![0]);
        for (index, (q, kv)) in requests.iter().enumerate() {
            tables.extend(free.drain(..needed(*kv)));
            tables.resize((index + 1) * max_pages, [-1, i32::MIN, i32::MAX][index % 3]);
            starts.push(starts[index] + *q as i32);
        }
        Self {
            starts,
            lens: requests.iter().map(|(_, kv)| *kv as i32).collect(),
            tables,
            max_pages,
            page_size,
            pages,
        }
    }

    fn tokens(&self) -> usize {
        self.starts[self.lens.len()] as usize
    }

    fn longest(&self) -> usize {
        *self.lens.iter().max().unwrap() as usize
    }

    /// Returns the request of each token, and the number of positions that it sees.
    fn rows(&self) -> Vec<(usize, usize)> {
        let mut rows = Vec::new();
        for (request, len) in self.lens.iter().enumerate() {
            let count = self.starts[request + 1] - self.starts[request];
            rows.extend((0..count).map(|i| (request, (len - count + i + 1).max(0) as usize)));
        }
        rows
    }

    fn slot(&self, request: usize, position: usize) -> usize {
        let page = self.tables[request * self.max_pages + position / self.page_size];
        page as usize * self.page_size + position % self.page_size
    }

    fn view(&self, tokens: std::ops::Range<usize>) -> IndexRows<'_, Cpu> {
        let tables = ArrayRef::from_slice(&self.tables);
        IndexRows::new(
            DecodeBatch::new(
                BlockTable::new(tables, self.lens.len(), self.max_pages).unwrap(),
                (ArrayRef::from_slice(&self.lens), self.longest()),
                (ArrayRef::from_slice(&self.starts), 1),
            ),
            tokens,
        )
    }
}

/// Tables of cosines and sines, and the positions.
struct Tables {
    positions: Vec<i64>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    rows: usize,
    pairs: usize,
    style: RotaryStyle,
}

impl Tables {
    fn new(positions: Vec<i64>, rope: usize, style: RotaryStyle) -> Self {
        let rows = *positions.iter().max().unwrap_or(&0) as usize + 1;
        let pairs = rope / 2;
        let angle = |i: usize| {
            let frequency = 10_000f64.powf(-((i % pairs) as f64) / pairs as f64);
            (i / pairs) as f64 * frequency
        };
        let table = |f: fn(f64) -> f64| (0..rows * pairs).map(|i| f(angle(i)) as f32).collect();
        Self {
            positions,
            cos: table(f64::cos),
            sin: table(f64::sin),
            rows,
            pairs,
            style,
        }
    }

    fn view(&self) -> Rotary<'_, Cpu> {
        let shape = [1, self.rows, self.pairs];
        Rotary::new(
            ArrayRef::from_slice(&self.positions),
            [
                TensorRef::from_slice(&self.cos, shape).unwrap(),
                TensorRef::from_slice(&self.sin, shape).unwrap(),
            ],
            self.style,
        )
    }

    fn turn(&self, token: usize) -> Turn {
        let start = self.positions[token] as usize * self.pairs;
        let pair = |i: usize| {
            (
                f64::from(self.cos[start + i]),
                f64::from(self.sin[start + i]),
            )
        };
        Turn {
            style: self.style,
            pairs: (0..self.pairs).map(pair).collect(),
        }
    }
}
