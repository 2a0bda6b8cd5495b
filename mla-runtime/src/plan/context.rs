//! The context-chunk planner: divides cached context into chunks that fit the workspace.
//!
//! The expanded path turns cached latent rows into keys and values, which are many times larger. It
//! goes through the cached context of a batch in chunks, and each chunk fits a workspace of W rows.
//! This module decides which rows form a chunk.
//!
//! Requests are packed in order. If a request does not fit into the rest of a chunk, it is cut at
//! the largest aligned length that fits, and its remainder opens the next chunk. If no aligned
//! length fits, the whole request opens the next chunk. With W = 1024 and pages of 16 tokens:
//!
//! ```text
//! contexts 768, 512, 512     chunk 0: |768 of #0             |256 of #1|
//!                            chunk 1: |256 of #1|512 of #2         |
//!                                      continuation
//! ```
//!
//! The layer relies on the following consequences:
//!
//! - Every context row is in exactly one chunk. Rows and requests keep their order.
//! - Only the first request of a chunk can be a continuation. (The layer does not read
//!   `is_continuation`. It attends to the new tokens first, and then merges the partial results of
//!   every chunk into that result.)
//! - A request without context is in no chunk. A chunk's requests are consecutive, so such a
//!   request ends a chunk even if rows are left.
//!
//! The cuts of a request thus depend on the requests before it. So does the order in which its
//! partial results are merged. With own cuts every request is cut as if it were alone, and a
//! segment that does not fit opens the next chunk.
//!
//! ```
//! use mla_runtime::plan::context::plan_chunks;
//!
//! let plan = plan_chunks(&[768, 512, 512], 1024, 16, false)?;
//! assert_eq!(plan[0].seq_lens, [768, 256]);
//! assert_eq!(plan[1].seq_lens, [256, 512]);
//! assert!(plan[1].is_continuation);
//! # Ok::<(), mla_runtime::Error>(())
//! ```

use std::ops::Range;

use serde::Serialize;

use crate::{Error, Result};

/// One workspace full of context: a segment of each of several consecutive requests.
///
/// Serialises as `{"request_start", "request_end", "starts", "seq_lens", "is_continuation"}`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct ContextChunk {
    /// The first request with a segment in this chunk.
    pub request_start: usize,
    /// One past the last request with a segment in this chunk.
    pub request_end: usize,
    /// The start of each request's segment in its context, in tokens. Only the first entry can be
    /// nonzero.
    pub starts: Vec<u32>,
    /// The number of tokens in each request's segment; never zero.
    pub seq_lens: Vec<u32>,
    /// True if the first request has rows in an earlier chunk.
    pub is_continuation: bool,
}

impl ContextChunk {
    /// A chunk with one segment of each of these requests, by their starts and lengths. The first
    /// request is no continuation.
    pub const fn new(requests: Range<usize>, starts: Vec<u32>, seq_lens: Vec<u32>) -> Self {
        Self {
            request_start: requests.start,
            request_end: requests.end,
            starts,
            seq_lens,
            is_continuation: false,
        }
    }

    /// The requests with a segment in this chunk.
    pub fn requests(&self) -> Range<usize> {
        self.request_start..self.request_end
    }

    /// The segments in order. Each has the request's index in the batch, the position of its first
    /// token in the request's context, and its number of tokens.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = (usize, u32, u32)> + '_ {
        self.starts
            .iter()
            .zip(&self.seq_lens)
            .enumerate()
            .map(|(index, (&start, &len))| (self.request_start + index, start, len))
    }

    /// The number of context rows in the chunk.
    pub fn rows(&self) -> u64 {
        self.seq_lens.iter().copied().map(u64::from).sum()
    }

    /// The length of the longest segment.
    pub fn max_seq_len(&self) -> u32 {
        self.seq_lens.iter().copied().max().unwrap_or(0)
    }
}

/// The maximum number of chunks in a plan. With a very small workspace, the plan itself would
/// otherwise become larger than the memory it saves.
pub const MAX_CHUNKS: usize = 1 << 20;

/// Packs the cached context of a batch into chunks, in the order of their execution. The
/// [module](self) describes the rules. There are no chunks if no request has context.
///
/// `context_lens` has one entry per request: the number of its cached tokens, without the new ones.
/// `rows` is W, the number of rows in the workspace. Cuts are at multiples of `align` tokens, the
/// page size, because the gather starts at a page. With `own_cuts` each request is cut as if it
/// were alone.
///
/// # Errors
///
/// If `align` is zero or exceeds `rows`, or if the plan would have more than [`MAX_CHUNKS`] chunks.
pub fn plan_chunks(
    context_lens: &[u32],
    rows: u32,
    align: u32,
    own_cuts: bool,
) -> Result<Vec<ContextChunk>> {
    if align == 0 {
        return Err(Error::argument("align", 0, "at least 1"));
    }
    if rows < align {
        let accepted = format!("at least the alignment, {align}");
        return Err(Error::argument("rows", rows, accepted));
    }
    let mut chunks = Vec::new();
    // The first token that is not yet in a chunk.
    let (mut request, mut start) = (0, 0);
    while request < context_lens.len() {
        if context_lens[request] == 0 {
            request += 1;
            continue;
        }
        if chunks.len() == MAX_CHUNKS {
            let accepted = format!("a number with which at most {MAX_CHUNKS} chunks are needed");
            return Err(Error::argument("rows", rows, accepted));
        }
        let mut chunk = ContextChunk::new(request..request, Vec::new(), Vec::new());
        chunk.is_continuation = start > 0;
        let mut available = rows;
        while let Some(&len) = context_lens.get(request).filter(|&&len| len > 0) {
            let room = if own_cuts { rows } else { available };
            let fits = len - start <= room;
            let segment = if fits {
                len - start
            } else {
                room - room % align
            };
            if segment == 0 || segment > available {
                break;
            }
            chunk.starts.push(start);
            chunk.seq_lens.push(segment);
            if !fits {
                start += segment;
                break;
            }
            available -= segment;
            request += 1;
            start = 0;
        }
        chunk.request_end += chunk.seq_lens.len();
        chunks.push(chunk);
    }
    Ok(chunks)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Each chunk as its first request and its (start, length) pairs.
    fn shape(plan: &[ContextChunk]) -> Vec<(usize, Vec<(u32, u32)>)> {
        plan.iter()
            .map(|chunk| {
                let segments = chunk
                    .segments()
                    .map(|(_, start, len)| (start, len))
                    .collect();
                (chunk.request_start, segments)
            })
            .collect()
    }

    #[test]
    fn requests_are_packed_in_order_and_cut_where_a_chunk_is_full() {
        let packed = |lens: &[u32], rows| shape(&plan_chunks(lens, rows, 16, false).unwrap());
        let cut = [
            (0, vec![(0, 768), (0, 256)]),
            (1, vec![(256, 256), (0, 512)]),
        ];
        assert_eq!(packed(&[768, 512, 512], 1024), cut);
        // A request without context ends its chunk.
        let apart = [
            (0, vec![(0, 1024)]),
            (0, vec![(1024, 16)]),
            (2, vec![(0, 5)]),
        ];
        assert_eq!(packed(&[1040, 0, 5], 1024), apart);
        // A cut is aligned, and what fits whole may use the other rows.
        assert_eq!(packed(&[1000], 1000), [(0, vec![(0, 1000)])]);
        let aligned = [(0, vec![(0, 992)]), (0, vec![(992, 9)])];
        assert_eq!(packed(&[1001], 1000), aligned);
    }

    #[test]
    fn own_cuts_are_those_of_a_request_alone() {
        let own = plan_chunks(&[768, 512, 2000, 40], 1024, 16, true).unwrap();
        assert_eq!(
            shape(&own),
            [
                (0, vec![(0, 768)]),
                (1, vec![(0, 512)]),
                (2, vec![(0, 1024)]),
                (2, vec![(1024, 976), (0, 40)]),
            ]
        );
    }

    #[test]
    fn serialises_in_the_documented_form() {
        let plan = plan_chunks(&[960, 80], 1024, 16, false).unwrap();
        assert_eq!(
            serde_json::to_string(&plan).unwrap(),
            concat!(
                r#"[{"request_start":0,"request_end":2,"starts":[0,0],"#,
                r#""seq_lens":[960,64],"is_continuation":false},"#,
                r#"{"request_start":1,"request_end":2,"starts":[64],"seq_lens":[16],"#,
                r#""is_continuation":true}]"#
            )
        );
    }

    #[test]
    fn refuses_what_cannot_be_planned() {
        let message = |len, rows, align| {
            let refused = plan_chunks(&[len], rows, align, false);
            refused.unwrap_err().to_string()
        };
        assert_eq!(
            message(5, 15, 16),
            "rows: given 15, accepted at least the alignment, 16"
        );
        assert_eq!(
            message(5, 0, 1),
            "rows: given 0, accepted at least the alignment, 1"
        );
        assert_eq!(message(5, 16, 0), "align: given 0, accepted at least 1");
        assert_eq!(
            message(u32::MAX, 1, 1),
            "rows: given 1, accepted a number with which at most 1048576 chunks are needed"
        );
    }

    #[test]
    fn the_largest_numbers_plan() {
        let plan = plan_chunks(&[u32::MAX; 3], u32::MAX, u32::MAX, false).unwrap();
        assert_eq!(plan.len(), 3);
        assert_eq!(plan[0].rows(), u64::from(u32::MAX));
    }

    /// Follows the rules of the module's documentation literally: it finds every cut by trying all
    /// lengths.
    fn naive(lens: &[u32], rows: u32, align: u32) -> Vec<(usize, Vec<(u32, u32)>)> {
        let mut chunks = Vec::new();
        let mut left: Vec<(usize, u32)> = lens.iter().map(|_| 0).enumerate().collect();
        left.reverse();
        while let Some((first, _)) = left.last().copied() {
            if lens[first] == 0 {
                left.pop();
                continue;
            }
            let mut segments = Vec::new();
            let mut available = rows;
            while let Some((request, start)) = left.pop() {
                let rest = lens[request] - start;
                let whole = rest > 0 && rest <= available;
                let cut = |len: &u32| len.is_multiple_of(align) && *len <= available;
                let len = match whole {
                    true => rest,
                    false => (1..rest).rev().find(cut).unwrap_or(0),
                };
                if len > 0 {
                    segments.push((start, len));
                    available -= len;
                }
                if !whole {
                    left.push((request, start + len));
                    break;
                }
            }
            chunks.push((first, segments));
        }
        chunks
    }

    /// Contexts that cross borders of chunks and pages. Some requests have no context.
    fn contexts() -> impl Strategy<Value = Vec<u32>> {
        let len = prop_oneof![1 => Just(0u32), 3 => 1u32..40, 3 => 1u32..700];
        proptest::collection::vec(len, 0..24)
    }

    /// A number of rows, and an alignment that does not exceed it.
    fn any_limits() -> impl Strategy<Value = (u32, u32)> {
        (1u32..20, 0u32..300).prop_map(|(align, spare)| (align + spare, align))
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_planner(lens in contexts(), (rows, align) in any_limits()) {
            let plan = plan_chunks(&lens, rows, align, false).unwrap();
            prop_assert_eq!(shape(&plan), naive(&lens, rows, align));
        }

        #[test]
        fn chunks_tile_the_context(
            lens in contexts(), (rows, align) in any_limits(), own_cuts: bool,
        ) {
            let plan = plan_chunks(&lens, rows, align, own_cuts).unwrap();

            // Every row occurs exactly once, in order. The loop walks the segments and compares
            // them with a cursor.
            let mut seen = vec![0u32; lens.len()];
            let mut last_request = 0;
            for chunk in &plan {
                prop_assert!(!chunk.seq_lens.is_empty());
                prop_assert_eq!(chunk.requests().len(), chunk.seq_lens.len());
                prop_assert_eq!(chunk.starts.len(), chunk.seq_lens.len());
                prop_assert_eq!(chunk.is_continuation, chunk.starts[0] > 0);
                prop_assert!(chunk.starts[1..].iter().all(|&start| start == 0));
                prop_assert!(chunk.request_start >= last_request);
                last_request = chunk.request_start;
                for (request, start, len) in chunk.segments() {
                    prop_assert!(len > 0);
                    prop_assert_eq!(start, seen[request]);
                    prop_assert_eq!(start % align, 0);
                    seen[request] += len;
                    // A cut can only be the last segment of its chunk.
                    if seen[request] < lens[request] {
                        prop_assert_eq!(request + 1, chunk.request_end);
                    }
                }
                prop_assert!(chunk.rows() <= u64::from(rows));
            }
            prop_assert_eq!(&seen, &lens);
        }

        /// With own cuts, a request is cut in the same way with and without other requests.
        #[test]
        fn own_cuts_ignore_other_requests(lens in contexts(), (rows, align) in any_limits()) {
            let segments = |lens: &[u32], own_cuts, number| -> Vec<_> {
                let plan = plan_chunks(lens, rows, align, own_cuts).unwrap();
                let all = plan.iter().flat_map(ContextChunk::segments);
                let of_request = all.filter(|(request, ..)| *request == number);
                of_request.map(|(_, start, len)| (start, len)).collect()
            };
            for (number, len) in lens.iter().enumerate() {
                let alone = segments(&[*len], false, 0);
                prop_assert_eq!(segments(&lens, true, number), alone);
            }
        }

        #[test]
        fn any_input_gives_a_plan_or_an_error(
            lens in proptest::collection::vec(any::<u32>(), 0..4),
            rows in (1u32 << 16)..,
            align: u32,
            own_cuts: bool,
        ) {
            let _ = plan_chunks(&lens, rows, align, own_cuts);
        }
    }
}
