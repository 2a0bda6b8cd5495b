//! Which backends a request gets, and why.
//!
//! [`Registry::select`] chooses a prefill and a decode backend together with the cache format and
//! page size that both can work with; [`Registry::explain`] says the same without insisting on a
//! result, for this machine or for any other. The rules:
//!
//! - Candidates are tried from the highest priority on the target down, ties by name. The first
//!   against which nothing speaks is selected.
//! - A backend asked for by name is the only one tried. It is never replaced by another.
//! - What this build has not compiled for the target is never selected, and what has run on no GPU yet only by
//!   name ([`Kernels`](crate::kernels::Kernels)).
//! - Cache formats are tried in the order of the request. The first for which both phases have a
//!   backend is taken.
//! - Within a format, the page size whose decode backend has the highest priority is taken, ties by
//!   the order of the request.
//! - For hardware that is not this machine's, what this machine lacks (a driver, a device) does not
//!   count.

use std::cmp::Ordering;
use std::fmt::Write as _;

use crate::backend::{Entry, LayerConfig};
use crate::capability::Target;
use crate::dims::MlaDims;
use crate::dtype::DType;
use crate::error::Error;
use crate::explain::{Candidate, Explanation, PhaseExplanation};
use crate::feature::FeatureSet;
use crate::kv_format::KvFormat;
use crate::problem::Problem;
use crate::reason::Reasons;
use crate::registry::{HOW_TO_LINK, Registry, RegistryError};
use crate::spec::{BackendSpec, GraphSupport, Phase, QueryLen};

/// What an engine asks for: a model on some hardware, and the caches it could live with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// The hardware.
    pub target: Target,
    /// The model's dimensions.
    pub dims: MlaDims,
    /// Query heads on one device, after any tensor parallelism.
    pub heads: u32,
    /// The dtype of queries, weights and outputs.
    pub dtype: DType,
    /// The acceptable cache formats, the preferred one first.
    pub kv_formats: Vec<KvFormat>,
    /// The acceptable page sizes, the preferred one first.
    pub page_sizes: Vec<u32>,
    /// How query lengths differ within the batches sent to the decode backend.
    pub query_len: QueryLen,
    /// What has to be captured into CUDA graphs.
    pub graphs: GraphSupport,
    /// Whether the cache is split over ranks, so that results merge by their log-sum-exp.
    pub context_parallel: bool,
    /// Whether the output is to be written quantised.
    pub quant_output: bool,
    /// Whether each query attends to a list of slots instead of its whole context.
    pub sparse: bool,
    /// What is wanted beyond plain causal attention.
    pub features: FeatureSet,
    /// The prefill backend, by name; `None`: the best one.
    pub prefill: Option<String>,
    /// The decode backend, by name; `None`: the best one.
    pub decode: Option<String>,
}

impl Request {
    /// The backends of a [`Problem::new`], whichever they are.
    pub fn new(target: Target, dims: MlaDims, heads: u32, dtype: DType) -> Self {
        Self::of(target, &Problem::new(dims, heads, dtype))
    }

    /// The backends of one problem, whichever they are: one cache format and one page size.
    pub fn of(target: Target, problem: &Problem) -> Self {
        Self {
            target,
            dims: problem.dims,
            heads: problem.heads,
            dtype: problem.dtype,
            kv_formats: vec![problem.kv_format],
            page_sizes: vec![problem.page_size],
            query_len: problem.query_len,
            graphs: problem.graphs,
            context_parallel: problem.context_parallel,
            quant_output: problem.quant_output,
            sparse: problem.sparse,
            features: problem.features,
            prefill: None,
            decode: None,
        }
    }

    /// The problem on one cache format and page size.
    pub fn problem(&self, kv_format: KvFormat, page_size: u32) -> Problem {
        Problem {
            dims: self.dims,
            heads: self.heads,
            dtype: self.dtype,
            kv_format,
            page_size,
            query_len: self.query_len,
            graphs: self.graphs,
            context_parallel: self.context_parallel,
            quant_output: self.quant_output,
            sparse: self.sparse,
            features: self.features,
        }
    }

    fn preferred(&self, phase: Phase) -> Option<&str> {
        match phase {
            Phase::Prefill => self.prefill.as_deref(),
            Phase::Decode => self.decode.as_deref(),
        }
    }

    // What no backend could make up for.
    fn check(&self) -> Result<(), Error> {
        if self.kv_formats.is_empty() {
            return Err(Error::argument(
                "kv_formats",
                "an empty list",
                "at least one format",
            ));
        }
        if self.page_sizes.is_empty() {
            return Err(Error::argument(
                "page_sizes",
                "an empty list",
                "at least one size",
            ));
        }
        for kv_format in &self.kv_formats {
            for page_size in &self.page_sizes {
                if let Some(fault) = self.problem(*kv_format, *page_size).fault() {
                    return Err(fault.into());
                }
            }
        }
        Ok(())
    }
}

/// The backends of a request, the cache they share, and why these.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Selection {
    /// The prefill backend.
    pub prefill: BackendSpec,
    /// The decode backend.
    pub decode: BackendSpec,
    /// What was selected for, with the cache format and page size that were chosen.
    pub problem: Problem,
    /// Every candidate and what speaks against it.
    pub explanation: Explanation,
    /// What [`layer`](Self::layer) makes its backends with: prefill, decode.
    pub(crate) entries: [Entry; 2],
}

// Of two selections with the same specs and reasons, the entries are the same backends.
impl PartialEq for Selection {
    fn eq(&self, other: &Self) -> bool {
        let parts = |it: &Self| (it.prefill, it.decode, it.problem);
        parts(self) == parts(other) && self.explanation == other.explanation
    }
}

impl Eq for Selection {}

impl Selection {
    /// What to instantiate the backends with.
    pub const fn config(&self, softmax_scale: f32) -> LayerConfig {
        LayerConfig {
            problem: self.problem,
            softmax_scale,
        }
    }
}

/// Why there is no selection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelectionError {
    /// A name that is unknown.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The backend that was asked for does not fit. Another is not taken in its place.
    #[error("{phase}: {name} was asked for, but does not fit on {target}: {reasons}")]
    Refused {
        /// The phase.
        phase: Phase,
        /// The backend.
        name: &'static str,
        /// The hardware.
        target: Target,
        /// What speaks against it.
        reasons: Box<Reasons>,
    },
    /// No backend fits; what speaks against each is part of the message.
    #[error("{phase}: no backend fits on {}{}", explanation.target, refusals(explanation.phase(*phase)))]
    NoneFits {
        /// The phase.
        phase: Phase,
        /// Every candidate and what speaks against it.
        explanation: Box<Explanation>,
    },
    /// The program has no implementation of any backend.
    #[error("no backend is linked into this program; {HOW_TO_LINK}")]
    NothingLinked,
    /// The backend was made for devices of another type.
    #[error("device: given {given}, accepted the device type that {phase} backend {name} is for")]
    OtherDevice {
        /// The phase.
        phase: Phase,
        /// The backend.
        name: &'static str,
        /// The type of the device.
        given: &'static str,
    },
    /// The backend that was selected is not among the types that were listed.
    #[error(
        "{phase}: given {name} (by {provider}), accepted one of the listed types: {}; add its type to \
         the list, or make it through the registry",
        listed.join(", ")
    )]
    NoArm {
        /// The phase.
        phase: Phase,
        /// The backend.
        name: &'static str,
        /// Who provides it.
        provider: &'static str,
        /// The backends that are listed.
        listed: Vec<&'static str>,
    },
    /// The request or the device is at fault.
    #[error(transparent)]
    Runtime(#[from] Error),
}

// One line per candidate.
fn refusals(phase: &PhaseExplanation) -> String {
    phase
        .candidates
        .iter()
        .fold(String::new(), |mut lines, candidate| {
            // Writing to a string cannot fail.
            let _ = write!(lines, "\n  {}: {}", candidate.spec.name, candidate.reasons);
            lines
        })
}

/// Whether `a` is tried before `b` on this hardware: by priority, ties by name. Usable in constants,
/// so that a choice by the compiler is that of a selection at run time.
pub const fn tried_before(a: &BackendSpec, b: &BackendSpec, target: Target) -> bool {
    let (first, second) = (a.priority.on(target), b.priority.on(target));
    if first != second {
        return first > second;
    }
    name_before(a.name.as_bytes(), b.name.as_bytes())
}

const fn name_before(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() {
        if a[i] != b[i] {
            return a[i] < b[i];
        }
        i += 1;
    }
    a.len() < b.len()
}

/// The best of the candidates that were considered so far: of those against which nothing speaks, the
/// one that is tried before all others. Usable in constants, so that a choice by the compiler is that
/// of a selection at run time.
#[derive(Clone, Copy, Debug)]
pub struct Best<'a> {
    target: Target,
    chosen: Option<(usize, &'a BackendSpec)>,
}

impl<'a> Best<'a> {
    /// Of none.
    pub const fn on(target: Target) -> Self {
        Self {
            target,
            chosen: None,
        }
    }

    /// With one more candidate, which `index` stands for.
    #[must_use]
    pub const fn or(self, index: usize, spec: &'a BackendSpec, reasons: &Reasons) -> Self {
        let better = match self.chosen {
            Some((_, chosen)) => tried_before(spec, chosen, self.target),
            None => true,
        };
        if better && reasons.is_empty() {
            Self {
                target: self.target,
                chosen: Some((index, spec)),
            }
        } else {
            self
        }
    }

    /// The index of the best, where there is one.
    pub const fn index(self) -> Option<usize> {
        match self.chosen {
            Some((index, _)) => Some(index),
            None => None,
        }
    }
}

impl Registry {
    /// Chooses backends to run, and says which as a `tracing` event: the only one in this project, as
    /// nothing that runs per step logs.
    ///
    /// # Errors
    ///
    /// Where nothing is linked, a name is unknown, a backend that was asked for by name does not
    /// fit, or none fits; the reasons are part of the error.
    pub fn select(&self, request: &Request) -> Result<Selection, SelectionError> {
        let explanation = self.explain(request)?;
        let selected = |phase: Phase| -> Result<BackendSpec, SelectionError> {
            let of_phase = explanation.phase(phase);
            if let Some(candidate) = of_phase.selected() {
                return Ok(candidate.spec);
            }
            Err(match of_phase.preferred() {
                Some(candidate) => SelectionError::Refused {
                    phase,
                    name: candidate.spec.name,
                    target: request.target,
                    reasons: Box::new(candidate.reasons),
                },
                None if !self.is_implemented() => SelectionError::NothingLinked,
                None => SelectionError::NoneFits {
                    phase,
                    explanation: Box::new(explanation.clone()),
                },
            })
        };
        let (prefill, decode) = (selected(Phase::Prefill)?, selected(Phase::Decode)?);
        let problem = explanation.problem;
        tracing::info!(
            "attention on {}: {} and {}, {} cache in pages of {}",
            request.target,
            prefill.name,
            decode.name,
            problem.kv_format,
            problem.page_size
        );
        tracing::debug!("{explanation}");
        Ok(Selection {
            entries: [
                *self.get_on(request.target, Phase::Prefill, prefill.name)?,
                *self.get_on(request.target, Phase::Decode, decode.name)?,
            ],
            prefill,
            decode,
            problem,
            explanation,
        })
    }

    /// Says what would be chosen and why, whether or not anything fits. Where nothing fits in both
    /// phases, it is about the first cache format.
    ///
    /// # Errors
    ///
    /// Where a name is unknown, or the request makes no sense for any backend (no heads, no cache
    /// format, no page size).
    pub fn explain(&self, request: &Request) -> Result<Explanation, SelectionError> {
        request.check()?;
        for phase in [Phase::Prefill, Phase::Decode] {
            if let Some(name) = request.preferred(phase) {
                self.get(phase, name)?;
            }
        }
        let mut first = None;
        for kv_format in &request.kv_formats {
            let explanation = self.explain_format(request, *kv_format);
            if explanation.fits() {
                return Ok(explanation);
            }
            first.get_or_insert(explanation);
        }
        // The request has at least one format.
        first.ok_or_else(|| {
            Error::argument("kv_formats", "an empty list", "at least one format").into()
        })
    }

    // The best page size for one cache format.
    fn explain_format(&self, request: &Request, kv_format: KvFormat) -> Explanation {
        let first = request.page_sizes.first().copied().unwrap_or(1);
        let mut best = self.explain_problem(request, request.problem(kv_format, first));
        for page_size in request.page_sizes.iter().skip(1) {
            let other = self.explain_problem(request, request.problem(kv_format, *page_size));
            let priority =
                |explanation: &Explanation| explanation.decode.selected().map(|c| c.priority);
            // None, where nothing fits, is below every priority.
            if priority(&other) > priority(&best) {
                best = other;
            }
        }
        best
    }

    fn explain_problem(&self, request: &Request, problem: Problem) -> Explanation {
        let phase = |phase| self.explain_phase(request, &problem, phase);
        Explanation {
            target: request.target,
            problem,
            prefill: phase(Phase::Prefill),
            decode: phase(Phase::Decode),
        }
    }

    fn explain_phase(
        &self,
        request: &Request,
        problem: &Problem,
        phase: Phase,
    ) -> PhaseExplanation {
        let target = request.target;
        let candidate = |entry: &Entry| {
            let asked = request.preferred(phase) == Some(entry.spec.name);
            Candidate {
                spec: entry.spec,
                kernels: entry.kernels,
                priority: entry.spec.priority.on(target),
                reasons: Self::reasons_against(entry, target, problem, asked),
            }
        };
        let mut candidates: Vec<Candidate> = self.iter_on(target, phase).map(candidate).collect();
        candidates.sort_by(|a, b| {
            b.applies().cmp(&a.applies()).then_with(|| {
                if tried_before(&a.spec, &b.spec, target) {
                    Ordering::Less
                } else {
                    Ordering::Greater
                }
            })
        });
        let preferred = request
            .preferred(phase)
            .and_then(|name| candidates.iter().position(|c| c.spec.name == name));
        let selected = match preferred {
            Some(index) => Some(index).filter(|index| candidates[*index].is_valid()),
            None => {
                let all = candidates.iter().enumerate();
                all.fold(Best::on(target), |best, (index, candidate)| {
                    best.or(index, &candidate.spec, &candidate.reasons)
                })
                .index()
            }
        };
        PhaseExplanation::new(phase, candidates, preferred, selected)
    }
}
