//! The candidates and the result of a selection as data, for people and as JSON.

use std::fmt;

use serde::ser::{Serialize, SerializeMap as _, Serializer};

use crate::model::MlaDims;
use crate::select::HOW_TO_LINK;
use crate::spec::{
    BackendSpec, Feature, Field, KernelFacts, Phase, Problem, Reason, Reasons, Run, Target,
};

/// A backend that a selection considered.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Candidate {
    /// The problems that the backend supports.
    pub spec: BackendSpec,
    /// The facts of its kernels.
    pub kernels: KernelFacts,
    /// The backend's priority on the target.
    pub priority: i32,
    /// The reasons against the backend.
    pub reasons: Reasons,
}

impl Candidate {
    /// Returns true if there is no reason against the backend.
    pub const fn is_valid(&self) -> bool {
        self.reasons.is_empty()
    }

    /// Returns true if the only reason against the backend is its availability: it is not built,
    /// for example.
    pub fn applies(&self) -> bool {
        self.reasons
            .iter()
            .all(|reason| reason.field == Field::Availability)
    }
}

/// The candidates and the result of a selection.
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
    /// The problem of the request, with the chosen cache format and page size.
    pub problem: Problem,
    /// The candidates of each phase.
    pub(super) candidates: [Vec<Candidate>; 2],
    /// The indices of the backends that were asked for by name.
    pub(super) preferred: [Option<usize>; 2],
    /// The indices of the selected backends.
    pub(super) selected: [Option<usize>; 2],
}

impl Explanation {
    /// Returns true if a backend fits in both phases.
    pub fn fits(&self) -> bool {
        let mut phases = Phase::ALL.iter();
        phases.all(|phase| self.selected(*phase).is_some())
    }

    /// The candidates of a phase, in the order in which they are tried. Those that
    /// [apply](Candidate::applies) come first.
    pub fn candidates(&self, phase: Phase) -> &[Candidate] {
        &self.candidates[phase as usize]
    }

    /// The selected backend of a phase, if one fits.
    pub fn selected(&self, phase: Phase) -> Option<&Candidate> {
        self.candidates(phase).get(self.selected[phase as usize]?)
    }

    /// The backend of a phase that was asked for by name, if one was.
    pub fn preferred(&self, phase: Phase) -> Option<&Candidate> {
        self.candidates(phase).get(self.preferred[phase as usize]?)
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
        write!(
            f,
            "{}\n{}",
            Of(self, Phase::Prefill),
            Of(self, Phase::Decode)
        )
    }
}

/// The candidates of one phase, and the result for it.
struct Of<'a>(&'a Explanation, Phase);

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(explanation, phase) = *self;
        let candidates = explanation.candidates(phase);
        match (explanation.selected(phase), explanation.preferred(phase)) {
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
            (None, None) if candidates.is_empty() => {
                write!(
                    f,
                    "{phase}: none, because nothing is registered; {HOW_TO_LINK}"
                )?;
            }
            (None, None) => write!(f, "{phase}: none fits")?,
        }
        for candidate in candidates {
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

// Serialises a type as an object with these keys, in this order.
macro_rules! object {
    ($type:ty, |$it:ident| $($key:ident: $value:expr),+ $(,)?) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let $it = self;
                let mut object = serializer.serialize_map(None)?;
                $(object.serialize_entry(stringify!($key), &$value)?;)+
                object.end()
            }
        }
    };
}

object!(Explanation, |it|
    target: it.target,
    dims: it.problem.dims,
    heads: it.problem.heads,
    dtype: it.problem.dtype.name(),
    kv_format: it.problem.kv_format.name(),
    page_size: it.problem.page_size,
    query_len: it.problem.query_len.name(),
    graphs: it.problem.graphs.name(),
    context_parallel: it.problem.context_parallel,
    quant_output: it.problem.quant_output,
    sparse: it.problem.sparse,
    features: it.problem.features.iter().map(Feature::name).collect::<Vec<_>>(),
    prefill: Of(it, Phase::Prefill),
    decode: Of(it, Phase::Decode),
);

object!(Target, |it|
    platform: it.platform.name(),
    capability: it.capability.map(|capability| capability.to_string()),
    present: it.present,
);

object!(MlaDims, |it|
    latent: it.latent,
    nope: it.head.nope,
    rope: it.head.rope,
    v: it.head.v,
);

object!(Of<'_>, |it|
    selected: it.0.selected(it.1).map(|candidate| candidate.spec.name),
    candidates: it.0.candidates(it.1),
);

object!(Candidate, |it|
    name: it.spec.name,
    provider: it.spec.provider,
    priority: it.priority,
    valid: it.is_valid(),
    graphs: it.spec.graphs.name(),
    dependent_launch: it.spec.dependent_launch,
    lse_precision: it.spec.lse_precision.name(),
    // Null if the targets are not known.
    compiled_for: it.kernels.families_said().map(|families| {
        families.iter().flat_map(|family| family.targets).collect::<Vec<_>>()
    }),
    run_on: it.kernels.run_on,
    reasons: it.reasons.iter().collect::<Vec<_>>(),
);

object!(Run, |it|
    gpu: it.gpu,
    capability: it.capability.to_string(),
    date: it.date,
    commit: it.commit,
);

object!(Reason, |it|
    field: it.field.name(),
    given: it.given.to_string(),
    accepted: it.accepted.to_string(),
    message: it.to_string(),
);
