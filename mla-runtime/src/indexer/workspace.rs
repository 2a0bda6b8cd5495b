//! The memory that the indexers of an engine share: scratch, and the lists of the current step.

use crate::backend::{DecodeStage, PrefillStage, SlotLists};
use crate::device::Device;
use crate::layer::{Workspace, device_plan};
use crate::model::DType;
use crate::plan::index::IndexNeeds;
use crate::plan::memory::{MemoryPlan, RegionName};
use crate::tensor::ArrayRef;
use crate::{Error, Result};

/// The scratch of an engine's indexers, and their lists. It is made once and used by one layer
/// after another.
pub struct IndexerWorkspace<D: Device> {
    pub(super) buffer: D::Buffer,
    pub(super) needs: IndexNeeds,
    /// The dtype of projected queries.
    pub(super) dtype: DType,
    /// The location of each tensor in the buffer.
    pub(super) plan: MemoryPlan,
    /// The step that the lists are for.
    pub(super) selected: Option<[u64; 2]>,
}

impl<D: Device> IndexerWorkspace<D> {
    pub(super) fn new(
        device: &D,
        needs: IndexNeeds,
        dtype: DType,
        plan: MemoryPlan,
    ) -> Result<Self> {
        Ok(Self {
            buffer: device.allocate(device_plan(plan.indexer_bytes)?)?,
            needs,
            dtype,
            plan,
            selected: None,
        })
    }

    /// Returns the plan of the allocated memory, without a cache.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The size of the buffer in bytes: the plan's `indexer_bytes`.
    pub fn allocated_bytes(&self) -> usize {
        D::byte_len(D::bytes(&self.buffer))
    }

    /// The number of query tokens that are scored at a time.
    pub fn rows(&self) -> usize {
        self.needs.rows as usize
    }

    /// The lists of the last selection, for the layer that made them and for those that share them.
    ///
    /// # Errors
    ///
    /// If the last selection was not for the step that `workspace` was last prepared for.
    pub fn lists<P, B>(&self, workspace: &Workspace<P, B>) -> Result<SlotLists<'_, D>>
    where
        P: PrefillStage<Device = D>,
        B: DecodeStage<Device = D>,
    {
        if self.selected != Some(workspace.step_id()) {
            let given = match self.selected {
                None => "none",
                Some(_) => "those of another step",
            };
            let accepted = "those of the prepared step: a layer with an indexer selects first";
            return Err(Error::argument("slot_lists", given, accepted));
        }
        let width = self.needs.config.list_width() as usize;
        let bytes = D::byte_range(
            D::bytes(&self.buffer),
            self.plan.range(RegionName::SlotLists),
        );
        let slots = ArrayRef::new(bytes, workspace.tokens() * width)?;
        Ok(SlotLists::new(slots, width))
    }

    /// Drops the lists. There are none until the next selection.
    pub(crate) fn forget(&mut self) {
        self.selected = None;
    }
}
