//! The memory that an indexer of sparse attention needs.

use super::limits::StepLimits;
use crate::model::IndexDims;
use crate::setters::setters;
use crate::{Error, Result};

/// The columns of the logits are a multiple of this: rows then begin at multiples of 1024 bytes.
const COLUMNS: usize = 256;

/// The limits of a selection's scratch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct IndexLimits {
    /// The limits of the steps, as the layer's workspace has them.
    pub steps: StepLimits,
    /// Maximum bytes of logits at a time. Tokens are scored in groups whose rows fit, or one by one
    /// if not even one row does.
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

    setters! {
        with_steps(steps: StepLimits);
        with_logits_bytes(logits_bytes: u64);
    }
}

/// The part of an indexer in a [memory plan](super::memory).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct IndexNeeds {
    /// The indexer's extents.
    pub dims: IndexDims,
    /// The layers that have an index cache; see [`IndexLayers`](crate::model::IndexLayers).
    pub layers: u32,
    /// The max number of query tokens of a step.
    pub tokens: u32,
    /// The query tokens that are scored at a time.
    pub rows: u32,
    /// The columns of the logits: the max number of tokens of a request, or of its pools, or more.
    pub columns: u32,
}

impl IndexNeeds {
    /// Returns the needs of one layer within `limits` on pages of `page_size` tokens.
    ///
    /// # Errors
    ///
    /// If a limit is out of range.
    pub fn of(dims: IndexDims, limits: &IndexLimits, page_size: u32) -> Result<Self> {
        let steps = &limits.steps;
        let columns = steps
            .pages_per_request
            .checked_mul(page_size as usize / dims.tokens_per_key())
            .and_then(|columns| columns.checked_next_multiple_of(COLUMNS))
            .and_then(|columns| u32::try_from(columns).ok())
            .filter(|columns| i32::try_from(*columns).is_ok())
            .ok_or_else(|| {
                let given = steps.pages_per_request;
                let columns = i32::MAX as usize / COLUMNS * COLUMNS;
                let max = columns / (page_size as usize).max(1);
                let accepted = format!("at most {max} pages of {page_size} tokens");
                Error::argument("limits.pages_per_request", given, accepted)
            })?;
        let tokens = u32::try_from(steps.tokens)
            .ok()
            .filter(|tokens| i32::try_from(*tokens).is_ok())
            .ok_or_else(|| Error::argument("limits.tokens", steps.tokens, "at most 2147483647"))?;
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
