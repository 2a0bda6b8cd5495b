//! The rows of a step's tokens in the tensors of a call, if they are in the engine's own order or
//! padded.

use std::ops::Range;

use super::StepPlan;
use crate::batch::Request;
use crate::{Error, Result};

impl StepPlan {
    /// The same step for tensors that are padded to `max_len` rows per request, `[requests,
    /// max_len, …]`. Requests are in the given order, and the padding of
    /// [`padded_to`](Self::padded_to) comes after them. New tokens are the first rows of their
    /// request. [`Self::with_row_starts`] describes the other rows.
    ///
    /// ```
    /// # use mla_runtime::layer::{StepPlan, StepRequest};
    /// # use mla_runtime::backend::StepLimits;
    /// # use mla_runtime::{model::{DType, MlaDims}, spec::Problem};
    /// # let problem = Problem::new(MlaDims::R1, 16, DType::BF16).with_page_size(64);
    /// # let limits = StepLimits::new(8, 512, 4).with_context_rows(64).with_call_rows(512);
    /// // Tensors of [2, 100] rows, and pages as the engine's block manager has them.
    /// let tables: Vec<Vec<usize>> = vec![vec![4, 0], vec![7, 2]];
    /// let requests = [
    ///     StepRequest::new(100, 100, &tables[0]),
    ///     StepRequest::new(1, 71, &tables[1]),
    /// ];
    /// let step = StepPlan::within(&problem, &limits, 1, &requests)?.with_padded_rows(100)?;
    /// assert_eq!((step.rows(0), step.rows(1)), (0..100, 100..101));
    /// assert_eq!((step.tensor_rows(), step.rows_in_order()), (200, false));
    /// # Ok::<(), mla_runtime::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a request has more than `max_len` new tokens, or if the number of rows overflows.
    pub fn with_padded_rows(self, max_len: usize) -> Result<Self> {
        let count = self.requests.len();
        for (at, request) in self.requests.iter().enumerate() {
            if request.q as usize > max_len {
                let number = self.number(at);
                let accepted = format!("at least the {} new tokens of request {number}", request.q);
                return Err(Error::argument("max_len", max_len, accepted));
            }
        }
        let Some(rows) = count.checked_mul(max_len) else {
            let accepted = format!("a length that {count} requests can be padded to");
            return Err(Error::argument("max_len", max_len, accepted));
        };
        // Each start is below `rows`.
        let starts: Vec<usize> = (0..count).map(|number| number * max_len).collect();
        self.with_row_starts(&starts, rows)
    }

    /// The same step for tensors in which the requests follow each other in the given order. The
    /// padding of [`padded_to`](Self::padded_to) comes after them.
    ///
    /// # Errors
    ///
    /// Never: there is a row for each token.
    pub fn with_rows_as_given(self) -> Result<Self> {
        let mut lens = vec![0; self.requests.len()];
        for (at, request) in self.requests.iter().enumerate() {
            lens[self.number(at)] = request.q as usize;
        }
        let mut rows = 0usize;
        let starts: Vec<usize> = lens
            .iter()
            .map(|len| {
                let start = rows;
                rows += len;
                start
            })
            .collect();
        self.with_row_starts(&starts, rows)
    }

    /// The same step for tensors of `rows` rows. The new tokens of request number i, in the given
    /// order, begin at row `starts[i]`. The padding of [`padded_to`](Self::padded_to) has the
    /// numbers after those of the requests. The start of a request without new tokens may be
    /// anything.
    ///
    /// Rows that belong to no request are padding. They are not read, and such rows of outputs and
    /// of a log-sum-exp stay unchanged. [`MlaLayer::forward`](crate::layer::MlaLayer::forward) and
    /// [`forward_unrotated`](crate::layer::MlaLayer::forward_unrotated) accept such tensors. If the
    /// used rows follow each other in the order of the layer, they are used in place. Otherwise the
    /// layer copies them into memory that [`call_rows`](crate::backend::StepLimits::call_rows)
    /// reserves, and copies the results back. Lists of slots are always in the order of the layer.
    ///
    /// # Errors
    ///
    /// If the number of starts is not that of the requests, if a start is out of range, or if two
    /// requests share a row.
    pub fn with_row_starts(mut self, starts: &[usize], rows: usize) -> Result<Self> {
        let count = self.requests.len();
        if starts.len() != count {
            let accepted = format!("one for each of {count} requests, padding included");
            let given = format!("{} entries", starts.len());
            return Err(Error::argument("rows.starts", given, accepted));
        }
        let mut spans = Vec::with_capacity(count);
        for (at, request) in self.requests.iter().enumerate() {
            let (number, tokens) = (self.number(at), request.q as usize);
            let start = starts[number];
            let end = start.checked_add(tokens).filter(|end| *end <= rows);
            if tokens > 0 && end.is_none() {
                let given = format!("{start} of request {number}, which brings {tokens} tokens");
                let accepted = format!("a start with {tokens} rows from it on, of {rows} in all");
                return Err(Error::argument("rows.starts", given, accepted));
            }
            spans.push(start..end.unwrap_or(start));
        }
        for (at, span) in spans.iter().enumerate() {
            let number = self.number(at);
            if let Some(rows) = self.rows.get_mut(number) {
                *rows = span.clone();
            }
        }
        self.own_rows = Some((spans.iter().map(|span| span.start).collect(), rows));
        spans.retain(|span| !span.is_empty());
        spans.sort_unstable_by_key(|span| span.start);
        match spans.windows(2).find(|pair| pair[1].start < pair[0].end) {
            Some(pair) => {
                let given = format!("row {} of two tokens", pair[1].start);
                Err(Error::argument("rows.starts", given, "rows that differ"))
            }
            None => Ok(self),
        }
    }

    /// The number of rows in every tensor of the step. It is the number of [tokens](Self::tokens),
    /// unless the engine's own rows were set.
    pub fn tensor_rows(&self) -> usize {
        match &self.own_rows {
            Some((_, rows)) => *rows,
            None => self.tokens(),
        }
    }

    /// Returns true if the tensors are used in place. Otherwise the layer copies rows, for which
    /// the limits need [`call_rows`](crate::backend::StepLimits::call_rows).
    pub fn rows_in_order(&self) -> bool {
        self.span().is_some()
    }

    /// The rows of the tokens, if they follow each other in the order of the layer.
    pub(in crate::layer) fn span(&self) -> Option<Range<usize>> {
        let mut span: Option<Range<usize>> = None;
        for (request, start) in self.starts() {
            let tokens = request.q as usize;
            match &mut span {
                _ if tokens == 0 => {}
                None => span = Some(start..start + tokens),
                Some(span) if span.end == start => span.end += tokens,
                Some(_) => return None,
            }
        }
        Some(span.unwrap_or(0..0))
    }

    /// The requests in the order of the layer, and the row of each one's first new token.
    pub(in crate::layer) fn starts(&self) -> impl Iterator<Item = (&Request, usize)> {
        let own = self.own_rows.as_ref().map(|(starts, _)| starts);
        let mut end = 0;
        self.requests.iter().enumerate().map(move |(at, request)| {
            let start = own.map_or(end, |starts| starts[at]);
            end += request.q as usize;
            (request, start)
        })
    }

    /// The rows of a request's new tokens. `request` is its number in the given order.
    ///
    /// # Panics
    ///
    /// If there is no such request.
    pub fn rows(&self, request: usize) -> Range<usize> {
        self.rows[request].clone()
    }

    /// The row of each request's last new token, by the request's number; `None` if it has no new
    /// tokens. The next token is sampled from this row.
    pub fn last_rows(&self) -> impl Iterator<Item = Option<usize>> + '_ {
        self.rows.iter().map(|rows| rows.clone().next_back())
    }
}
