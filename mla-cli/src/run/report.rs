//! The result of a run.

use std::fmt::Write as _;

use comfy_table::{Cell, Table};
use mla_runtime::plan::memory::MemoryPlan;
use mla_runtime::select::{Explanation, Selection};
use mla_runtime::spec;
use serde::Serialize;

use super::deviation::Errors;
use super::measure::Timings;
use super::sparse::ListErrors;
use super::workload::Workload;
use crate::args::Model;
use crate::run::cost::Cost;
use crate::table::{bold, counted, number, numbers, size, table, wide_table};

/// The data from which a report is made.
pub(super) struct Run<'a> {
    pub model: &'a Model,
    pub device: &'a str,
    pub selection: &'a Selection,
    pub workload: &'a Workload,
    pub chunks: usize,
    pub rows: usize,
    pub memory: &'a MemoryPlan,
    pub timings: Timings,
    /// The errors of the absorbed and of the expanded path.
    pub errors: [Option<Errors>; 2],
    pub lists: Option<ListErrors>,
    pub seed: u32,
    pub repeat: u32,
}

/// The result of `mla run`.
#[derive(Serialize)]
pub(super) struct Report {
    model: String,
    dims: String,
    heads: u32,
    dtype: &'static str,
    kv_format: &'static str,
    split_cache: bool,
    page_size: u32,
    device: String,
    batch: String,
    context_rows: usize,
    context_chunks: usize,
    seed: u32,
    repeat: u32,
    /// The reasons for the choice of each backend.
    selection: [String; 2],
    memory: MemoryPlan,
    /// The lists that the indexer of a sparse layer made.
    #[serde(skip_serializing_if = "Option::is_none")]
    lists: Option<Selected>,
    phases: Vec<Phase>,
    /// True if every phase agrees with the reference.
    pub pass: bool,
}

/// The lists of a sparse layer.
#[derive(Serialize)]
struct Selected {
    /// The median time for writing index keys and making the lists.
    seconds: f64,
    #[serde(flatten)]
    errors: ListErrors,
}

/// The figures of one phase, or of all phases together.
#[derive(Serialize)]
struct Phase {
    phase: &'static str,
    backend: String,
    requests: usize,
    tokens: usize,
    seconds: f64,
    tokens_per_second: f64,
    gflop_per_second: f64,
    gb_per_second: f64,
    #[serde(flatten)]
    errors: Option<Errors>,
}

impl Phase {
    fn new(
        phase: &'static str,
        backend: &str,
        [requests, tokens]: [usize; 2],
        seconds: f64,
        cost: Cost,
        errors: Option<Errors>,
    ) -> Self {
        // If the clock is too coarse for the work, this is infinity, which JSON writes as null.
        let per_second = |amount: f64| amount / seconds;
        Self {
            phase,
            backend: backend.to_owned(),
            requests,
            tokens,
            seconds,
            tokens_per_second: per_second(tokens as f64),
            gflop_per_second: per_second(cost.flop / 1e9),
            gb_per_second: per_second(cost.bytes / 1e9),
            errors,
        }
    }
}

/// Returns the times of each path that requests took, and the arithmetic and traffic of both.
fn phases_of(run: &Run<'_>) -> (Vec<Phase>, Cost) {
    let Run {
        selection,
        workload,
        timings,
        errors,
        ..
    } = run;
    let problem = &selection.problem;
    let mut phases = Vec::new();
    let mut total = Cost::default();
    for (name, backend, requests, time, cost, errors) in [
        (
            "decode",
            selection.decode.name,
            workload.absorbed.clone(),
            timings.absorbed,
            workload.absorbed_cost(problem),
            errors[0],
        ),
        (
            "prefill",
            selection.prefill.name,
            workload.expanded(),
            timings.expanded,
            workload.expanded_cost(problem),
            errors[1],
        ),
    ] {
        let tokens = workload.tokens_of(&requests).len();
        total.flop += cost.flop;
        total.bytes += cost.bytes;
        if tokens > 0 {
            let counts = [requests.len(), tokens];
            phases.push(Phase::new(name, backend, counts, time, cost, errors));
        }
    }
    (phases, total)
}

impl Report {
    pub(super) fn new(run: Run<'_>) -> Self {
        let Run {
            selection,
            workload,
            timings,
            ..
        } = &run;
        let problem = &selection.problem;
        let (mut phases, total) = phases_of(&run);
        let pass = phases
            .iter()
            .all(|phase| phase.errors.is_some_and(|errors| errors.pass))
            && run.lists.is_none_or(|lists| lists.pass);
        let counts = [workload.requests.len(), workload.tokens()];
        phases.push(Phase::new("total", "", counts, timings.total, total, None));
        Self {
            model: run.model.name.clone(),
            dims: problem.dims.to_string(),
            heads: problem.heads,
            dtype: problem.dtype.name(),
            kv_format: problem.kv_format.name(),
            split_cache: problem.has_split_cache(),
            page_size: problem.page_size,
            device: run.device.to_owned(),
            batch: workload.label.clone(),
            context_rows: run.rows,
            context_chunks: run.chunks,
            seed: run.seed,
            repeat: run.repeat,
            selection: [
                why(&selection.explanation, spec::Phase::Decode),
                why(&selection.explanation, spec::Phase::Prefill),
            ],
            memory: run.memory.clone(),
            lists: run.lists.map(|errors| Selected {
                seconds: timings.selection,
                errors,
            }),
            phases,
            pass,
        }
    }

    pub(super) fn describe(&self) -> String {
        let mut text = format!(
            "{}: {}, {}, {}\n{} cache{} in pages of {}, on {}\n{}\n\n",
            self.model,
            self.dims,
            counted(self.heads, "head"),
            self.dtype,
            self.kv_format,
            if self.split_cache {
                " of two tensors"
            } else {
                ""
            },
            self.page_size,
            self.device,
            self.batch
        );
        for why in &self.selection {
            let _ = writeln!(text, "{why}");
        }
        let _ = writeln!(text, "\n{}", self.memory_table().trim_fmt());
        let _ = writeln!(text, "\n{}", self.phase_table().trim_fmt());
        let _ = writeln!(
            text,
            "Times are the median of {}, the total with the cache write. GFLOP/s and\n\
             GB/s count the arithmetic of each form and the bytes it has to move at least.\n\
             Errors are those of sampled rows against attention in f64: relative per row,\n\
             1 − cos over all of them.",
            counted(self.repeat, "run")
        );
        if let Some(lists) = &self.lists {
            let ListErrors {
                index_heads,
                index_head_dim,
                topk,
                lists: count,
                identical,
                largest_distance,
                ..
            } = lists.errors;
            let _ = writeln!(
                text,
                "\nThe indexer has {index_heads} heads of {index_head_dim} and chooses {topk} \
                 tokens, in {}.\n\
                 {identical} of {} compared with f64 are the same; in the others a token's\n\
                 logit is at most {} of the row's range from the last chosen one.\n\
                 The decode's costs are those of all context, of which lists leave some out.",
                time(lists.seconds),
                counted(count as u64, "list"),
                small(largest_distance)
            );
        }
        if self.context_chunks > 0 {
            let _ = writeln!(
                text,
                "Context was expanded in {} of at most {}.",
                counted(self.context_chunks as u64, "chunk"),
                counted(self.context_rows as u64, "row")
            );
        }
        text
    }

    fn memory_table(&self) -> Table {
        let mut table = table(["memory", "shape", "size"]);
        for region in &self.memory.regions {
            let shape: Vec<_> = region.shape.iter().map(u64::to_string).collect();
            table.add_row([
                region.name().to_owned(),
                shape.join(" × "),
                size(region.bytes),
            ]);
        }
        table.add_row([
            Cell::new("planned"),
            Cell::new(""),
            bold(Cell::new(size(self.memory.total_bytes))),
        ]);
        numbers(&mut table, [2]);
        table
    }

    // The table has a column for each phase, since there are more figures than phases.
    fn phase_table(&self) -> Table {
        let phases = &self.phases;
        let columns = std::iter::once("").chain(phases.iter().map(|phase| phase.phase));
        let mut table = wide_table(columns, 1..=phases.len());
        type Figure = (&'static str, fn(&Phase) -> String);
        let rows: [Figure; 12] = [
            ("backend", |phase| phase.backend.clone()),
            ("requests", |phase| phase.requests.to_string()),
            ("new tokens", |phase| phase.tokens.to_string()),
            ("time", |phase| time(phase.seconds)),
            ("tokens/s", |phase| number(phase.tokens_per_second)),
            ("GFLOP/s", |phase| number(phase.gflop_per_second)),
            ("GB/s", |phase| number(phase.gb_per_second)),
            ("rows checked", |phase| of(phase, |e| e.rows.to_string())),
            ("largest error", |phase| of(phase, |e| small(e.absolute))),
            ("relative", |phase| of(phase, |e| small(e.relative))),
            ("  accepted", |phase| of(phase, |e| small(e.tolerance))),
            ("1 − cos", |phase| {
                of(phase, |e| small(e.cosine_difference))
            }),
        ];
        for (name, figure) in rows {
            table.add_row(std::iter::once(name.to_owned()).chain(phases.iter().map(figure)));
        }
        let verdicts = phases.iter().map(|phase| {
            let pass = phase.errors.map_or(self.pass, |errors| errors.pass);
            bold(Cell::new(if pass { "pass" } else { "FAIL" }))
        });
        table.add_row(std::iter::once(Cell::new("verdict")).chain(verdicts));
        table
    }
}

/// Explains a phase's choice in one line.
fn why(explanation: &Explanation, phase: spec::Phase) -> String {
    let chosen = explanation.selected(phase);
    let chosen = chosen.map_or("none", |chosen| chosen.spec.name);
    let candidates = explanation.candidates(phase);
    let others = candidates.len().saturating_sub(1);
    let fitting = candidates
        .iter()
        .filter(|candidate| candidate.is_valid())
        .count()
        .saturating_sub(1);
    let reason = match (explanation.preferred(phase), fitting) {
        (Some(_), _) => "as asked for".to_owned(),
        (None, 0) => {
            format!("the only one that fits; `mla explain` says why not the {others} others")
        }
        (None, _) => format!("the first of those that fit; {fitting} more of {others} others do"),
    };
    format!("{phase}: {chosen}, {reason}")
}

fn of(phase: &Phase, figure: fn(&Errors) -> String) -> String {
    phase.errors.as_ref().map(figure).unwrap_or_default()
}

fn small(number: f64) -> String {
    format!("{number:.1e}")
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}
