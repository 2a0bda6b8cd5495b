//! The context of a step's requests on the expanded path. It is attended to in chunks, or in one
//! call together with the new tokens.

use std::ops::Range;

use super::StagedStep;
use crate::Result;
use crate::batch::Request;
use crate::device::{Device, GatherRows};
use crate::model::KvFormat;
use crate::plan::context::plan_chunks;
use crate::plan::slots::SKIPPED;
use crate::spec::{Feature, Problem};
use crate::tensor::ArrayRef;

/// One attention to rows of the cache. The rows are a chunk of the context, or all context and the
/// new tokens.
pub(in crate::layer) struct StepChunk<'a, D: Device> {
    pub(in crate::layer) chunk: Option<(usize, [&'a [u32]; 2])>,
    /// The queries, as a range of the tokens on the expanded path.
    pub(in crate::layer) tokens: Range<usize>,
    pub(in crate::layer) gather: GatherRows<'a, D>,
    pub(in crate::layer) query_starts: ArrayRef<'a, D, i32>,
    pub(in crate::layer) key_starts: ArrayRef<'a, D, i32>,
    pub(in crate::layer) max_query_len: usize,
    pub(in crate::layer) max_key_len: usize,
}

/// The number of array elements of a chunk with this number of segments.
pub(super) fn chunk_elements(segments: usize) -> usize {
    3 * segments + 2
}

impl StagedStep {
    /// Divides the context of the requests on the expanded path. The limits have room for it.
    pub(super) fn plan_context(&mut self, problem: &Problem, expanded: &[Request]) -> Result<()> {
        // The context of a request without new tokens is not needed.
        let context_len = |request: &Request| match request.q {
            0 => 0,
            _ => request.context_len(),
        };
        self.context.clear();
        self.context_in_one_call = false;
        self.expanded_key_lens.clone_from(&self.expanded_query_lens);
        if expanded.iter().all(|request| context_len(request) == 0) {
            return Ok(());
        }
        let own_cuts = problem.features.contains(Feature::BatchInvariant);
        if !own_cuts && self.fits_one_call(problem, expanded) {
            self.context_in_one_call = true;
            let with_context = expanded.iter().map(|r| r.q + context_len(r));
            super::replace(&mut self.expanded_key_lens, with_context);
            return Ok(());
        }
        let lens: Vec<u32> = expanded.iter().map(context_len).collect();
        // Less than 2³¹, as the check of the limits ensures.
        let rows = self.limits.context_rows as u32;
        self.context = plan_chunks(&lens, rows, problem.page_size, own_cuts)?;
        Ok(())
    }

    /// Returns true if one causal call can cover context and new tokens of the requests on the
    /// expanded path. This takes less time than two calls and a merge. All keys are then gathered
    /// from the cache. Every new token must therefore be written, the cache must hold unquantised
    /// rows, and the rows of all requests must fit at once. Because of the last condition, a
    /// batch-invariant layer never does this.
    fn fits_one_call(&self, problem: &Problem, expanded: &[Request]) -> bool {
        let with_tokens = expanded.iter().filter(|request| request.q > 0);
        let rows: u64 = with_tokens.map(|request| u64::from(request.kv)).sum();
        rows <= self.limits.context_rows as u64
            && problem.kv_format == KvFormat::of(problem.dtype)
            && !self.slots[self.absorbed_tokens..].contains(&SKIPPED)
            && 4 * chunk_elements(expanded.len()) <= self.layout.chunks.len()
    }

    /// A chunk, and what its call needs.
    pub(in crate::layer) fn chunk<'a, D: Device>(
        &'a self,
        index: usize,
        arrays: D::Bytes<'a>,
    ) -> Result<StepChunk<'a, D>> {
        let chunk = &self.context[index];
        let requests = chunk.request_start..chunk.request_end;
        let gathered = self.gathered(index, arrays, requests.clone(), &chunk.seq_lens)?;
        Ok(StepChunk {
            chunk: Some((
                index,
                [&self.expanded_query_lens[requests], &chunk.seq_lens],
            )),
            ..gathered
        })
    }

    /// The call for context and new tokens, if there is only one.
    pub(in crate::layer) fn one_call<'a, D: Device>(
        &'a self,
        arrays: D::Bytes<'a>,
    ) -> Result<Option<StepChunk<'a, D>>> {
        let requests = 0..self.expanded_key_lens.len();
        if self.context_in_one_call {
            self.gathered(0, arrays, requests, &self.expanded_key_lens)
                .map(Some)
        } else {
            Ok(None)
        }
    }

    /// The call of these requests to their gathered rows. `index` is the index of the call's
    /// numbers among those of the chunks.
    fn gathered<'a, D: Device>(
        &'a self,
        index: usize,
        arrays: D::Bytes<'a>,
        requests: Range<usize>,
        key_lens: &[u32],
    ) -> Result<StepChunk<'a, D>> {
        let count = key_lens.len();
        let start = self.chunk_starts[index];
        let end = start + chunk_elements(count);
        let all = ArrayRef::new(D::byte_range(arrays, self.layout.chunks.clone()), end)?;
        let key_starts = all.range(start + count + 1..start + 2 * count + 2)?;
        let first = self.absorbed_requests;
        let longest = |lens: &[u32]| lens.iter().max().map_or(0, |len| *len as usize);
        // At most `context_rows`.
        let rows = key_lens.iter().map(|len| *len as usize).sum();
        Ok(StepChunk {
            chunk: None,
            tokens: self.expanded_starts[requests.start]..self.expanded_starts[requests.end],
            gather: GatherRows::new(
                self.block_table(arrays, first + requests.start..first + requests.end)?,
                all.range(start + 2 * count + 2..end)?,
                key_starts,
                rows,
            ),
            query_starts: all.range(start..start + count + 1)?,
            key_starts,
            max_query_len: longest(&self.expanded_query_lens[requests]),
            max_key_len: longest(key_lens),
        })
    }
}
