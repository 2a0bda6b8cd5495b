//! `mla run`: a layer on a batch of random data, timed and compared with the f64 reference.

pub(crate) mod batch_args;
pub(crate) mod cost;
pub(crate) mod data;
pub(crate) mod deviation;
mod measure;
pub(crate) mod reference;
mod report;
pub(crate) mod sparse;
pub(crate) mod step;
pub(crate) mod wanted;
pub(crate) mod workload;

use mla_runtime::device::Device;
use mla_runtime::indexer::IndexDevice;
use mla_runtime::plan::crossover;
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Phase, Problem};

use self::batch_args::BatchArgs;
use self::data::Data;
use self::report::Report;
use self::sparse::{Dense, Indexed, Lists};
use self::wanted::Wanted;
use crate::args::{self, Format, Model, ModelArgs, natural, positive, samples};
use crate::device::progress::Progress;
use crate::device::{About, IndexedJob, Job};
use crate::error::CliError;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    on: BatchArgs,
    /// Tokens in a page of the cache.
    #[arg(long, value_name = "TOKENS", default_value = "64", value_parser = positive)]
    page: u32,
    /// Keep latents and rotary keys in two tensors, instead of in rows of both.
    #[arg(long)]
    split_cache: bool,
    /// The prefill backend [default: the best that fits].
    #[arg(long, value_name = "NAME")]
    prefill: Option<String>,
    /// The decode backend [default: the best that fits].
    #[arg(long, value_name = "NAME")]
    decode: Option<String>,
    /// W: rows of the context workspace, rounded up to whole pages [default: the customary budget,
    /// but no more than the batch can use].
    #[arg(long, value_name = "W", value_parser = positive)]
    rows: Option<u32>,
    /// Maximum number of new tokens of a request on the absorbed path [default: the crossover, but
    /// no more than the decode backend accepts].
    #[arg(long, value_name = "TOKENS", value_parser = natural)]
    threshold: Option<u32>,
    /// Attend to all context, although the model has an indexer that selects from it.
    #[arg(long)]
    dense: bool,
    /// Number of (token, head) rows of each phase to compare with the reference.
    #[arg(long, value_name = "N", default_value = "64", value_parser = positive)]
    samples: u32,
    /// Number of timed runs of the layer. The median counts.
    #[arg(long, value_name = "N", default_value = "5", value_parser = samples)]
    repeat: u32,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

/// Returns the output, and true if every phase agrees with the reference.
pub(crate) fn output(args: &Args) -> Result<(String, bool), CliError> {
    let model = args.model.read()?;
    let run = Run {
        args,
        model: &model,
    };
    let report = match model.config.indexer {
        Some(_) if !args.dense => args.on.device.run_indexed(run)?,
        _ => args.on.device.run(run)?,
    };
    let text = args.format.write(&report, || report.describe());
    Ok((text, report.pass))
}

/// The job of `mla run`, for any device.
struct Run<'a> {
    args: &'a Args,
    model: &'a Model,
}

impl Job for Run<'_> {
    type Output = Report;

    fn run<D: Device>(self, device: &D, about: &About) -> Result<Report, CliError> {
        run::<D, Dense>(self.args, self.model, device, about)
    }
}

impl IndexedJob for Run<'_> {
    type Output = Report;

    fn run<D: IndexDevice>(self, device: &D, about: &About) -> Result<Report, CliError> {
        run::<D, Indexed<D>>(self.args, self.model, device, about)
    }
}

/// Refuses arguments that divide a batch between two paths, since a sparse layer has only one.
fn check_sparse(args: &Args) -> Result<(), CliError> {
    for (argument, given) in [("--threshold", args.threshold), ("--rows", args.rows)] {
        if let Some(given) = given {
            return Err(CliError::Argument {
                argument,
                given: format!("{given} for a sparse layer"),
                accepted: "nothing, as every token is on the absorbed path; or --dense".to_owned(),
            });
        }
    }
    Ok(())
}

/// Returns the problem, before a batch says how its query lengths differ, and the maximum number of
/// new tokens of a request on the absorbed path.
fn problem<D: Device, L: Lists<D>>(
    args: &Args,
    model: &Model,
    device: &D,
) -> Result<(Problem, u32), CliError> {
    let problem = Problem::new(model.config.dims, model.heads, model.dtype)
        .with_sparse(L::SPARSE)
        .with_kv_format(args.on.kv_format(model.dtype))
        .with_page_size(args.page)
        .with_features(args::cache_features(args.split_cache));
    let threshold = match (L::SPARSE, args.threshold) {
        // The expanded form has no lists.
        (true, _) => u32::MAX,
        (false, Some(threshold)) => threshold,
        (false, None) => crossover::threshold(&device.machine(), &problem, false, None)
            .min(longest_decode(args, &problem, device)?),
    };
    Ok((problem, threshold))
}

/// Returns the maximum number of new tokens of a request that the decode backend accepts, for the
/// queries of the layer.
fn longest_decode<D: Device>(args: &Args, problem: &Problem, device: &D) -> Result<u32, CliError> {
    let mut request = SelectionRequest::new(device.target(), *problem);
    request.decode.clone_from(&args.decode);
    let explanation = Registry::linked()?.explain(&request)?;
    // If no backend fits, the selection reports it.
    let decode = explanation.selected(Phase::Decode);
    Ok(decode
        .and_then(|candidate| candidate.spec.max_query_len)
        .unwrap_or(u32::MAX))
}

fn run<D: Device, L: Lists<D>>(
    args: &Args,
    model: &Model,
    device: &D,
    about: &About,
) -> Result<Report, CliError> {
    if L::SPARSE {
        check_sparse(args)?;
    }
    let (problem, threshold) = problem::<D, L>(args, model, device)?;
    let wanted = Wanted {
        model,
        on: &args.on,
        problem,
        threshold,
        rows: args.rows,
        prefill: args.prefill.as_deref(),
        decode: args.decode.as_deref(),
    };
    let (step, selection, memory) = wanted.step(device, about, |needs, limits| {
        L::needs(needs, &model.config, limits)
    })?;
    let progress = Progress::spinner();
    progress.begin(&format!(
        "running {} of {} on {}",
        args.on.batch, model.name, about.description
    ));
    progress.step("allocating");
    let mut workspace = step.workspace()?;
    let mut data = Data::new(&step.layer, &step.workload, step.seed, &progress)?;
    let mut lists = L::new(&model.config, &step, &progress)?;
    let timings = measure::measure(
        &step,
        &mut workspace,
        &mut data,
        &mut lists,
        args.repeat,
        &progress,
    )?;
    let errors = reference::compare(&step, &data, &workspace, args.samples, &progress)?;
    let lists = lists.compare(&step, data.lists.as_ref(), args.samples, &progress)?;
    progress.finish();
    Ok(Report::new(report::Run {
        model,
        device: &about.description,
        selection: &selection,
        workload: &step.workload,
        chunks: workspace.context().len(),
        rows: step.limits.context_rows,
        memory: &memory,
        timings,
        errors,
        lists,
        seed: args.on.seed,
        repeat: args.repeat,
    }))
}
