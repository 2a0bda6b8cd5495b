//! An engine, which turns requests into tokens.

use crate::config::Config;
use crate::drafts::accepted;
use crate::error::{Error, Result};
use crate::graphs::Graphs;
use crate::metrics::Metrics;
use crate::pages::Pages;
use crate::request::{Ending, Request, RequestId};
use crate::runner::{Brought, Runner, Size};
use crate::scheduler::Scheduler;

/// The result of a step for a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The request got tokens.
    Tokens(RequestId, Vec<u32>),
    /// The request has ended.
    Ended(RequestId, Ending),
}

/// An engine: a model on a device, and the requests that it serves.
pub struct Engine<D: Graphs> {
    runner: Runner<D>,
    scheduler: Scheduler,
    metrics: Metrics,
    size: Size,
    vocab: usize,
    next: u64,
}

impl<D: Graphs> Engine<D> {
    /// Makes an engine with a model of random weights.
    ///
    /// # Errors
    ///
    /// If a size is 0 or too large, no backend fits, or the device has no memory left.
    pub fn new(device: &D, config: &Config, size: &Size, seed: u64) -> Result<Self> {
        size.check()?;
        // The runner comes first, so that a device refuses a model before anything else is
        // allocated for it.
        let runner = Runner::new(device, config, size, seed)?;
        let pages = Pages::new(size.pages, size.page_size);
        Ok(Self {
            runner,
            scheduler: Scheduler::new(pages, size.requests, size.tokens, size.drafts),
            metrics: Metrics::default(),
            size: *size,
            vocab: config.widths.vocab_size,
            next: 0,
        })
    }

    /// Accepts a request for `more` tokens after `prompt`.
    ///
    /// # Errors
    ///
    /// If the prompt is empty or has a token that the model does not know, if no token is asked
    /// for, or if a request or the cache cannot hold all tokens.
    pub fn submit(&mut self, prompt: &[u32], more: usize) -> Result<RequestId> {
        if prompt.is_empty() {
            return Err(Error::refused("prompt", "no tokens", "1 and up"));
        }
        if let Some(token) = prompt.iter().find(|token| **token as usize >= self.vocab) {
            let accepted = format!("below the vocabulary's {}", self.vocab);
            return Err(Error::refused("prompt", format!("token {token}"), accepted));
        }
        if more == 0 {
            return Err(Error::refused("max_tokens", 0, "1 and up"));
        }
        let cache = self.size.pages.saturating_mul(self.size.page_size);
        let max = self.size.max_len.min(cache);
        if prompt.len().saturating_add(more) > max {
            let given = format!("{} and {more} more", prompt.len());
            return Err(Error::refused(
                "prompt",
                given,
                format!("at most {max} tokens in all"),
            ));
        }
        let id = RequestId(self.next);
        self.next += 1;
        self.scheduler.add(Request::new(id, prompt.to_vec(), more));
        Ok(id)
    }

    /// Cancels a request. Returns `None` if no request has this id any more.
    pub fn cancel(&mut self, id: RequestId) -> Option<Event> {
        self.scheduler.remove(id)?;
        Some(Event::Ended(id, Ending::Cancelled))
    }

    /// True if no request is running or waiting.
    pub fn is_idle(&self) -> bool {
        self.scheduler.running().is_empty() && self.scheduler.waiting() == 0
    }

    /// Runs one step.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let runner = &mut self.runner;
        let copy = |copy: crate::scheduler::Copy| runner.copy_page(copy.from, copy.to);
        let shares = self.scheduler.schedule(&mut self.metrics, copy)?;
        if shares.is_empty() {
            return Ok(Vec::new());
        }
        let mut brought = Vec::with_capacity(shares.len());
        for share in &shares {
            let Some(request) = self.scheduler.get(share.id) else {
                continue;
            };
            let known = &request.tokens[request.cached..request.cached + share.known];
            brought.push((request, [known, &share.drafts].concat()));
        }
        let steps: Vec<Brought<'_>> = brought
            .iter()
            .map(|(request, tokens)| Brought {
                tokens,
                total: request.cached + tokens.len(),
                pages: &request.pages,
            })
            .collect();
        let best = self.runner.run(&steps)?;
        self.metrics.steps += 1;
        self.metrics.computed_tokens += steps.iter().map(|b| b.tokens.len()).sum::<usize>();
        let mut events = Vec::new();
        for (share, best) in shares.iter().zip(best) {
            self.settle(share, &best, &mut events);
        }
        self.metrics.pages = [self.scheduler.pages().peak_used(), self.size.pages];
        Ok(events)
    }

    /// Processes the model's output for each of a request's tokens.
    fn settle(&mut self, share: &crate::scheduler::Share, best: &[u32], events: &mut Vec<Event>) {
        let Some(request) = self.scheduler.get(share.id) else {
            return;
        };
        if share.known < request.pending() {
            // This is a part of the prompt, so the tokens after it are known.
            return self.scheduler.advance(share.id, share.known, &[]);
        }
        let before = request.generated().len();
        let best = &best[share.known - 1..];
        let right = accepted(&share.drafts, best);
        self.metrics.drafts += share.drafts.len();
        self.metrics.accepted_drafts += right;
        self.scheduler
            .advance(share.id, share.known + right, &best[..=right]);
        let Some(request) = self.scheduler.get(share.id) else {
            return;
        };
        let tokens = request.generated()[before..].to_vec();
        self.metrics.generated_tokens += tokens.len();
        if before == 0 {
            self.metrics
                .first_tokens
                .extend(request.time_to_first_token());
        }
        let done = request.is_done();
        events.push(Event::Tokens(share.id, tokens));
        if done {
            self.scheduler.remove(share.id);
            self.metrics.finished += 1;
            events.push(Event::Ended(share.id, Ending::Length));
        }
    }

    /// Returns the scheduler, with the requests and the pages.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Returns the counts so far.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns the names of the prefill and the decode backend.
    pub fn backends(&self) -> [&'static str; 2] {
        self.runner.backends()
    }

    /// Returns the kind of device.
    pub fn platform(&self) -> &'static str {
        D::PLATFORM.name()
    }
}
