//! `cargo lab indexer`: the parts of a sparse layer, from the caches' rows to the output.
//!
//! Each part is timed alone by the protocol of all benchmarks. Then all parts are timed together,
//! as [`forward_selecting`](mla_runtime::layer::MlaLayer::forward_selecting) enqueues them. The
//! lists and the output are compared with f64.

mod peers;
mod report;
mod steps;

use std::path::PathBuf;

use mla_cli::parts::{
    About, BatchArgs, CliError, Data, Environment, Errors, Format, HostLists, Indexed, IndexedJob,
    ListErrors, Lists, Model, ModelArgs, Progress, Run, Step, Stopwatch, Wanted, check_files,
    compare_outputs, positive, samples, warm_up,
};
use mla_runtime::indexer::IndexDevice;
use mla_runtime::spec::Problem;

use self::peers::{Case, LayerCase};
use self::report::Report;
use self::steps::{Space, Steps, whole};
use crate::timing::{Timer, saved};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    on: BatchArgs,
    /// Timed runs of each part.
    #[arg(long, value_name = "N", default_value = "30", value_parser = samples)]
    samples: u32,
    /// Untimed runs of each part, before the first sample.
    #[arg(long, value_name = "N", default_value = "3", value_parser = warm_up)]
    warm_up: u32,
    /// Number of lists, and of output rows, to compare with the reference.
    #[arg(long, value_name = "N", default_value = "16", value_parser = positive)]
    check: u32,
    #[command(flatten)]
    peers: peers::PeerArgs,
    /// File for all results.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

impl Args {
    fn wanted<'a>(&'a self, model: &'a Model) -> Wanted<'a> {
        Wanted {
            model,
            on: &self.on,
            problem: Problem::new(model.config.dims, model.heads, model.dtype)
                .with_sparse(true)
                .with_kv_format(self.on.kv_format(model.dtype)),
            // The expanded form has no lists.
            threshold: u32::MAX,
            rows: None,
            prefill: None,
            decode: None,
        }
    }
}

/// Returns the table, and true if lists and outputs are right.
pub(crate) fn output(args: &Args) -> std::result::Result<(String, bool), CliError> {
    check_files([&args.json])?;
    args.peers.check(args.on.device)?;
    let model = args.model.read()?;
    model.indexer()?;
    let report = args.on.device.run_indexed(Bench {
        args,
        model: &model,
    })?;
    let text = args.format.write(&report, || report.describe());
    saved(args.json.as_deref(), &report, text, report.pass)
}

struct Bench<'a> {
    args: &'a Args,
    model: &'a Model,
}

impl IndexedJob for Bench<'_> {
    type Output = Report;

    fn run<D: IndexDevice + Stopwatch>(
        self,
        device: &D,
        about: &About,
    ) -> std::result::Result<Report, CliError> {
        let (args, model) = (self.args, self.model);
        let wanted = args.wanted(model);
        let step = Step::new::<Indexed<D>>(&wanted, device, about)?;
        let (layer, workload) = (&step.layer, &step.workload);

        let progress = Progress::spinner();
        let mut workspace = layer.workspace(&step.limits)?;
        let mut data = Data::new(device, &step.config, workload, args.on.seed, &progress)?;
        let made_from = step.made_from(&wanted, device, &progress);
        let mut indexed = Indexed::new(&made_from)?;
        let planned = workload.step(&layer.config().problem, workspace.limits())?;
        workspace.prepare(layer, &planned)?;
        let mut timer = Timer::new(device, [args.samples, args.warm_up], &progress)?;
        let mut steps = Steps::new(device, &mut indexed, workload, args.on.seed)?;
        steps.time(&mut timer, &mut indexed, &mut data, layer)?;
        let rows = steps.rows();
        drop(steps);
        whole(&mut timer, layer, &mut workspace, &mut indexed, &mut data)?;

        let (lists, outputs) =
            compare(&made_from, &mut indexed, &mut data, &workspace, args.check)?;
        let case = Case {
            requests: workload.requests.iter().map(|r| [r.q, r.kv]).collect(),
            heads: lists.index_heads,
            topk: lists.topk,
            samples: args.samples,
            warm_up: args.warm_up,
            layer: LayerCase {
                heads: model.heads,
                query_rank: indexed.query_rank(),
                kv: step.config.problem.kv_format.name(),
            },
        };
        progress.finish();
        let beside = args.peers.time(&case, rows)?;
        Ok(Report {
            model: model.name.clone(),
            device: about.description.clone(),
            batch: workload.label.clone(),
            backends: [step.selection.prefill.name, step.selection.decode.name].map(str::to_owned),
            environment: Environment::here(),
            protocol: timer.protocol,
            rows,
            parts: timer.rows,
            pass: lists.pass && outputs.pass,
            lists,
            largest_error: outputs.relative,
            beside,
        })
    }
}

/// Compares the lists and the outputs with the reference.
fn compare<D: IndexDevice>(
    run: &Run<'_, D>,
    indexed: &mut Indexed<D>,
    data: &mut Data<D>,
    workspace: &Space<D>,
    check: u32,
) -> std::result::Result<(ListErrors, Errors), CliError> {
    data.lists = match &indexed.lists(workspace)? {
        Some(lists) => Some(HostLists::read(run.device, lists)?),
        None => None,
    };
    let errors = compare_outputs(
        run.device,
        run.config,
        run.workload,
        data,
        workspace,
        check,
        run.seed,
        run.progress,
    )?;
    let lists = indexed
        .compare(run, data.lists.as_ref(), check)?
        .expect("a sparse layer has lists");
    Ok((lists, Errors::of_paths([errors.absorbed, errors.expanded])))
}
