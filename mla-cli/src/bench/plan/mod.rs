//! The rows of settings: every combination, and every reason why one cannot run, before any does.
//!
//! `axes` reads the batches and models of a sweep, `layer_settings` says how a layer runs a batch,
//! and `rows` collects what comes of them for each backend that is compared, for a `sweep` or for a
//! file of `cases`.

mod axes;
mod layer_settings;
mod names;
pub(crate) mod rows;
pub(super) mod sweep;

use mla_runtime::spec::{GraphSupport, Phase, Problem, QueryLen};

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
