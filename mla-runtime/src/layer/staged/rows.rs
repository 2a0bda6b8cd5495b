//! The rows of a staged step's tensors, with an index if they are out of order.

use std::ops::Range;

use crate::backend::StepLimits;
use crate::layer::step_plan::StepPlan;
use crate::plan::slots::SKIPPED;
use crate::room::with_room;
use crate::{Error, Result};

/// The rows of a step's tensors.
pub(super) struct RowOrder {
    /// The maximum number of rows for which an index has room.
    limit: usize,
    /// The number of rows in the tensors.
    pub(super) rows: usize,
    /// The rows of the step's tokens, if they are in order. Otherwise an index has the row of each
    /// token.
    pub(super) span: Option<Range<usize>>,
    /// The row of each token, if the step has an index.
    of_tokens: Vec<i64>,
    /// The token of each row, or [`SKIPPED`].
    tokens: Vec<i64>,
}

impl RowOrder {
    pub(super) fn new(limits: &StepLimits) -> Result<Self> {
        let tokens = match limits.call_rows {
            0 => 0,
            _ => limits.tokens,
        };
        Ok(Self {
            limit: limits.call_rows,
            rows: 0,
            span: Some(0..0),
            of_tokens: with_room(tokens)?,
            tokens: with_room(limits.call_rows)?,
        })
    }

    /// Stages the rows of a plan. The plan has checked that no row is out of range or shared.
    pub(super) fn stage(&mut self, plan: &StepPlan) -> Result<()> {
        self.rows = plan.tensor_rows();
        self.span = plan.span();
        self.of_tokens.clear();
        self.tokens.clear();
        if self.span.is_some() {
            return Ok(());
        }
        if self.rows > self.limit {
            let accepted = format!(
                "at least the {} rows of the step's tensors, whose order is not that of the \
                 requests",
                self.rows
            );
            return Err(Error::argument("limits.call_rows", self.limit, accepted));
        }
        self.tokens.resize(self.rows, SKIPPED);
        for (request, start) in plan.starts() {
            for row in start..start.saturating_add(request.q as usize) {
                self.tokens[row] = self.of_tokens.len() as i64;
                self.of_tokens.push(row as i64);
            }
        }
        Ok(())
    }

    /// The index of each row and of each token, for the device. It is empty if the rows are in
    /// order.
    pub(super) fn index(&self) -> [&[i64]; 2] {
        [&self.tokens, &self.of_tokens]
    }

    /// Returns true if the rows are exactly those of the step's tokens in order.
    pub(super) fn is_packed(&self) -> bool {
        self.span == Some(0..self.rows)
    }
}
