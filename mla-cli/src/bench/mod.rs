//! `mla bench`: times attention, checks what it times, and says how far the limit is.
//!
//! `settings` reads what is wanted, `plan` turns it into rows and finds every reason why one cannot
//! run, `measure` runs one, `report` tells of them all.

mod attention;
mod cases;
mod ceilings;
mod check;
mod compare;
mod crossover;
mod environment;
mod indexer;
mod job;
mod layer;
mod lists;
mod measure;
mod peers;
mod plan;
mod plot;
mod random;
mod report;
mod row;
mod sampling;
mod settings;
mod site;
mod statistics;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use mla_runtime::registry::Registry;
use serde::Serialize;

use self::cases::Case;
use self::ceilings::Ceilings;
pub(crate) use self::environment::Environment;
pub(crate) use self::report::Report;
use self::report::SCHEMA;
use self::row::Row;
use self::sampling::Sampling;
use self::settings::{Measure, Settings};
use self::site::Site;
use crate::device::{About, DeviceName, Job};
use crate::error::CliError;
use crate::progress::Progress;
use crate::stopwatch::Stopwatch;

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    bench: BenchArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Say whether one result is faster than another, and how sure that is.
    Compare(compare::Args),
    /// Measure what this machine does at most.
    Ceilings(ceilings::Args),
    /// Time a sparse layer's parts: the caches' rows, the indexer's queries, logits and lists, and the layer.
    Indexer(indexer::Args),
    /// Time the built-in backends beside other libraries, in the same run on the same GPU.
    Peers(Box<peers::Args>),
}

#[derive(clap::Args)]
struct BenchArgs {
    /// A sweep file: these arguments in YAML. An argument takes the place of the file's key.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    cases: CaseArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Cases by a protocol, instead of batches.
#[derive(clap::Args)]
struct CaseArgs {
    /// Cases in JSON, run by the protocol of their file: R1's dimensions in bf16, pages of 64.
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Only the cases whose ids begin so.
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', requires = "cases")]
    only: Vec<String>,
}

#[derive(clap::Args, Clone, Default)]
struct OutputArgs {
    /// What the machine does at most, as `mla bench ceilings` wrote it [default: what is known].
    #[arg(long, value_name = "FILE")]
    ceilings: Option<PathBuf>,
    /// Where to write everything, samples included. It is written anew after each row.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where to write a line per row, which it has as soon as the row is measured.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Where to draw: roofline, time by what varies, crossover, whichever apply.
    #[arg(long, value_name = "FILE.svg|FILE.png")]
    plot: Option<PathBuf>,
}

impl OutputArgs {
    /// Refuses what could not be written, before anything is measured.
    fn check(&self) -> Result<(), CliError> {
        if let Some(path) = &self.plot {
            plot::check(path)?;
        }
        check_files([&self.json, &self.csv, &self.plot])
    }

    /// Writes every file of a finished run.
    fn write(&self, report: &Report) -> Result<(), CliError> {
        self.write_rows(report, Until::End)?;
        match &self.plot {
            Some(path) => plot::draw(path, report),
            None => Ok(()),
        }
    }

    /// Writes the files that hold a row each.
    fn write_rows(&self, report: &Report, until: Until) -> Result<(), CliError> {
        if let Some(path) = &self.json {
            save(path, until, &json(report))?;
        }
        match &self.csv {
            Some(path) => save(path, until, &csv(&report.rows)?),
            None => Ok(()),
        }
    }
}

/// Refuses files that could not be written, or of which one would take another's place.
fn check_files<const N: usize>(paths: [&Option<PathBuf>; N]) -> Result<(), CliError> {
    let paths: Vec<&PathBuf> = paths.into_iter().flatten().collect();
    for (index, path) in paths.iter().enumerate() {
        let folder = path.parent().filter(|path| !path.as_os_str().is_empty());
        let accepted = if folder.is_some_and(|folder| !folder.is_dir()) || path.is_dir() {
            "a file in a folder that exists"
        } else if paths[..index].contains(path) && (path.is_file() || !path.exists()) {
            "a file for each output"
        } else {
            continue;
        };
        return Err(CliError::File {
            argument: "output",
            path: path.to_path_buf(),
            message: format!("accepted: {accepted}"),
        });
    }
    Ok(())
}

/// The output, and whether all is well: every row agrees with the reference, or nothing is slower.
pub(crate) fn output(args: &Args) -> Result<(String, bool), CliError> {
    match &args.command {
        Some(Command::Compare(args)) => compare::output(args),
        Some(Command::Ceilings(args)) => Ok((ceilings::output(args)?, true)),
        Some(Command::Indexer(args)) => indexer::output(args),
        Some(Command::Peers(args)) => peers::output(args),
        None => {
            let report = run(&args.bench)?;
            let text = report.describe();
            match args.bench.output.write(&report) {
                Ok(()) => Ok((text, report.pass())),
                Err(error) => Err(error.behind(text)),
            }
        }
    }
}

fn run(args: &BenchArgs) -> Result<Report, CliError> {
    args.output.check()?;
    let settings = match &args.config {
        Some(path) => args.settings.clone().over(path)?,
        None => args.settings.clone(),
    };
    settings.refuse_repetitions()?;
    let cases = match &args.cases.cases {
        Some(path) => {
            settings.refuse_beside_cases()?;
            Some(cases::read(Some(path), &args.cases.only)?)
        }
        None => None,
    };
    let ceilings = args.output.ceilings.as_deref();
    let mut saved = Saved(&args.output);
    run_on_device(&settings, cases, ceilings, &mut saved, &Progress::rows())
}

/// What `mla selftest` times: a decode and a prefill of few heads by every backend that fits, and a mixed batch
/// through the layer with the best of them. Each is checked as every benchmark is.
pub(crate) fn for_selftest(device: DeviceName) -> Result<Vec<Report>, CliError> {
    let settings = |batches: &[&str], measure| Settings {
        batches: batches.iter().map(|batch| (*batch).to_owned()).collect(),
        measure: Some(measure),
        device: Some(device),
        model: Some(vec!["deepseek-v2-lite".to_owned()]),
        backends: (measure == Measure::Attention).then(|| vec![plan::ALL.to_owned()]),
        samples: Some(10),
        ..Settings::default()
    };
    [
        settings(&["8q1s4k", "1q2k"], Measure::Attention),
        settings(&["2q100_8q1s1k"], Measure::Layer),
    ]
    .iter()
    .map(|settings| run_on_device(settings, None, None, &mut Unwatched, &Progress::rows()))
    .collect()
}

/// What goes on beside the measuring of rows.
trait Watcher {
    /// In how many rounds the samples of a row are taken.
    fn rounds(&self) -> usize {
        1
    }

    /// Called after each round of a row, with the row's id and the samples of the round.
    fn after_round(&mut self, _: &str, _: usize) -> Result<(), CliError> {
        Ok(())
    }

    /// Called after each row, with all rows so far.
    fn after_row(&mut self, _: &Report) -> Result<(), CliError> {
        Ok(())
    }
}

/// Nothing goes on.
struct Unwatched;

impl Watcher for Unwatched {}

/// Files are written anew after each row, so that an interrupted run has them up to there.
struct Saved<'a>(&'a OutputArgs);

impl Watcher for Saved<'_> {
    fn after_row(&mut self, report: &Report) -> Result<(), CliError> {
        self.0.write_rows(report, Until::Row)
    }
}

/// How far a run has come when a file is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    Row,
    End,
}

/// Runs the cases, or the settings' batches where there are none, and tells which is being run.
fn run_on_device<'a>(
    settings: &'a Settings,
    cases: Option<Vec<Case>>,
    ceilings: Option<&'a Path>,
    watcher: &'a mut dyn Watcher,
    progress: &'a Progress,
) -> Result<Report, CliError> {
    settings.device.unwrap_or(DeviceName::Cpu).run(Bench {
        settings,
        cases,
        ceilings,
        watcher,
        progress,
    })
}

/// A result as JSON.
fn json(result: &impl Serialize) -> String {
    // Strings, numbers, lists and structs: nothing that JSON cannot hold.
    serde_json::to_string_pretty(result).expect("the result is JSON") + "\n"
}

/// Writes a file whole or not at all: who is interrupted meanwhile has the one before. What is no file, such as a
/// pipe, takes the text at the end alone.
fn save(path: &Path, until: Until, text: &str) -> Result<(), CliError> {
    let failed = |error: std::io::Error| CliError::File {
        argument: "output",
        path: path.to_owned(),
        message: format!("cannot be written: {error}"),
    };
    // A link stays one.
    let place = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if place.exists() && !place.is_file() {
        return match until {
            Until::Row => Ok(()),
            Until::End => fs::write(&place, text).map_err(failed),
        };
    }
    let part = place.with_added_extension("part");
    fs::write(&part, text)
        .and_then(|()| fs::rename(&part, &place))
        .map_err(failed)
}

/// The columns of a CSV file before the parameters'.
const COLUMNS: [&str; 23] = [
    "case",
    "kind",
    "backend",
    "batch",
    "requests",
    "tokens",
    "median_us",
    "planned_us",
    "mean_us",
    "spread",
    "min_us",
    "max_us",
    "outliers",
    "tokens_per_second",
    "tflops",
    "gbps",
    "of_limit",
    "peak_bytes",
    "error",
    "tolerance",
    "pass",
    "clock_mhz",
    "temperature_celsius",
];

/// What stands in them.
fn cells(row: &Row) -> [String; COLUMNS.len()] {
    fn optional(value: Option<impl ToString>) -> String {
        value.map(|value| value.to_string()).unwrap_or_default()
    }
    [
        row.id.clone(),
        row.kind.clone(),
        row.contender.clone(),
        row.batch.clone(),
        row.requests.to_string(),
        row.tokens.to_string(),
        row.us.median.to_string(),
        optional(row.planned_us),
        row.us.mean.to_string(),
        row.us.spread.to_string(),
        row.us.min.to_string(),
        row.us.max.to_string(),
        row.us.outliers.to_string(),
        row.tokens_per_second.to_string(),
        row.tflops.to_string(),
        row.gbps.to_string(),
        optional(row.of_limit),
        optional(row.peak_bytes),
        row.errors.relative.to_string(),
        row.errors.tolerance.to_string(),
        row.errors.pass.to_string(),
        optional(row.conditions.clock_mhz),
        optional(row.conditions.temperature_celsius),
    ]
}

/// A line per row, without the samples.
fn csv(rows: &[Row]) -> Result<String, CliError> {
    let mut names: Vec<&String> = rows.iter().flat_map(|row| row.parameters.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let failed = |error: csv::Error| CliError::Output(error.into());
    let header = COLUMNS.into_iter();
    writer
        .write_record(header.chain(names.iter().map(|name| name.as_str())))
        .map_err(failed)?;
    for row in rows {
        let parameters = names
            .iter()
            .map(|name| row.parameters.get(*name).cloned().unwrap_or_default());
        writer
            .write_record(cells(row).into_iter().chain(parameters))
            .map_err(failed)?;
    }
    let bytes = writer
        .into_inner()
        .map_err(|error| CliError::Output(error.into_error()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// What is to be timed, on whichever device.
struct Bench<'a> {
    settings: &'a Settings,
    cases: Option<Vec<Case>>,
    ceilings: Option<&'a Path>,
    watcher: &'a mut dyn Watcher,
    progress: &'a Progress,
}

impl Job for Bench<'_> {
    type Output = Report;

    fn run<D: Stopwatch>(self, device: &D, about: &About) -> Result<Report, CliError> {
        let settings = self.settings;
        let protocol = plan::protocol::<D>(settings)?;
        let registry = Registry::linked()?;
        let ceilings = Ceilings::find(self.ceilings, &about.description)?;
        let site = Site {
            registry: &registry,
            device,
            about,
            graphs: protocol.graphs,
        };
        let jobs = match self.cases {
            Some(cases) => plan::cases(&site, settings, cases)?,
            None => plan::sweep(&site, settings)?,
        };
        let check = settings.check.unwrap_or(16) as usize;
        let mut flush = device.allocate(match protocol.cold_cache {
            true => device.flush_bytes(),
            false => size_of::<f32>(),
        })?;
        let mut report = Report {
            schema: SCHEMA,
            device: about.description.clone(),
            environment: Environment::here(),
            // Strings, numbers and lists.
            settings: serde_json::to_value(settings).expect("settings are JSON"),
            protocol,
            ceilings,
            rows: Vec::with_capacity(jobs.len()),
            missing: jobs.len(),
            crossovers: Vec::new(),
        };
        for (index, job) in jobs.iter().enumerate() {
            let message = format!("{} runs {}", job.contender, job.case);
            self.progress.begin_row(index + 1, jobs.len(), &message);
            let mut sampling = Sampling {
                protocol: &report.protocol,
                rounds: self.watcher.rounds(),
                after_round: &mut |samples| {
                    self.watcher.after_round(&job.case, samples)?;
                    // Again, where that was others' turn.
                    self.progress.resume(&message);
                    Ok(())
                },
            };
            let measured =
                measure::measure(&registry, device, &mut flush, job, &mut sampling, check)?;
            let row = Row::new(job, measured, report.ceilings.as_ref())?;
            report.rows.push(row);
            report.missing -= 1;
            self.watcher.after_row(&report)?;
        }
        self.progress.finish();
        let (rows, ceilings) = (&report.rows, report.ceilings.as_ref());
        report.crossovers = crossover::find(&jobs, rows, ceilings, device.machine());
        Ok(report)
    }
}
