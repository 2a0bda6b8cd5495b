//! `mla bench`: times attention, checks the results, and says how far they are from the limit.
//!
//! `settings` reads the settings. `plan` turns them into rows and finds every reason why a row
//! cannot run. `measure` measures a row. `record` defines the result, and `report` formats it.

mod attention;
pub mod cases;
pub(crate) mod ceilings;
mod compare;
mod crossover;
mod dims;
pub(crate) mod environment;
pub(crate) mod files;
mod lists;
mod measure;
pub(crate) mod output;
pub(crate) mod plan;
pub(crate) mod plot;
pub(crate) mod record;
pub(crate) mod report;
pub(crate) mod runner;
pub(crate) mod settings;
mod work;

use std::path::PathBuf;

use clap::Subcommand;

use self::files::Until;
use self::output::OutputArgs;
use self::record::Report;
use self::runner::{Watcher, run_on_device};
use self::settings::Settings;
use crate::device::progress::Progress;
use crate::error::CliError;

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
    /// Compare two results, and say which rows are significantly faster or slower.
    Compare(compare::Args),
}

#[derive(clap::Args)]
struct BenchArgs {
    /// A sweep file: these arguments in YAML. An argument replaces the file's value for the same
    /// key.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
    /// Cases in JSON instead of batches, as in lab/cases of the repository, with pages of 64, in
    /// bf16, and with R1's dimensions if a case names no others. The protocol in the file is text
    /// for people: samples, graphs and caches follow these arguments.
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Run only the cases whose ids begin with this text.
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', requires = "cases")]
    only: Vec<String>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Returns the output, and true if every row agrees with the reference, or if nothing is slower in
/// a comparison.
pub(crate) fn output(args: &Args) -> Result<(String, bool), CliError> {
    match &args.command {
        Some(Command::Compare(args)) => compare::output(args),
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
    let cases = match &args.cases {
        Some(path) => {
            settings.refuse_beside_cases()?;
            Some(cases::read(path, &args.only)?)
        }
        None => None,
    };
    let ceilings = args.output.ceilings.as_deref();
    let mut saved = Saved(&args.output);
    run_on_device(&settings, cases, ceilings, &mut saved, &Progress::rows())
}

/// Writes the files again after each row, so that an interrupted run has all rows up to there.
struct Saved<'a>(&'a OutputArgs);

impl Watcher for Saved<'_> {
    fn after_row(&mut self, report: &Report) -> Result<(), CliError> {
        self.0.write_rows(report, Until::Row)
    }
}
