//! The scheduler. It chooses the requests of a step, and the number of tokens of each.
//!
//! Requests that decode come first, each with its drafts. The rest of a step's tokens is used for
//! prompts, in parts if necessary. If a request finds no free page, the youngest requests release
//! theirs. They start again later, with the generated tokens as a part of their prompt. The oldest
//! request therefore always proceeds.

use std::collections::VecDeque;

use crate::drafts;
use crate::error::Result;
use crate::metrics::Metrics;
use crate::pages::Pages;
use crate::request::{Request, RequestId};

/// The part of one running request in a step.
pub struct Share {
    /// The request's number.
    pub id: RequestId,
    /// The number of known tokens, from the first one that is not in the cache.
    pub known: usize,
    /// Drafts after the known tokens.
    pub drafts: Vec<u32>,
}

/// A page to copy before the step. A request is about to write to a page that others read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy {
    /// The shared page.
    pub from: i32,
    /// The writer's own page.
    pub to: i32,
}

/// The requests of an engine, and their pages.
pub struct Scheduler {
    pages: Pages,
    waiting: VecDeque<Request>,
    /// The running requests, the oldest first.
    running: Vec<Request>,
    max_requests: usize,
    max_tokens: usize,
    max_drafts: usize,
}

impl Scheduler {
    /// Makes a scheduler of steps of at most `requests` requests and `tokens` tokens, with at most
    /// `drafts` drafts per request.
    pub fn new(pages: Pages, requests: usize, tokens: usize, drafts: usize) -> Self {
        Self {
            pages,
            waiting: VecDeque::new(),
            running: Vec::new(),
            max_requests: requests,
            max_tokens: tokens,
            max_drafts: drafts,
        }
    }

    /// Returns the page allocator.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Returns the running requests, the oldest first.
    pub fn running(&self) -> &[Request] {
        &self.running
    }

    /// Returns the number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a request to the waiting ones.
    pub fn add(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// Returns a running request.
    pub fn get(&self, id: RequestId) -> Option<&Request> {
        self.running.iter().find(|request| request.id == id)
    }

    /// Removes a request, and releases its pages.
    pub fn remove(&mut self, id: RequestId) -> Option<Request> {
        let found = |request: &Request| request.id == id;
        let mut request = match self.running.iter().position(found) {
            Some(at) => self.running.remove(at),
            None => self.waiting.remove(self.waiting.iter().position(found)?)?,
        };
        self.release(&mut request);
        Some(request)
    }

    /// Plans a step. `copy` is called to copy a page before the step.
    ///
    /// # Errors
    ///
    /// If `copy` fails.
    pub fn schedule(
        &mut self,
        metrics: &mut Metrics,
        mut copy: impl FnMut(Copy) -> Result<()>,
    ) -> Result<Vec<Share>> {
        self.admit(metrics);
        let mut shares: Vec<Share> = Vec::new();
        let mut left = self.max_tokens;
        for decodes in [true, false] {
            // Ids are collected first, since some requests may be sent back in the loop.
            let of_kind = |request: &&Request| request.decodes() == decodes;
            let ids = self
                .running
                .iter()
                .filter(of_kind)
                .map(|request| request.id);
            for id in ids.collect::<Vec<_>>() {
                self.share_prefix(id, metrics);
                let Some(request) = self.get(id).filter(|_| left > 0) else {
                    continue;
                };
                let share = self.share_of(request, left);
                let total = request.cached + share.known + share.drafts.len();
                if !self.reserve(id, total, &mut shares, metrics, &mut copy)? {
                    continue;
                }
                left -= share.known + share.drafts.len();
                shares.push(share);
            }
        }
        Ok(shares)
    }

    /// Records the result of a step for a request: `accepted` of its new tokens stay, and `tokens`
    /// are added.
    pub fn advance(&mut self, id: RequestId, accepted: usize, tokens: &[u32]) {
        let Some(request) = self.running.iter_mut().find(|request| request.id == id) else {
            return;
        };
        request.push(tokens);
        request.cached += accepted;
        self.pages
            .register(&request.tokens[..request.cached], &request.pages);
    }

    /// Starts waiting requests for which there is room. Each gets the pages that others have
    /// already computed.
    fn admit(&mut self, metrics: &mut Metrics) {
        while self.running.len() < self.max_requests {
            let Some(mut request) = self.waiting.pop_front() else {
                return;
            };
            let page = self.pages.page_size();
            let shared = self.pages.share(&request.tokens);
            let needed = request.tokens.len().div_ceil(page) - shared.len();
            // One more page is for generated tokens, unless the request has the whole cache for
            // itself.
            let fits = needed < self.pages.available() || self.running.is_empty();
            request.start_behind(shared, page);
            if !fits {
                self.release(&mut request);
                self.waiting.push_front(request);
                return;
            }
            metrics.shared_tokens += request.cached;
            self.running.push(request);
        }
    }

    /// Looks again for shared pages, for a request without pages. Other requests may have computed
    /// some since it was started.
    fn share_prefix(&mut self, id: RequestId, metrics: &mut Metrics) {
        let page = self.pages.page_size();
        let nothing = |request: &&mut Request| request.id == id && request.pages.is_empty();
        if let Some(request) = self.running.iter_mut().find(nothing) {
            request.start_behind(self.pages.share(&request.tokens), page);
            metrics.shared_tokens += request.cached;
        }
    }

    fn share_of(&self, request: &Request, left: usize) -> Share {
        let known = request.pending().min(left);
        let mut drafts = Vec::new();
        if request.decodes() {
            let remaining = request.end - request.tokens.len();
            let max = self
                .max_drafts
                .min(left - known)
                .min(remaining.saturating_sub(1));
            drafts = drafts::propose(&request.tokens, max).to_vec();
        }
        Share {
            id: request.id,
            known,
            drafts,
        }
    }

    /// Gives a request the pages for `total` tokens. Pages that it will write are its own. Returns
    /// false if there are not enough pages. The request was then sent back, or it waits.
    fn reserve(
        &mut self,
        id: RequestId,
        total: usize,
        shares: &mut Vec<Share>,
        metrics: &mut Metrics,
        copy: &mut impl FnMut(Copy) -> Result<()>,
    ) -> Result<bool> {
        let page_size = self.pages.page_size();
        loop {
            let Some(at) = self.running.iter().position(|request| request.id == id) else {
                return Ok(false);
            };
            let request = &mut self.running[at];
            // The first written page may be shared. It is the only one of the written pages that
            // can be.
            let first = request.cached / page_size;
            let foreign = request.pages.get(first).copied();
            let foreign = foreign.filter(|page| !self.pages.is_private(*page));
            let missing = request.pages.len() * page_size < total;
            if foreign.is_none() && !missing {
                return Ok(true);
            }
            if let Some(to) = self.pages.allocate() {
                match foreign {
                    Some(from) => {
                        copy(Copy { from, to })?;
                        metrics.copied_pages += 1;
                        request.pages[first] = to;
                        self.pages.release(from);
                    }
                    None => request.pages.push(to),
                }
                continue;
            }
            self.send_back_youngest(shares, metrics);
        }
    }

    /// Makes room: the youngest running request starts again later.
    fn send_back_youngest(&mut self, shares: &mut Vec<Share>, metrics: &mut Metrics) {
        let Some(mut request) = self.running.pop() else {
            return;
        };
        shares.retain(|share| share.id != request.id);
        self.release(&mut request);
        metrics.preemptions += 1;
        self.waiting.push_front(request);
    }

    fn release(&mut self, request: &mut Request) {
        for page in request.pages.drain(..) {
            self.pages.release(page);
        }
        request.cached = 0;
    }
}
