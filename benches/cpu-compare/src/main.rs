//! The CPU backends beside candle's tensor operations and PyTorch's attention, on the same inputs
//! in one run. Rounds are interleaved, and ratios are medians over rounds of ratios within a round,
//! so that whatever else loads the machine hits all alike.
//!
//! `PYTHON` names the interpreter; where it cannot import torch, torch is left out and the table
//! says so. With `--without-candle` candle only computes what the others are compared with;
//! `--cases=decode` takes the cases whose name contains that.

mod peer;
mod work;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use comfy_table::Table;
use half::bf16;
use mla_runtime::dtype::Element;

use work::{Case, Work};

type Failure = Box<dyn std::error::Error>;

const ROUNDS: usize = 7;

// Longer than the waiting of the contenders' thread pools.
const PAUSE: Duration = Duration::from_millis(300);

// At least one run, and long enough for the system to spread threads over cores.
const WARM_UP: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cpu-compare: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    let (mut candle, mut cases) = (true, String::new());
    for argument in std::env::args().skip(1) {
        match argument.split_once('=') {
            None if argument == "--without-candle" => candle = false,
            Some(("--cases", text)) => cases = text.to_owned(),
            _ => {
                let accepted = "--without-candle, --cases=TEXT";
                return Err(format!("argument: given {argument}, accepted {accepted}").into());
            }
        }
    }
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
    let decode = Case::Decode {
        batch: 8,
        heads: 16,
        tokens: 4096,
    };
    let single = Case::Decode {
        batch: 1,
        heads: 16,
        tokens: 4096,
    };
    let prefill = Case::Prefill {
        heads: 16,
        tokens: 2048,
    };
    for case in [decode, single, prefill] {
        if case.name::<bf16>().contains(&cases) {
            compare::<bf16>(case, threads, candle, &mut table)?;
        }
        if case.name::<f32>().contains(&cases) {
            compare::<f32>(case, threads, candle, &mut table)?;
        }
    }
    println!("{table}");
    Ok(())
}

// One way to do the work: its name, how to run it once, and its output for checking.
struct Contender<'a> {
    name: String,
    run: Box<dyn FnMut() -> Result<f64, Failure> + 'a>,
    out: Vec<f32>,
}

fn compare<T: Element + candle_core::WithDType>(
    case: Case,
    threads: usize,
    candle: bool,
    table: &mut Table,
) -> Result<(), Failure> {
    let work = Work::<T>::new(case);
    // Declared first, so that it outlives those that borrow it.
    let torch;
    let mut contenders = Vec::new();

    let mut ours = work.ours()?;
    let out = ours.output()?;
    contenders.push(Contender {
        name: "mla-runtime".to_owned(),
        run: Box::new(move || timed(|| ours.run())),
        out,
    });
    let mut truth = None;
    for (name, variant) in work.candle()? {
        let out = work::to_f32(&variant()?)?;
        // The first is candle in f32.
        truth.get_or_insert_with(|| out.clone());
        if !candle {
            break;
        }
        contenders.push(Contender {
            name,
            run: Box::new(move || timed(|| variant().map(drop))),
            out,
        });
    }
    let truth = truth.ok_or("candle computes nothing to compare with")?;
    torch = match peer::Peer::start(&work, threads) {
        Ok(peer) => Some(std::cell::RefCell::new(peer)),
        Err(error) => {
            table.add_row([case.name::<T>(), format!("torch: {error}")]);
            None
        }
    };
    if let Some(torch) = &torch {
        let variants = torch.borrow().variants.clone();
        for variant in variants {
            let out = torch.borrow_mut().output(&variant)?;
            contenders.push(Contender {
                name: format!("torch {} {variant}", torch.borrow().version),
                run: Box::new(move || torch.borrow_mut().run(&variant)),
                out,
            });
        }
    }

    // Of each contender: the first call after a pause, and a call when everything has settled.
    let mut times = vec![[const { Vec::new() }; 2]; contenders.len()];
    for _ in 0..ROUNDS {
        for ([first, settled], contender) in times.iter_mut().zip(&mut contenders) {
            // Threads of the contender before may still spin in wait for work, caches hold its
            // data, and threads that wake after a pause begin on one core: a pause, and runs that
            // do not count until everything has settled, give everyone the same start.
            std::thread::sleep(PAUSE);
            let start = Instant::now();
            first.push((contender.run)()?);
            while start.elapsed() < WARM_UP {
                (contender.run)()?;
            }
            settled.push((contender.run)()?);
        }
    }
    for (contender, theirs) in contenders.iter().zip(&times) {
        let [first, settled] = [0, 1].map(|which| {
            let ratios = theirs[which].iter().zip(&times[0][which]);
            (
                median(theirs[which].clone()),
                median(ratios.map(|(a, b)| a / b).collect()),
            )
        });
        // candle in f32 is the truth. What the others compute has to be the
        // same, or the times compare nothing; ours has to be so to the rounding of bf16, while
        // candle in bf16 rounds scores and weights as well, and shows it.
        let error = 1.0 - cosine(&contender.out, &truth);
        let bound = if std::ptr::eq(contender, &contenders[0]) {
            2e-5
        } else {
            2e-2
        };
        if error.is_nan() || error > bound {
            return Err(format!("{}: 1 − cosine is {error:.1e}", contender.name).into());
        }
        table.add_row([
            case.name::<T>(),
            contender.name.clone(),
            format!("{:.2}", settled.0 * 1e3),
            format!("{:.2}", settled.1),
            format!("{:.0}", case.flop() / settled.0 / 1e9),
            format!("{:.2}", first.0 * 1e3),
            format!("{:.2}", first.1),
            format!("{error:.1e}"),
        ]);
    }
    Ok(())
}

fn timed(run: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::NAN;
    }
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
