//! The counts of an engine, and their summary at the end.

use std::fmt;
use std::time::{Duration, Instant};

/// The counts of an engine.
#[derive(Clone, Default, Debug)]
pub struct Metrics {
    started: Start,
    /// The number of steps that ran.
    pub steps: usize,
    /// The number of tokens that the model computed, including drafts.
    pub computed_tokens: usize,
    /// The number of generated tokens.
    pub generated_tokens: usize,
    /// The number of prompt tokens that were already in the cache.
    pub shared_tokens: usize,
    /// The number of drafts that were verified.
    pub drafts: usize,
    /// The number of drafts that were right.
    pub accepted_drafts: usize,
    /// The number of pages that were copied before a write.
    pub copied_pages: usize,
    /// The number of times that a request had to release its pages and start again.
    pub preemptions: usize,
    /// The number of requests that ended by themselves.
    pub finished: usize,
    /// The time from arrival to first token, for each request with a first token.
    pub first_tokens: Vec<Duration>,
    /// The maximum number of pages in use at once, and the number of all pages.
    pub pages: [usize; 2],
}

/// The time at which an engine started.
#[derive(Clone, Debug)]
struct Start(Instant);

impl Default for Start {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Metrics {
    /// Returns the generated tokens per second since the engine was made.
    pub fn tokens_per_second(&self) -> f64 {
        self.generated_tokens as f64 / self.started.0.elapsed().as_secs_f64().max(1e-9)
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = self.first_tokens.clone();
        first.sort_unstable();
        let at = |share: f64| {
            let place = (first.len().saturating_sub(1) as f64 * share).round() as usize;
            first
                .get(place)
                .map_or(0.0, |time| time.as_secs_f64() * 1e3)
        };
        let [used, all] = self.pages;
        writeln!(
            f,
            "{} tokens of {} requests in {} steps, {:.1} tokens/s",
            self.generated_tokens,
            self.finished,
            self.steps,
            self.tokens_per_second()
        )?;
        writeln!(
            f,
            "time to first token: median {:.1} ms, longest {:.1} ms",
            at(0.5),
            at(1.0)
        )?;
        writeln!(
            f,
            "cache: at most {used} of {all} pages ({:.0}%), {} prompt tokens shared, {} pages \
             copied, {} requests sent back",
            100.0 * used as f64 / all.max(1) as f64,
            self.shared_tokens,
            self.copied_pages,
            self.preemptions
        )?;
        write!(
            f,
            "drafts: {} of {} accepted; {} tokens went through the model",
            self.accepted_drafts, self.drafts, self.computed_tokens
        )
    }
}
