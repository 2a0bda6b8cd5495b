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
    Lists, Model, ModelArgs, Progress, Stopwatch, Wanted, check_files, compare_outputs, positive,
    samples, warm_up,
};
use mla_runtime::indexer::IndexDevice;
use mla_runtime::spec::Problem;
use serde_json::json;

use self::report::Report;
use self::steps::{Steps, whole};
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
        let wanted = Wanted {
            model,
            on: &args.on,
            problem: Problem::new(model.config.dims, model.heads, model.dtype)
                .with_sparse(true)
                .with_kv_format(args.on.kv_format(model.dtype)),
            // The expanded form has no lists.
            threshold: u32::MAX,
            rows: None,
            prefill: None,
            decode: None,
        };
        let (step, selection, _) = wanted.step(device, about, |needs, limits| {
            Indexed::<D>::needs(needs, &model.config, limits)
        })?;
        let (layer, workload) = (&step.layer, &step.workload);

        let progress = Progress::spinner();
        let mut workspace = step.workspace()?;
        let mut data = Data::new(layer, workload, step.seed, &progress)?;
        let mut indexed = Indexed::new(&model.config, &step, &progress)?;
        let mut timer = Timer::new(device, [args.samples, args.warm_up], &progress)?;
        let mut steps = Steps::new(device, &mut indexed, workload, step.seed)?;
        steps.time(&mut timer, &mut indexed, &mut data, layer)?;
        let rows = steps.rows();
        drop(steps);
        whole(&mut timer, layer, &mut workspace, &mut indexed, &mut data)?;

        data.lists = match &indexed.lists(&workspace)? {
            Some(lists) => Some(HostLists::read(device, lists)?),
            None => None,
        };
        let outputs = compare_outputs(&step, &data, &workspace, args.check, &progress)?;
        let outputs = Errors::of_paths(outputs);
        let lists = indexed
            .compare(&step, data.lists.as_ref(), args.check, &progress)?
            .expect("a sparse layer has lists");
        let case = json!({
            // The numbers of query and kv tokens of each request.
            "requests": workload.requests.iter().map(|r| [r.q, r.kv]).collect::<Vec<_>>(),
            "heads": lists.index_heads,
            "topk": lists.topk,
            "samples": args.samples,
            "warm_up": args.warm_up,
            "layer": {
                "heads": model.heads,
                // The width of the latent from which queries are made.
                "query_rank": indexed.query_rank(),
                "kv": layer.config().problem.kv_format.name(),
            },
        });
        progress.finish();
        let beside = args.peers.time(case, workload.tokens(), rows)?;
        Ok(Report {
            model: model.name.clone(),
            device: about.description.clone(),
            batch: workload.label.clone(),
            backends: [selection.prefill.name, selection.decode.name].map(str::to_owned),
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
