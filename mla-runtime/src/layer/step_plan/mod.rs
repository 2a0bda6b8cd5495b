//! The plan of a step: an engine's requests, checked, ordered and divided between the paths, with
//! block tables.

mod check;
mod padding;
mod paths;
mod rows;

use std::fmt::Display;
use std::ops::Range;

pub(super) use self::check::Origin;
use self::paths::Paths;
use crate::backend::StepLimits;
use crate::batch::Request;
use crate::plan::slots::SKIPPED;
use crate::plan::split;
use crate::room::with_room;
use crate::spec::{Problem, QueryLen};
use crate::{Error, Result};

/// A request of a step, from the engine's scheduler.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StepRequest<'a, T = i32> {
    /// The number of new tokens in the step: a whole prompt, a part of it, one token, or a token
    /// and its drafts.
    pub new_tokens: u32,
    /// The total number of tokens after the step: those in the cache and the new ones.
    pub total: u32,
    /// The pages of these tokens in order, in any integer type. There may be more pages than
    /// needed.
    pub pages: &'a [T],
}

impl<'a, T> StepRequest<'a, T> {
    /// A request with `new_tokens` new tokens and `total` tokens in all, in these pages.
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

/// A planned step. Its requests are checked and in the order that a layer needs. Each has its path,
/// and the rows of its tokens. [`Workspace::prepare`](super::Workspace::prepare) takes the plan.
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
    /// The problem of the layers that the plan is for.
    pub(super) problem: Problem,
    /// The maximum number of requests, padding included.
    limit: usize,
    /// The requests in the order of the layer.
    requests: Vec<Request>,
    /// The number of requests on the absorbed path. They come first.
    pub(super) absorbed: usize,
    /// The places of the padding that [`Self::padded_to`] has added.
    padding: Range<usize>,
    /// The numbers of the other requests, in the order of the layer.
    order: Vec<usize>,
    /// The rows of each request, by its number in the given order.
    rows: Vec<Range<usize>>,
    /// The first row of each request in the order of the layer, and the number of rows. Present if
    /// rows are in the engine's own order.
    own_rows: Option<(Vec<usize>, usize)>,
    /// `[requests, max_pages]`, in the order of the layer.
    tables: Vec<i32>,
    max_pages: usize,
    /// One more than the largest page number.
    pub(super) pages_end: usize,
    /// For each token, true if it is written; `None` if all tokens except padding are written.
    written: Option<Vec<bool>>,
    /// The origin of the requests. It determines which checks of their pages were made.
    origin: Origin,
    pub(super) dense_within: u32,
    causal: bool,
    max_len: Option<u32>,
}

impl StepPlan {
    /// Plans as [`Self::new`] does, but without a workspace. The plan is for layers of this problem
    /// and steps within these limits. Requests of at most `threshold` new tokens take the absorbed
    /// path. A larger threshold counts as [`decode_query_len`](StepLimits::decode_query_len).
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`].
    pub fn within<T: Copy + Display + TryInto<i64>>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self> {
        Self::planned(problem, limits, threshold, 0, requests, Origin::Engine)
    }

    /// Takes requests in the given order, and checks only what the kernels rely on. Requests on the
    /// absorbed path must come first, as [`plan::split`](crate::plan::split) orders them. A request
    /// whose total is 0 is padding: its tokens attend to nothing, and their outputs are 0. (In
    /// sparse problems they attend to the slots in their lists, as other tokens do. Lists of an
    /// [`Indexer`](crate::indexer::Indexer) have no slots for them.) Several requests may write to
    /// one page, each to slots of its own.
    ///
    /// The threshold has the same meaning as in [`Self::within`], and `dense_within` as in
    /// [`Self::sparse`].
    ///
    /// # Errors
    ///
    /// If a request contradicts itself, has too few pages or is out of order, or if the limits have
    /// no room for the requests, tokens or pages. [`Workspace::prepare`](super::Workspace::prepare)
    /// refuses two tokens with one slot.
    pub fn in_order<T: Copy + Display + TryInto<i64>>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        dense_within: u32,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self> {
        Self::planned(
            problem,
            limits,
            threshold,
            dense_within,
            requests,
            Origin::Raw,
        )
    }

    pub(super) fn planned<T: Copy + Display + TryInto<i64>>(
        problem: &Problem,
        limits: &StepLimits,
        threshold: u32,
        dense_within: u32,
        requests: &[StepRequest<'_, T>],
        origin: Origin,
    ) -> Result<Self> {
        let paths = Paths::new(problem, limits, threshold, dense_within)?;
        let pages = check::requests(problem, limits, requests, origin)?;
        let (mut left, page) = (&pages[..], problem.page_size);
        let requests = requests.iter().map(|request| {
            let (used, others) = left.split_at(request.used(page));
            left = others;
            StepRequest::new(request.new_tokens, request.total, used)
        });
        let requests: Vec<StepRequest<'_>> = requests.collect();
        if origin == Origin::Engine {
            check::check_pages(page, &requests)?;
        }
        let lens: Vec<Request> = requests.iter().map(StepRequest::lens).collect();
        let uniform = problem.query_len != QueryLen::Ragged;
        let order = match origin {
            Origin::Engine => split::order(&lens, |request| paths.threshold(request), uniform)?,
            Origin::Raw => (0..requests.len()).collect(),
        };
        let lens: Vec<Request> = order.iter().map(|&at| lens[at]).collect();
        let used = requests.iter().map(|request| request.pages.len());
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
            // The table row of every request is as wide as that of the longest one. The table is
            // therefore larger than the sum of the pages.
            tables: with_room(requests.len().saturating_mul(max_pages))?,
            max_pages,
            // A page number is 0 or above.
            pages_end: pages.iter().max().map_or(0, |page| *page as usize + 1),
            written: None,
            origin,
            dense_within,
            causal: true,
            max_len: None,
        };
        plan.place(&requests);
        Ok(plan)
    }

    /// Assigns rows to requests that have been checked, and copies their pages.
    fn place(&mut self, requests: &[StepRequest<'_>]) {
        let mut end = 0;
        for (place, &index) in self.order.iter().enumerate() {
            let request = &requests[index];
            let start = end;
            end += request.new_tokens as usize;
            self.rows[index] = start..end;
            self.tables.extend(request.pages);
            self.tables.resize((place + 1) * self.max_pages, 0);
        }
    }

    /// Sets whether new tokens are causal, which is the default. Otherwise new tokens see all new
    /// tokens of their request, on both paths. Drafts can thus see each other. If a request has
    /// several new tokens, this takes backends with [`NonCausal`](crate::spec::Feature::NonCausal)
    /// and a problem that is not sparse.
    #[must_use]
    pub const fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the maximum number of tokens that a request on the absorbed path will have while a
    /// graph replays this step with other lengths. `None` means the maximum of this step. It is
    /// limited to the capacity of the limits' pages. Backends may choose a kernel by it. A replay
    /// gives the same bits as a step that is run directly with the same maximum.
    #[must_use]
    pub const fn with_max_len(mut self, max_len: Option<u32>) -> Self {
        self.max_len = max_len;
        self
    }

    /// Sets the slots to which the new tokens' rows are written. Each is the token's slot in its
    /// request's pages, or [`SKIPPED`] if the row must not be written. Slots are in the order of
    /// the layer, whatever order the engine's tensors have. They may have any integer type, but
    /// unsigned types have no value for [`SKIPPED`].
    ///
    /// # Errors
    ///
    /// If the number of slots is not that of the tokens, padding included. Also if a slot is not
    /// the token's slot in its request's pages.
    pub fn with_slots<S: Copy + Display + TryInto<i64>>(mut self, slots: &[S]) -> Result<Self> {
        self.written = None;
        let tokens = self.tokens();
        if slots.len() != tokens {
            let given = format!("{} entries", slots.len());
            let accepted = format!("one for each of {tokens} new tokens");
            return Err(Error::argument("slots", given, accepted));
        }
        let mut written = with_room(tokens)?;
        for (index, (slot, given)) in self.slots().zip(slots).enumerate() {
            let number = (*given).try_into().ok();
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

    /// The requests' numbers in the given order, listed in the order of the layer. Padding has no
    /// number.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The total number of new tokens, padding included.
    pub fn tokens(&self) -> usize {
        self.requests.iter().map(|request| request.q as usize).sum()
    }

    /// Returns true if new tokens see only the tokens up to themselves.
    pub const fn is_causal(&self) -> bool {
        self.causal
    }

    /// The maximum number of tokens that a request will have in replays, if it was set.
    pub const fn max_len(&self) -> Option<u32> {
        self.max_len
    }

    /// Returns true if no two requests write to one page. Then no two tokens have one slot.
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

    /// A page whose conversion gives another number each time.
    #[derive(Clone, Copy)]
    struct Rising<'a>(&'a std::cell::Cell<i64>);

    impl From<Rising<'_>> for i64 {
        fn from(page: Rising<'_>) -> Self {
            page.0.replace(page.0.get() + 1)
        }
    }

    impl Display for Rising<'_> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            self.0.get().fmt(f)
        }
    }

    // The layer compares `pages_end` with the cache; kernels read the tables.
    #[test]
    fn tables_have_the_pages_that_were_checked() {
        let page = std::cell::Cell::new(0);
        let pages = [Rising(&page); 2];
        let requests = [
            StepRequest::new(2, 20, &pages),
            StepRequest::new(1, 20, &pages),
        ];
        let step = StepPlan::within(&problem(QueryLen::Ragged), &LIMITS, 4, &requests).unwrap();
        assert_eq!((&step.tables[..], step.pages_end), (&[2, 3, 0, 1][..], 4));
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
        // A request without new tokens comes after the padding.
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
        // Requests may share a page that they only read.
        let shared = [
            StepRequest::new(1, 17, &[9, 1]),
            StepRequest::new(1, 18, &[9, 2]),
        ];
        assert!(plan(QueryLen::Ragged, &shared).is_ok());
        // They may also share it if its tokens are written in this step. At another index it would
        // hold other tokens.
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
