//! `mla bench`: times attention, checks what it times, and says how far the limit is.

mod attention;
mod cases;
mod check;
mod cost;
mod measure;
mod random;
mod report;
mod statistics;

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::ValueEnum;
use mla_runtime::backend::LayerConfig;
use mla_runtime::capability::Platform;
use mla_runtime::dims::MlaDims;
use mla_runtime::dtype::DType;
use mla_runtime::problem::Problem;
use mla_runtime::registry::Registry;
use mla_runtime::selection::{Request, SelectionError};
use mla_runtime::spec::{GraphSupport, Phase, QueryLen};

use self::attention::{Attention, Kind};
use self::cases::{Case, CaseKind};
use self::report::{Report, Row, describe_requests};
use crate::args::{natural, positive};
use crate::device::{About, DeviceName, Job};
use crate::error::CliError;
use crate::stopwatch::{Protocol, Stopwatch};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cases in JSON, run by the protocol of their file.
    #[arg(long, value_name = "FILE")]
    cases: PathBuf,
    /// Only the cases whose ids begin so.
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    only: Vec<String>,
    /// Where to run.
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// The prefill backend [default: the best that fits].
    #[arg(long, value_name = "NAME")]
    prefill: Option<String>,
    /// The decode backend [default: the best that fits].
    #[arg(long, value_name = "NAME")]
    decode: Option<String>,
    /// Timed runs of each row.
    #[arg(long, value_name = "N", default_value = "30", value_parser = positive)]
    samples: u32,
    /// Runs of each row that do not count.
    #[arg(long, value_name = "N", default_value = "3", value_parser = natural)]
    warm_up: u32,
    /// Whether to replay a CUDA graph [default: on a GPU].
    #[arg(long)]
    graphs: Option<Switch>,
    /// Whether to fill the caches with something else before every sample.
    #[arg(long, default_value = "on")]
    cold_cache: Switch,
    /// Output rows of each case that are compared with the reference.
    #[arg(long, value_name = "N", default_value = "16", value_parser = positive)]
    check: u32,
    /// What the random numbers are made from.
    #[arg(long, value_name = "N", default_value = "1", value_parser = natural)]
    seed: u32,
    /// Where to write everything, samples included.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// On or off.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

/// The output, and whether every row agrees with the reference.
pub(crate) fn output(args: &Args) -> Result<(String, bool), CliError> {
    let report = args.device.run(Bench(args))?;
    if let Some(path) = &args.json {
        // Strings, numbers, lists and structs: nothing that JSON cannot hold.
        let json = serde_json::to_string_pretty(&report).expect("the report is JSON");
        std::fs::write(path, json + "\n")?;
    }
    Ok((report.describe(), report.pass()))
}

/// What is to be timed, on whichever device.
struct Bench<'a>(&'a Args);

impl Job for Bench<'_> {
    type Output = Report;

    fn run<D: Stopwatch>(self, device: &D, about: &About) -> Result<Report, CliError> {
        run(self.0, device, about)
    }
}

fn run<D: Stopwatch>(args: &Args, device: &D, about: &About) -> Result<Report, CliError> {
    let graphs = match (args.graphs, D::PLATFORM) {
        (Some(Switch::On), Platform::Cpu) => {
            return Err(CliError::Argument {
                argument: "--graphs",
                given: "on".to_owned(),
                accepted: "off: a CPU has no graphs to replay".to_owned(),
            });
        }
        (graphs, platform) => {
            graphs.map_or(platform == Platform::Cuda, |graphs| graphs == Switch::On)
        }
    };
    let protocol = Protocol {
        samples: args.samples as usize,
        warm_up: args.warm_up as usize,
        cold_cache: args.cold_cache == Switch::On,
        graphs,
    };
    let registry = Registry::linked()?;
    let (_, cases) = cases::read(&args.cases, &args.only)?;
    let mut attentions = Vec::new();
    for case in cases {
        attentions.push((
            case.id.clone(),
            attention(args, &registry, device, graphs, case)?,
        ));
    }
    for (id, attention) in &attentions {
        check_memory(id, attention, about.memory)?;
    }
    let mut flush = device.allocate(match protocol.cold_cache {
        true => device.flush_bytes(),
        false => 4,
    })?;
    let mut rows = Vec::new();
    for (id, attention) in attentions {
        let measured = measure::measure(
            &registry,
            device,
            &mut flush,
            &attention,
            &protocol,
            args.check as usize,
        )?;
        let batch = describe_requests(&attention.requests);
        let row = Row::new(id, batch, &attention, measured, None);
        eprintln!(
            "{} {} {:.1} µs, error {:.1e}",
            row.id, row.backend, row.e2e_us, row.errors.relative
        );
        rows.push(row);
    }
    Ok(Report {
        device: about.description.clone(),
        protocol,
        ceilings: None,
        rows,
    })
}

/// Refuses what would not fit into the device's memory, before anything is made.
fn check_memory(id: &str, attention: &Attention, available: Option<u64>) -> Result<(), CliError> {
    let (Some(available), needed) = (available, attention.bytes()) else {
        return Ok(());
    };
    if needed <= available {
        return Ok(());
    }
    let size = |bytes: u64| ByteSize(bytes).display().iec();
    Err(CliError::Argument {
        argument: "memory",
        given: format!("{id}, which takes {} at least", size(needed)),
        accepted: format!("what fits into the {} of the device", size(available)),
    })
}

fn attention<D: Stopwatch>(
    args: &Args,
    registry: &Registry,
    device: &D,
    graphs: bool,
    case: Case,
) -> Result<Attention, CliError> {
    let (kind, phase, deviation) = match case.kind {
        CaseKind::Decode => (Kind::Decode, Phase::Decode, 0.1),
        CaseKind::Prefill { causal } => (Kind::Prefill { causal }, Phase::Prefill, 1.0),
    };
    let first = case.requests[0].q;
    let query_len = match kind {
        Kind::Prefill { .. } => QueryLen::Single,
        Kind::Decode if case.requests.iter().any(|r| r.q != first) => QueryLen::Ragged,
        Kind::Decode if first == 1 => QueryLen::Single,
        Kind::Decode => QueryLen::Uniform,
    };
    let problem = Problem {
        query_len,
        graphs: match (graphs, kind, query_len) {
            (false, ..) => GraphSupport::Never,
            (_, Kind::Decode, QueryLen::Single) => GraphSupport::SingleToken,
            (_, Kind::Decode, QueryLen::Uniform) => GraphSupport::UniformBatch,
            _ => GraphSupport::Always,
        },
        ..Problem::new(MlaDims::R1, case.heads, DType::BF16)
    };
    let request = Request {
        prefill: args.prefill.clone(),
        decode: args.decode.clone(),
        ..Request::of(device.target(), &problem)
    };
    let explanation = registry.explain(&request)?;
    let Some(chosen) = explanation.phase(phase).selected() else {
        return Err(SelectionError::NoneFits {
            phase,
            explanation: Box::new(explanation),
        }
        .into());
    };
    Ok(Attention {
        backend: chosen.spec.name,
        kind,
        config: LayerConfig {
            problem,
            softmax_scale: 1.0 / (problem.dims.head.qk() as f32).sqrt(),
        },
        requests: case.requests,
        deviation,
        layers: 1,
        seed: args.seed.into(),
    })
}
