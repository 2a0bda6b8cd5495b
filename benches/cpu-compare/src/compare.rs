//! Comparison of all contenders in one case, in turns.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use mla_runtime::model::Element;

use crate::Failure;
use crate::peer::Peer;
use crate::work::{self, Case, Work};

// Pause that is longer than the contenders' thread pools wait actively.
const PAUSE: Duration = Duration::from_millis(300);

// Minimum time of the first runs, of which there is at least one: long enough for the system to
// spread threads over cores.
const WARM_UP: Duration = Duration::from_millis(200);

/// The result of one case.
pub(crate) struct Comparison {
    pub(crate) case: String,
    pub(crate) flop: f64,
    /// The rows, ours first.
    pub(crate) rows: Vec<Row>,
    /// The reason why torch is not among them.
    pub(crate) without_torch: Option<String>,
}

/// The times of one contender.
pub(crate) struct Row {
    pub(crate) who: String,
    /// Time of a call when everything has settled.
    pub(crate) settled: Time,
    /// Time of the first call after a pause.
    pub(crate) first: Time,
    /// 1 − the cosine of its output and that of candle in f32.
    pub(crate) error: f64,
}

/// Medians over the rounds: of a time, and of its ratio to ours in the same round.
pub(crate) struct Time {
    pub(crate) seconds: f64,
    pub(crate) ratio: f64,
}

/// The contenders that take part.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Who {
    Everybody,
    WithoutCandle,
    /// All but candle, and but variants that take much longer than torch's fastest.
    Fast,
}

/// Runs a case in `rounds` rounds.
pub(crate) fn compare<T: Element + candle_core::WithDType>(
    case: Case,
    who: Who,
    rounds: usize,
) -> Result<Comparison, Failure> {
    let work = Work::<T>::new(case);
    let torch = Peer::start(&work, rayon::current_num_threads());
    let without_torch = torch.as_ref().err().map(ToString::to_string);
    let torch = torch.ok().map(RefCell::new);
    let candle = who == Who::Everybody;
    let (mut contenders, truth) = contenders(&work, candle, torch.as_ref())?;
    if who == Who::Fast {
        leave_slow_ones_out(&mut contenders)?;
    }
    let times = take_turns(&mut contenders, rounds)?;
    let rows = contenders.iter().zip(&times).enumerate();
    let rows = rows.map(|(index, (contender, theirs))| {
        let [first, settled] = [0, 1].map(|which| {
            let ratios = theirs[which].iter().zip(&times[0][which]);
            Time {
                seconds: median(theirs[which].clone()),
                ratio: median(ratios.map(|(a, b)| a / b).collect()),
            }
        });
        Ok(Row {
            who: contender.name.clone(),
            settled,
            first,
            error: contender.check(&truth, index == 0)?,
        })
    });
    Ok(Comparison {
        case: case.name::<T>(),
        flop: case.flop(),
        rows: rows.collect::<Result<_, Failure>>()?,
        without_torch,
    })
}

// A way to do the work: its name, a function that runs it once, and its output for checking.
struct Contender<'a> {
    name: String,
    run: Box<dyn FnMut() -> Result<f64, Failure> + 'a>,
    out: Vec<f32>,
}

impl Contender<'_> {
    // The distance from the reference. The results of the other libraries have to be the same, or
    // their times could not be compared. Ours has to agree to the rounding of bf16. candle in bf16
    // rounds scores and weights as well, and differs more.
    fn check(&self, truth: &[f32], is_ours: bool) -> Result<f64, Failure> {
        let error = 1.0 - cosine(&self.out, truth);
        let bound = if is_ours { 2e-5 } else { 2e-2 };
        if error.is_nan() || error > bound {
            return Err(format!("{}: 1 − cosine is {error:.1e}", self.name).into());
        }
        Ok(error)
    }
}

// Returns all contenders, ours first, and the output of candle in f32.
fn contenders<'a, T: Element + candle_core::WithDType>(
    work: &'a Work<T>,
    candle: bool,
    torch: Option<&'a RefCell<Peer>>,
) -> Result<(Vec<Contender<'a>>, Vec<f32>), Failure> {
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
    if let Some(torch) = torch {
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
    Ok((contenders, truth))
}

// Leaves out contenders that take four times as long as the fastest one but ours, by a single run
// each.
fn leave_slow_ones_out(contenders: &mut Vec<Contender<'_>>) -> Result<(), Failure> {
    let runs = contenders.iter_mut().map(|contender| (contender.run)());
    let times = runs.collect::<Result<Vec<f64>, Failure>>()?;
    let fastest = times[1..].iter().copied().fold(f64::INFINITY, f64::min);
    let mut index = 0;
    contenders.retain(|_| {
        index += 1;
        index == 1 || times[index - 1] < 4.0 * fastest
    });
    Ok(())
}

// Times each contender: the first call after a pause, and a call when everything has settled.
fn take_turns(
    contenders: &mut [Contender<'_>],
    rounds: usize,
) -> Result<Vec<[Vec<f64>; 2]>, Failure> {
    let mut times = vec![[const { Vec::new() }; 2]; contenders.len()];
    for _ in 0..rounds {
        for ([first, settled], contender) in times.iter_mut().zip(&mut *contenders) {
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
    Ok(times)
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
