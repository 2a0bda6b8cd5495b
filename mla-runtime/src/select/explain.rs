//! The candidates and the result of a selection, as data: for a person to read, or as JSON.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::model::MlaDims;
use crate::select::HOW_TO_LINK;
use crate::spec::{BackendSpec, Field, KernelFacts, Phase, Problem, Reason, Reasons, Run, Target};

/// A backend that was considered.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Candidate {
    /// The problems that it supports.
    pub spec: BackendSpec,
    /// The facts of its kernels.
    pub kernels: KernelFacts,
    /// Its priority on the target.
    pub priority: i32,
    /// Everything that speaks against it.
    pub reasons: Reasons,
}

impl Candidate {
    /// Returns true if nothing speaks against it.
    pub const fn is_valid(&self) -> bool {
        self.reasons.is_empty()
    }

    /// Returns true if nothing speaks against it but that it cannot run: it is not built, say.
    pub fn applies(&self) -> bool {
        self.reasons
            .iter()
            .all(|reason| reason.field == Field::Availability)
    }
}

/// The candidates of one phase.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PhaseExplanation {
    /// The phase.
    pub phase: Phase,
    /// The candidates that [apply](Candidate::applies), in the order in which they are tried; then
    /// the rest, in the same order.
    pub candidates: Vec<Candidate>,
    preferred: Option<usize>,
    selected: Option<usize>,
}

impl PhaseExplanation {
    pub(crate) const fn new(
        phase: Phase,
        candidates: Vec<Candidate>,
        preferred: Option<usize>,
        selected: Option<usize>,
    ) -> Self {
        Self {
            phase,
            candidates,
            preferred,
            selected,
        }
    }

    /// The backend that was selected, if one fits.
    pub fn selected(&self) -> Option<&Candidate> {
        self.candidates.get(self.selected?)
    }

    /// The backend that was asked for by name, if one was.
    pub fn preferred(&self) -> Option<&Candidate> {
        self.candidates.get(self.preferred?)
    }
}

/// The candidates and the choices of a selection.
///
/// Serialises as `{"target", …, "prefill": {"selected": NAME or null, "candidates": [{"name",
/// "provider", "priority", "valid", "graphs", "dependent_launch", "lse_precision", "compiled_for":
/// ["sm_90a"] or null, "run_on": [{"gpu", "capability", "date", "commit"}] or null, "reasons":
/// [{"field", "given", "accepted", "message"}]}]}, "decode": {…}}`.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// The hardware.
    pub target: Target,
    /// The problem of the request, with the cache format and page size that were chosen.
    pub problem: Problem,
    /// The prefill backends.
    pub prefill: PhaseExplanation,
    /// The decode backends.
    pub decode: PhaseExplanation,
}

impl Explanation {
    /// Returns true if both phases have a backend.
    pub fn fits(&self) -> bool {
        self.prefill.selected().is_some() && self.decode.selected().is_some()
    }

    /// The candidates of a phase.
    pub const fn phase(&self, phase: Phase) -> &PhaseExplanation {
        match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => &self.decode,
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem {
            dims,
            heads,
            dtype,
            kv_format,
            page_size,
            ..
        } = self.problem;
        writeln!(
            f,
            "On {}, for {dims}, {heads} heads, {dtype}, {kv_format} cache in pages of {page_size}:",
            self.target
        )?;
        write!(f, "{}\n{}", self.prefill, self.decode)
    }
}

impl fmt::Display for PhaseExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = self.phase;
        match (self.selected(), self.preferred()) {
            (Some(chosen), Some(_)) => write!(f, "{phase}: {}, as asked for", chosen.spec.name)?,
            (Some(chosen), None) => write!(
                f,
                "{phase}: {}, the first that fits (priority {})",
                chosen.spec.name, chosen.priority
            )?,
            (None, Some(asked)) => write!(
                f,
                "{phase}: none, because {} was asked for and does not fit",
                asked.spec.name
            )?,
            (None, None) if self.candidates.is_empty() => {
                write!(
                    f,
                    "{phase}: none, because nothing is registered; {HOW_TO_LINK}"
                )?;
            }
            (None, None) => write!(f, "{phase}: none fits")?,
        }
        for candidate in &self.candidates {
            write!(
                f,
                "\n  {} ({})",
                candidate.spec.name, candidate.spec.provider
            )?;
            if candidate.is_valid() {
                f.write_str(" fits")?;
            } else {
                write!(f, " does not: {}", candidate.reasons)?;
            }
        }
        Ok(())
    }
}

impl Serialize for Explanation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Report::of(self).serialize(serializer)
    }
}

// The JSON, as types: keys in the order in which they are written.

#[derive(Serialize)]
struct Report<'a> {
    target: TargetReport,
    dims: DimsReport,
    heads: u32,
    dtype: &'static str,
    kv_format: &'static str,
    page_size: u32,
    query_len: &'static str,
    graphs: &'static str,
    context_parallel: bool,
    quant_output: bool,
    sparse: bool,
    features: Vec<&'static str>,
    prefill: PhaseReport<'a>,
    decode: PhaseReport<'a>,
}

#[derive(Serialize)]
struct TargetReport {
    platform: &'static str,
    capability: Option<String>,
    present: bool,
}

#[derive(Serialize)]
struct DimsReport {
    latent: u32,
    nope: u32,
    rope: u32,
    v: u32,
}

#[derive(Serialize)]
struct PhaseReport<'a> {
    selected: Option<&'a str>,
    candidates: Vec<CandidateReport<'a>>,
}

#[derive(Serialize)]
struct CandidateReport<'a> {
    name: &'a str,
    provider: &'a str,
    priority: i32,
    valid: bool,
    graphs: &'static str,
    dependent_launch: bool,
    lse_precision: &'static str,
    // Null where it is not known.
    compiled_for: Option<Vec<&'static str>>,
    run_on: Option<Vec<RunReport>>,
    reasons: Vec<ReasonReport>,
}

#[derive(Serialize)]
struct RunReport {
    gpu: &'static str,
    capability: String,
    date: &'static str,
    commit: &'static str,
}

#[derive(Serialize)]
struct ReasonReport {
    field: &'static str,
    given: String,
    accepted: String,
    message: String,
}

impl<'a> Report<'a> {
    fn of(explanation: &'a Explanation) -> Self {
        let (target, problem) = (explanation.target, &explanation.problem);
        let MlaDims { latent, head } = problem.dims;
        Self {
            target: TargetReport {
                platform: target.platform.name(),
                capability: target.capability.map(|capability| capability.to_string()),
                present: target.present,
            },
            dims: DimsReport {
                latent,
                nope: head.nope,
                rope: head.rope,
                v: head.v,
            },
            heads: problem.heads,
            dtype: problem.dtype.name(),
            kv_format: problem.kv_format.name(),
            page_size: problem.page_size,
            query_len: problem.query_len.name(),
            graphs: problem.graphs.name(),
            context_parallel: problem.context_parallel,
            quant_output: problem.quant_output,
            sparse: problem.sparse,
            features: problem
                .features
                .iter()
                .map(|feature| feature.name())
                .collect(),
            prefill: PhaseReport::of(&explanation.prefill),
            decode: PhaseReport::of(&explanation.decode),
        }
    }
}

impl<'a> PhaseReport<'a> {
    fn of(phase: &'a PhaseExplanation) -> Self {
        Self {
            selected: phase.selected().map(|candidate| candidate.spec.name),
            candidates: phase
                .candidates
                .iter()
                .map(|candidate| CandidateReport {
                    name: candidate.spec.name,
                    provider: candidate.spec.provider,
                    priority: candidate.priority,
                    valid: candidate.is_valid(),
                    graphs: candidate.spec.graphs.name(),
                    dependent_launch: candidate.spec.dependent_launch,
                    lse_precision: candidate.spec.lse_precision.name(),
                    compiled_for: candidate.kernels.families_said().map(|families| {
                        let targets = families.iter().flat_map(|family| family.targets);
                        targets.copied().collect()
                    }),
                    run_on: candidate
                        .kernels
                        .run_on
                        .map(|runs| runs.iter().map(RunReport::of).collect()),
                    reasons: candidate.reasons.iter().map(ReasonReport::of).collect(),
                })
                .collect(),
        }
    }
}

impl RunReport {
    fn of(run: &Run) -> Self {
        Self {
            gpu: run.gpu,
            capability: run.capability.to_string(),
            date: run.date,
            commit: run.commit,
        }
    }
}

impl ReasonReport {
    fn of(reason: Reason) -> Self {
        Self {
            field: reason.field.name(),
            given: reason.given.to_string(),
            accepted: reason.accepted.to_string(),
            message: reason.to_string(),
        }
    }
}
