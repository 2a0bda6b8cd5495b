//! The memory that an indexer of sparse attention needs.

use super::limits::StepLimits;
use crate::model::IndexerConfig;
use crate::{Error, Result};

/// The number of columns of the logits is a multiple of this, so rows begin at multiples of 1024
/// bytes.
const COLUMNS: usize = 256;

/// The part of an indexer in a [memory plan](super::memory).
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct IndexNeeds {
    /// The indexer's extents.
    pub(crate) config: IndexerConfig,
    /// The number of layers that have an index cache.
    pub(crate) layers: u32,
    /// The maximum number of query tokens of a step.
    pub(crate) tokens: u32,
    /// The number of query tokens that are scored at a time.
    pub(crate) rows: u32,
    /// The number of columns of the logits: at least the maximum number of tokens of a request, or
    /// of pools if index keys are shared.
    pub(crate) columns: u32,
}

impl IndexNeeds {
    /// Returns the needs of one layer within `limits` on pages of `page_size` tokens.
    pub(crate) fn of(config: &IndexerConfig, limits: &StepLimits, page_size: u32) -> Result<Self> {
        let keys = page_size as usize / config.tokens_per_key();
        let columns = limits
            .pages_per_request
            .checked_mul(keys)
            .and_then(|columns| columns.checked_next_multiple_of(COLUMNS))
            .and_then(|columns| u32::try_from(columns).ok())
            .filter(|columns| i32::try_from(*columns).is_ok())
            .ok_or_else(|| {
                let given = limits.pages_per_request;
                let columns = i32::MAX as usize / COLUMNS * COLUMNS;
                let max = columns / keys.max(1);
                let accepted = format!("at most {max} pages of {page_size} tokens");
                Error::argument("limits.pages_per_request", given, accepted)
            })?;
        let tokens = u32::try_from(limits.tokens)
            .ok()
            .filter(|tokens| i32::try_from(*tokens).is_ok())
            .ok_or_else(|| Error::argument("limits.tokens", limits.tokens, "at most 2147483647"))?;
        let fitting = limits.logits_bytes / (4 * u64::from(columns).max(1));
        let rows = fitting.clamp(1, u64::from(tokens.max(1))) as u32;
        Ok(Self {
            config: *config,
            layers: 1,
            tokens,
            rows: rows.min(tokens),
            columns,
        })
    }

    /// The rows, columns and tokens, and the heads, width and list width of the indexer.
    pub(super) fn extents(&self) -> [u32; 6] {
        let config = &self.config;
        let list = config.list_width();
        [
            self.rows,
            self.columns,
            self.tokens,
            config.heads,
            config.width,
            list,
        ]
    }
}
