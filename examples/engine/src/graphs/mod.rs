//! Replays of steps that a device has run before.

mod cpu;
#[cfg(feature = "gpu")]
mod cuda;

use mla_runtime::Result;
use mla_runtime::prelude::*;

use crate::memory::{Memory, Shared};
use crate::model::Model;
use crate::operations::Operations;

/// A device that replays steps of decodes, if there is anything to gain from it.
pub trait Graphs: Operations {
    /// The steps that can be replayed.
    type Captured: Send;

    /// Captures what the model enqueues for steps of decodes, one for each of these numbers of new
    /// tokens and several numbers of requests.
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

    /// Replays a step if there is a graph for it, and says whether there was.
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
