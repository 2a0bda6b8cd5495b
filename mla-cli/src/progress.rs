//! What is going on, for someone who waits at a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long a run is silent before it shows that it is at work.
const PATIENCE: Duration = Duration::from_millis(700);

/// A spinner on standard error: on a terminal only, and only for runs that take long.
pub(crate) struct Progress {
    bar: ProgressBar,
    start: Instant,
    patience: Duration,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{spinner} {elapsed} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        Self {
            bar,
            start: Instant::now(),
            patience: PATIENCE,
        }
    }

    /// One that never shows, for those who show their own.
    pub(crate) fn hidden() -> Self {
        Self {
            patience: Duration::MAX,
            ..Self::new()
        }
    }

    /// What is being done now.
    pub(crate) fn step(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
        if self.bar.is_hidden() && self.start.elapsed() > self.patience {
            // Standard error hides by itself where it is no terminal.
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.tick();
    }

    /// Leaves no trace.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
