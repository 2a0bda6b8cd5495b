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
//! partial results are merged. With [own cuts](ChunkLimits::own_cuts) every request is cut as if it
//! were alone, and a segment that does not fit opens the next chunk.
//!
//! ```
//! use mla_runtime::plan::context::{ChunkLimits, plan_chunks};
//!
//! let limits = ChunkLimits::new(1024, 16);
//! let plan = plan_chunks(&[768, 512, 512], &limits)?;
//! assert_eq!(plan[0].seq_lens, [768, 256]);
//! assert_eq!(plan[1].seq_lens, [256, 512]);
//! assert!(plan[1].is_continuation);
//! # Ok::<(), mla_runtime::Error>(())
//! ```
//!
//! Under [context parallelism](super::parallel) every rank gathers only the rows it holds. The
//! budget is then ⌊W/N⌋ rows per rank. A segment is charged with the padded number of rows that
//! each rank reserves for it, so that all ranks agree. Cuts are multiples of lcm(page, N·I).

use std::ops::Range;

use serde::Serialize;

use super::parallel::ContextParallel;
use crate::setters::setters;
use crate::{Error, Result};

/// The limits of the chunks of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ChunkLimits {
    /// W: the number of rows in the workspace, over all ranks.
    pub rows: u32,
    /// The alignment of cuts in a context, in tokens. It is the page size, because the gather
    /// starts at a page.
    pub align: u32,
    /// The maximum number of tokens in a segment that ends with a cut. It is rounded down to the
    /// alignment. A request that fits is never cut. `None` means W rounded down to the alignment.
    pub max_chunk: Option<u32>,
    /// The distribution of the cache over ranks. `None` means that the cache is on one device, and
    /// the plan has no shards.
    pub parallel: Option<ContextParallel>,
    /// True if each request is cut as if it were alone.
    pub own_cuts: bool,
}

impl ChunkLimits {
    /// Chunks of `rows` rows on one device, cut at multiples of `align` tokens. A segment may be as
    /// long as fits.
    pub const fn new(rows: u32, align: u32) -> Self {
        Self {
            rows,
            align,
            max_chunk: None,
            parallel: None,
            own_cuts: false,
        }
    }

    setters! {
        with_max_chunk(max_chunk: Option<u32>);
        with_parallel(parallel: Option<ContextParallel>);
        with_own_cuts(own_cuts: bool);
    }
}

/// One workspace full of context: a segment of each of several consecutive requests.
///
/// Serialises as `{"request_start", "request_end", "starts", "seq_lens", "is_continuation"}`. Under
/// context parallelism the three fields about ranks are added.
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
    /// `[requests][ranks]`: the number of tokens that each rank holds of each request's whole
    /// context. Like the two fields below, it is filled only under context parallelism.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub local_context_lens: Vec<Vec<u32>>,
    /// The start of each request's segment among the rows of a rank; the same on every rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub local_starts: Vec<u32>,
    /// The number of rows that a rank reserves for each request's segment; the same on every rank.
    /// The rank holds min(`padded`, max(0, `local_context_lens` − `local_starts`)) of these rows.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub padded_local_seq_lens: Vec<u32>,
}

impl ContextChunk {
    /// A chunk with one segment of each of these requests, by their starts and lengths. The first
    /// request is no continuation, and the cache is on one device.
    pub const fn new(requests: Range<usize>, starts: Vec<u32>, seq_lens: Vec<u32>) -> Self {
        Self {
            request_start: requests.start,
            request_end: requests.end,
            starts,
            seq_lens,
            is_continuation: false,
            local_context_lens: Vec::new(),
            local_starts: Vec::new(),
            padded_local_seq_lens: Vec::new(),
        }
    }
}

impl ContextChunk {
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

    /// The number of context rows in the chunk, over all ranks.
    pub fn rows(&self) -> u64 {
        self.seq_lens.iter().copied().map(u64::from).sum()
    }

    /// The length of the longest segment.
    pub fn max_seq_len(&self) -> u32 {
        self.seq_lens.iter().copied().max().unwrap_or(0)
    }

    /// `[requests + 1]`: the start of each segment among the chunk's rows, followed by the number
    /// of rows.
    pub fn cumulative_seq_lens(&self) -> Vec<u64> {
        let lens = self.seq_lens.iter().copied().map(u64::from);
        let ends = lens.scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        });
        std::iter::once(0).chain(ends).collect()
    }
}

/// The maximum number of chunks in a plan. With a very small workspace, the plan itself would
/// otherwise become larger than the memory it saves.
pub const MAX_CHUNKS: usize = 1 << 20;

/// Packs the cached context of a batch into chunks, in the order of their execution. The
/// [module](self) describes the rules. There are no chunks if no request has context.
///
/// `context_lens` has one entry per request: the number of its cached tokens, without the new ones.
///
/// # Errors
///
/// If a limit is zero, if the alignment exceeds `rows` or `max_chunk`, or if the plan would have
/// more than [`MAX_CHUNKS`] chunks. With `parallel`, over N ranks with an interleave of I tokens,
/// the alignment is lcm(align, N·I).
pub fn plan_chunks(context_lens: &[u32], limits: &ChunkLimits) -> Result<Vec<ContextChunk>> {
    let packer = Packer::new(limits)?;
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
            return Err(Error::argument("rows", limits.rows, accepted));
        }
        let mut chunk = ContextChunk::new(request..request, Vec::new(), Vec::new());
        chunk.is_continuation = start > 0;
        let mut available = packer.budget;
        while let Some(&len) = context_lens.get(request).filter(|&&len| len > 0) {
            let room = if limits.own_cuts {
                packer.budget
            } else {
                available
            };
            let fits = packer.rows(start, len) <= room;
            let end = if fits {
                len
            } else {
                start + packer.longest_cut(room)
            };
            let rows = packer.rows(start, end);
            if end == start || rows > available {
                break;
            }
            chunk.starts.push(start);
            chunk.seq_lens.push(end - start);
            if !fits {
                start = end;
                break;
            }
            available -= rows;
            request += 1;
            start = 0;
        }
        chunk.request_end += chunk.seq_lens.len();
        if let Some(parallel) = limits.parallel {
            shard(&mut chunk, context_lens, parallel)?;
        }
        chunks.push(chunk);
    }
    Ok(chunks)
}

/// The limits, in the units that the packing uses.
struct Packer {
    parallel: ContextParallel,
    /// The number of rows per chunk and rank.
    budget: u64,
    /// Cuts are multiples of this many tokens.
    align: u64,
    /// The longest segment that may end with a cut, in tokens; a multiple of `align`, and not zero.
    max_cut: u64,
}

impl Packer {
    fn new(limits: &ChunkLimits) -> Result<Self> {
        let parallel = limits.parallel.unwrap_or(ContextParallel::SINGLE);
        let align = parallel.alignment(limits.align)?;
        let max_chunk = limits.max_chunk.unwrap_or(limits.rows);
        for (field, given) in [("rows", limits.rows), ("max_chunk", max_chunk)] {
            if u64::from(given) < align {
                let accepted = format!("at least the alignment, {align}");
                return Err(Error::argument(field, given, accepted));
            }
        }
        let max_chunk = u64::from(max_chunk);
        Ok(Self {
            parallel,
            budget: u64::from(limits.rows / parallel.world()),
            align,
            max_cut: max_chunk - max_chunk % align,
        })
    }

    /// The number of rows per rank for the tokens from `start` to `end`.
    fn rows(&self, start: u32, end: u32) -> u64 {
        self.parallel.padded_local_len(end) - self.parallel.padded_local_len(start)
    }

    /// The longest segment, from an aligned start, that takes at most `available` rows per rank.
    ///
    /// A multiple of the alignment is a multiple of N·I. Its tokens are therefore dealt evenly, and
    /// every rank has exactly 1/N of them as rows. For a whole budget the result is not zero:
    /// `align` is at most W and a multiple of N, so its share is at most ⌊W/N⌋.
    fn longest_cut(&self, available: u64) -> u32 {
        let tokens = available * u64::from(self.parallel.world());
        let cut = (tokens - tokens % self.align).min(self.max_cut);
        // At most W, so it fits 32 bits.
        cut as u32
    }
}

/// Adds the part of a chunk that each rank gathers.
fn shard(chunk: &mut ContextChunk, context_lens: &[u32], parallel: ContextParallel) -> Result<()> {
    let padded = |len| {
        u32::try_from(parallel.padded_local_len(len)).map_err(|_| Error::Overflow {
            quantity: "the rows of a rank",
            limit: u32::MAX.into(),
        })
    };
    for (&start, &len) in chunk.starts.iter().zip(&chunk.seq_lens) {
        let local_start = padded(start)?;
        chunk.local_starts.push(local_start);
        chunk
            .padded_local_seq_lens
            .push(padded(start + len)? - local_start);
    }
    let requests = &context_lens[chunk.requests()];
    chunk.local_context_lens = requests
        .iter()
        .map(|&len| parallel.local_lens(len))
        .collect();
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn limits(rows: u32, align: u32) -> ChunkLimits {
        ChunkLimits {
            rows,
            align,
            max_chunk: None,
            parallel: None,
            own_cuts: false,
        }
    }

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

    /// For each chunk its first request, and the start and length of each segment.
    type Chunks = &'static [(usize, &'static [(u32, u32)])];

    /// Asserts that contexts are packed as expected into chunks of `rows` rows, cut at multiples of
    /// 16.
    fn packed(lens: &[u32], rows: u32, expected: Chunks) {
        let plan = plan_chunks(lens, &limits(rows, 16)).unwrap();
        let expected: Vec<_> = expected
            .iter()
            .map(|(first, segments)| (*first, segments.to_vec()))
            .collect();
        assert_eq!(shape(&plan), expected, "{lens:?} W={rows}");
    }

    #[test]
    fn requests_are_packed_in_order_and_cut_where_a_chunk_is_full() {
        packed(
            &[768, 512, 512],
            1024,
            &[(0, &[(0, 768), (0, 256)]), (1, &[(256, 256), (0, 512)])],
        );
        packed(
            &[37, 1000, 5],
            1024,
            &[(0, &[(0, 37), (0, 976)]), (1, &[(976, 24), (0, 5)])],
        );
        packed(
            &[2048, 320],
            1024,
            &[(0, &[(0, 1024)]), (0, &[(1024, 1024)]), (1, &[(0, 320)])],
        );
        // A chunk that is exactly full, and one with a row too many.
        packed(&[960, 16, 16], 1024, &[(0, &[(0, 960), (0, 16), (0, 16)])]);
        packed(
            &[960, 48, 17],
            1024,
            &[(0, &[(0, 960), (0, 48), (0, 16)]), (2, &[(16, 1)])],
        );
        // No aligned length fits into the 8 rows that are left.
        packed(&[1016, 20], 1024, &[(0, &[(0, 1016)]), (1, &[(0, 20)])]);
    }

    #[test]
    fn a_request_without_context_ends_the_chunk_wherever_it_stands() {
        packed(&[], 1024, &[]);
        packed(&[0, 0], 1024, &[]);
        packed(&[0, 0, 64, 0], 1024, &[(2, &[(0, 64)])]);
        packed(&[64, 0, 64, 0], 1024, &[(0, &[(0, 64)]), (2, &[(0, 64)])]);
        packed(
            &[1040, 0, 5],
            1024,
            &[(0, &[(0, 1024)]), (0, &[(1024, 16)]), (2, &[(0, 5)])],
        );
    }

    #[test]
    fn what_fits_whole_may_use_rows_beyond_the_alignment_and_a_cut_may_not() {
        packed(&[1000], 1000, &[(0, &[(0, 1000)])]);
        packed(&[1001], 1000, &[(0, &[(0, 992)]), (0, &[(992, 9)])]);
        // The alignment equals W.
        packed(
            &[5, 20],
            16,
            &[(0, &[(0, 5)]), (1, &[(0, 16)]), (1, &[(16, 4)])],
        );
    }

    #[test]
    fn max_chunk_bounds_cuts_only() {
        let limits = |max_chunk| ChunkLimits {
            max_chunk: Some(max_chunk),
            ..limits(1024, 16)
        };
        // 800 fits, so nothing is cut.
        let plan = plan_chunks(&[800], &limits(512)).unwrap();
        assert_eq!(shape(&plan), [(0, vec![(0, 800)])]);
        // Cuts of at most 512 tokens (given as 520) until the rest fits.
        let plan = plan_chunks(&[2048], &limits(520)).unwrap();
        assert_eq!(
            shape(&plan),
            [
                (0, vec![(0, 512)]),
                (0, vec![(512, 512)]),
                (0, vec![(1024, 1024)])
            ]
        );
    }

    #[test]
    fn own_cuts_are_those_of_a_request_alone() {
        let own =
            |lens: &[u32], rows| plan_chunks(lens, &limits(rows, 16).with_own_cuts(true)).unwrap();
        assert_eq!(
            shape(&own(&[768, 512, 2000, 40], 1024)),
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
        let plan = plan_chunks(&[960, 80], &limits(1024, 16)).unwrap();
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
    fn dealt_to_ranks() {
        // Budget 512 rows per rank, cuts at multiples of lcm(128, 2·64) = 128.
        let limits = ChunkLimits {
            parallel: Some(ContextParallel::new(2, 64).unwrap()),
            ..limits(1024, 128)
        };
        let plan = plan_chunks(&[3000, 200, 200], &limits).unwrap();
        let chunk = |request: [usize; 2], starts, seq_lens, continues, local: [_; 3]| {
            let [lens, local_starts, padded] = local;
            json!({
                "request_start": request[0], "request_end": request[1],
                "starts": starts, "seq_lens": seq_lens, "is_continuation": continues,
                "local_context_lens": lens, "local_starts": local_starts,
                "padded_local_seq_lens": padded,
            })
        };
        let long = json!([[1528, 1472]]);
        assert_eq!(
            serde_json::to_value(&plan).unwrap(),
            json!([
                chunk(
                    [0, 1],
                    json!([0]),
                    json!([1024]),
                    false,
                    [long.clone(), json!([0]), json!([512])]
                ),
                chunk(
                    [0, 1],
                    json!([1024]),
                    json!([1024]),
                    true,
                    [long.clone(), json!([512]), json!([512])]
                ),
                // The last 952 tokens are padded to 1024, which fills the chunk.
                chunk(
                    [0, 1],
                    json!([2048]),
                    json!([952]),
                    true,
                    [long, json!([1024]), json!([512])]
                ),
                chunk(
                    [1, 3],
                    json!([0, 0]),
                    json!([200, 200]),
                    false,
                    [
                        json!([[128, 72], [128, 72]]),
                        json!([0, 0]),
                        json!([128, 128])
                    ]
                ),
            ])
        );
    }

    #[test]
    fn padding_decides_what_fits() {
        // Four ranks take one token each in turn. 65 tokens take 17 rows and 96 take 24; 32 rows
        // fit.
        let limits = ChunkLimits {
            parallel: Some(ContextParallel::new(4, 1).unwrap()),
            ..limits(128, 64)
        };
        let plan = plan_chunks(&[65, 96], &limits).unwrap();
        assert_eq!(shape(&plan), [(0, vec![(0, 65)]), (1, vec![(0, 96)])]);
        assert_eq!(plan[0].local_context_lens, [[17, 16, 16, 16]]);
        assert_eq!(plan[0].padded_local_seq_lens, [17]);
    }

    #[test]
    fn one_rank_plans_as_none_does() {
        let lens = [768, 512, 512, 0, 3];
        let alone = ChunkLimits {
            parallel: Some(ContextParallel::new(1, 64).unwrap()),
            ..limits(1024, 16)
        };
        let plan = plan_chunks(&lens, &alone).unwrap();
        assert_eq!(
            shape(&plan),
            shape(&plan_chunks(&lens, &limits(1024, 16)).unwrap())
        );
        for chunk in &plan {
            assert_eq!(chunk.local_starts, chunk.starts);
            assert_eq!(chunk.padded_local_seq_lens, chunk.seq_lens);
        }
    }

    #[test]
    fn refuses_what_cannot_be_planned() {
        let message = |lens: &[u32], limits| plan_chunks(lens, &limits).unwrap_err().to_string();
        assert_eq!(
            message(&[5], limits(15, 16)),
            "rows: given 15, accepted at least the alignment, 16"
        );
        assert_eq!(
            message(&[5], limits(0, 1)),
            "rows: given 0, accepted at least the alignment, 1"
        );
        assert_eq!(
            message(&[5], limits(16, 0)),
            "align: given 0, accepted at least 1"
        );
        let capped = ChunkLimits {
            max_chunk: Some(8),
            ..limits(1024, 16)
        };
        assert_eq!(
            message(&[5], capped),
            "max_chunk: given 8, accepted at least the alignment, 16"
        );
        let dealt = ChunkLimits {
            parallel: Some(ContextParallel::new(2, 48).unwrap()),
            ..limits(128, 64)
        };
        assert_eq!(
            message(&[5], dealt),
            "rows: given 128, accepted at least the alignment, 192"
        );
        assert_eq!(
            message(&[u32::MAX], limits(1, 1)),
            "rows: given 1, accepted a number with which at most 1048576 chunks are needed"
        );
    }

    #[test]
    fn the_largest_numbers_plan() {
        let plan = plan_chunks(&[u32::MAX; 3], &limits(u32::MAX, u32::MAX)).unwrap();
        assert_eq!(plan.len(), 3);
        assert_eq!(plan[0].rows(), u64::from(u32::MAX));
    }

    /// Follows the rules of the module's documentation literally: it finds every cut by trying all
    /// lengths, and it counts a rank's rows instead of computing them.
    fn naive(lens: &[u32], limits: &ChunkLimits) -> Vec<(usize, Vec<(u32, u32)>)> {
        let parallel = limits.parallel.unwrap_or(ContextParallel::SINGLE);
        let align = parallel.alignment(limits.align).unwrap() as u32;
        let budget = u64::from(limits.rows / parallel.world());
        // The rows of the fullest rank, padded to whole blocks. Each round begins with rank 0.
        let rows = |start: u32, len: u32| {
            let period = parallel.period() as u32;
            let rounds = (start..start + len).filter(|at| at.is_multiple_of(period));
            rounds.count() as u64 * u64::from(parallel.interleave())
        };
        let mut chunks = Vec::new();
        let mut left: Vec<(usize, u32)> = lens.iter().map(|_| 0).enumerate().collect();
        left.reverse();
        while let Some((first, _)) = left.last().copied() {
            if lens[first] == 0 {
                left.pop();
                continue;
            }
            let mut segments = Vec::new();
            let mut available = budget;
            while let Some((request, start)) = left.pop() {
                let rest = lens[request] - start;
                let whole = rest > 0 && rows(start, rest) <= available;
                let max = limits.max_chunk.unwrap_or(limits.rows);
                let len = if whole {
                    rest
                } else {
                    (1..rest)
                        .rev()
                        .filter(|len| len.is_multiple_of(align) && *len <= max)
                        .find(|&len| rows(start, len) <= available)
                        .unwrap_or(0)
                };
                if len > 0 {
                    segments.push((start, len));
                    available -= rows(start, len);
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

    fn any_limits() -> impl Strategy<Value = ChunkLimits> {
        let parallel = proptest::option::of((1u32..6, 1u32..9));
        (
            1u32..20,
            parallel,
            0u32..300,
            proptest::option::of(0u32..300),
        )
            .prop_map(|(page, parallel, spare_rows, spare_chunk)| {
                let parallel = parallel.map(|(n, i)| ContextParallel::new(n, i).unwrap());
                let align = parallel
                    .unwrap_or(ContextParallel::SINGLE)
                    .alignment(page)
                    .unwrap() as u32;
                ChunkLimits {
                    rows: align + spare_rows,
                    align: page,
                    max_chunk: spare_chunk.map(|spare| align + spare),
                    parallel,
                    own_cuts: false,
                }
            })
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_planner(lens in contexts(), limits in any_limits()) {
            let plan = plan_chunks(&lens, &limits).unwrap();
            prop_assert_eq!(shape(&plan), naive(&lens, &limits));
        }

        #[test]
        fn chunks_tile_the_context(
            lens in contexts(), limits in any_limits(), own_cuts: bool,
        ) {
            let limits = limits.with_own_cuts(own_cuts);
            let plan = plan_chunks(&lens, &limits).unwrap();
            let parallel = limits.parallel.unwrap_or(ContextParallel::SINGLE);
            let align = parallel.alignment(limits.align).unwrap() as u32;

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
                        prop_assert!(len <= limits.max_chunk.unwrap_or(limits.rows));
                    }
                }
                prop_assert!(chunk.rows() <= u64::from(limits.rows));
                prop_assert_eq!(chunk.cumulative_seq_lens().pop(), Some(chunk.rows()));
            }
            prop_assert_eq!(&seen, &lens);
        }

        /// With own cuts, a request is cut in the same way with and without other requests.
        #[test]
        fn own_cuts_ignore_other_requests(lens in contexts(), limits in any_limits()) {
            let segments = |lens: &[u32], limits: &ChunkLimits, number| -> Vec<_> {
                let plan = plan_chunks(lens, limits).unwrap();
                let all = plan.iter().flat_map(ContextChunk::segments);
                let of_request = all.filter(|(request, ..)| *request == number);
                of_request.map(|(_, start, len)| (start, len)).collect()
            };
            let own = limits.with_own_cuts(true);
            for (number, len) in lens.iter().enumerate() {
                let alone = segments(&[*len], &limits, 0);
                prop_assert_eq!(segments(&lens, &own, number), alone);
            }
        }

        /// A chunk ends only at the end of the batch, before a request without context, at a cut,
        /// or if no aligned segment of the next request fits.
        #[test]
        fn chunks_are_filled(lens in contexts(), limits in any_limits()) {
            let plan = plan_chunks(&lens, &limits).unwrap();
            let parallel = limits.parallel.unwrap_or(ContextParallel::SINGLE);
            let align = parallel.alignment(limits.align).unwrap() as u32;
            let budget = u64::from(limits.rows / parallel.world());
            for (chunk, next) in plan.iter().zip(plan.iter().skip(1)) {
                let used: u64 = chunk
                    .segments()
                    .map(|(_, start, len)| parallel.padded_local_len(start + len)
                        - parallel.padded_local_len(start))
                    .sum();
                let (request, start, _) = next.segments().next().unwrap();
                if request > chunk.request_end {
                    prop_assert!(lens[chunk.request_end..request].iter().all(|&len| len == 0));
                    continue;
                }
                // One more aligned segment would not have fitted or would have exceeded `max_cut`.
                let segment = u64::from(align / parallel.world());
                let open = request < chunk.request_end;
                let cut = if open { *chunk.seq_lens.last().unwrap() } else { 0 };
                let too_long = cut + align > limits.max_chunk.unwrap_or(limits.rows);
                prop_assert!(used + segment > budget || too_long);
                prop_assert!(
                    used + parallel.padded_local_len(lens[request])
                        - parallel.padded_local_len(start) > budget
                );
            }
        }

        /// The shards cover exactly the tokens that each rank holds, within the rank's share of the
        /// rows.
        #[test]
        fn local_parts_tile_each_rank(lens in contexts(), limits in any_limits()) {
            prop_assume!(limits.parallel.is_some());
            let parallel = limits.parallel.unwrap();
            let plan = plan_chunks(&lens, &limits).unwrap();
            let mut cursor = vec![0u32; lens.len()];
            let mut held = vec![0u64; lens.len()];
            for chunk in &plan {
                let padded = chunk.padded_local_seq_lens.iter().copied().map(u64::from);
                prop_assert!(padded.sum::<u64>() <= u64::from(limits.rows / parallel.world()));
                for (index, (request, _, len)) in chunk.segments().enumerate() {
                    let start = chunk.local_starts[index];
                    let padded = chunk.padded_local_seq_lens[index];
                    prop_assert_eq!(start, cursor[request]);
                    cursor[request] += padded;
                    let ranks = &chunk.local_context_lens[index];
                    prop_assert_eq!(ranks, &parallel.local_lens(lens[request]));
                    // The rows that the ranks really hold add up to the segment's tokens.
                    let rows: u64 = ranks
                        .iter()
                        .map(|&len| u64::from(len.saturating_sub(start).min(padded)))
                        .sum();
                    prop_assert_eq!(rows, u64::from(len));
                    held[request] += rows;
                }
            }
            for (request, &len) in lens.iter().enumerate() {
                prop_assert_eq!(held[request], u64::from(len));
                prop_assert_eq!(u64::from(cursor[request]), parallel.padded_local_len(len));
            }
        }

        #[test]
        fn any_input_gives_a_plan_or_an_error(
            lens in proptest::collection::vec(any::<u32>(), 0..4),
            rows in (1u32 << 16)..,
            align: u32,
            max_chunk: Option<u32>,
            own_cuts: bool,
            parallel in proptest::option::of((0u32..9, any::<u32>())),
        ) {
            // A test of `ContextParallel` covers the values that it refuses. Here they mean no
            // parallelism.
            let parallel = parallel.and_then(|(n, i)| ContextParallel::new(n, i).ok());
            let _ = plan_chunks(&lens, &ChunkLimits {
                rows, align, max_chunk, parallel, own_cuts,
            });
        }
    }
}
