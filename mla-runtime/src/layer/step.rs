//! A step: which requests it has, which path they take, and the arrays that say so to the device.

use std::ops::Range;

use bytemuck::Pod;

use super::token_rows::{Arrangement, RowOrder, TokenRows};
use crate::backend::{Chunk, DecodeBatch, HostLens, PrefillBatch, StepLimits};
use crate::batch::Request;
use crate::device::{Device, GatherRows};
use crate::model::KvFormat;
use crate::plan::context::{ChunkLimits, ContextPlan, plan_chunks};
use crate::plan::limits::ArrayLayout;
use crate::plan::slots::{BlockTables, HostIndex, SKIPPED};
use crate::room::{with_room, zeros};
use crate::setters::setters;
use crate::spec::{Problem, QueryLen};
use crate::tensor::{ArrayRef, BlockTable};
use crate::{Error, Result};

/// The input of one step.
///
/// The requests stand in the order that [`plan::split`](crate::plan::split) gives, and so do their
/// tokens, one request's after the other's. The first requests with at most the threshold's number
/// of new tokens take the absorbed path, all from the first longer one on the expanded path. A
/// request behind that one which belongs before it is refused.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StepBatch<'a, T = i32, S = i64> {
    /// The requests. One with q new tokens and a kv of 0 is padding: its tokens attend to nothing,
    /// and their outputs are 0. (Of sparse problems they attend to what their lists name, as other
    /// tokens do; lists of an [`Indexer`](crate::indexer::Indexer) name nothing.) One with a q of 0
    /// is skipped.
    pub requests: &'a [Request],
    /// The pages of each request, row i being that of request i. Pages are held in any integer type
    /// of [`HostIndex`].
    pub block_tables: BlockTables<'a, T>,
    /// The rows of each request's new tokens in the tensors of a call. `None`: one request's behind
    /// the other's, in the order of `requests`, from row 0 on.
    pub rows: Option<TokenRows<'a>>,
    /// The slot to which each new token's row is written: the one that the block tables have for
    /// the token, or [`SKIPPED`] if it is not to be written. `None`: those that the block tables
    /// have. In the order of `requests`, whatever `rows` says.
    pub slots: Option<&'a [S]>,
    /// The max number of new tokens of a request on the absorbed path; `None`: the workspace's
    /// [threshold](super::Workspace::threshold). More than
    /// [`decode_query_len`](StepLimits::decode_query_len) count as that many.
    pub threshold: Option<u32>,
    /// The max number of tokens that a request on the absorbed path will have while this step is
    /// replayed from a graph with other lengths; `None`: the max that one has now. More than the
    /// limits' pages hold count as that many. Backends may choose a kernel by it: a replay has the
    /// bits of a step that is run at once and says as much.
    pub max_len: Option<u32>,
    /// The max tokens of a dense request of a sparse problem: such requests attend to all that they
    /// see, by the dense paths, and their slot lists are not read. It is what a model chooses of
    /// each context (its `topk`), since a request with no more is told to attend to everything.
    /// Dense requests of more new tokens than the threshold take the expanded path, if
    /// [`context_rows`](StepLimits::context_rows) is not 0. 0: every request goes by its lists.
    pub dense_within: u32,
    /// True if a new token sees its request up to itself. If not, every new token of a request sees
    /// all of them, on both paths: drafts that see each other. It takes backends with
    /// [`NonCausal`](crate::spec::Feature::NonCausal), if a request brings several, and a
    /// problem that is not sparse.
    pub causal: bool,
}

impl<'a, T: HostIndex> StepBatch<'a, T> {
    /// Requests and their pages; every new token is written, and the workspace's threshold decides.
    pub const fn new(requests: &'a [Request], block_tables: BlockTables<'a, T>) -> Self {
        Self {
            requests,
            block_tables,
            rows: None,
            slots: None,
            threshold: None,
            max_len: None,
            dense_within: 0,
            causal: true,
        }
    }
}

impl<'a, T: HostIndex, S: HostIndex> StepBatch<'a, T, S> {
    /// The same with these [`slots`](Self::slots), of any integer type of [`HostIndex`]. Types
    /// without a sign cannot say [`SKIPPED`].
    #[must_use]
    pub const fn with_slots<N: HostIndex>(self, slots: Option<&'a [N]>) -> StepBatch<'a, T, N> {
        StepBatch {
            requests: self.requests,
            block_tables: self.block_tables,
            rows: self.rows,
            slots,
            threshold: self.threshold,
            max_len: self.max_len,
            dense_within: self.dense_within,
            causal: self.causal,
        }
    }

    setters! {
        with_rows(rows: Option<TokenRows<'a>>);
        with_threshold(threshold: Option<u32>);
        with_max_len(max_len: Option<u32>);
        with_dense_within(dense_within: u32);
        with_causal(causal: bool);
    }
}

/// Refuses dense requests of a problem whose requests are all dense.
pub(super) fn check_dense_within(problem: &Problem, tokens: u32) -> Result<()> {
    if tokens == 0 || problem.sparse {
        return Ok(());
    }
    let accepted = "0, as the problem is not sparse";
    Err(Error::argument("dense_within", tokens, accepted))
}

/// A step as the host knows it, and the bytes that tell the device.
pub(super) struct Step {
    limits: StepLimits,
    layout: ArrayLayout,
    staging: Vec<u8>,
    prepared: bool,
    tokens: usize,
    /// The slot of each new token.
    slots: Vec<i64>,
    /// The slots that are written, in order.
    written: Vec<i64>,
    /// The requests on the absorbed path come first.
    absorbed_requests: usize,
    absorbed_tokens: usize,
    max_absorbed_query_len: usize,
    max_seq_len: usize,
    /// The new tokens and all tokens of each request on the absorbed path.
    absorbed_query_lens: Vec<u32>,
    absorbed_seq_lens: Vec<u32>,
    dense_within: u32,
    requests: usize,
    /// The new tokens of each request on the expanded path, and where they begin among them.
    expanded_query_lens: Vec<u32>,
    expanded_starts: Vec<usize>,
    /// The keys of each of these requests in the call of its new tokens: these, or its context,
    /// too.
    expanded_key_lens: Vec<u32>,
    /// True if context and new tokens are attended to in one causal call; then there are no chunks.
    context_in_one_call: bool,
    context: ContextPlan,
    /// The start of each chunk's numbers in the array of chunks, and the end of the last.
    chunk_starts: Vec<usize>,
    longest: usize,
    /// One past the largest page that the step names: what the cache must have.
    pages_end: usize,
    order: RowOrder,
    causal: bool,
}

impl Step {
    pub(super) fn new(limits: &StepLimits, page_size: u32) -> Result<Self> {
        let layout = ArrayLayout::new(limits, page_size)?;
        Ok(Self {
            limits: *limits,
            staging: zeros(layout.bytes())?,
            layout,
            prepared: false,
            tokens: 0,
            slots: with_room(limits.tokens)?,
            written: with_room(limits.tokens)?,
            absorbed_requests: 0,
            absorbed_tokens: 0,
            max_absorbed_query_len: 0,
            max_seq_len: 0,
            absorbed_query_lens: with_room(limits.requests)?,
            absorbed_seq_lens: with_room(limits.requests)?,
            dense_within: 0,
            requests: 0,
            expanded_query_lens: with_room(limits.requests)?,
            expanded_starts: with_room(limits.requests + 1)?,
            expanded_key_lens: with_room(limits.requests)?,
            context_in_one_call: false,
            context: ContextPlan { chunks: Vec::new() },
            chunk_starts: vec![0],
            longest: 0,
            pages_end: 0,
            order: RowOrder::new(limits)?,
            causal: true,
        })
    }

    /// Checks a batch, decides which request takes which path, and writes the arrays.
    pub(super) fn plan<T: HostIndex, S: HostIndex>(
        &mut self,
        problem: &Problem,
        threshold: u32,
        batch: &StepBatch<'_, T, S>,
    ) -> Result<()> {
        self.prepared = false;
        self.check(problem, batch)?;
        self.split(problem, threshold, batch)?;
        self.plan_context(problem, batch)?;
        self.stage(problem, batch);
        Ok(())
    }

    fn check<T: HostIndex, S: HostIndex>(
        &mut self,
        problem: &Problem,
        batch: &StepBatch<'_, T, S>,
    ) -> Result<()> {
        let limits = self.limits;
        if batch.requests.len() > limits.requests {
            return Err(Error::argument(
                "requests",
                batch.requests.len(),
                format!("at most the limit of {}", limits.requests),
            ));
        }
        let tables = batch.block_tables;
        if tables.page_size() != problem.page_size {
            return Err(Error::argument(
                "block_tables.page_size",
                tables.page_size(),
                format!("the problem's, {}", problem.page_size),
            ));
        }
        // A table of more rows may be one of rows of another width.
        if tables.requests() != batch.requests.len() {
            return Err(Error::argument(
                "block_tables",
                format!("{} rows", tables.requests()),
                format!("a row for each of {} requests", batch.requests.len()),
            ));
        }
        check_dense_within(problem, batch.dense_within)?;
        if problem.sparse && !batch.causal {
            let accepted = "true: a token of a sparse problem sees what its list names";
            return Err(Error::argument("causal", false, accepted));
        }
        self.causal = batch.causal;
        self.check_requests(batch)?;
        self.place(batch)?;
        self.check_written()?;
        self.order.plan(batch.requests, self.tokens, batch.rows)?;
        // Lists of slots, and what makes them, are in the order of the step.
        if problem.sparse && !self.order.is_packed() {
            let given = "an order of the engine's own, of a sparse problem";
            let accepted = "rows in the order of the requests, without padding";
            return Err(Error::argument("rows", given, accepted));
        }
        Ok(())
    }

    // The max number of tokens of a request in a replay, of a batch whose page size was checked.
    fn max_len<T: HostIndex, S: HostIndex>(&self, batch: &StepBatch<'_, T, S>) -> Option<u32> {
        let page = batch.block_tables.page_size() as usize;
        // Less than 2³¹, as checked with the limits.
        let room = (self.limits.pages_per_request * page) as u32;
        batch.max_len.map(|len| len.min(room))
    }

    // Checks the lengths and pages of requests that are as many as there is room for.
    fn check_requests<T: HostIndex, S: HostIndex>(
        &mut self,
        batch: &StepBatch<'_, T, S>,
    ) -> Result<()> {
        let limits = self.limits;
        let tables = batch.block_tables;
        let page = tables.page_size() as usize;
        let longest = limits.pages_per_request.min(tables.max_pages()) * page;
        let (mut tokens, mut pages_end) = (0usize, 0usize);
        let rows = tables.entries().chunks(tables.max_pages());
        for (index, (request, row)) in batch.requests.iter().zip(rows).enumerate() {
            let accepted = if request.kv as usize > longest {
                Some(format!(
                    "at most {longest} tokens, which the block table has room for"
                ))
            } else if request.kv < request.q && request.kv > 0 {
                Some(format!(
                    "at least its {} new tokens, or 0 for padding",
                    request.q
                ))
            } else {
                None
            };
            if let Some(accepted) = accepted {
                let given = format!("{} of request {index}", request.kv);
                return Err(Error::argument("requests.kv", given, accepted));
            }
            tokens = tokens.saturating_add(request.q as usize);
            for (place, &entry) in row[..(request.kv as usize).div_ceil(page)]
                .iter()
                .enumerate()
            {
                let page = entry.to_page().map_err(|accepted| {
                    let given = format!("{entry} at [{index}][{place}]");
                    Error::argument("block_tables", given, accepted)
                })?;
                // A page is 0 or above.
                pages_end = pages_end.max(page as usize + 1);
            }
        }
        if tokens > limits.tokens {
            return Err(Error::argument(
                "new tokens",
                tokens,
                format!("at most the limit of {}", limits.tokens),
            ));
        }
        self.tokens = tokens;
        self.requests = batch.requests.len();
        let lens = batch.requests.iter().map(|r| r.q.max(r.kv));
        self.longest = lens.chain(self.max_len(batch)).max().unwrap_or(0) as usize;
        self.pages_end = pages_end;
        Ok(())
    }

    // Finds the slot of every new token in a batch whose pages were checked.
    fn place<T: HostIndex, S: HostIndex>(&mut self, batch: &StepBatch<'_, T, S>) -> Result<()> {
        let tables = batch.block_tables;
        let page = i64::from(tables.page_size());
        self.slots.clear();
        let rows = tables.entries().chunks(tables.max_pages());
        for (request, row) in batch.requests.iter().zip(rows) {
            let slot = |position: u32| {
                let position = i64::from(position);
                i64::from(checked_page(row[(position / page) as usize])) * page + position % page
            };
            match request.is_padding() {
                true => self.slots.extend((0..request.q).map(|_| SKIPPED)),
                false => self
                    .slots
                    .extend((request.context_len()..request.kv).map(slot)),
            }
        }
        let Some(given) = batch.slots else {
            return Ok(());
        };
        if given.len() != self.slots.len() {
            return Err(Error::argument(
                "slots",
                format!("{} entries", given.len()),
                format!("one for each of {} new tokens", self.slots.len()),
            ));
        }
        for (index, (slot, given)) in self.slots.iter_mut().zip(given).enumerate() {
            let number = given.to_i64();
            if number != Some(*slot) && number != Some(SKIPPED) {
                return Err(Error::argument(
                    "slots",
                    format!("{given} of token {index}"),
                    match *slot {
                        SKIPPED => "−1, as the token is padding".to_owned(),
                        slot => format!("{slot}, where the block table has it, or −1"),
                    },
                ));
            }
            if number == Some(SKIPPED) {
                *slot = SKIPPED;
            }
        }
        Ok(())
    }

    // Two tokens in one slot would leave there what is written last, which is any of them on a GPU.
    fn check_written(&mut self) -> Result<()> {
        self.written.clear();
        let written = self.slots.iter().filter(|slot| **slot != SKIPPED);
        self.written.extend(written);
        self.written.sort_unstable();
        match self.written.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(Error::argument(
                "slots",
                format!("slot {} twice", pair[0]),
                "slots that differ",
            )),
            None => Ok(()),
        }
    }

    fn split<T: HostIndex, S: HostIndex>(
        &mut self,
        problem: &Problem,
        threshold: u32,
        batch: &StepBatch<'_, T, S>,
    ) -> Result<()> {
        let limit = u32::try_from(self.limits.decode_query_len).unwrap_or(u32::MAX);
        let most = match problem.query_len {
            QueryLen::Single => limit.min(1),
            _ => limit,
        };
        let dense = match problem.sparse && self.limits.context_rows == 0 {
            true => u32::MAX,
            false => batch.threshold.unwrap_or(threshold).min(most),
        };
        self.dense_within = batch.dense_within;
        let first_len = batch.requests.first().map_or(0, |request| request.q);
        let is_absorbed = |request: &Request| {
            let threshold = threshold_of(problem, batch.dense_within, dense, request);
            // Padding has no expanded form, which knows no tokens that attend to nothing.
            let short = request.q <= threshold || (request.kv == 0 && request.q <= limit);
            match problem.query_len {
                QueryLen::Single => short && request.q == 1,
                QueryLen::Uniform => short && request.q == first_len && request.q > 0,
                QueryLen::Ragged => short,
            }
        };
        let absorbed = batch
            .requests
            .iter()
            .position(|request| !is_absorbed(request))
            .unwrap_or(batch.requests.len());
        let (absorbed, expanded) = batch.requests.split_at(absorbed);
        let misplaced = |r: &&Request| r.q > 0 && !r.is_padding() && is_absorbed(r);
        if let Some(request) = expanded.iter().find(misplaced) {
            let longer = expanded[0].q;
            return Err(Error::argument(
                "requests",
                format!("one of {} new tokens behind one of {longer}", request.q),
                format!(
                    "the order that plan::split gives: those of the absorbed path first, here of \
                     at most {} new tokens",
                    threshold_of(problem, batch.dense_within, dense, request)
                ),
            ));
        }
        self.take_absorbed(problem, batch, absorbed)?;
        self.take_expanded(problem, batch, expanded)
    }

    // Notes the requests on the absorbed path, the first ones.
    fn take_absorbed<T: HostIndex, S: HostIndex>(
        &mut self,
        problem: &Problem,
        batch: &StepBatch<'_, T, S>,
        absorbed: &[Request],
    ) -> Result<()> {
        self.absorbed_requests = absorbed.len();
        self.absorbed_query_lens.clear();
        self.absorbed_query_lens
            .extend(absorbed.iter().map(|r| r.q));
        self.absorbed_seq_lens.clear();
        self.absorbed_seq_lens.extend(absorbed.iter().map(|r| r.kv));
        self.absorbed_tokens = absorbed.iter().map(|r| r.q as usize).sum();
        self.max_absorbed_query_len = absorbed.iter().map(|r| r.q as usize).max().unwrap_or(0);
        let longest = absorbed.iter().map(|r| r.kv).max().unwrap_or(0);
        self.max_seq_len = longest.max(self.max_len(batch).unwrap_or(0)) as usize;
        if problem.sparse && self.max_absorbed_query_len > self.limits.decode_query_len {
            return Err(Error::argument(
                "requests.q",
                self.max_absorbed_query_len,
                format!(
                    "at most limits.decode_query_len = {}: sparse attention has the absorbed form \
                     only, but for requests within dense_within",
                    self.limits.decode_query_len
                ),
            ));
        }
        Ok(())
    }

    // Notes the requests on the expanded path, which follow.
    fn take_expanded<T: HostIndex, S: HostIndex>(
        &mut self,
        problem: &Problem,
        batch: &StepBatch<'_, T, S>,
        expanded: &[Request],
    ) -> Result<()> {
        let first = self.absorbed_requests;
        self.expanded_query_lens.clear();
        self.expanded_starts.clear();
        let mut start = 0;
        for (index, request) in expanded.iter().enumerate() {
            if request.kv == 0 && request.q > 0 {
                let given = format!("0 of request {}", first + index);
                let accepted = format!(
                    "at least its {} new tokens: padding stands first, and has the query length \
                     of the absorbed path",
                    request.q
                );
                return Err(Error::argument("requests.kv", given, accepted));
            }
            self.expanded_query_lens.push(request.q);
            self.expanded_starts.push(start);
            start += request.q as usize;
        }
        self.expanded_starts.push(start);
        let listed = |r: &Request| r.q > 0 && !is_dense(problem, batch.dense_within, r);
        if let Some(place) = expanded.iter().position(listed) {
            return Err(Error::argument(
                "requests.q",
                format!("{} of request {}", expanded[place].q, first + place),
                format!(
                    "{} query lengths: sparse attention has the absorbed form only",
                    problem.query_len
                ),
            ));
        }
        Ok(())
    }

    fn plan_context<T: HostIndex, S: HostIndex>(
        &mut self,
        problem: &Problem,
        batch: &StepBatch<'_, T, S>,
    ) -> Result<()> {
        // A request without new tokens needs none of its context.
        let context_len = |request: &Request| match request.q {
            0 => 0,
            _ => request.context_len(),
        };
        let expanded = &batch.requests[self.absorbed_requests..];
        self.context.chunks.clear();
        self.context_in_one_call = false;
        self.expanded_key_lens.clone_from(&self.expanded_query_lens);
        if expanded.iter().all(|request| context_len(request) == 0) {
            return Ok(());
        }
        if self.limits.context_rows == 0 {
            return Err(Error::argument(
                "limits.context_rows",
                0,
                "at least a page, for requests with context on the expanded path",
            ));
        }
        if self.fits_one_call(problem, expanded) {
            self.context_in_one_call = true;
            let with_context = expanded.iter().map(|r| r.q + context_len(r));
            self.expanded_key_lens.clear();
            self.expanded_key_lens.extend(with_context);
            return Ok(());
        }
        let lens: Vec<u32> = expanded.iter().map(context_len).collect();
        self.context = plan_chunks(
            &lens,
            &ChunkLimits {
                // Less than 2³¹, as checked with the limits.
                rows: self.limits.context_rows as u32,
                align: problem.page_size,
                max_chunk: None,
                parallel: None,
            },
        )?;
        Ok(())
    }

    /// Returns true if the requests of the expanded path can attend to context and new tokens by
    /// one causal call, which takes less time than two and a merge. All of these keys are then
    /// gathered from the cache: so every new token has to be written, as it is, and all rows have
    /// to fit at once.
    fn fits_one_call(&self, problem: &Problem, expanded: &[Request]) -> bool {
        let rows: u64 = expanded
            .iter()
            .map(|request| match request.q {
                0 => 0,
                _ => u64::from(request.kv),
            })
            .sum();
        rows <= self.limits.context_rows as u64
            && problem.kv_format == KvFormat::of(problem.dtype)
            && !self.slots[self.absorbed_tokens..].contains(&SKIPPED)
            && 4 * chunk_elements(expanded.len()) <= self.layout.chunks.len()
    }

    // Every number below fits its array's integers, by the checks of the limits and the batch.
    fn stage<T: HostIndex, S: HostIndex>(
        &mut self,
        problem: &Problem,
        batch: &StepBatch<'_, T, S>,
    ) {
        let (layout, staging) = (&self.layout, &mut self.staging);
        let requests = batch.requests;
        let absorbed = &requests[..self.absorbed_requests];
        write(staging, &layout.slots, self.slots.iter().copied());
        let positions = requests.iter().flat_map(|request| {
            // Padding has no place of its own.
            let first = i64::from(request.context_len());
            (0..i64::from(request.q)).map(move |token| first + token)
        });
        write(staging, &layout.positions, positions);
        write(
            staging,
            &layout.seq_lens,
            requests.iter().map(|r| r.kv as i32),
        );
        let starts = starts(absorbed.iter().map(|r| r.q));
        write(staging, &layout.absorbed_starts, starts);
        let starts = self.expanded_starts.iter().map(|start| *start as i32);
        write(staging, &layout.expanded_starts, starts);

        self.chunk_starts.clear();
        self.chunk_starts.push(0);
        let mut end = 0;
        let mut chunks = Writer::new(staging, &layout.chunks);
        if self.context_in_one_call {
            end += chunk_elements(self.expanded_key_lens.len());
            self.chunk_starts.push(end);
            chunks.extend(self.expanded_starts.iter().map(|start| *start as i32));
            chunks.extend(self::starts(self.expanded_key_lens.iter().copied()));
            chunks.extend(self.expanded_key_lens.iter().map(|_| 0i32));
        }
        for chunk in &self.context.chunks {
            end += chunk_elements(chunk.seq_lens.len());
            self.chunk_starts.push(end);
            let first = self.expanded_starts[chunk.request_start];
            let ends = &self.expanded_starts[chunk.request_start..=chunk.request_end];
            chunks.extend(ends.iter().map(|start| (start - first) as i32));
            chunks.extend(self::starts(chunk.seq_lens.iter().copied()));
            chunks.extend(chunk.starts.iter().map(|start| *start as i32));
        }

        let page = problem.page_size as usize;
        let row_bytes = 4 * self.limits.pages_per_request;
        let rows = batch
            .block_tables
            .entries()
            .chunks(batch.block_tables.max_pages());
        for (index, (request, row)) in requests.iter().zip(rows).enumerate() {
            let start = layout.block_table.start + index * row_bytes;
            let pages = &row[..(request.kv as usize).div_ceil(page)];
            let pages = pages.iter().map(|entry| checked_page(*entry));
            write(staging, &(start..start + row_bytes), pages);
        }
        let [tokens, rows] = self.order.index();
        write(staging, &layout.row_tokens, tokens.iter().copied());
        write(staging, &layout.token_rows, rows.iter().copied());
    }

    /// Copies what this step uses of the arrays.
    pub(super) fn upload<D: Device>(&self, device: &D, mut arrays: D::BytesMut<'_>) -> Result<()> {
        let layout = &self.layout;
        let chunk_bytes = 4 * self.chunk_starts.last().copied().unwrap_or(0);
        let table_bytes = 4 * self.requests * self.limits.pages_per_request;
        let [tokens, rows] = self.order.index();
        for range in [
            0..layout.expanded_starts.end,
            layout.chunks.start..layout.chunks.start + chunk_bytes,
            layout.block_table.start..layout.block_table.start + table_bytes,
            layout.row_tokens.start..layout.row_tokens.start + size_of_val(tokens),
            layout.token_rows.start..layout.token_rows.start + size_of_val(rows),
        ] {
            if !range.is_empty() {
                let (_, to) = D::split_mut(D::reborrow(&mut arrays), range.start);
                let (to, _) = D::split_mut(to, range.len());
                device.upload(&self.staging[range], to)?;
            }
        }
        Ok(())
    }

    /// Checks that a step was prepared.
    pub(super) fn check_prepared(&self) -> Result<()> {
        if self.prepared {
            return Ok(());
        }
        Err(Error::argument(
            "workspace",
            "one without a prepared step",
            "one whose last `prepare` succeeded",
        ))
    }

    /// To be called when the arrays are uploaded and the backends have prepared. Until then there
    /// is no step, also if one of them panics.
    pub(super) fn set_prepared(&mut self) {
        self.prepared = true;
    }

    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    pub(super) fn absorbed_tokens(&self) -> usize {
        self.absorbed_tokens
    }

    pub(super) fn absorbed_requests(&self) -> usize {
        self.absorbed_requests
    }

    pub(super) fn expanded_tokens(&self) -> usize {
        self.tokens - self.absorbed_tokens
    }

    pub(super) fn pages_end(&self) -> usize {
        self.pages_end
    }

    /// The rows of a call's tensors.
    pub(super) fn call_rows(&self) -> usize {
        self.order.rows
    }

    /// The rows of the step's tokens, if they are in order.
    pub(super) fn rows_in_order(&self) -> Option<Range<usize>> {
        match &self.order.arrangement {
            Arrangement::InOrder(rows) => Some(rows.clone()),
            Arrangement::Indexed => None,
        }
    }

    /// Returns true if a call's tensors have the rows of the step's tokens alone, in order.
    pub(super) fn is_packed(&self) -> bool {
        self.order.is_packed()
    }

    /// The token of each row and the row of each token, of rows that are not in order.
    pub(super) fn row_index<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
    ) -> Result<[ArrayRef<'a, D, i64>; 2]> {
        self.order.arrays(&self.layout, arrays)
    }

    pub(super) fn context(&self) -> &ContextPlan {
        &self.context
    }

    pub(super) fn prefill_batch(&self) -> PrefillBatch<'_> {
        PrefillBatch {
            query_lens: &self.expanded_query_lens,
            key_lens: &self.expanded_key_lens,
            chunks: &self.context.chunks,
            causal: self.expanded_causal(),
        }
    }

    /// True if tokens of the absorbed path see their request up to themselves; a single new token
    /// sees all of it either way.
    pub(super) fn absorbed_causal(&self) -> bool {
        self.causal || self.max_absorbed_query_len <= 1
    }

    /// The same of the expanded path.
    pub(super) fn expanded_causal(&self) -> bool {
        self.causal || self.max_expanded_query_len() <= 1
    }

    pub(super) fn max_expanded_query_len(&self) -> usize {
        let longest = self.expanded_query_lens.iter().max();
        longest.map_or(0, |len| *len as usize)
    }

    pub(super) fn slots<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
    ) -> Result<ArrayRef<'a, D, i64>> {
        let bytes = D::byte_range(arrays, self.layout.slots.clone());
        ArrayRef::new(bytes, self.tokens)
    }

    pub(super) fn positions<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
    ) -> Result<ArrayRef<'a, D, i64>> {
        let bytes = D::byte_range(arrays, self.layout.positions.clone());
        ArrayRef::new(bytes, self.tokens)
    }

    pub(super) fn dense_within(&self) -> usize {
        self.dense_within as usize
    }

    /// The max number of tokens of a request, and of one while the step is replayed.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    pub(super) fn expanded_starts<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
    ) -> Result<ArrayRef<'a, D, i32>> {
        let bytes = D::byte_range(arrays, self.layout.expanded_starts.clone());
        ArrayRef::new(bytes, self.expanded_starts.len())
    }

    fn block_table<'a, D: Device>(
        &self,
        arrays: D::Bytes<'a>,
        requests: Range<usize>,
    ) -> Result<BlockTable<'a, D>> {
        let bytes = D::byte_range(arrays, self.layout.block_table.clone());
        let width = self.limits.pages_per_request;
        let entries = ArrayRef::new(bytes, self.requests * width)?;
        BlockTable::new(entries, self.requests, width)?.range(requests)
    }

    pub(super) fn decode_batch<'a, D: Device>(
        &'a self,
        arrays: D::Bytes<'a>,
    ) -> Result<DecodeBatch<'a, D>> {
        let requests = self.absorbed_requests;
        let array =
            |range: &Range<usize>, len| ArrayRef::new(D::byte_range(arrays, range.clone()), len);
        Ok(DecodeBatch {
            block_table: self.block_table(arrays, 0..requests)?,
            seq_lens: array(&self.layout.seq_lens, requests)?,
            query_starts: array(&self.layout.absorbed_starts, requests + 1)?,
            max_query_len: self.max_absorbed_query_len,
            max_seq_len: self.max_seq_len,
            causal: self.absorbed_causal(),
            host: Some(HostLens {
                query_lens: &self.absorbed_query_lens,
                seq_lens: &self.absorbed_seq_lens,
            }),
        })
    }

    /// A chunk, with what its call needs.
    pub(super) fn chunk<'a, D: Device>(
        &'a self,
        index: usize,
        arrays: D::Bytes<'a>,
    ) -> Result<StepChunk<'a, D>> {
        let chunk = &self.context.chunks[index];
        let requests = chunk.request_start..chunk.request_end;
        let gathered = self.gathered(index, arrays, requests.clone(), &chunk.seq_lens)?;
        Ok(StepChunk {
            chunk: Some(Chunk {
                index,
                query_lens: &self.expanded_query_lens[requests],
                key_lens: &chunk.seq_lens,
            }),
            ..gathered
        })
    }

    /// If context and new tokens are attended to by one call: what it needs.
    pub(super) fn one_call<'a, D: Device>(
        &'a self,
        arrays: D::Bytes<'a>,
    ) -> Result<Option<StepChunk<'a, D>>> {
        let requests = 0..self.expanded_key_lens.len();
        match self.context_in_one_call {
            true => self
                .gathered(0, arrays, requests, &self.expanded_key_lens)
                .map(Some),
            false => Ok(None),
        }
    }

    /// The call of these requests to so many rows of each, whose numbers stand at `index` among
    /// those of chunks.
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

/// A page of a batch whose entries in use were checked.
pub(super) fn checked_page(entry: impl HostIndex) -> i32 {
    entry.to_page().unwrap_or_default()
}

/// Returns true if a request attends to all that it sees.
pub(super) fn is_dense(problem: &Problem, dense_within: u32, request: &Request) -> bool {
    !problem.sparse || (dense_within > 0 && request.kv <= dense_within)
}

/// The max number of new tokens that a request may have on the absorbed path, if a dense one may
/// have `dense`: the expanded form has no lists of slots.
pub(super) fn threshold_of(
    problem: &Problem,
    dense_within: u32,
    dense: u32,
    request: &Request,
) -> u32 {
    match is_dense(problem, dense_within, request) {
        true => dense,
        false => u32::MAX,
    }
}

/// One attention to rows of the cache, on the device: to a chunk of the context, or to all of it
/// and the new tokens.
pub(super) struct StepChunk<'a, D: Device> {
    pub(super) chunk: Option<Chunk<'a>>,
    /// Its queries, among the tokens of the expanded path.
    pub(super) tokens: Range<usize>,
    pub(super) gather: GatherRows<'a, D>,
    pub(super) query_starts: ArrayRef<'a, D, i32>,
    pub(super) key_starts: ArrayRef<'a, D, i32>,
    pub(super) max_query_len: usize,
    pub(super) max_key_len: usize,
}

/// The array elements of a chunk with this many segments.
fn chunk_elements(segments: usize) -> usize {
    3 * segments + 2
}

/// Returns the starts of parts of these lengths, one behind the other, and the end of the last.
fn starts(lens: impl Iterator<Item = u32>) -> impl Iterator<Item = i32> {
    let mut end = 0;
    std::iter::once(0).chain(lens.map(move |len| {
        end += len as i32;
        end
    }))
}

fn write<T: Pod>(staging: &mut [u8], range: &Range<usize>, values: impl Iterator<Item = T>) {
    Writer::new(staging, range).extend(values);
}

/// Writes numbers one behind the other.
struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    fn new(staging: &'a mut [u8], range: &Range<usize>) -> Self {
        Self {
            bytes: &mut staging[range.clone()],
            at: 0,
        }
    }

    fn extend<T: Pod>(&mut self, values: impl Iterator<Item = T>) {
        for value in values {
            let end = self.at + size_of::<T>();
            self.bytes[self.at..end].copy_from_slice(bytemuck::bytes_of(&value));
            self.at = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{DType, MlaDims};
    use crate::plan::split::split;

    fn problem(page_size: u32) -> Problem {
        Problem {
            page_size,
            query_len: QueryLen::Ragged,
            ..Problem::new(MlaDims::R1, 16, DType::BF16)
        }
    }

    // Limits, and a batch that keeps to them, with as little room for context as there can be.
    fn steps() -> impl Strategy<Value = (StepLimits, u32, Vec<Request>)> {
        let page = prop_oneof![Just(1u32), Just(3), Just(16)];
        (page, 1usize..12, 1usize..9, 0usize..70, 0usize..5).prop_flat_map(
            |(page, pages, count, rows, threshold)| {
                let longest = page * pages as u32;
                let request = (0..=longest).prop_flat_map(|kv| (0..=kv.min(9), Just(kv)));
                let request = request.prop_map(|(q, kv)| Request { q, kv });
                proptest::collection::vec(request, 0..=count).prop_map(move |requests| {
                    let limits = StepLimits {
                        requests: count,
                        tokens: requests.iter().map(|r| r.q as usize).sum(),
                        decode_query_len: threshold,
                        pages_per_request: pages,
                        context_rows: rows.max(page as usize),
                        call_rows: 0,
                    };
                    (limits, page, requests)
                })
            },
        )
    }

    proptest! {
        /// No step within the limits is too large for the arrays, whatever its chunks.
        #[test]
        fn every_step_within_the_limits_fits((limits, page, requests) in steps()) {
            let entries = requests.len() * limits.pages_per_request;
            let pages: Vec<i32> = (0..entries as i32).collect();
            let mut step = Step::new(&limits, page).unwrap();
            let order = split(&requests, limits.decode_query_len as u32, false).unwrap().order;
            let requests: Vec<Request> = order.iter().map(|&at| requests[at]).collect();
            let tables = BlockTables::new(&pages, limits.pages_per_request, page).unwrap();
            let batch = StepBatch::new(&requests, tables);
            step.plan(&problem(page), 4, &batch).unwrap();
            let end = 4 * step.chunk_starts.last().unwrap();
            prop_assert!(step.layout.chunks.start + end <= step.layout.chunks.end);
            let tokens: usize = requests.iter().map(|r| r.q as usize).sum();
            prop_assert_eq!(step.absorbed_tokens() + step.expanded_tokens(), tokens);
            // Every context row of the expanded path is in a chunk.
            let expanded = &requests[step.absorbed_requests()..];
            let with_tokens = expanded.iter().filter(|r| r.q > 0);
            let rows: u64 = with_tokens.map(|r| u64::from(r.context_len())).sum();
            let chunks = &step.context().chunks;
            let chunk_rows = chunks.iter().map(|chunk| chunk.rows()).sum::<u64>();
            let key_lens = &step.prefill_batch().key_lens;
            let keys: u64 = key_lens.iter().map(|len| u64::from(*len)).sum();
            let new = step.expanded_tokens() as u64;
            match step.context_in_one_call {
                true => prop_assert_eq!((chunk_rows, keys), (0, rows + new)),
                false => prop_assert_eq!((chunk_rows, keys), (rows, new)),
            }
        }
    }

    #[test]
    fn arrays_keep_their_places_from_step_to_step() {
        let limits = StepLimits {
            requests: 3,
            tokens: 40,
            decode_query_len: 2,
            pages_per_request: 5,
            context_rows: 32,
            call_rows: 0,
        };
        let mut step = Step::new(&limits, 16).unwrap();
        let pages = [0; 10];
        let mut places = Vec::new();
        for requests in [
            &[Request { q: 1, kv: 70 }, Request { q: 1, kv: 0 }][..],
            &[Request { q: 1, kv: 3 }, Request { q: 1, kv: 80 }],
        ] {
            let batch = StepBatch {
                max_len: Some(80),
                ..StepBatch::new(requests, BlockTables::new(&pages, 5, 16).unwrap())
            };
            step.plan(&problem(16), 2, &batch).unwrap();
            // A graph would have captured this: places, counts, and the longest length.
            places.push((
                format!("{:?}", step.layout),
                step.absorbed_requests(),
                step.absorbed_tokens(),
                step.max_absorbed_query_len,
                step.max_seq_len,
            ));
        }
        assert_eq!(places[0], places[1]);
        assert_eq!(places[0].4, 80);
    }
}
