//! Replays of captured steps.

mod cpu;
#[cfg(feature = "gpu")]
mod cuda;

use mla_runtime::Result;
use mla_runtime::prelude::*;

use crate::memory::{Memory, Shared};
use crate::model::Model;
use crate::operations::Operations;

/// A device that replays decode steps if this makes them faster.
pub trait Graphs: Operations {
    /// The steps that can be replayed.
    type Captured: Send;

    /// Captures the model's work for decode steps: for each of these numbers of new tokens, and for
    /// several numbers of requests.
    ///
    /// # Errors
    ///
    /// If something cannot be captured.
    fn capture(
        model: &Model<Self>,
        shared: &mut Shared<Self>,
        memory: &mut Memory<Self>,
        query_lens: &[u32],
    ) -> Result<Self::Captured>;

    /// Replays a step if there is a graph for it. Returns true if there is one.
    ///
    /// # Errors
    ///
    /// If the step does not fit the graph, or the device fails.
    fn replay(
        graphs: &mut Self::Captured,
        model: &Model<Self>,
        shared: &mut Shared<Self>,
        step: &StepPlan,
    ) -> Result<bool>;
}
