//! `mla explain`: which backends a model gets on a GPU, and why not the others.

use std::fmt::Write as _;

use comfy_table::Cell;
use mla_runtime::model::KvFormat;
use mla_runtime::select::{Candidate, Explanation, Registry, SelectionRequest};
use mla_runtime::spec::{
    BackendSpec, Capability, Cause, Feature, GraphSupport, KernelFacts, Phase, Platform, Problem,
    QueryLen, Reason, Run, Target,
};

use crate::args::{Format, Model, ModelArgs, SparseArgs, kv_format, named, positive};
use crate::error::CliError;
use crate::table::{bold, counted, numbers, table};
use crate::target::{describe_build, describe_gpu, present_target};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The GPU's compute capability, such as 9.0. This machine need not have such a GPU
    /// [default: this machine's].
    #[arg(long, value_name = "CAPABILITY")]
    sm: Option<Capability>,
    #[command(flatten)]
    model: ModelArgs,
    /// The acceptable cache formats, the preferred one first [default: the dtype].
    #[arg(long, value_delimiter = ',', value_parser = kv_format())]
    kv: Vec<KvFormat>,
    /// The acceptable page sizes in tokens, the preferred one first.
    #[arg(long, value_delimiter = ',', default_value = "64", value_parser = positive)]
    page: Vec<u32>,
    /// Ask for this prefill backend, and no other.
    #[arg(long, value_name = "NAME")]
    prefill: Option<String>,
    /// Ask for this decode backend, and no other.
    #[arg(long, value_name = "NAME")]
    decode: Option<String>,
    /// Query lengths within a decode batch.
    #[arg(long, default_value = "single", value_parser = named(QueryLen::ALL, QueryLen::name))]
    query_len: QueryLen,
    /// Steps that have to be captured into CUDA graphs.
    #[arg(
        long,
        default_value = "never",
        value_parser = named(GraphSupport::ALL, GraphSupport::name)
    )]
    graphs: GraphSupport,
    /// Features beyond plain causal attention.
    #[arg(long, value_delimiter = ',', value_parser = named(Feature::ALL, Feature::name))]
    feature: Vec<Feature>,
    #[command(flatten)]
    form: SparseArgs,
    /// Spread the cache over ranks and merge their results.
    #[arg(long)]
    context_parallel: bool,
    /// Write the output quantised.
    #[arg(long)]
    quant_output: bool,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

pub(crate) fn output(args: &Args) -> Result<String, CliError> {
    let model = args.model.read()?;
    let target = args.sm.map_or_else(present_target, Target::dry_run);
    let features = args.feature.iter();
    let features = features.fold(model.features(), |all, feature| all.with(*feature));
    let problem = Problem::new(model.config.dims, model.heads, model.dtype)
        .with_query_len(args.query_len)
        .with_graphs(args.graphs)
        .with_context_parallel(args.context_parallel)
        .with_quant_output(args.quant_output)
        .with_sparse(args.form.read(&model))
        .with_features(features);
    let mut request = SelectionRequest::new(target, problem)
        .with_kv_formats(&args.kv)
        .with_page_sizes(&args.page);
    request.prefill.clone_from(&args.prefill);
    request.decode.clone_from(&args.decode);
    let explanation = Registry::linked()?.explain(&request)?;
    Ok(args.format.write(&explanation, || {
        let text = describe(&explanation, &model);
        // A GPU that the arguments name need not be present. A GPU of this machine is named in the
        // output.
        let here = match args.sm {
            Some(_) => String::new(),
            None => describe_gpu() + "\n",
        };
        here + &describe_build() + &text
    }))
}

fn describe(explanation: &Explanation, model: &Model) -> String {
    let problem = &explanation.problem;
    let mut text = format!(
        "{} on {}: {}, {}, {} cache in pages of {}\n{}\n",
        model.name,
        explanation.target,
        counted(problem.heads, "head"),
        problem.dtype,
        problem.kv_format,
        problem.page_size,
        problem.dims
    );
    for phase in [Phase::Prefill, Phase::Decode] {
        let [verdict, candidates] = [verdict, candidates].map(|it| it(explanation, phase));
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{verdict}\n{candidates}\n");
    }
    let _ = write!(text, "\n{}", model.engine_work());
    if let Some(slots) = model.config.index_topk {
        let _ = match problem.sparse {
            true => writeln!(
                text,
                "\nEach query token attends to {slots} slots, which the model's indexer chooses; \
                 --dense asks for all."
            ),
            false => writeln!(
                text,
                "\nThis model can attend to {slots} slots per query token; --sparse asks for that."
            ),
        };
    }
    text
}

fn verdict(explanation: &Explanation, phase: Phase) -> String {
    match (explanation.selected(phase), explanation.preferred(phase)) {
        (Some(chosen), _) => format!("{phase}: {}", chosen.spec.name),
        (None, Some(asked)) => format!("{phase}: none, since {} does not fit", asked.spec.name),
        (None, None) => match unbuilt(explanation.candidates(phase)) {
            Some((backend, cause)) => format!(
                "{phase}: none that fits is in this program; {backend} would be chosen: {}",
                cause.remedy()
            ),
            None => format!("{phase}: none fits"),
        },
    }
}

// Returns the first backend that is refused only because this program was built without it. A
// backend that has not run on any GPU is skipped.
fn unbuilt(candidates: &[Candidate]) -> Option<(&'static str, Cause)> {
    let has_run = |candidate: &&Candidate| {
        let runs = candidate.kernels.run_on;
        runs.is_none_or(|runs| !runs.is_empty())
    };
    candidates.iter().filter(has_run).find_map(|candidate| {
        let mut reasons = candidate.reasons.iter();
        match (reasons.next()?.cause(), reasons.next()) {
            (Some(cause @ Cause::FeatureOff { .. }), None) => Some((candidate.spec.name, cause)),
            _ => None,
        }
    })
}

fn candidates(explanation: &Explanation, phase: Phase) -> String {
    let mut table = table(["backend", "priority", "why"]);
    let chosen = explanation
        .selected(phase)
        .map(|candidate| candidate.spec.name);
    for candidate in explanation.candidates(phase) {
        let is_chosen = chosen == Some(candidate.spec.name);
        let mut why = if is_chosen {
            format!("selected, by {}", candidate.spec.provider)
        } else if candidate.is_valid() {
            format!("fits, by {}", candidate.spec.provider)
        } else {
            reasons(candidate)
        };
        // For a backend that cannot run here, the reasons suffice.
        if could_run(candidate) {
            let spec = &candidate.spec;
            let declared = [graphs(spec), overlap(spec), lse(spec)];
            let declared = declared.into_iter().flatten();
            for fact in declared.chain(facts(&candidate.kernels)) {
                why += "\n";
                why += &fact;
            }
        }
        let mut cells = [
            Cell::new(candidate.spec.name),
            Cell::new(candidate.priority),
            Cell::new(why),
        ];
        if is_chosen {
            cells = cells.map(bold);
        }
        table.add_row(cells);
    }
    numbers(&mut table, [1]);
    table.trim_fmt()
}

// True if no reason is against the backend, or if another build, crate or version would have it.
fn could_run(candidate: &Candidate) -> bool {
    let mut reasons = candidate.reasons.iter();
    reasons.all(|reason| reason.cause().is_some())
}

// Returns the reasons against the backend. For a backend of another platform, only the platform
// counts.
fn reasons(candidate: &Candidate) -> String {
    let all = || candidate.reasons.iter();
    let platform = all().find(|reason| reason.field() == "platform");
    let lines: Vec<_> = match platform {
        Some(reason) => vec![line(reason)],
        None => all().map(line).collect(),
    };
    lines.join("\n")
}

// Describes the decode steps that can be captured in a CUDA graph and replayed with other lengths.
fn graphs(spec: &BackendSpec) -> Option<String> {
    let steps = match spec.graphs {
        GraphSupport::Never => return None,
        GraphSupport::SingleToken => "of one token per request",
        GraphSupport::UniformBatch => "of equal query lengths",
        GraphSupport::Always => "of any query lengths",
    };
    (spec.phase == Phase::Decode).then(|| format!("CUDA graphs of steps {steps}"))
}

// Returns a note about a GPU backend that does not support dependent launches, which costs a fence
// before and after its calls.
fn overlap(spec: &BackendSpec) -> Option<String> {
    let apart = spec.platform != Platform::Cpu && !spec.dependent_launch;
    apart.then(|| "no kernel overlaps its calls: it declares no dependent_launch".to_owned())
}

// Describes the error of a log-sum-exp, if it is larger than that of f32.
fn lse(spec: &BackendSpec) -> Option<String> {
    let errors: Vec<_> = spec
        .dtypes
        .iter()
        .map(|dtype| (dtype, spec.lse_precision.error(*dtype)))
        .filter(|(_, error)| *error > 0.0)
        .map(|(dtype, error)| format!("{error:.1e} in {dtype}"))
        .collect();
    (!errors.is_empty()).then(|| format!("its log-sum-exp is off by up to {}", errors.join(", ")))
}

// Describes the targets of the backend's kernels and the GPUs that they ran on, if known.
fn facts(kernels: &KernelFacts) -> impl Iterator<Item = String> {
    let compiled = kernels.families_said().map(|families| {
        let targets: Vec<_> = families.iter().flat_map(|it| it.targets).copied().collect();
        format!("compiled for {}", targets.join(", "))
    });
    let run_on = kernels.run_on.map(|runs| match runs.is_empty() {
        true => "has run on no GPU yet".to_owned(),
        false => format!("has run on {}", same_runs(runs)),
    });
    compiled.into_iter().chain(run_on)
}

// Joins GPUs of one capability that ran the same commit on the same day.
fn same_runs(runs: &[Run]) -> String {
    let alike =
        runs.chunk_by(|a, b| (a.capability, a.date, a.commit) == (b.capability, b.date, b.commit));
    let texts: Vec<_> = alike
        .map(|runs| {
            let gpus: Vec<_> = runs.iter().map(|run| run.gpu).collect();
            let Run {
                capability,
                date,
                commit,
                ..
            } = runs[0];
            format!("{} (sm {capability}; {date}, {commit})", gpus.join(" and "))
        })
        .collect();
    texts.join(", ")
}

// Formats a reason in one short line. The table's heading has the problem and the backend already.
// The remedy for "not built" would be the same in every row, so it is left out.
fn line(reason: Reason) -> String {
    let (field, given, accepted) = (reason.field(), reason.given(), reason.accepted());
    match (reason.cause(), field) {
        (
            Some(
                Cause::NotBuilt
                | Cause::Needs(_)
                | Cause::Instead(_)
                | Cause::NotLinked(_)
                | Cause::NotRegistered,
            ),
            _,
        ) => given.to_string(),
        (Some(_), _) => reason.to_string(),
        (None, "lse" | "quant_output" | "sparse") => format!("{given}: takes {accepted}"),
        _ => format!("{field} {given}: takes {accepted}"),
    }
}
