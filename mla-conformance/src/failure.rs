//! Failures of a backend.

use mla_runtime::Error;
use mla_runtime::select::SelectionError;
use mla_runtime::spec::{Feature, Problem, Reasons, Target};

/// The reason why a backend does not conform, with a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The spec accepts none of the problems of this suite on the device.
    #[error(
        "{name}: the spec accepts no problem of this suite on {target}; what speaks against the \
         plainest: {reasons}. Give it a device that it accepts, or widen the keys of #[mla_backend]"
    )]
    NothingAccepted {
        /// The backend.
        name: &'static str,
        /// The device's hardware.
        target: Target,
        /// The reasons against the plainest problem of the suite.
        reasons: Box<Reasons>,
    },
    /// The implementation refuses what the spec accepts.
    #[error(
        "{name}: the spec accepts {}, but `{operation}` refuses it: {error}. Narrow the key of \
         #[mla_backend] that lets it through, or make the implementation take it",
        describe(problem)
    )]
    Refused {
        /// The backend.
        name: &'static str,
        /// The refused problem.
        problem: Box<Problem>,
        /// The function of the backend that refused.
        operation: &'static str,
        /// The error that it returned.
        #[source]
        error: Error,
    },
    /// A number differs from the reference.
    #[error(
        "{name}: {what} is {got}, but should be {want} within {tolerance}, for {}. If the \
         implementation is not meant for this, narrow the key of #[mla_backend] that lets it \
         through",
        describe(problem)
    )]
    Wrong {
        /// The backend.
        name: &'static str,
        /// The problem that was computed.
        problem: Box<Problem>,
        /// Name of the number.
        what: String,
        /// The value that the backend wrote.
        got: f64,
        /// The value of the reference.
        want: f64,
        /// The maximum difference.
        tolerance: f64,
    },
    /// Memory between the output's rows was written.
    #[error(
        "{name}: wrote byte {byte} of {tensor}, which lies between its rows, for {}. Use the \
         strides of the output's layout",
        describe(problem)
    )]
    Touched {
        /// The backend.
        name: &'static str,
        /// The problem that was computed.
        problem: Box<Problem>,
        /// Name of the output.
        tensor: &'static str,
        /// Index of the byte that was written.
        byte: usize,
    },
    /// A case fails only when the backend is held to one of its promises.
    #[error("{name}: {}: {failure}. {}", promise.tried(), promise.remedy())]
    Broken {
        /// The backend.
        name: &'static str,
        /// The promise.
        promise: Promise,
        /// The failure of the case, which passes without the promise.
        #[source]
        failure: Box<Self>,
    },
    /// State and metadata take more memory than `workspace_bytes` says.
    #[error(
        "{name}: state and metadata allocate {allocated} bytes, but `workspace_bytes` says {said}, \
         for {}. Count all of them",
        describe(problem)
    )]
    Workspace {
        /// The backend.
        name: &'static str,
        /// The problem that it was made for.
        problem: Box<Problem>,
        /// The bytes that `workspace_bytes` says.
        said: u64,
        /// The bytes that were allocated.
        allocated: u64,
    },
    /// Memory outside the state and the metadata was written.
    #[error(
        "{name}: wrote beyond its workspace, {damage}, for {}. Let `workspace_bytes` and `state` \
         take as much as the kernels write, or refuse what needs more",
        describe(problem)
    )]
    Beyond {
        /// The backend.
        name: &'static str,
        /// The problem that was computed.
        problem: Box<Problem>,
        /// The memory that was written.
        damage: String,
    },
    /// Two runs with the same inputs differ, although the spec says `deterministic`. Or a request
    /// has other bits than when it runs alone, although the spec says `batch_invariant`.
    #[error(
        "{name}: {how}, for {}. Make the order of additions the same in every run, or remove the \
         feature `{feature}`",
        describe(problem)
    )]
    Differs {
        /// The backend.
        name: &'static str,
        /// The problem that was computed.
        problem: Box<Problem>,
        /// The feature that is promised.
        feature: Feature,
        /// Description of the second run.
        how: &'static str,
    },
    /// The registry does not return the backend.
    #[error("{name}: the registry does not give it: {error}")]
    Unregistered {
        /// The backend.
        name: &'static str,
        /// The registry's reason.
        #[source]
        error: Box<SelectionError>,
    },
    /// A device accepts an operand that does not fit, or refuses it under another name.
    #[error(
        "{name}, which does not fit: {said}. Refuse it by this name before anything is written"
    )]
    NotRefused {
        /// The operand.
        name: &'static str,
        /// The error, or a text that says that there was none.
        said: String,
    },
    /// The device failed before the backend was called.
    #[error("the device failed: {0}")]
    Device(#[from] Error),
}

/// A promise of a spec that a case tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Promise {
    /// The key `dependent_launch`. Without it, the device promises that nothing overlaps with the
    /// backend's calls.
    DependentLaunch,
    /// The key `graphs`.
    Graphs,
    /// The key `alignment`.
    Alignment,
}

impl Promise {
    /// Wraps the failure of a case that passes without the promise.
    pub(crate) fn broken(self, name: &'static str) -> impl FnOnce(Failure) -> Failure {
        move |failure| Failure::Broken {
            name,
            promise: self,
            failure: Box::new(failure),
        }
    }

    const fn tried(self) -> &'static str {
        match self {
            Self::DependentLaunch => {
                "between a kernel that writes its inputs late and one that reads its results early"
            }
            Self::Graphs => "captured into a graph and replayed with other inputs",
            Self::Alignment => "with tensors that are no better aligned than the spec asks for",
        }
    }

    const fn remedy(self) -> &'static str {
        match self {
            Self::DependentLaunch => {
                "Let every kernel wait (griddepcontrol.wait) before its first access and end \
                 behind that, or remove the key `dependent_launch`"
            }
            Self::Graphs => {
                "Read lengths and tables on the device, from the call's own arrays, or narrow the \
                 key `graphs`"
            }
            Self::Alignment => "Widen the key `alignment` to what the kernel reads at a time",
        }
    }
}

// Lists the keys of the attribute, with the problem's value of each.
fn describe(problem: &Problem) -> String {
    let mut text = format!(
        "{}, heads = {}, dtype = {}, kv = {}, page size = {}, query_len = {}",
        problem.dims,
        problem.heads,
        problem.dtype,
        problem.kv_format,
        problem.page_size,
        problem.query_len
    );
    if problem.sparse {
        text += ", sparse";
    }
    if problem.quant_output {
        text += ", quant_output";
    }
    text
}

/// Makes the failure of a backend whose function `operation` refused a problem that its spec
/// accepts.
pub(crate) fn refused(
    problem: Problem,
    name: &'static str,
    operation: &'static str,
    error: Error,
) -> Failure {
    Failure::Refused {
        name,
        problem: Box::new(problem),
        operation,
        error,
    }
}
