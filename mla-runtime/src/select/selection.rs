//! Chooses the backends for a request, and explains the choice.
//!
//! [`Registry::select`] chooses a prefill and a decode backend, together with a cache format and a
//! page size that both support. [`Registry::explain`] returns the same information even if nothing
//! fits, for this machine or for any other. The rules:
//!
//! - Candidates are tried in the order of their priority on the target, the highest first. Equal
//!   priorities are ordered by name. The first candidate without a reason against it is selected.
//! - If a backend is asked for by name, no other one is tried. It is never replaced by another.
//! - A backend that this build has not compiled for the target is never selected. A backend that
//!   has not yet run on a GPU is selected only by name ([`KernelFacts`](crate::spec::KernelFacts)).
//! - Cache formats are tried in the order of the request. The first format with a backend for both
//!   phases is chosen.
//! - Within a format, the page size whose decode backend has the highest priority is chosen. Equal
//!   priorities are decided by the order of the request.
//! - For hardware of another machine, it does not matter that this machine lacks a driver or a
//!   device.

use std::cmp::Ordering;

use crate::Error;
use crate::backend::{Entry, LayerConfig};
use crate::model::KvFormat;
use crate::select::{Candidate, Explanation, Registry, SelectionError};
use crate::spec::{BackendSpec, Phase, Problem, Target};

/// The request of a selection: a problem on some hardware, and the other acceptable caches.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SelectionRequest {
    /// The hardware.
    pub target: Target,
    /// The problem, with the preferred cache format and page size.
    pub problem: Problem,
    /// The other acceptable cache formats, in the order of preference.
    pub other_kv_formats: Vec<KvFormat>,
    /// The other acceptable page sizes, in the order of preference.
    pub other_page_sizes: Vec<u32>,
    /// The name of the prefill backend; `None` selects the best one.
    pub prefill: Option<String>,
    /// The name of the decode backend; `None` selects the best one.
    pub decode: Option<String>,
}

impl SelectionRequest {
    /// A request for any backends for one problem, with its own cache format and page size.
    pub const fn new(target: Target, problem: Problem) -> Self {
        Self {
            target,
            problem,
            other_kv_formats: Vec::new(),
            other_page_sizes: Vec::new(),
            prefill: None,
            decode: None,
        }
    }

    /// The same request with these cache formats, the preferred one first. An empty list means the
    /// problem's own.
    #[must_use]
    pub fn with_kv_formats(mut self, kv_formats: &[KvFormat]) -> Self {
        if let [preferred, others @ ..] = kv_formats {
            self.problem.kv_format = *preferred;
            self.other_kv_formats = others.to_vec();
        }
        self
    }

    /// The same request with these page sizes, the preferred one first. An empty list means the
    /// problem's own.
    #[must_use]
    pub fn with_page_sizes(mut self, page_sizes: &[u32]) -> Self {
        if let [preferred, others @ ..] = page_sizes {
            self.problem.page_size = *preferred;
            self.other_page_sizes = others.to_vec();
        }
        self
    }

    /// The same request with the prefill backend of this name.
    #[must_use]
    pub fn with_prefill(mut self, name: impl Into<String>) -> Self {
        self.prefill = Some(name.into());
        self
    }

    /// The same request with the decode backend of this name.
    #[must_use]
    pub fn with_decode(mut self, name: impl Into<String>) -> Self {
        self.decode = Some(name.into());
        self
    }

    fn kv_formats(&self) -> impl Iterator<Item = KvFormat> {
        std::iter::once(self.problem.kv_format).chain(self.other_kv_formats.iter().copied())
    }

    fn page_sizes(&self) -> impl Iterator<Item = u32> {
        std::iter::once(self.problem.page_size).chain(self.other_page_sizes.iter().copied())
    }

    fn preferred(&self, phase: Phase) -> Option<&str> {
        match phase {
            Phase::Prefill => self.prefill.as_deref(),
            Phase::Decode => self.decode.as_deref(),
        }
    }

    // Refuses requests with faults that rule out every backend.
    fn check(&self) -> Result<(), Error> {
        for kv_format in self.kv_formats() {
            for page_size in self.page_sizes() {
                let problem = self.problem.with_kv_format(kv_format);
                if let Some(fault) = problem.with_page_size(page_size).fault() {
                    return Err(fault.into());
                }
            }
        }
        Ok(())
    }
}

/// The backends for a request, the cache they share, and the explanation of the choice.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Selection {
    /// The prefill backend.
    pub prefill: BackendSpec,
    /// The decode backend.
    pub decode: BackendSpec,
    /// The problem of the request, with the chosen cache format and page size.
    pub problem: Problem,
    /// Every candidate with the reasons against it.
    pub explanation: Explanation,
    /// The entries from which [`layer`](Self::layer) makes its backends: prefill, decode.
    pub(crate) entries: [Entry; 2],
}

// The entries are not compared: two selections with the same specs and reasons have the same
// entries.
impl PartialEq for Selection {
    fn eq(&self, other: &Self) -> bool {
        let parts = |it: &Self| (it.prefill, it.decode, it.problem);
        parts(self) == parts(other) && self.explanation == other.explanation
    }
}

impl Eq for Selection {}

impl Selection {
    /// Returns the configuration for making the backends.
    pub const fn config(&self, softmax_scale: f32) -> LayerConfig {
        LayerConfig::new(self.problem, softmax_scale)
    }
}

/// Returns true if `a` is tried before `b` on this hardware: by priority, then by name. Usable in
/// constants, so that the compiler chooses as a selection at run time does.
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

impl Registry {
    /// Chooses backends to run, and logs them as a `tracing` event, with the explanation as an
    /// event of level debug. All other events of this project report problems with a GPU, such as a
    /// resource that could not be released. Code that runs per step does not log.
    ///
    /// # Errors
    ///
    /// If nothing is linked, if a name is unknown, if a backend that was asked for by name does not
    /// fit, or if no backend fits. The error contains the reasons.
    pub fn select(&self, request: &SelectionRequest) -> Result<Selection, SelectionError> {
        let explanation = self.explain(request)?;
        let selected = |phase: Phase| -> Result<BackendSpec, SelectionError> {
            if let Some(candidate) = explanation.selected(phase) {
                return Ok(candidate.spec);
            }
            Err(match explanation.preferred(phase) {
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

    /// Explains what would be chosen and why, even if nothing fits. If no cache format has a
    /// backend for both phases, the explanation is for the first format.
    ///
    /// # Errors
    ///
    /// If a name is unknown, or if the request makes no sense for any backend (no heads, pages of
    /// no tokens).
    pub fn explain(&self, request: &SelectionRequest) -> Result<Explanation, SelectionError> {
        request.check()?;
        for phase in [Phase::Prefill, Phase::Decode] {
            if let Some(name) = request.preferred(phase) {
                self.get(phase, name)?;
            }
        }
        let preferred = self.explain_format(request, request.problem.kv_format);
        if preferred.fits() {
            return Ok(preferred);
        }
        let others = request.other_kv_formats.iter();
        let mut others = others.map(|kv_format| self.explain_format(request, *kv_format));
        Ok(others.find(Explanation::fits).unwrap_or(preferred))
    }

    // Explains the best page size for one cache format.
    fn explain_format(&self, request: &SelectionRequest, kv_format: KvFormat) -> Explanation {
        let problem = request.problem.with_kv_format(kv_format);
        let mut best = self.explain_problem(request, problem);
        for page_size in &request.other_page_sizes {
            let other = self.explain_problem(request, problem.with_page_size(*page_size));
            let priority = |it: &Explanation| it.selected(Phase::Decode).map(|c| c.priority);
            // If nothing fits, the priority is `None`, which is less than every priority.
            if priority(&other) > priority(&best) {
                best = other;
            }
        }
        best
    }

    fn explain_problem(&self, request: &SelectionRequest, problem: Problem) -> Explanation {
        let [prefill, decode] = [Phase::Prefill, Phase::Decode]
            .map(|phase| self.explain_phase(request, &problem, phase));
        Explanation {
            target: request.target,
            problem,
            candidates: [prefill.0, decode.0],
            preferred: [prefill.1, decode.1],
            selected: [prefill.2, decode.2],
        }
    }

    // Returns the candidates, and the indices of the preferred and of the selected one.
    fn explain_phase(
        &self,
        request: &SelectionRequest,
        problem: &Problem,
        phase: Phase,
    ) -> (Vec<Candidate>, Option<usize>, Option<usize>) {
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
            None => candidates.iter().position(Candidate::is_valid),
        };
        (candidates, preferred, selected)
    }
}
