//! Graphs on the CPU. Nothing is launched there, so nothing is replayed. Enqueuing a step costs no
//! more than a replay.

use mla_cpu::Cpu;
use mla_runtime::Result;
use mla_runtime::prelude::*;

use super::Graphs;
use crate::memory::{Memory, Shared};
use crate::model::Model;

impl Graphs for Cpu {
    type Captured = ();

    fn capture(
        _: &Model<Self>,
        _: &mut Shared<Self>,
        _: &mut Memory<Self>,
        _: &[u32],
    ) -> Result<()> {
        Ok(())
    }

    fn replay((): &mut (), _: &Model<Self>, _: &mut Shared<Self>, _: &StepPlan) -> Result<bool> {
        Ok(false)
    }
}
