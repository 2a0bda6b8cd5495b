//! Rows in an order of the engine's own: where each request's tokens stand in the tensors of a
//! call.

use std::ops::Range;

use crate::backend::StepLimits;
use crate::batch::Request;
use crate::device::Device;
use crate::plan::limits::ArrayLayout;
use crate::plan::slots::SKIPPED;
use crate::room::with_room;
use crate::tensor::ArrayRef;
use crate::{Error, Result};

/// The rows of each request's new tokens in the tensors of a call: padded, or in an order of the
/// engine's own. Rows that belong to no request are padding: they are not read, and those of
/// outputs and of a log-sum-exp are left as they are.
///
/// [`MlaLayer::forward`](super::MlaLayer::forward) and
/// [`forward_unrotated`](super::MlaLayer::forward_unrotated) take such tensors. If the rows that
/// are used lie one behind the other in the order of the requests, they are taken as they lie;
/// otherwise the layer copies them by an index of its own, into memory that
/// [`call_rows`](StepLimits::call_rows) sets aside, and the results back
/// ([`Workspace::rows_in_order`](super::Workspace::rows_in_order)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TokenRows<'a> {
    /// The row of each request's first new token; its others are the rows behind it. That of a
    /// request without new tokens may be anything.
    pub starts: &'a [usize],
    /// The rows of the tensors.
    pub rows: usize,
}

impl<'a> TokenRows<'a> {
    /// Request i from row `starts[i]` on, of tensors of `rows` rows.
    pub const fn new(starts: &'a [usize], rows: usize) -> Self {
        Self { starts, rows }
    }
}

/// The arrangement of the rows of a prepared step's tensors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Arrangement {
    /// The step's tokens are these rows, in order.
    InOrder(Range<usize>),
    /// An index says which row each token has.
    Indexed,
}

/// The rows of a step's tensors, checked.
pub(super) struct RowOrder {
    /// The max number of rows that an index has room for.
    limit: usize,
    /// The rows of the tensors.
    pub(super) rows: usize,
    pub(super) arrangement: Arrangement,
    /// The row of each token, of an indexed step.
    of_tokens: Vec<i64>,
    /// The token of each row, or [`SKIPPED`].
    tokens: Vec<i64>,
}

impl RowOrder {
    pub(super) fn new(limits: &StepLimits) -> Result<Self> {
        let tokens = if limits.call_rows == 0 {
            0
        } else {
            limits.tokens
        };
        Ok(Self {
            limit: limits.call_rows,
            rows: 0,
            arrangement: Arrangement::InOrder(0..0),
            of_tokens: with_room(tokens)?,
            tokens: with_room(limits.call_rows)?,
        })
    }

    /// Takes up the rows of a batch of `tokens` new tokens.
    pub(super) fn plan(
        &mut self,
        requests: &[Request],
        tokens: usize,
        rows: Option<TokenRows<'_>>,
    ) -> Result<()> {
        let Some(rows) = rows else {
            self.rows = tokens;
            self.arrangement = Arrangement::InOrder(0..tokens);
            return Ok(());
        };
        check_starts(requests, &rows)?;
        self.rows = rows.rows;
        if let Some(first) = in_order(requests, &rows) {
            self.arrangement = Arrangement::InOrder(first..first + tokens);
            return Ok(());
        }
        if rows.rows > self.limit {
            let accepted = format!(
                "at least the {} rows of the step's tensors, whose order is not that of the \
                 requests",
                rows.rows
            );
            return Err(Error::argument("limits.call_rows", self.limit, accepted));
        }
        self.arrangement = Arrangement::Indexed;
        self.of_tokens.clear();
        self.tokens.clear();
        self.tokens.resize(rows.rows, SKIPPED);
        for (request, &start) in requests.iter().zip(rows.starts) {
            for row in start..start.saturating_add(request.q as usize) {
                if self.tokens[row] != SKIPPED {
                    return Err(shared(row));
                }
                self.tokens[row] = self.of_tokens.len() as i64;
                self.of_tokens.push(row as i64);
            }
        }
        Ok(())
    }

    /// The index of each row and of each token, for the device: none if the rows are in order.
    pub(super) fn index(&self) -> [&[i64]; 2] {
        match self.arrangement {
            Arrangement::InOrder(_) => [&[], &[]],
            Arrangement::Indexed => [&self.tokens, &self.of_tokens],
        }
    }

    /// Returns true if the tensors have the rows of the step's tokens alone, in order.
    pub(super) fn is_packed(&self) -> bool {
        self.arrangement == Arrangement::InOrder(0..self.rows)
    }

    /// The token of each row and the row of each token, as they lie on the device.
    pub(super) fn arrays<'a, D: Device>(
        &self,
        layout: &ArrayLayout,
        arrays: D::Bytes<'a>,
    ) -> Result<[ArrayRef<'a, D, i64>; 2]> {
        let [tokens, rows] = self.index();
        let array =
            |range: &Range<usize>, len| ArrayRef::new(D::byte_range(arrays, range.clone()), len);
        Ok([
            array(&layout.row_tokens, tokens.len())?,
            array(&layout.token_rows, rows.len())?,
        ])
    }
}

/// Refuses rows that are missing or shared.
pub(super) fn check_rows(requests: &[Request], rows: TokenRows<'_>) -> Result<()> {
    check_starts(requests, &rows)?;
    let mut spans: Vec<Range<usize>> = requests
        .iter()
        .zip(rows.starts)
        .filter(|(request, _)| request.q > 0)
        .map(|(request, start)| *start..start + request.q as usize)
        .collect();
    spans.sort_unstable_by_key(|span| span.start);
    match spans.windows(2).find(|pair| pair[1].start < pair[0].end) {
        Some(pair) => Err(shared(pair[1].start)),
        None => Ok(()),
    }
}

fn shared(row: usize) -> Error {
    let given = format!("row {row} of two tokens");
    Error::argument("rows.starts", given, "rows that differ")
}

fn check_starts(requests: &[Request], rows: &TokenRows<'_>) -> Result<()> {
    if rows.starts.len() != requests.len() {
        return Err(Error::argument(
            "rows.starts",
            format!("{} entries", rows.starts.len()),
            format!("one for each of {} requests", requests.len()),
        ));
    }
    for (index, (request, &start)) in requests.iter().zip(rows.starts).enumerate() {
        let tokens = request.q as usize;
        let end = start.checked_add(tokens);
        if tokens > 0 && end.is_none_or(|end| end > rows.rows) {
            let given = format!("{start} of request {index}, which brings {tokens} tokens");
            let accepted = format!("a row with as many behind it of {} in all", rows.rows);
            return Err(Error::argument("rows.starts", given, accepted));
        }
    }
    Ok(())
}

/// The first row, if the requests lie one behind the other.
pub(super) fn in_order(requests: &[Request], rows: &TokenRows<'_>) -> Option<usize> {
    let mut span: Option<Range<usize>> = None;
    for (request, &start) in requests.iter().zip(rows.starts) {
        let tokens = request.q as usize;
        match &mut span {
            _ if tokens == 0 => {}
            None => span = Some(start..start + tokens),
            Some(span) if span.end == start => span.end += tokens,
            Some(_) => return None,
        }
    }
    Some(span.map_or(0, |span| span.start))
}
