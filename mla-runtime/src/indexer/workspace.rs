//! What the indexers of an engine share: scratch, and the lists of the present step.

use std::ops::Range;

use super::{IndexDims, Indexer};
use crate::backend::{DecodeStage, PrefillStage, SlotLists, StepLimits};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::layer::{Workspace, WorkspaceId};
use crate::plan::memory::MemoryPlan;
use crate::tensor::ArrayRef;

/// The columns of the logits are a multiple of this: rows then begin at multiples of 1024 bytes.
const COLUMNS: usize = 256;

/// What a selection's scratch is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexLimits {
    /// The limits of the steps, as the layer's workspace has them.
    pub steps: StepLimits,
    /// The bytes of logits that are there at a time. Tokens are scored so many at a time that their
    /// rows fit, or one by one if not even one does.
    pub logits_bytes: u64,
}

impl IndexLimits {
    /// Steps within `steps`, with 256 MiB of logits: 512 rows of a context of 128k tokens.
    pub const fn new(steps: StepLimits) -> Self {
        Self {
            steps,
            logits_bytes: 256 << 20,
        }
    }
}

/// What an indexer adds to a [memory plan](crate::plan::memory).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexNeeds {
    /// The indexer's extents.
    pub dims: IndexDims,
    /// The layers that have an index cache; see [`IndexLayers`](super::IndexLayers).
    pub layers: u32,
    /// The most query tokens of a step.
    pub tokens: u32,
    /// The query tokens that are scored at a time.
    pub rows: u32,
    /// The columns of the logits: the most tokens of a request, or more.
    pub columns: u32,
}

impl IndexNeeds {
    /// What one layer needs within `limits` on pages of `page_size` tokens.
    ///
    /// # Errors
    ///
    /// If a limit is out of range.
    pub fn of(dims: IndexDims, limits: &IndexLimits, page_size: u32) -> Result<Self> {
        let steps = &limits.steps;
        let columns = steps
            .pages_per_request
            .checked_mul(page_size as usize)
            .and_then(|columns| columns.checked_next_multiple_of(COLUMNS))
            .and_then(|columns| u32::try_from(columns).ok())
            .filter(|columns| i32::try_from(*columns).is_ok())
            .ok_or_else(|| {
                let given = steps.pages_per_request;
                let accepted = format!("so many pages of {page_size} that 31 bits count tokens");
                Error::argument("limits.pages_per_request", given, accepted)
            })?;
        let tokens = u32::try_from(steps.tokens)
            .ok()
            .filter(|tokens| i32::try_from(*tokens).is_ok())
            .ok_or_else(|| {
                Error::argument("limits.tokens", steps.tokens, "less than 2147483647")
            })?;
        let fitting = limits.logits_bytes / (4 * u64::from(columns).max(1));
        let rows = fitting.clamp(1, u64::from(tokens.max(1))) as u32;
        Ok(Self {
            dims,
            layers: 1,
            tokens,
            rows: rows.min(tokens),
            columns,
        })
    }
}

/// The scratch of an engine's indexers and their lists: made once, used by one layer after the other.
pub struct IndexerWorkspace<D: Device> {
    pub(super) buffer: D::Buffer,
    pub(super) regions: Regions,
    pub(super) needs: IndexNeeds,
    plan: MemoryPlan,
    /// The workspace and the step that the lists are for.
    selected: Option<Selected>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Selected {
    pub(super) workspace: WorkspaceId,
    pub(super) step: u64,
    pub(super) tokens: usize,
}

/// Where each tensor lies in the buffer, in bytes, in the order of the plan.
pub(super) struct Regions {
    pub(super) projection: Range<usize>,
    pub(super) queries: Range<usize>,
    pub(super) weights: Range<usize>,
    pub(super) logits: Range<usize>,
    pub(super) lists: Range<usize>,
}

impl<D: Device> IndexerWorkspace<D> {
    pub(super) fn new(indexer: &Indexer<D>, limits: &IndexLimits) -> Result<Self> {
        let needs = indexer.needs(limits)?;
        let plan = indexer.memory_plan(limits, 1, 0)?;
        let bytes = usize::try_from(plan.indexer_bytes).map_err(|_| {
            let given = format!("{} bytes", plan.indexer_bytes);
            Error::argument("limits", given, "what memory can hold")
        })?;
        // The whole plan fits the address space, as its allocation shows.
        let range = |name| {
            plan.region(name).map_or(0..0, |region| {
                region.offset as usize..(region.offset + region.bytes) as usize
            })
        };
        Ok(Self {
            regions: Regions {
                projection: range("index_projection"),
                queries: range("index_queries"),
                weights: range("index_head_weights"),
                logits: range("index_logits"),
                lists: range("slot_lists"),
            },
            buffer: indexer.device().allocate(bytes)?,
            needs,
            plan,
            selected: None,
        })
    }

    /// What was allocated, without a cache: the regions of
    /// [`Allocation::Indexer`](crate::plan::memory::Allocation::Indexer).
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The bytes of the buffer: the plan's `indexer_bytes`.
    pub fn allocated_bytes(&self) -> usize {
        D::byte_len(D::bytes(&self.buffer))
    }

    /// The query tokens that are scored at a time.
    pub fn rows(&self) -> usize {
        self.needs.rows as usize
    }

    /// The lists of the last selection, for the layer that made them and those that share them.
    ///
    /// # Errors
    ///
    /// If the last selection was not for the step that `workspace` was last prepared for.
    pub fn lists<P, B>(&self, workspace: &Workspace<P, B>) -> Result<SlotLists<'_, D>>
    where
        P: PrefillStage<Device = D>,
        B: DecodeStage<Device = D>,
    {
        let present = Selected {
            workspace: workspace.id(),
            step: workspace.step_number(),
            tokens: workspace.tokens(),
        };
        if self.selected != Some(present) {
            let given = match self.selected {
                None => "none",
                Some(_) => "those of another step",
            };
            let accepted = "those of the prepared step: a layer with an indexer selects first";
            return Err(Error::argument("slot_lists", given, accepted));
        }
        let width = self.needs.dims.topk as usize;
        let bytes = D::byte_range(D::bytes(&self.buffer), self.regions.lists.clone());
        Ok(SlotLists {
            slots: ArrayRef::new(bytes, present.tokens * width)?,
            width,
        })
    }

    pub(super) fn set_selected(&mut self, selected: Option<Selected>) {
        self.selected = selected;
    }
}
