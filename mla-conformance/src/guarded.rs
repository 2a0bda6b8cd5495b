//! A backend's own memory, between guards where the device has any.

use mla_runtime::Error;
use mla_runtime::device::Device;
use mla_runtime::spec::Problem;

use super::failure::{Failure, refused};

/// Calls of one backend for one problem that are held to their workspace.
pub(super) struct Guarded<'a, D> {
    name: &'static str,
    problem: Problem,
    device: &'a D,
}

impl<'a, D: Device> Guarded<'a, D> {
    pub(super) const fn new(name: &'static str, problem: Problem, device: &'a D) -> Self {
        Self {
            name,
            problem,
            device,
        }
    }

    pub(super) fn refused(
        &self,
        operation: &'static str,
    ) -> impl FnOnce(Error) -> Failure + use<D> {
        let (name, problem) = (self.name, self.problem);
        move |error| refused(problem, name, operation, error)
    }

    /// Returns what `make` gives, if its memory, between guards, is at most `said` bytes.
    pub(super) fn made<T>(
        &self,
        said: u64,
        make: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let Some(guards) = self.device.probe_guards() else {
            return make();
        };
        let before = guards.guarded_bytes();
        guards.guard(true);
        let made = make();
        guards.guard(false);
        let (made, allocated) = (made?, guards.guarded_bytes() - before);
        if allocated <= said {
            return Ok(made);
        }
        Err(Failure::Workspace {
            name: self.name,
            problem: Box::new(self.problem),
            said,
            allocated,
        })
    }

    /// Refuses what has written to a guard of memory that still lives.
    pub(super) fn check(&self) -> Result<(), Failure> {
        let damage = match self.device.probe_guards() {
            Some(guards) => guards.damage()?,
            None => None,
        };
        match damage {
            None => Ok(()),
            Some(damage) => Err(Failure::Beyond {
                name: self.name,
                problem: Box::new(self.problem),
                damage,
            }),
        }
    }
}
