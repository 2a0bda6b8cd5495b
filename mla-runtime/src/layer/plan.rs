//! From an engine's requests to a step: ordered, padded, with block tables.

use std::collections::HashMap;
use std::ops::Range;

use super::step::{check_dense_within, checked_page as page_number, threshold_of};
use super::token_rows::{TokenRows, check_rows, in_order};
use super::{StepBatch, Workspace};
use crate::backend::{DecodeStage, PrefillStage, StepLimits};
use crate::batch::Request;
use crate::plan::slots::{BlockTables, HostIndex};
use crate::plan::split::{BatchSplit, split_by};
use crate::room::{reserve, with_room};
use crate::spec::{Problem, QueryLen};
use crate::{Error, Result};

/// A request of a step, as an engine's scheduler has it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StepRequest<'a, T = i32> {
    /// The tokens that the step brings: all of a prompt, a part of it, one token, or a token and
    /// its drafts.
    pub new_tokens: u32,
    /// The tokens that there will then be: those in the cache and the new ones.
    pub total: u32,
    /// The pages of those tokens, in order, in any integer type of [`HostIndex`]. There may be
    /// more.
    pub pages: &'a [T],
}

impl<'a, T: HostIndex> StepRequest<'a, T> {
    /// `new_tokens` more, which make `total` in these pages.
    pub const fn new(new_tokens: u32, total: u32, pages: &'a [T]) -> Self {
        Self {
            new_tokens,
            total,
            pages,
        }
    }
}

/// A planned step: requests in the order in which a layer takes them, and where each one's tokens
/// stand.
///
/// ```
/// # use mla_runtime::layer::{Step, StepRequest};
/// # use mla_runtime::backend::StepLimits;
/// # use mla_runtime::model::{DType, MlaDims};
/// # use mla_runtime::spec::Problem;
/// # let problem = Problem::new(MlaDims::R1, 16, DType::BF16).with_page_size(64);
/// # let limits = StepLimits::new(8, 512, 4).with_context_rows(64);
/// // A prompt of 100 tokens, and a request that decodes its 71st. (`Step::plan` takes a
/// // workspace.)
/// let requests = [StepRequest::new(100, 100, &[4, 0]), StepRequest::new(1, 71, &[7, 2])];
/// let step = Step::within(&problem, &limits, 1, &requests)?;
/// // The decode comes first: its token is row 0, and the prompt's are the rows behind it.
/// assert_eq!((step.rows(1), step.rows(0)), (0..1, 1..101));
/// # Ok::<(), mla_runtime::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Step {
    /// In the order of the layer.
    requests: Vec<Request>,
    /// The rows of each request by number, as they were given; those of padding behind them.
    rows: Vec<Range<usize>>,
    /// The first row of each request in the order of the layer, and how many rows there are, if
    /// rows are in an order of the engine's own.
    own_rows: Option<(Vec<usize>, usize)>,
    order: Vec<usize>,
    tables: Vec<i32>,
    max_pages: usize,
    page_size: u32,
    threshold: u32,
    dense_within: u32,
    causal: bool,
    /// The number of requests with new tokens on the absorbed path: padding goes behind them, and
    /// before those without new tokens.
    absorbed: usize,
    /// The query length of the former, if they have the same.
    uniform_len: Option<u32>,
    limit: usize,
}

impl Step {
    /// Orders the requests as the workspace's layers take them, checks them, and finds where each
    /// token stands.
    ///
    /// # Errors
    ///
    /// If a request contradicts itself or has too few pages, if two write to one page or one reads
    /// it as another of its own, or if there are more than the workspace was made for.
    pub fn plan<P, D, T>(
        workspace: &Workspace<P, D>,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
        T: HostIndex,
    {
        Self::plan_sparse(workspace, requests, 0)
    }

    /// [`Self::plan`] for a sparse problem whose requests of at most `dense_within` tokens attend
    /// to all that they see, by the dense paths ([`StepBatch::dense_within`]): what the model
    /// chooses of a context. Of such requests long prompts take the expanded path, if the limits
    /// have room for context.
    ///
    /// # Errors
    ///
    /// Same as [`Self::plan`].
    pub fn plan_sparse<P, D, T>(
        workspace: &Workspace<P, D>,
        requests: &[StepRequest<'_, T>],
        dense_within: u32,
    ) -> Result<Self>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
        T: HostIndex,
    {
        let problem = &workspace.config.problem;
        let (limits, threshold) = (workspace.limits(), workspace.threshold());
        Self::ordered(problem, limits, threshold, dense_within, requests)
    }

    /// [`Self::plan`] without a workspace: for layers of this problem, steps within these limits,
    /// and requests of at most `threshold` new tokens on the absorbed path.
    ///
    /// # Errors
    ///
    /// Same as [`Self::plan`].
    pub fn within<T: HostIndex>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self> {
        Self::ordered(problem, limits, threshold, 0, requests)
    }

    fn ordered<T: HostIndex>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        dense_within: u32,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self> {
        check(problem, limits, requests)?;
        check_dense_within(problem, dense_within)?;
        let most = u32::try_from(limits.decode_query_len).unwrap_or(u32::MAX);
        let threshold = match problem.query_len {
            _ if problem.sparse && limits.context_rows == 0 => u32::MAX,
            QueryLen::Single => threshold.min(most).min(1),
            _ => threshold.min(most),
        };
        let lens: Vec<Request> = requests
            .iter()
            .map(|request| Request {
                q: request.new_tokens,
                kv: request.total,
            })
            .collect();
        let split = split_by(
            &lens,
            |request| threshold_of(problem, dense_within, threshold, request),
            problem.query_len != QueryLen::Ragged,
        )?;
        let mut step = Self::of(problem, limits, threshold, requests, &split)?;
        step.dense_within = dense_within;
        Ok(step)
    }

    fn of<T: HostIndex>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        requests: &[StepRequest<'_, T>],
        split: &BatchSplit,
    ) -> Result<Self> {
        let used =
            |request: &StepRequest<'_, T>| request.total.div_ceil(problem.page_size) as usize;
        let max_pages = requests.iter().map(used).max().unwrap_or(0).max(1);
        let mut step = Self {
            requests: Vec::with_capacity(requests.len()),
            rows: vec![0..0; requests.len()],
            own_rows: None,
            order: split.order.clone(),
            // Every request's row is as wide as the longest one's: more than their own pages in
            // all.
            tables: with_room(requests.len().saturating_mul(max_pages))?,
            max_pages,
            page_size: problem.page_size,
            threshold,
            dense_within: 0,
            causal: true,
            absorbed: split.short_extend.end,
            uniform_len: split.uniform_len,
            limit: limits.requests,
        };
        let mut end = 0;
        for &index in &split.order {
            let request = &requests[index];
            let start = end;
            end += request.new_tokens as usize;
            step.rows[index] = start..end;
            step.requests.push(Request {
                q: request.new_tokens,
                kv: request.total,
            });
            let pages = &request.pages[..used(request)];
            step.tables
                .extend(pages.iter().map(|page| page_number(*page)));
            let entries = step.requests.len() * max_pages;
            step.tables.resize(entries, 0);
        }
        Ok(step)
    }

    /// The same with padding behind the requests with new tokens on the absorbed path, of as many
    /// new tokens as each of those has, until there are `requests` requests in all: what a graph
    /// that was captured for so many needs. Padding attends to nothing and writes nothing; the rows
    /// of the expanded path move behind it.
    ///
    /// # Errors
    ///
    /// If the step has more already, the limits have no room for so many, or the absorbed path's
    /// requests differ in length, or the host has not as much memory left. If it has rows of the
    /// engine's own already: padding comes first.
    pub fn padded_to(mut self, requests: usize) -> Result<Self> {
        if self.own_rows.is_some() {
            let accepted = "none yet: padded_to comes before rows of the engine's own";
            return Err(Error::argument("rows", "those of a step", accepted));
        }
        let own = self.requests.len();
        if !(own..=self.limit).contains(&requests) {
            let accepted = format!("{own}, as the step has, to the limit of {}", self.limit);
            return Err(Error::argument("requests", requests, accepted));
        }
        let missing = requests - own;
        if missing == 0 {
            return Ok(self);
        }
        let Some(len) = self.uniform_len else {
            let given = format!("{} on the absorbed path", self.absorbed);
            let accepted = "some, all of one number of new tokens, for padding to have it too";
            return Err(Error::argument("requests", given, accepted));
        };
        let entries = missing.saturating_mul(self.max_pages);
        reserve(&mut self.requests, missing)?;
        reserve(&mut self.tables, entries)?;
        let padding = std::iter::repeat_n(Request { q: len, kv: 0 }, missing);
        self.requests.splice(self.absorbed..self.absorbed, padding);
        let entry = self.absorbed * self.max_pages;
        self.tables
            .splice(entry..entry, std::iter::repeat_n(0, entries));
        for &index in &self.order[self.absorbed..] {
            let rows = &mut self.rows[index];
            let moved = missing.saturating_mul(len as usize);
            *rows = rows.start.saturating_add(moved)..rows.end.saturating_add(moved);
        }
        Ok(self)
    }

    /// The same for tensors that are padded to `max_len` rows a request, `[requests, max_len, …]`,
    /// with the requests in the order in which they were given and the padding of
    /// [`padded_to`](Self::padded_to) behind them. New tokens are the first rows of their
    /// request's. [`TokenRows`] says what is done with the others.
    ///
    /// ```
    /// # use mla_runtime::layer::{Step, StepRequest};
    /// # use mla_runtime::backend::StepLimits;
    /// # use mla_runtime::model::{DType, MlaDims};
    /// # use mla_runtime::spec::Problem;
    /// # let problem = Problem::new(MlaDims::R1, 16, DType::BF16).with_page_size(64);
    /// # let limits = StepLimits::new(8, 512, 4).with_context_rows(64).with_call_rows(512);
    /// // Tensors of [2, 100] rows, and pages as the engine's block manager has them.
    /// let tables: Vec<Vec<usize>> = vec![vec![4, 0], vec![7, 2]];
    /// let requests = [
    ///     StepRequest::new(100, 100, &tables[0]),
    ///     StepRequest::new(1, 71, &tables[1]),
    /// ];
    /// let step = Step::within(&problem, &limits, 1, &requests)?.with_padded_rows(100)?;
    /// assert_eq!((step.rows(0), step.rows(1)), (0..100, 100..101));
    /// assert_eq!((step.tensor_rows(), step.rows_in_order()), (200, false));
    /// # Ok::<(), mla_runtime::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If a request brings more than `max_len` tokens, or no tensor has as many rows.
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
        // Each is below `rows`.
        let starts: Vec<usize> = (0..count).map(|number| number * max_len).collect();
        self.with_row_starts(&starts, rows)
    }

    /// The same for tensors in which the requests stand one behind the other in the order in which
    /// they were given, with the padding of [`padded_to`](Self::padded_to) behind them.
    ///
    /// # Errors
    ///
    /// None, since the rows are as many as the tokens.
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

    /// The same for tensors of `rows` rows in which the new tokens of request number i, as they
    /// were given, stand from row `starts[i]` on. [`TokenRows`] says what is done with other rows.
    /// The padding of [`padded_to`](Self::padded_to) has the numbers behind those of the requests.
    ///
    /// # Errors
    ///
    /// If there is not a start for each request, one lies outside, or two requests share a row.
    pub fn with_row_starts(mut self, starts: &[usize], rows: usize) -> Result<Self> {
        let count = self.requests.len();
        if starts.len() != count {
            let accepted = format!("one for each of {count} requests, padding included");
            let given = format!("{} entries", starts.len());
            return Err(Error::argument("rows.starts", given, accepted));
        }
        let starts: Vec<usize> = (0..count).map(|at| starts[self.number(at)]).collect();
        let own = TokenRows::new(&starts, rows);
        check_rows(&self.requests, own)?;
        for (at, (request, &start)) in self.requests.iter().zip(&starts).enumerate() {
            let number = self.number(at);
            if let Some(place) = self.rows.get_mut(number) {
                *place = start..start.saturating_add(request.q as usize);
            }
        }
        self.own_rows = Some((starts, rows));
        Ok(self)
    }

    /// The same with new tokens that see their request up to themselves, as they do if this is not
    /// called, or with such that see all of it ([`StepBatch::causal`]).
    #[must_use]
    pub const fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// The number of the request at a place of the layer's order, those of padding behind the
    /// others.
    fn number(&self, at: usize) -> usize {
        let own = self.order.len();
        let padding = self.requests.len() - own;
        match at.checked_sub(self.absorbed) {
            None => self.order[at],
            Some(behind) if behind < padding => own + behind,
            Some(_) => self.order[at - padding],
        }
    }

    /// Returns the batch that [`Workspace::prepare`] takes.
    ///
    /// # Errors
    ///
    /// None: the tables are rows of as many entries. Their check is a `Result` all the same.
    pub fn batch(&self) -> Result<StepBatch<'_>> {
        let tables = BlockTables::new(&self.tables, self.max_pages, self.page_size)?;
        let rows = self.own_rows.as_ref();
        Ok(StepBatch {
            rows: rows.map(|(starts, rows)| TokenRows::new(starts, *rows)),
            threshold: Some(self.threshold),
            dense_within: self.dense_within,
            causal: self.causal,
            ..StepBatch::new(&self.requests, tables)
        })
    }

    /// The requests in the order of the layer, padding included.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The numbers of the requests, as they were given, in the order of the layer; padding has
    /// none.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The rows of every tensor of the step: its [tokens](Self::tokens), or what was said of rows
    /// of the engine's own.
    pub fn tensor_rows(&self) -> usize {
        match &self.own_rows {
            Some((_, rows)) => *rows,
            None => self.tokens(),
        }
    }

    /// Returns true if the tensors are taken as they lie. If not, the layer copies rows by an
    /// index, which takes [`call_rows`](StepLimits::call_rows) in the limits.
    pub fn rows_in_order(&self) -> bool {
        self.own_rows.as_ref().is_none_or(|(starts, rows)| {
            in_order(&self.requests, &TokenRows::new(starts, *rows)).is_some()
        })
    }

    /// The new tokens in all, padding included.
    pub fn tokens(&self) -> usize {
        self.requests.iter().map(|request| request.q as usize).sum()
    }

    /// The rows of the new tokens of request number `request`, as they were given.
    ///
    /// # Panics
    ///
    /// If there is no such request.
    pub fn rows(&self, request: usize) -> Range<usize> {
        self.rows[request].clone()
    }

    /// The row of each request's last new token, by number: what the next token is sampled from.
    /// `None`: it brings none.
    pub fn last_rows(&self) -> impl Iterator<Item = Option<usize>> + '_ {
        self.rows.iter().map(|rows| rows.clone().next_back())
    }
}

/// Refuses requests that contradict themselves or each other.
fn check<T: HostIndex>(
    problem: &Problem,
    limits: &StepLimits,
    requests: &[StepRequest<'_, T>],
) -> Result<()> {
    if requests.len() > limits.requests {
        let accepted = format!("at most the limit of {}", limits.requests);
        return Err(Error::argument("requests", requests.len(), accepted));
    }
    let page = problem.page_size;
    if page == 0 {
        return Err(Error::argument("page_size", 0, "1 and up"));
    }
    let mut tokens = 0usize;
    // The request that writes each page, and the page's place among its own.
    let mut writers = HashMap::new();
    for (index, request) in requests.iter().enumerate() {
        if request.total < request.new_tokens {
            let given = format!("{} of request {index}", request.total);
            let accepted = format!("at least its {} new tokens", request.new_tokens);
            return Err(Error::argument("requests.total", given, accepted));
        }
        tokens = tokens.saturating_add(request.new_tokens as usize);
        let needed = request.total.div_ceil(page) as usize;
        if needed > limits.pages_per_request {
            let given = format!("{} of request {index}", request.total);
            let most = limits.pages_per_request.saturating_mul(page as usize);
            let accepted = format!("at most {most} tokens, the limit of a request's pages");
            return Err(Error::argument("requests.total", given, accepted));
        }
        let Some(pages) = request.pages.get(..needed) else {
            let given = format!("{} of request {index}", request.pages.len());
            let accepted = format!("at least {needed}, for {} tokens", request.total);
            return Err(Error::argument("requests.pages", given, accepted));
        };
        for (place, entry) in pages.iter().enumerate() {
            entry.to_page().map_err(|accepted| {
                let given = format!("{entry} at [{index}][{place}]");
                Error::argument("requests.pages", given, accepted)
            })?;
        }
        let first = (request.total - request.new_tokens) / page;
        let written = if request.new_tokens == 0 {
            &[]
        } else {
            &pages[first as usize..]
        };
        for (place, entry) in (first as usize..).zip(written) {
            if let Some((other, _)) = writers.insert(page_number(*entry), (index, place)) {
                let given = format!("page {entry} of request {index}, which {other} writes too");
                let accepted = "pages to write that no other request of the step writes";
                return Err(Error::argument("requests.pages", given, accepted));
            }
        }
    }
    if tokens > limits.tokens {
        let accepted = format!("at most the limit of {}", limits.tokens);
        return Err(Error::argument("new tokens", tokens, accepted));
    }
    check_reads(page, requests, &writers)
}

/// Refuses a page that one request writes and one reads at another place of its own: the new tokens
/// would lie where those are that it attends to. At the same place it is a shared prefix, which may
/// be written by the step that reads it.
fn check_reads<T: HostIndex>(
    page: u32,
    requests: &[StepRequest<'_, T>],
    writers: &HashMap<i32, (usize, usize)>,
) -> Result<()> {
    // Most pages are written by nobody: sixteen bits for each one that is tell most of them apart.
    let bits = (16 * writers.len()).next_power_of_two().max(64);
    let mut marks = vec![0u64; bits / 64];
    let bit = |entry: i32| (entry as u32).wrapping_mul(0x9e37_79b1) as usize % bits;
    for entry in writers.keys() {
        marks[bit(*entry) / 64] |= 1 << (bit(*entry) % 64);
    }
    for (index, request) in requests.iter().enumerate() {
        if request.new_tokens == 0 {
            continue;
        }
        let read = &request.pages[..request.total.div_ceil(page) as usize];
        for (place, entry) in read.iter().map(|entry| page_number(*entry)).enumerate() {
            if marks[bit(entry) / 64] >> (bit(entry) % 64) & 1 == 0 {
                continue;
            }
            match writers.get(&entry) {
                Some((writer, at)) if *at != place => {
                    let given = format!(
                        "page {entry} at [{index}][{place}], which request {writer} writes at \
                         [{writer}][{at}]"
                    );
                    let accepted = "a page that holds the same tokens in every request that has it";
                    return Err(Error::argument("requests.pages", given, accepted));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{DType, MlaDims};

    const LIMITS: StepLimits = StepLimits {
        requests: 6,
        tokens: 64,
        decode_query_len: 4,
        pages_per_request: 3,
        context_rows: 16,
        call_rows: 0,
    };

    fn problem(query_len: QueryLen) -> Problem {
        Problem {
            page_size: 16,
            query_len,
            ..Problem::new(MlaDims::R1, 16, DType::BF16)
        }
    }

    fn plan(query_len: QueryLen, requests: &[StepRequest<'_>]) -> Result<Step> {
        Step::within(&problem(query_len), &LIMITS, 4, requests)
    }

    #[test]
    fn requests_are_ordered_and_their_rows_known() {
        let requests = [
            StepRequest::new(20, 20, &[5, 6]),
            StepRequest::new(1, 33, &[1, 2, 3, 99]),
            StepRequest::new(10, 30, &[7, 8]),
            StepRequest::new(3, 9, &[4]),
        ];
        let step = plan(QueryLen::Ragged, &requests).unwrap();
        assert_eq!(step.order(), [1, 3, 2, 0]);
        let rows: Vec<_> = (0..4).map(|request| step.rows(request)).collect();
        assert_eq!(rows, [14..34, 0..1, 4..14, 1..4]);
        assert_eq!(
            step.last_rows().collect::<Vec<_>>(),
            [33, 0, 13, 3].map(Some)
        );
        assert_eq!(step.tokens(), 34);
        let batch = step.batch().unwrap();
        assert_eq!(
            batch.block_tables.entries(),
            [1, 2, 3, 4, 0, 0, 7, 8, 0, 5, 6, 0]
        );
        let kv: Vec<u32> = batch.requests.iter().map(|request| request.kv).collect();
        assert_eq!(kv, [33, 9, 30, 20]);
        // Kernels of one length get that of most: the others take the expanded path.
        let step = plan(QueryLen::Single, &requests).unwrap();
        assert_eq!((step.order(), step.absorbed), (&[1, 2, 3, 0][..], 1));
        assert_eq!(plan(QueryLen::Ragged, &[]).unwrap().tokens(), 0);
    }

    #[test]
    fn padding_stands_before_the_expanded_path() {
        let requests = [
            StepRequest::new(20, 20, &[5, 6]),
            StepRequest::new(2, 33, &[1, 2, 3]),
        ];
        let step = plan(QueryLen::Uniform, &requests)
            .unwrap()
            .padded_to(4)
            .unwrap();
        let padding = Request { q: 2, kv: 0 };
        let [decode, prompt] = [Request { q: 2, kv: 33 }, Request { q: 20, kv: 20 }];
        assert_eq!(step.requests(), [decode, padding, padding, prompt]);
        assert_eq!((step.rows(1), step.rows(0)), (0..2, 6..26));
        assert_eq!(step.batch().unwrap().block_tables.entries()[9..], [5, 6, 0]);
        // A request without new tokens has a place behind the padding.
        let idle = [requests[0], StepRequest::new(0, 9, &[7]), requests[1]];
        let idle = plan(QueryLen::Uniform, &idle).unwrap().padded_to(4);
        let idle_request = Request { q: 0, kv: 9 };
        let expected = [decode, padding, idle_request, prompt];
        assert_eq!(idle.unwrap().requests(), expected);
        let refused = |step: Step, to| step.padded_to(to).unwrap_err().to_string();
        assert_eq!(
            refused(step, 7),
            "requests: given 7, accepted 4, as the step has, to the limit of 6"
        );
        let own = || plan(QueryLen::Uniform, &requests).unwrap();
        assert_eq!(
            refused(own(), 1),
            "requests: given 1, accepted 2, as the step has, to the limit of 6"
        );
        assert_eq!(own().padded_to(2).unwrap().requests(), own().requests());
        let ragged = [StepRequest::new(1, 1, &[1]), StepRequest::new(2, 2, &[2])];
        assert_eq!(
            refused(plan(QueryLen::Ragged, &ragged).unwrap(), 3),
            "requests: given 2 on the absorbed path, accepted some, all of one number of new \
             tokens, for padding to have it too"
        );
    }

    #[test]
    fn contradictions_name_the_field() {
        let refused = |requests: &[StepRequest<'_>]| {
            plan(QueryLen::Ragged, requests).unwrap_err().to_string()
        };
        let fine = StepRequest::new(1, 5, &[0]);
        for (request, message) in [
            (
                StepRequest::new(5, 4, &[1]),
                "requests.total: given 4 of request 1, accepted at least its 5 new tokens",
            ),
            (
                StepRequest::new(1, 17, &[1]),
                "requests.pages: given 1 of request 1, accepted at least 2, for 17 tokens",
            ),
            (
                StepRequest::new(1, 49, &[1, 2, 3, 4]),
                "requests.total: given 49 of request 1, accepted at most 48 tokens, the limit of a \
                 request's pages",
            ),
            (
                StepRequest::new(1, 17, &[1, -1]),
                "requests.pages: given -1 at [1][1], accepted a page, 0 or above",
            ),
            (
                StepRequest::new(1, 3, &[0]),
                "requests.pages: given page 0 of request 1, which 0 writes too, accepted pages to \
                 write that no other request of the step writes",
            ),
            (
                StepRequest::new(20, 20, &[2, 2]),
                "requests.pages: given page 2 of request 1, which 1 writes too, accepted pages to \
                 write that no other request of the step writes",
            ),
        ] {
            assert_eq!(refused(&[fine, request]), message);
        }
        assert_eq!(
            refused(&[StepRequest::<i32>::new(0, 0, &[]); 7]),
            "requests: given 7, accepted at most the limit of 6"
        );
        let long = [
            StepRequest::new(40, 40, &[0, 1, 2]),
            StepRequest::new(40, 40, &[3, 4, 5]),
        ];
        assert_eq!(
            refused(&long),
            "new tokens: given 80, accepted at most the limit of 64"
        );
        // A page that is read may be shared.
        let shared = [
            StepRequest::new(1, 17, &[9, 1]),
            StepRequest::new(1, 18, &[9, 2]),
        ];
        assert!(plan(QueryLen::Ragged, &shared).is_ok());
        // Also if its tokens come with this step. At another place it would hold others.
        let [own, moved] = [[9, 2], [2, 9]];
        let writer = StepRequest::new(16, 16, &[9]);
        assert!(plan(QueryLen::Ragged, &[writer, StepRequest::new(1, 18, &own)]).is_ok());
        assert_eq!(
            refused(&[
                StepRequest::new(1, 16, &[9]),
                StepRequest::new(1, 18, &moved)
            ]),
            "requests.pages: given page 9 of request 1, which 0 writes too, accepted pages to \
             write that no other request of the step writes"
        );
        assert_eq!(
            refused(&[
                StepRequest::new(1, 16, &[9]),
                StepRequest::new(1, 33, &[2, 9, 1])
            ]),
            "requests.pages: given page 9 at [1][1], which request 0 writes at [0][0], accepted a \
             page that holds the same tokens in every request that has it"
        );
    }
}
