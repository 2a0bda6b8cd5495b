//! The errors of a registry and of a selection.

use std::fmt::Write as _;

use super::{Candidate, Explanation, HOW_TO_LINK};
use crate::Error;
use crate::spec::{Phase, Reasons, Target};

/// The reason why there is no selection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelectionError {
    /// Two backends of one phase have the same name.
    #[error(
        "name: given {name} for two {phase} backends, `{first}` and `{second}`, accepted one \
         backend of a name. Give one of them another name in its crate, or settle it in this \
         program with `Registry::linked_by`"
    )]
    Duplicate {
        /// The phase.
        phase: Phase,
        /// The name.
        name: &'static str,
        /// The [origin](crate::backend::Entry::origin) of the backend that had the name first.
        first: &'static str,
        /// The origin of the backend that has the name now.
        second: &'static str,
    },
    /// No backend has this name.
    #[error(
        "{phase}: given {given:?}, accepted {}{}",
        accepted_names(existing),
        suggestion.map_or_else(|| unless_linked(existing), |name| format!("; did you mean {name}?"))
    )]
    Unknown {
        /// The phase.
        phase: Phase,
        /// The name as given, cut if it is very long.
        given: String,
        /// The existing names of the phase.
        existing: Vec<&'static str>,
        /// The name that is most similar, if one is similar.
        suggestion: Option<&'static str>,
    },
    /// The backend that was asked for does not fit. No other backend replaces it.
    #[error("{phase}: {name} was asked for, but does not fit on {target}: {reasons}")]
    Refused {
        /// The phase.
        phase: Phase,
        /// The backend.
        name: &'static str,
        /// The hardware.
        target: Target,
        /// The reasons against the backend.
        reasons: Box<Reasons>,
    },
    /// No backend fits. The message contains the reasons against each.
    #[error(
        "{phase}: no backend fits on {}{}",
        explanation.target,
        refusals(explanation.candidates(*phase))
    )]
    NoneFits {
        /// The phase.
        phase: Phase,
        /// Every candidate with the reasons against it.
        explanation: Box<Explanation>,
    },
    /// The program has no implementation of any backend.
    #[error("no backend is linked into this program; {HOW_TO_LINK}")]
    NothingLinked,
    /// The backend needs devices of another type.
    #[error("device: given {given}, accepted the device type that {phase} backend {name} is for")]
    OtherDevice {
        /// The phase.
        phase: Phase,
        /// The backend.
        name: &'static str,
        /// The type of the device.
        given: &'static str,
    },
    /// The selected backend is not among the listed types.
    #[error(
        "{phase}: given {name} (by {provider}), accepted one of the listed types: {}; add its type \
         to the list, or make it through the registry",
        listed.join(", ")
    )]
    NoArm {
        /// The phase.
        phase: Phase,
        /// The backend.
        name: &'static str,
        /// The backend's provider.
        provider: &'static str,
        /// The backends that are listed.
        listed: Vec<&'static str>,
    },
    /// The request or the device has a fault.
    #[error(transparent)]
    Runtime(#[from] Error),
}

// One line per candidate.
fn refusals(candidates: &[Candidate]) -> String {
    candidates
        .iter()
        .fold(String::new(), |mut lines, candidate| {
            // Writing to a string cannot fail.
            let _ = write!(lines, "\n  {}: {}", candidate.spec.name, candidate.reasons);
            lines
        })
}

// Cargo does not link a dependency that no code names. Only this message tells the author about it.
fn unless_linked(existing: &[&str]) -> String {
    if existing.is_empty() {
        String::new()
    } else {
        "; if a crate provides it, name the crate in the program: `use its_crate as _;`".to_owned()
    }
}

pub(super) fn accepted_names(existing: &[&str]) -> String {
    if existing.is_empty() {
        format!("none, because the registry is empty: {HOW_TO_LINK}")
    } else {
        existing.join(", ")
    }
}
