//! The positions that each query token sees.

use std::ops::Range;

use crate::Cpu;
use crate::buffer::out_of_memory;
use crate::view::scalars;
use mla_runtime::indexer::IndexRows;
use mla_runtime::{Error, Result};

/// A query token: its request, and the positions `0 .. seen` that it sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Row {
    pub(super) request: usize,
    pub(super) seen: usize,
}

/// Returns the rows of a selection, which [`check`](IndexRows::check) has accepted. An error if a
/// row sees more than `columns` positions, or pools of them.
pub(super) fn rows(of: &IndexRows<'_, Cpu>, columns: usize) -> Result<Vec<Row>> {
    let starts = scalars("query starts", &of.batch.query_starts)?;
    let lens = scalars("sequence lengths", &of.batch.seq_lens)?;
    let requests = lens.len();
    if starts[0] != 0 || !starts.is_sorted() {
        return Err(Error::argument(
            "query starts",
            format!("{starts:?}"),
            "ascending from 0",
        ));
    }
    let all = starts[requests] as usize;
    let Range { start, end } = of.tokens;
    if start > end || end > all {
        let accepted = format!("within the batch's {all}");
        return Err(Error::argument(
            "tokens",
            format!("{start}..{end}"),
            accepted,
        ));
    }
    let mut rows = Vec::new();
    let refused = rows.try_reserve_exact(end - start);
    refused.map_err(|_| out_of_memory((end - start).saturating_mul(size_of::<Row>())))?;
    for (request, (range, len)) in starts.windows(2).zip(lens).enumerate() {
        if usize::try_from(*len).is_ok_and(|len| len / of.pool as usize > columns) {
            return Err(Error::argument(
                "sequence length",
                format!("{len} of request {request}"),
                format!("at most {columns}, the columns of the logits"),
            ));
        }
        let [first, last] = [range[0], range[1]].map(|token| token as usize);
        for token in first.max(start)..last.min(end) {
            // The last token sees every position. Each token before it sees one position less.
            let behind = (last - 1 - token) as i64;
            let seen = (i64::from(*len) - behind).max(0);
            rows.push(Row {
                request,
                seen: seen as usize,
            });
        }
    }
    Ok(rows)
}
