//! The rows of a file of cases.

use std::collections::BTreeMap;

use mla_runtime::backend::LayerConfig;
use mla_runtime::model::{DType, MlaDims};
use mla_runtime::spec::{Phase, Problem, QueryLen};

use super::rows::Rows;
use super::with_graphs;
use crate::bench::attention::{Attention, Kind};
use crate::bench::cases::{Case, CaseKind};
use crate::bench::job::{Job, Subject};
use crate::bench::lists::Lists;
use crate::bench::settings::{Key, SEED, Settings};
use crate::bench::site::Site;
use crate::error::CliError;
use crate::run::workload;
use crate::stopwatch::Stopwatch;

/// The rows of a file of cases, with numbers as its protocol says.
pub(crate) fn cases<D: Stopwatch>(
    site: &Site<'_, D>,
    settings: &Settings,
    cases: Vec<Case>,
) -> Result<Vec<Job>, CliError> {
    let mut rows = Rows::new(site, settings);
    for case in cases {
        add(&mut rows, case)?;
    }
    rows.finish()
}

fn add<D: Stopwatch>(rows: &mut Rows<'_, D>, case: Case) -> Result<(), CliError> {
    let (kind, phase, key, deviation) = match case.kind {
        CaseKind::Decode | CaseKind::Sparse { .. } => {
            (Kind::Decode, Phase::Decode, Key::Decode, 0.1)
        }
        CaseKind::Prefill { causal } => {
            (Kind::Prefill { causal }, Phase::Prefill, Key::Prefill, 1.0)
        }
    };
    let (problem, lists) = problem_of(&case, phase, rows.site.graphs);
    rows.note(&case.id, &[key], &[]);
    let queries: u64 = case.requests.iter().map(|r| u64::from(r.q)).sum();
    let keys: u64 = case.requests.iter().map(|r| u64::from(r.kv)).sum();
    let label = format!(
        "{} requests, {queries} query and {keys} kv tokens",
        case.requests.len()
    );
    for backend in rows.contenders.of(&problem, phase)? {
        let attention = Attention {
            backend,
            kind,
            config: LayerConfig::new(problem, 1.0 / (problem.dims.head.qk() as f32).sqrt()),
            requests: case.requests.clone(),
            deviation,
            layers: rows.settings.layers.unwrap_or(1) as usize,
            num_splits: None,
            seed: rows.settings.seed.unwrap_or(SEED).into(),
            lists,
        };
        rows.push(Job {
            case: case.id.clone(),
            contender: backend.to_owned(),
            label: label.clone(),
            parameters: BTreeMap::from([("heads", case.heads.to_string())]),
            subject: Subject::Attention(attention),
        })?;
    }
    Ok(())
}

/// The problem of a case: R1's dimensions in bf16, and pages of 64; with the lists of a sparse one.
fn problem_of(case: &Case, phase: Phase, graphs: bool) -> (Problem, Option<Lists>) {
    let query_len = match phase {
        Phase::Decode => workload::query_len(&case.requests),
        Phase::Prefill => QueryLen::Single,
    };
    let problem = Problem::new(MlaDims::R1, case.heads, DType::BF16).with_query_len(query_len);
    let (problem, lists) = match case.kind {
        CaseKind::Sparse { kv_format, lists } => {
            let problem = problem.with_kv_format(kv_format).with_sparse(true);
            (problem, Some(lists))
        }
        _ => (problem, None),
    };
    (with_graphs(problem, graphs, phase), lists)
}
