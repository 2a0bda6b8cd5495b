//! The `mla` command: which backend a model gets on which GPU and why, how a batch is planned, and
//! how much memory it takes.
//!
//! It knows the backends that its program links. To add backends of yours, link them into a program
//! of your own:
//!
//! ```
//! use std::process::ExitCode;
//!
//! // A crate that is not named is not linked, and its backends are not there.
//! use mla_kernels as _;
//!
//! fn main() -> ExitCode {
//!     # if false {
//!     mla_cli::main()
//!     # } else { ExitCode::SUCCESS }
//! }
//! ```
//!
//! Each subcommand has its own file. It returns its whole output, so that nothing is printed on
//! standard output if it fails.

#![cfg_attr(
    feature = "bench",
    expect(missing_docs, reason = "the laboratory's `parts` are hidden")
)]
#![cfg_attr(
    not(feature = "bench"),
    expect(unreachable_pub, reason = "the laboratory's `parts` are not there")
)]

mod args;
mod batch;
#[cfg(feature = "bench")]
mod bench;
#[cfg(feature = "build-report")]
mod build_report;
#[cfg(feature = "bench")]
mod device;
mod error;
mod explain;
mod models;
mod plan;
#[cfg(feature = "bench")]
mod run;
#[cfg(feature = "bench")]
mod selftest;
mod spec;
mod table;
mod target;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
// These crates are linked for their backends, and nothing else here names them.
use mla_cpu as _;
#[cfg(feature = "cudnn")]
use mla_cudnn as _;
#[cfg(feature = "flashinfer")]
use mla_flashinfer as _;
#[cfg(feature = "flashmla")]
use mla_flashmla as _;
use mla_kernels as _;

use crate::error::CliError;

/// Commands to try first: they need no GPU.
const FIRST: &str = "\
Try first:
  mla explain --sm 9.0 --model deepseek-r1   # which backend on Hopper, and why not the others
  mla run --model deepseek-v2-lite --batch 2q512_8q1s4k   # a layer on this processor, checked
  mla models   # every known model on every GPU, and what its cache takes
  mla spec 4q2k_8q4s1k_64q1s2k   # what a batch spec means";

/// Multi-head Latent Attention: select, plan, run and measure.
#[derive(Parser)]
#[command(name = "mla", version, max_term_width = 100, after_help = FIRST)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say which backends a model gets on a GPU, and why not the others.
    Explain(explain::Args),
    /// List the public models: what runs each on which GPU, and what its cache takes.
    Models(models::Args),
    /// Read a batch spec such as `2q2k_32q1s1k`.
    Spec(spec::Args),
    /// Plan a step without running it.
    #[command(subcommand)]
    Plan(plan::Command),
    /// Run the layer on random data, time it, and compare it with a reference in f64.
    #[cfg(feature = "bench")]
    Run(run::Args),
    /// Time attention, check it, and say how far it is from the limit.
    #[cfg(feature = "bench")]
    Bench(Box<bench::Args>),
    /// Try every backend of this program on this machine's GPU. The output is worth sending to the
    /// authors.
    #[cfg(feature = "bench")]
    Selftest(selftest::Args),
    /// Show what the last build of CUDA kernels did.
    #[cfg(feature = "build-report")]
    BuildReport(build_report::Args),
}

impl Command {
    /// Returns the output, and true if the result is good.
    fn output(&self) -> Result<(String, bool), CliError> {
        let output = match self {
            Self::Explain(args) => explain::output(args)?,
            Self::Models(args) => models::output(args)?,
            Self::Spec(args) => spec::output(args)?,
            Self::Plan(command) => plan::output(command)?,
            #[cfg(feature = "bench")]
            Self::Run(args) => return run::output(args),
            #[cfg(feature = "bench")]
            Self::Bench(args) => return bench::output(args),
            #[cfg(feature = "bench")]
            Self::Selftest(args) => return selftest::output(args),
            #[cfg(feature = "build-report")]
            Self::BuildReport(args) => build_report::output(args)?,
        };
        Ok((output, true))
    }
}

/// Parses a negative number as a value, not as an argument, so that its refusal names the argument
/// that it belongs to.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| match arg.get_action().takes_values() {
            true => arg.allow_negative_numbers(true),
            false => arg,
        })
        .mut_subcommands(with_negative_numbers)
}

/// Reads the arguments of a program, or ends the program with an error.
#[doc(hidden)]
#[must_use]
pub fn arguments<P: Parser>() -> P {
    let matches = with_negative_numbers(P::command()).get_matches();
    P::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// Prints the output or the error of a program, and returns its exit status. It is a success if
/// there is an output and its result is good.
#[doc(hidden)]
#[must_use]
pub fn finish(output: Result<(String, bool), CliError>) -> ExitCode {
    let written = output.and_then(|(output, good)| {
        match io::stdout().write_all(output.as_bytes()) {
            // The reader of the output may have stopped reading.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(good),
        }
    });
    match written {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            if let CliError::Unsaved { result, .. } = &error {
                let _ = io::stdout().write_all(result.as_bytes());
            }
            // The reader of standard error may be gone as well.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Runs the whole command: reads the program's arguments, prints the output, and returns the exit
/// status.
pub fn main() -> ExitCode {
    finish(arguments::<Cli>().command.output())
}

/// The parts of the command that `cargo lab` uses for measurements: the rows of `mla bench`, its
/// stopwatch, the layer of `mla run`, and the writing of results. Other crates must not rely on
/// them.
#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod parts {
    pub use crate::args::input::{lines, read_program};
    pub use crate::args::{Format, Model, ModelArgs, json, named, positive, samples, warm_up};
    pub use crate::bench::cases::{self, Case, CaseKind};
    pub use crate::bench::ceilings::Ceilings;
    pub use crate::bench::environment::Environment;
    pub use crate::bench::files::{Until, check_files, save};
    pub use crate::bench::output::OutputArgs;
    pub use crate::bench::plot::{Scatter, draw_with};
    pub use crate::bench::record::{Report, Row};
    pub use crate::bench::runner::{Watcher, run_on_device};
    pub use crate::bench::settings::{SEED, Settings};
    pub use crate::device::memory::upload;
    pub use crate::device::progress::Progress;
    pub use crate::device::random::Normal;
    pub use crate::device::statistics::Summary;
    pub use crate::device::stopwatch::{Protocol, Stopwatch};
    pub use crate::device::{About, DeviceName, IndexedJob, Job};
    pub use crate::error::CliError;
    pub use crate::run::batch_args::BatchArgs;
    pub use crate::run::cost::Cost;
    pub use crate::run::data::{Data, HostLists};
    pub use crate::run::deviation::Errors;
    pub use crate::run::reference::compare as compare_outputs;
    pub use crate::run::sparse::{Indexed, ListErrors, Lists};
    pub use crate::run::step::Step;
    pub use crate::run::wanted::Wanted;
    pub use crate::run::workload::Workload;
    pub use crate::table::{counted, number, numbers, table, time_cell, wide_table};
}
