//! Cases that try a backend within its spec.

mod accepted;
mod decode;
mod prefill;

use mla_runtime::backend::Entry;
use mla_runtime::select::{Registry, SelectionError};
use mla_runtime::spec::{BackendSpec, Feature, Problem, Target};

pub use decode::{decode, decode_entry};
pub use prefill::{prefill, prefill_entry};

use super::Failure;
use super::data::Bits;
use accepted::Accepted;

/// The cases of one phase, for one backend.
struct Cases<'a, C> {
    accepted: Accepted,
    plain: Problem,
    /// Makes a case from a problem and lengths.
    new: fn(Problem, &[usize]) -> C,
    /// Makes the backend for a case, and runs it.
    run: Box<dyn Fn(C) -> Result<Bits, Failure> + 'a>,
}

impl<'a, C> Cases<'a, C> {
    fn new(
        spec: BackendSpec,
        target: Target,
        new: fn(Problem, &[usize]) -> C,
        run: impl Fn(C) -> Result<Bits, Failure> + 'a,
    ) -> Result<Self, Failure> {
        let accepted = Accepted::new(spec, target)?;
        Ok(Self {
            plain: accepted.plainest,
            accepted,
            new,
            run: Box::new(run),
        })
    }

    fn check(&self, case: C) -> Result<(), Failure> {
        (self.run)(case).map(drop)
    }

    /// Checks a case with these lengths for each problem.
    fn each(&self, problems: Vec<Problem>, lens: &[usize]) -> Result<(), Failure> {
        let mut problems = problems.into_iter();
        problems.try_for_each(|problem| self.check((self.new)(problem, lens)))
    }

    /// Checks that a second run gives the same bits as the first, if the spec promises it.
    fn repeated(&self, case: impl Fn() -> C) -> Result<(), Failure> {
        let spec = &self.accepted.spec;
        if !spec.features.contains(Feature::Deterministic)
            || (self.run)(case())? == (self.run)(case())?
        {
            return Ok(());
        }
        Err(Failure::Differs {
            name: spec.name,
            problem: Box::new(self.plain),
            feature: Feature::Deterministic,
            how: "a second run gives other bits than the first",
        })
    }
}

fn registry(entry: Entry) -> Registry {
    let mut registry = Registry::empty();
    // The registry is empty, so the name is not taken.
    let _ = registry.add(entry);
    registry
}

fn unregistered(name: &'static str, error: SelectionError) -> Failure {
    Failure::Unregistered {
        name,
        error: Box::new(error),
    }
}
