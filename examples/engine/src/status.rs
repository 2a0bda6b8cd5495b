//! The display in a terminal while the engine runs. A line shows its state, and the tokens appear
//! above it.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::engine::{Engine, Event};
use crate::graphs::Graphs;
use crate::request::{Ending, RequestId};

/// The number of a request's tokens in a line.
const LINE: usize = 12;

/// The line of state, and the tokens of each request since its last line.
pub struct Status {
    bar: ProgressBar,
    unsaid: BTreeMap<RequestId, String>,
}

impl Status {
    /// Shows the line of state, which moves from the beginning.
    pub fn new(message: &str) -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed_precise} {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        bar.set_message(message.to_owned());
        Self {
            bar,
            unsaid: BTreeMap::new(),
        }
    }

    /// Shows the events of a step.
    ///
    /// # Errors
    ///
    /// If they cannot be written.
    pub fn show<D: Graphs>(&mut self, engine: &Engine<D>, events: &[Event]) -> io::Result<()> {
        for event in events {
            match event {
                Event::Tokens(id, tokens) => self.say(*id, tokens)?,
                Event::Ended(id, ending) => self.end(*id, *ending)?,
            }
        }
        let (scheduler, metrics) = (engine.scheduler(), engine.metrics());
        self.bar.set_message(format!(
            "{} running, {} waiting, {}/{} pages, {:.0} tokens/s",
            scheduler.running().len(),
            scheduler.waiting(),
            scheduler.pages().used(),
            scheduler.pages().count(),
            metrics.tokens_per_second()
        ));
        Ok(())
    }

    /// Removes the line of state.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Writes a line above the line of state.
    ///
    /// # Errors
    ///
    /// If the line cannot be written, for example because its reader has stopped reading.
    pub fn line(&self, text: &str) -> io::Result<()> {
        self.bar.suspend(|| writeln!(io::stdout(), "{text}"))
    }

    fn say(&mut self, id: RequestId, tokens: &[u32]) -> io::Result<()> {
        let unsaid = self.unsaid.entry(id).or_default();
        for token in tokens {
            unsaid.push(' ');
            unsaid.push_str(&word(*token));
        }
        match unsaid.split_whitespace().count() >= LINE {
            true => self.flush(id, ""),
            false => Ok(()),
        }
    }

    fn end(&mut self, id: RequestId, ending: Ending) -> io::Result<()> {
        let end = match ending {
            Ending::Length => " .",
            Ending::Cancelled => " (cancelled)",
        };
        self.flush(id, end)
    }

    fn flush(&mut self, id: RequestId, end: &str) -> io::Result<()> {
        let unsaid = self.unsaid.remove(&id).unwrap_or_default();
        match unsaid.is_empty() && end.is_empty() {
            true => Ok(()),
            false => self.line(&format!("{:>4} |{unsaid}{end}", id.0)),
        }
    }
}

/// Returns a token as one or two syllables, since a model of random weights has no words.
fn word(mut token: u32) -> String {
    const FIRST: [&str; 16] = [
        "b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "sh",
    ];
    const SECOND: [&str; 4] = ["a", "e", "i", "o"];
    let mut word = String::new();
    loop {
        word.push_str(FIRST[token as usize % 16]);
        word.push_str(SECOND[token as usize / 16 % 4]);
        token /= 64;
        if token == 0 {
            return word;
        }
    }
}
