//! The CPU backends beside candle's tensor operations and PyTorch's attention, on the same inputs
//! in one run. Rounds are interleaved, and ratios are medians over rounds of ratios within a round,
//! so that other load on the machine affects all contenders equally.
//!
//! `PYTHON` names the interpreter; where it cannot import torch, torch is left out and the table
//! says so. With `--without-candle` candle only computes what the others are compared with;
//! `--cases=decode` takes the cases whose name contains that. `--grid=60` takes 60 random cases
//! instead, `--seed=2` others, and sets PyTorch's fastest way beside ours; it exits with 1 if ours
//! is slower in one. `RAYON_NUM_THREADS` says how many threads everyone has.

mod compare;
mod grid;
mod peer;
mod work;

use std::process::ExitCode;

use comfy_table::Table;
use half::bf16;

use compare::{Comparison, Who, compare};
use work::Case;

type Failure = Box<dyn std::error::Error>;

/// The arguments.
struct Options {
    candle: bool,
    cases: String,
    grid: Option<usize>,
    seed: u64,
}

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut options = Self {
            candle: true,
            cases: String::new(),
            grid: None,
            seed: 1,
        };
        for argument in arguments {
            match argument.split_once('=') {
                None if argument == "--without-candle" => options.candle = false,
                Some(("--cases", text)) => options.cases = text.to_owned(),
                Some(("--grid", count)) => options.grid = Some(number("--grid", count)?),
                Some(("--seed", seed)) => options.seed = number("--seed", seed)?,
                _ => {
                    let accepted = "--without-candle, --cases=TEXT, --grid=COUNT, --seed=NUMBER";
                    return Err(format!("argument: given {argument}, accepted {accepted}").into());
                }
            }
        }
        Ok(options)
    }
}

fn number<N: std::str::FromStr>(name: &str, text: &str) -> Result<N, Failure> {
    let number = text.parse();
    number.map_err(|_| format!("{name}: given {text}, accepted a whole number").into())
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cpu-compare: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode, Failure> {
    let options = Options::parse(std::env::args().skip(1))?;
    match options.grid {
        Some(count) => grid::run(count, options.seed, &options.cases),
        None => documented(&options),
    }
}

// The cases of BENCHMARKS.md.
fn documented(options: &Options) -> Result<ExitCode, Failure> {
    const ROUNDS: usize = 7;
    let threads = rayon::current_num_threads();
    println!("{threads} threads, {ROUNDS} interleaved rounds, medians; ratio = theirs / ours");
    let mut table = Table::new();
    table.set_header([
        "case",
        "who",
        "ms",
        "ratio",
        "GFLOP/s",
        "first ms",
        "first ratio",
        "1 − cosine",
    ]);
    let who = match options.candle {
        true => Who::Everybody,
        false => Who::WithoutCandle,
    };
    let decode = |requests| Case::decode(requests, 16, 4096);
    for case in [decode(8), decode(1), Case::prefill(1, 16, 2048)] {
        if case.name::<bf16>().contains(&options.cases) {
            add_rows(&mut table, compare::<bf16>(case, who, ROUNDS)?);
        }
        if case.name::<f32>().contains(&options.cases) {
            add_rows(&mut table, compare::<f32>(case, who, ROUNDS)?);
        }
    }
    println!("{table}");
    Ok(ExitCode::SUCCESS)
}

fn add_rows(table: &mut Table, comparison: Comparison) {
    if let Some(reason) = &comparison.without_torch {
        table.add_row([comparison.case.clone(), format!("torch: {reason}")]);
    }
    for row in comparison.rows {
        table.add_row([
            comparison.case.clone(),
            row.who,
            format!("{:.2}", row.settled.seconds * 1e3),
            format!("{:.2}", row.settled.ratio),
            format!("{:.0}", comparison.flop / row.settled.seconds / 1e9),
            format!("{:.2}", row.first.seconds * 1e3),
            format!("{:.2}", row.first.ratio),
            format!("{:.1e}", row.error),
        ]);
    }
}
