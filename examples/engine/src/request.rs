//! A request: its tokens, its pages, and how far it is.

use std::time::{Duration, Instant};

/// Tells a request from every other one of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequestId(pub u64);

/// The reason why a request has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// All tokens that were asked for are there.
    Length,
    /// It was cancelled.
    Cancelled,
}

/// A request between its arrival and its end.
pub struct Request {
    /// The request's number.
    pub id: RequestId,
    /// The prompt, and behind it what was generated.
    pub tokens: Vec<u32>,
    /// The number of tokens of the prompt.
    pub prompt: usize,
    /// The number of tokens at the end.
    pub end: usize,
    /// The tokens whose rows are in the cache.
    pub cached: usize,
    /// The pages that it refers to.
    pub pages: Vec<i32>,
    arrived: Instant,
    first_token: Option<Instant>,
}

impl Request {
    /// A request that has just arrived, for `more` tokens behind its prompt.
    pub fn new(id: RequestId, prompt: Vec<u32>, more: usize) -> Self {
        Self {
            id,
            prompt: prompt.len(),
            end: prompt.len() + more,
            tokens: prompt,
            cached: 0,
            pages: Vec::new(),
            arrived: Instant::now(),
            first_token: None,
        }
    }

    /// Begins behind what these pages of `page` tokens hold: the whole beginning of its tokens.
    pub fn start_behind(&mut self, pages: Vec<i32>, page: usize) {
        // At least the last token goes through the model, for the one behind it.
        self.cached = (pages.len() * page).min(self.tokens.len() - 1);
        self.pages = pages;
    }

    /// The tokens that have to go through the model before the next one is known: one for a request
    /// that decodes.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// True if one token is pending: the next step computes it and generates the one after it.
    pub fn decodes(&self) -> bool {
        self.pending() == 1
    }

    /// True if there is nothing more to generate.
    pub fn is_done(&self) -> bool {
        self.tokens.len() >= self.end
    }

    /// The generated tokens.
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt..]
    }

    /// Adds generated tokens; those beyond the end are dropped.
    pub fn push(&mut self, tokens: &[u32]) {
        self.first_token.get_or_insert_with(Instant::now);
        let room = self.end - self.tokens.len();
        self.tokens.extend(tokens.iter().take(room));
    }

    /// The time from its arrival to its first token.
    pub fn time_to_first_token(&self) -> Option<Duration> {
        Some(self.first_token? - self.arrived)
    }
}
