//! The limits of a step, and the layout of the arrays that describe a step to the device.

use std::ops::Range;

use super::context::MAX_CHUNKS;
use crate::setters::setters;
use crate::spec::{Feature, Problem};
use crate::{Error, Result};

/// The limits of one step. State and metadata are made once for these limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StepLimits {
    /// The maximum number of requests in a step. Requests of zero length count as well.
    pub requests: usize,
    /// The maximum number of query tokens in a step.
    pub tokens: usize,
    /// The maximum number of query tokens of one request on the decode path.
    pub decode_query_len: usize,
    /// The number of entries per request in the block table.
    pub pages_per_request: usize,
    /// W: the number of rows in a context chunk. If a step's context and its new tokens on the
    /// expanded path fit into W rows together, one attention can cover both. The cache must then
    /// hold rows in the queries' format.
    pub context_rows: usize,
    /// The maximum number of rows in a call's tensors, padding included, if the rows are not in the
    /// order of the requests. Memory is reserved to copy the rows into that order. 0 means that the
    /// rows of every step are in order.
    pub call_rows: usize,
    /// The maximum number of bytes of the logits that an indexer makes at a time. Tokens are scored
    /// in groups whose rows fit. If not even one row fits, they are scored one by one.
    pub logits_bytes: u64,
}

impl StepLimits {
    /// Limits of `requests` requests with `tokens` new tokens in all, and `pages_per_request` pages
    /// per request. The decode path takes one token per request. There are no rows for context
    /// chunks, so prompts must come whole. An indexer has 256 MiB of logits: 512 rows for a context
    /// of 128k tokens.
    pub const fn new(requests: usize, tokens: usize, pages_per_request: usize) -> Self {
        Self {
            requests,
            tokens,
            decode_query_len: 1,
            pages_per_request,
            context_rows: 0,
            call_rows: 0,
            logits_bytes: 256 << 20,
        }
    }

    setters! {
        with_requests(requests: usize);
        with_tokens(tokens: usize);
        with_decode_query_len(decode_query_len: usize);
        with_pages_per_request(pages_per_request: usize);
        with_context_rows(context_rows: usize);
        with_call_rows(call_rows: usize);
        with_logits_bytes(logits_bytes: u64);
    }
}

/// The byte range of each array in the buffer of a step. The ranges depend on the limits alone. A
/// graph that was captured with them therefore stays valid from step to step.
#[derive(Clone, Debug)]
pub(crate) struct ArrayLayout {
    /// `[tokens]` i64.
    pub(crate) slots: Range<usize>,
    /// `[tokens]` i64.
    pub(crate) positions: Range<usize>,
    /// `[tokens]` f32, if the problem has scale factors of query tokens.
    pub(crate) query_scales: Range<usize>,
    /// `[requests]` i32.
    pub(crate) seq_lens: Range<usize>,
    /// `[requests + 1]` i32.
    pub(crate) absorbed_starts: Range<usize>,
    /// `[requests + 1]` i32.
    pub(crate) expanded_starts: Range<usize>,
    /// i32: for each chunk its query starts, its key starts and its token starts, one after
    /// another.
    pub(crate) chunks: Range<usize>,
    /// `[requests, pages_per_request]` i32.
    pub(crate) block_table: Range<usize>,
    /// `[call_rows]` i64: the token of each row.
    pub(crate) row_tokens: Range<usize>,
    /// `[tokens]` i64, if rows may be out of order: the row of each token.
    pub(crate) token_rows: Range<usize>,
}

impl ArrayLayout {
    /// The layout for steps of a problem within `limits`.
    pub(crate) fn new(limits: &StepLimits, problem: &Problem) -> Result<Self> {
        let (segments, table) = checked(limits, problem.page_size as usize)?;
        let scaled = match problem.features.contains(Feature::QueryScales) {
            true => limits.tokens,
            false => 0,
        };
        let mut end = 0usize;
        let mut array = |elements: usize, bytes: usize| {
            let start = end;
            let len = elements * bytes;
            end = (start + len).next_multiple_of(256);
            start..start + len
        };
        Ok(Self {
            slots: array(limits.tokens, 8),
            positions: array(limits.tokens, 8),
            query_scales: array(scaled, 4),
            seq_lens: array(limits.requests, 4),
            absorbed_starts: array(limits.requests + 1, 4),
            expanded_starts: array(limits.requests + 1, 4),
            // Each segment has a start of its queries, of its keys and of its tokens. Each chunk
            // also has two ends.
            chunks: array(5 * segments, 4),
            block_table: array(table, 4),
            row_tokens: array(limits.call_rows, 8),
            token_rows: array(
                if limits.call_rows == 0 {
                    0
                } else {
                    limits.tokens
                },
                8,
            ),
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.token_rows.end
    }
}

/// The maximum number of segments of a step, and the number of entries in its block table. Lengths
/// and starts are signed 32-bit integers on the device.
fn checked(limits: &StepLimits, page: usize) -> Result<(usize, usize)> {
    if page == 0 {
        return Err(Error::argument("page_size", 0, "1 and up"));
    }
    let max = i32::MAX as usize;
    for (field, given) in [
        ("limits.requests", limits.requests),
        ("limits.tokens", limits.tokens),
        ("limits.context_rows", limits.context_rows),
        ("limits.call_rows", limits.call_rows),
    ] {
        // One element beyond the last is counted as well.
        if given >= max {
            return Err(Error::argument(field, given, format!("less than {max}")));
        }
    }
    let (pages, rows) = (limits.pages_per_request, limits.context_rows);
    let of_pages = |accepted: String| Error::argument("limits.pages_per_request", pages, accepted);
    let of_rows = |accepted: String| Error::argument("limits.context_rows", rows, accepted);
    if pages > max / page {
        return Err(of_pages(format!(
            "at most {} pages of {page} tokens",
            max / page
        )));
    }
    if (1..page).contains(&rows) {
        return Err(of_rows(format!("0, or at least a page of {page} tokens")));
    }
    let segments = max_segments(limits, page);
    if segments > MAX_CHUNKS {
        return Err(of_rows(format!(
            "a number with which all requests at their longest have at most {MAX_CHUNKS} chunks"
        )));
    }
    let table = limits.requests.checked_mul(pages);
    let table = table
        .filter(|entries| *entries < max)
        .ok_or_else(|| of_pages(format!("less than {max} entries in the whole block table")))?;
    Ok((segments, table))
}

/// The maximum number of segments in all chunks of a step. A request is cut at most once in the
/// chunk that it shares with earlier requests, and then once for each chunk that it fills.
fn max_segments(limits: &StepLimits, page: usize) -> usize {
    if limits.context_rows == 0 {
        return 0;
    }
    let longest_cut = limits.context_rows - limits.context_rows % page;
    let segments = 2 + limits.pages_per_request * page / longest_cut;
    limits.requests.min(limits.tokens).saturating_mul(segments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{DType, MlaDims};

    #[test]
    fn limits_are_checked_against_the_devices_integers() {
        let limits = StepLimits::new(1, 1, 1).with_context_rows(64);
        let problem = Problem::new(MlaDims::R1, 1, DType::BF16).with_page_size(64);
        let refused =
            |limits: StepLimits| ArrayLayout::new(&limits, &problem).unwrap_err().to_string();
        assert_eq!(
            refused(StepLimits {
                tokens: 1 << 31,
                ..limits
            }),
            "limits.tokens: given 2147483648, accepted less than 2147483647"
        );
        assert_eq!(
            refused(StepLimits {
                pages_per_request: 1 << 25,
                ..limits
            }),
            "limits.pages_per_request: given 33554432, accepted at most 33554431 pages of 64 tokens"
        );
        assert!(
            refused(StepLimits {
                requests: 100_000,
                tokens: 100_000,
                pages_per_request: 20_000,
                ..limits
            })
            .starts_with("limits.context_rows: given 64, accepted a number with which ")
        );
    }
}
