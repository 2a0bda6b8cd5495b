//! A request: its tokens, its pages, and its progress.

use std::time::{Duration, Instant};

/// The unique number of a request within an engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequestId(pub u64);

/// The reason why a request has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// All requested tokens were generated.
    Length,
    /// The request was cancelled.
    Cancelled,
}

/// A request between its arrival and its end.
pub struct Request {
    /// The request's number.
    pub id: RequestId,
    /// The prompt, followed by the generated tokens.
    pub tokens: Vec<u32>,
    /// The number of tokens of the prompt.
    pub prompt: usize,
    /// The number of tokens at which the request ends.
    pub end: usize,
    /// The number of tokens whose rows are in the cache.
    pub cached: usize,
    /// The pages that the request refers to.
    pub pages: Vec<i32>,
    arrived: Instant,
    first_token: Option<Instant>,
}

impl Request {
    /// Makes a request that has just arrived, for `more` tokens after its prompt.
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

    /// Skips the tokens in these pages of `page` tokens, which hold the beginning of the request.
    pub fn start_behind(&mut self, pages: Vec<i32>, page: usize) {
        // The model has to compute at least the last token, in order to get the next one.
        self.cached = (pages.len() * page).min(self.tokens.len() - 1);
        self.pages = pages;
    }

    /// Returns the number of tokens that the model has to compute before the next one is known. It
    /// is 1 for a request that decodes.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// True if one token is pending. The next step computes it and generates the token after it.
    pub fn decodes(&self) -> bool {
        self.pending() == 1
    }

    /// True if there is nothing more to generate.
    pub fn is_done(&self) -> bool {
        self.tokens.len() >= self.end
    }

    /// Returns the generated tokens.
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt..]
    }

    /// Adds generated tokens. Tokens beyond the end are dropped.
    pub fn push(&mut self, tokens: &[u32]) {
        self.first_token.get_or_insert_with(Instant::now);
        let room = self.end - self.tokens.len();
        self.tokens.extend(tokens.iter().take(room));
    }

    /// Returns the time from the request's arrival to its first token.
    pub fn time_to_first_token(&self) -> Option<Duration> {
        Some(self.first_token? - self.arrived)
    }
}
