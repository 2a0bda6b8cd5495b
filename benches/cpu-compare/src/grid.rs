//! Random cases, to find those in which we are slower.

use std::process::ExitCode;

use half::bf16;

use crate::Failure;
use crate::compare::{Comparison, Who, compare};
use crate::work::{Case, Numbers};

const ROUNDS: usize = 5;

// The limits of a case: every contender runs it some dozens of times, and candle holds its scores.
const MOST_FLOP: f64 = 1e10;
const MOST_BYTES: usize = 400 << 20;

const HEADS: [usize; 8] = [8, 16, 20, 32, 40, 64, 96, 128];

/// Compares `count` cases whose name contains `text`.
pub(crate) fn run(count: usize, seed: u64, text: &str) -> Result<ExitCode, Failure> {
    let threads = rayon::current_num_threads();
    println!("{threads} threads, {ROUNDS} interleaved rounds, medians; ratio = theirs / ours");
    println!("| case | ms | torch | ms | ratio | first ms | first ratio |");
    println!("|---|---:|---|---:|---:|---:|---:|");
    let mut numbers = Numbers::new(seed);
    let (mut behind, mut ratios) = (0, Vec::new());
    while ratios.len() < count {
        let case = random_case(&mut numbers);
        let comparison = match numbers.below(2) {
            0 if case.name::<bf16>().contains(text) => compare::<bf16>(case, Who::Fast, ROUNDS)?,
            1 if case.name::<f32>().contains(text) => compare::<f32>(case, Who::Fast, ROUNDS)?,
            _ => continue,
        };
        let [settled, first] = print(&comparison)?;
        behind += usize::from(settled < 1.0 || first < 1.0);
        ratios.push([settled, first]);
    }
    for (which, name) in ["settled", "first"].into_iter().enumerate() {
        let mut ratios: Vec<f64> = ratios.iter().map(|ratio| ratio[which]).collect();
        ratios.sort_by(f64::total_cmp);
        let (least, median) = (ratios.first(), ratios.get(ratios.len() / 2));
        if let (Some(least), Some(median)) = (least, median) {
            println!("{name}: least ratio {least:.2}, median {median:.2}");
        }
    }
    println!("{behind} of {count} cases behind");
    Ok(ExitCode::from(u8::from(behind > 0)))
}

// Sizes of which each power of two is as likely as any other.
fn random_case(numbers: &mut Numbers) -> Case {
    loop {
        let requests = numbers.spread(1, 64);
        let heads = HEADS[numbers.below(HEADS.len())];
        let case = match numbers.below(2) {
            0 => Case::decode(requests, heads, numbers.spread(128, 8192)),
            _ => Case::prefill(requests, heads, numbers.spread(16, 2048)),
        };
        if case.flop() <= MOST_FLOP && case.bytes() <= MOST_BYTES {
            return case;
        }
    }
}

// A row of the table, with torch's fastest way; the ratios of torch's minimal times to ours.
fn print(comparison: &Comparison) -> Result<[f64; 2], Failure> {
    if let Some(reason) = &comparison.without_torch {
        return Err(format!("torch: {reason}").into());
    }
    let (ours, theirs) = comparison.rows.split_first().ok_or("no contender ran")?;
    let fastest = theirs
        .iter()
        .min_by(|a, b| a.settled.ratio.total_cmp(&b.settled.ratio));
    let fastest = fastest.ok_or("torch does nothing")?;
    let firsts = theirs.iter().map(|row| row.first.ratio);
    let first = firsts.fold(f64::INFINITY, f64::min);
    println!(
        "| {} | {:.3} | {} | {:.3} | {:.2} | {:.3} | {first:.2} |",
        comparison.case,
        ours.settled.seconds * 1e3,
        fastest.who,
        fastest.settled.seconds * 1e3,
        fastest.settled.ratio,
        ours.first.seconds * 1e3,
    );
    Ok([fastest.settled.ratio, first])
}
