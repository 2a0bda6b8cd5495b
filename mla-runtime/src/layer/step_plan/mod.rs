//! The plan of a step: an engine's requests, ordered, split and checked, with block tables.

mod check;
mod padding;
mod paths;
mod rows;

use std::ops::Range;

use self::check::Origin;
use self::paths::Paths;
use crate::backend::StepLimits;
use crate::batch::Request;
use crate::plan::slots::{HostIndex, SKIPPED};
use crate::plan::split;
use crate::room::with_room;
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

    const fn lens(&self) -> Request {
        Request::new(self.new_tokens, self.total)
    }

    const fn used(&self, page_size: u32) -> usize {
        self.total.div_ceil(page_size) as usize
    }
}

/// A planned step: requests in the order in which a layer takes them, checked, with the path of
/// each and the rows of its tokens. [`Workspace::prepare`](super::Workspace::prepare)
/// takes it.
///
/// ```
/// # use mla_runtime::layer::{StepPlan, StepRequest};
/// # use mla_runtime::backend::StepLimits;
/// # use mla_runtime::{model::{DType, MlaDims}, spec::Problem};
/// # let problem = Problem::new(MlaDims::R1, 16, DType::BF16).with_page_size(64);
/// # let limits = StepLimits::new(8, 512, 4).with_context_rows(64);
/// // A prompt of 100 tokens, and a request that decodes its 71st. (`StepPlan::new` takes a
/// // workspace.)
/// let requests = [StepRequest::new(100, 100, &[4, 0]), StepRequest::new(1, 71, &[7, 2])];
/// let step = StepPlan::within(&problem, &limits, 1, &requests)?;
/// // The decode comes first: its token is row 0, and the prompt's are the rows behind it.
/// assert_eq!((step.rows(1), step.rows(0)), (0..1, 1..101));
/// # Ok::<(), mla_runtime::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// The problem whose layers it is for.
    problem: Problem,
    /// The max number of requests, padding included.
    limit: usize,
    /// In the order of the layer.
    requests: Vec<Request>,
    /// The number of these on the absorbed path, the first ones.
    absorbed: usize,
    /// The places of the padding that [`Self::padded_to`] has added.
    padding: Range<usize>,
    /// The numbers of the other requests, in the order of the layer.
    order: Vec<usize>,
    /// The rows of each request by number, as they were given.
    rows: Vec<Range<usize>>,
    /// The first row of each request in the order of the layer, and the number of rows, if rows are
    /// in an order of the engine's own.
    own_rows: Option<(Vec<usize>, usize)>,
    /// `[requests, max_pages]`, in the order of the layer.
    tables: Vec<i32>,
    max_pages: usize,
    /// One past the largest page.
    pages_end: usize,
    /// For each token, true if it is written; `None`: all that are no padding.
    written: Option<Vec<bool>>,
    /// The way in which the requests came, which says what was checked of their pages.
    origin: Origin,
    dense_within: u32,
    causal: bool,
    max_len: Option<u32>,
}

impl StepPlan {
    /// [`Self::new`] without a workspace: for layers of this problem, steps within these limits,
    /// and requests of at most `threshold` new tokens on the absorbed path. A larger threshold
    /// counts as [`decode_query_len`](StepLimits::decode_query_len).
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`].
    pub fn within<T: HostIndex>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self> {
        Self::ordered(problem, limits, threshold, 0, requests)
    }

    /// Plans an engine's requests, which are in any order.
    pub(super) fn ordered<T: HostIndex>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        dense_within: u32,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self> {
        let paths = Paths::new(problem, limits, threshold, dense_within)?;
        Self::planned(&paths, requests, Origin::Engine)
    }

    /// The raw origin: takes requests in the order in which they stand, and checks what the kernels
    /// rely on alone. Requests of the absorbed path come first, all others behind them, as
    /// [`plan::split`](crate::plan::split) orders them. A request whose total is 0 is padding: its
    /// tokens attend to nothing, and their outputs are 0. (In sparse problems they attend to what
    /// their lists name, as other tokens do; lists of an [`Indexer`](crate::indexer::Indexer) name
    /// nothing.) Several requests may write to one page, each to slots of its own.
    ///
    /// The threshold is as in [`Self::within`], and `dense_within` as in [`Self::sparse`].
    ///
    /// # Errors
    ///
    /// If a request contradicts itself, has too few pages or is out of order, or if there are more
    /// requests, tokens or pages than the limits say.
    /// [`Workspace::prepare`](super::Workspace::prepare) refuses two tokens in one slot.
    pub fn in_order<T: HostIndex>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        dense_within: u32,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self> {
        let paths = Paths::new(problem, limits, threshold, dense_within)?;
        Self::planned(&paths, requests, Origin::Raw)
    }

    fn planned<T: HostIndex>(
        paths: &Paths<'_>,
        requests: &[StepRequest<'_, T>],
        origin: Origin,
    ) -> Result<Self> {
        let (problem, limits) = (paths.problem, paths.limits);
        let pages_end = check::requests(problem, limits, requests, origin)?;
        let lens: Vec<Request> = requests.iter().map(StepRequest::lens).collect();
        let uniform = problem.query_len != QueryLen::Ragged;
        let order = match origin {
            Origin::Engine => split::order(&lens, |request| paths.threshold(request), uniform)?,
            Origin::Raw => (0..requests.len()).collect(),
        };
        let lens: Vec<Request> = order.iter().map(|&at| lens[at]).collect();
        let used = requests.iter().map(|r| r.used(problem.page_size));
        let max_pages = used.max().unwrap_or(0).max(1);
        let mut plan = Self {
            problem: *problem,
            limit: limits.requests,
            absorbed: paths.absorbed(&lens, |place| order[place])?,
            requests: lens,
            padding: 0..0,
            order,
            rows: vec![0..0; requests.len()],
            own_rows: None,
            // Every request's row is as wide as the longest one's: more than their own pages in
            // all.
            tables: with_room(requests.len().saturating_mul(max_pages))?,
            max_pages,
            pages_end,
            written: None,
            origin,
            dense_within: paths.dense_within,
            causal: true,
            max_len: None,
        };
        plan.place(requests);
        Ok(plan)
    }

    /// Finds the rows and copies the pages of requests that were checked.
    fn place<T: HostIndex>(&mut self, requests: &[StepRequest<'_, T>]) {
        let mut end = 0;
        for (place, &index) in self.order.iter().enumerate() {
            let request = &requests[index];
            let start = end;
            end += request.new_tokens as usize;
            self.rows[index] = start..end;
            let pages = &request.pages[..request.used(self.problem.page_size)];
            let pages = pages.iter().map(|page| checked_page(*page));
            self.tables.extend(pages);
            self.tables.resize((place + 1) * self.max_pages, 0);
        }
    }

    /// Sets whether new tokens are causal, which is the default, or see all new tokens of their
    /// request, on both paths: drafts that see each other. The latter takes backends with
    /// [`NonCausal`](crate::spec::Feature::NonCausal), if a request brings several, and a problem
    /// that is not sparse.
    #[must_use]
    pub const fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the maximum number of tokens that a request on the absorbed path will have while this
    /// step is replayed from a graph with other lengths; `None`: the maximum of this step. It is
    /// capped at the room of the limits' pages. Backends may choose a kernel by it: a replay has
    /// the bits of a step that is run at once with the same maximum.
    #[must_use]
    pub const fn with_max_len(mut self, max_len: Option<u32>) -> Self {
        self.max_len = max_len;
        self
    }

    /// Sets the slot to which each new token's row is written: the token's slot in its request's
    /// pages, or [`SKIPPED`] if it is not to be written. They are in the order of the layer,
    /// whatever order the engine's tensors have. Slots are of any integer type of [`HostIndex`];
    /// unsigned types have no value for [`SKIPPED`].
    ///
    /// # Errors
    ///
    /// If there is not a slot for each token, padding included, or a slot is another than the
    /// token's in its request's pages.
    pub fn with_slots<S: HostIndex>(mut self, slots: &[S]) -> Result<Self> {
        self.written = None;
        let tokens = self.tokens();
        if slots.len() != tokens {
            let given = format!("{} entries", slots.len());
            let accepted = format!("one for each of {tokens} new tokens");
            return Err(Error::argument("slots", given, accepted));
        }
        let mut written = with_room(tokens)?;
        for (index, (slot, given)) in self.slots().zip(slots).enumerate() {
            let number = given.to_i64();
            if number != Some(slot) && number != Some(SKIPPED) {
                let accepted = match slot {
                    SKIPPED => "−1, as the token is padding".to_owned(),
                    slot => format!("{slot}, where the block table has it, or −1"),
                };
                return Err(Error::argument(
                    "slots",
                    format!("{given} of token {index}"),
                    accepted,
                ));
            }
            written.push(number != Some(SKIPPED));
        }
        self.written = Some(written);
        Ok(self)
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

    /// The new tokens in all, padding included.
    pub fn tokens(&self) -> usize {
        self.requests.iter().map(|request| request.q as usize).sum()
    }

    /// True if new tokens see their request up to themselves.
    pub const fn is_causal(&self) -> bool {
        self.causal
    }

    /// The max number of tokens that a request will have in replays, if it was said.
    pub const fn max_len(&self) -> Option<u32> {
        self.max_len
    }

    pub(super) fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(super) fn absorbed(&self) -> usize {
        self.absorbed
    }

    pub(super) fn dense_within(&self) -> u32 {
        self.dense_within
    }

    pub(super) fn pages_end(&self) -> usize {
        self.pages_end
    }

    /// True if no two requests write to one page, so that no two tokens have one slot.
    pub(super) fn has_own_pages(&self) -> bool {
        self.origin == Origin::Engine
    }

    /// The pages in use of each request, in the order of the layer.
    pub(super) fn pages(&self) -> impl Iterator<Item = &[i32]> {
        let rows = self.tables.chunks_exact(self.max_pages);
        let page = self.problem.page_size;
        let used = move |request: &Request| request.kv.div_ceil(page) as usize;
        self.requests
            .iter()
            .zip(rows)
            .map(move |(request, row)| &row[..used(request)])
    }

    /// The slot of each new token, in the order of the layer: [`SKIPPED`] if it is not written.
    pub fn slots(&self) -> impl Iterator<Item = i64> {
        let page = i64::from(self.problem.page_size);
        let slots = self.requests.iter().zip(self.pages());
        let slots = slots.flat_map(move |(request, pages)| {
            let first = i64::from(request.context_len());
            (first..first + i64::from(request.q)).map(move |position| match request.kv {
                0 => SKIPPED,
                _ => i64::from(pages[(position / page) as usize]) * page + position % page,
            })
        });
        let written = self.written.as_deref();
        slots.enumerate().map(move |(token, slot)| match written {
            Some(written) if !written[token] => SKIPPED,
            _ => slot,
        })
    }
}

/// A page of requests whose entries in use were checked.
fn checked_page(entry: impl HostIndex) -> i32 {
    entry.to_page().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{DType, MlaDims};

    const LIMITS: StepLimits = StepLimits::new(6, 64, 3)
        .with_decode_query_len(4)
        .with_context_rows(16);

    fn problem(query_len: QueryLen) -> Problem {
        Problem {
            page_size: 16,
            query_len,
            ..Problem::new(MlaDims::R1, 16, DType::BF16)
        }
    }

    fn plan(query_len: QueryLen, requests: &[StepRequest<'_>]) -> Result<StepPlan> {
        StepPlan::within(&problem(query_len), &LIMITS, 4, requests)
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
        assert_eq!(step.tables, [1, 2, 3, 4, 0, 0, 7, 8, 0, 5, 6, 0]);
        let kv: Vec<u32> = step.requests().iter().map(|r| r.kv).collect();
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
        assert_eq!(step.tables[9..], [5, 6, 0]);
        // A request without new tokens has a place behind the padding.
        let idle = [requests[0], StepRequest::new(0, 9, &[7]), requests[1]];
        let idle = plan(QueryLen::Uniform, &idle).unwrap().padded_to(4);
        let idle_request = Request { q: 0, kv: 9 };
        let expected = [decode, padding, idle_request, prompt];
        assert_eq!(idle.unwrap().requests(), expected);
        let refused = |step: StepPlan, to| step.padded_to(to).unwrap_err().to_string();
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
