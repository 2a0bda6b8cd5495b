//! The rows of settings: every combination, and every reason why one cannot run, before any does.
//!
//! `axes` reads the batches and models of a sweep, `way` says how a layer runs a batch,
//! `contenders` finds the backends that are compared, and `rows` collects what comes of them, for a
//! `sweep` or for a file of `cases`.

mod axes;
mod cases;
mod contenders;
mod names;
mod rows;
mod sweep;
mod way;

use mla_runtime::spec::{GraphSupport, Phase, Platform, Problem, QueryLen};

pub(super) use self::cases::cases;
pub(super) use self::contenders::ALL;
pub(super) use self::sweep::sweep;
use super::settings::{Settings, Switch};
use crate::error::CliError;
use crate::stopwatch::{Protocol, Stopwatch};

/// The protocol by which samples are taken.
pub(super) fn protocol<D: Stopwatch>(settings: &Settings) -> Result<Protocol, CliError> {
    let on_gpu = D::PLATFORM == Platform::Cuda;
    let graphs = settings
        .graphs
        .map_or(on_gpu, |graphs| graphs == Switch::On);
    if graphs && !on_gpu {
        return Err(CliError::argument(
            "graphs",
            "on",
            "off: a CPU has no graphs to replay",
        ));
    }
    Ok(Protocol {
        samples: settings.samples.unwrap_or(30) as usize,
        warm_up: settings.warm_up.unwrap_or(3) as usize,
        cold_cache: settings.cold_cache != Some(Switch::Off),
        graphs,
    })
}

/// The problem with the graph support that it takes.
const fn with_graphs(problem: Problem, graphs: bool, phase: Phase) -> Problem {
    let graphs = match (graphs, phase, problem.query_len) {
        (false, ..) => GraphSupport::Never,
        (_, Phase::Decode, QueryLen::Single) => GraphSupport::SingleToken,
        (_, Phase::Decode, QueryLen::Uniform) => GraphSupport::UniformBatch,
        _ => GraphSupport::Always,
    };
    problem.with_graphs(graphs)
}
