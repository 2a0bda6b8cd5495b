//! What is going on, for someone who waits at a terminal or reads a log.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long a run is silent before a terminal shows that it is at work.
const PATIENCE: Duration = Duration::from_millis(700);
/// How far apart lines of a log are, and how late the first one is.
const CALM: Duration = Duration::from_secs(10);

/// Tells on standard error what is being done: on a terminal by a bar that leaves no trace, into a pipe
/// or a file by lines.
#[derive(Clone)]
pub(crate) struct Progress {
    bar: ProgressBar,
    audience: Audience,
}

/// Who is told.
#[derive(Clone)]
enum Audience {
    Nobody,
    /// The bar is drawn from the first step after this moment on.
    Terminal(Instant),
    /// Lines, the newest of which is written when it is time.
    Log(Sender<String>),
}

impl Audience {
    fn find(patience: Duration) -> Self {
        if io::stderr().is_terminal() {
            return Self::Terminal(Instant::now() + patience);
        }
        let (sender, messages) = mpsc::channel();
        thread::spawn(move || write_calmly(&messages, CALM, tell));
        Self::Log(sender)
    }
}

impl Progress {
    /// A spinner, for runs that may take long.
    pub(crate) fn spinner() -> Self {
        Self::new("{spinner} {elapsed} {msg}", Audience::find(PATIENCE))
    }

    /// Rows done and the time left.
    pub(crate) fn rows() -> Self {
        let template = "{bar:24} {pos}/{len} rows, {eta} left, {msg}";
        Self::new(template, Audience::find(Duration::ZERO))
    }

    /// One that never shows, for those who show their own.
    pub(crate) fn hidden() -> Self {
        Self::new("{msg}", Audience::Nobody)
    }

    fn new(template: &str, audience: Audience) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar, audience }
    }

    /// What is being done now. A log has such a line every [`CALM`] at most.
    pub(crate) fn step(&self, what: impl Into<String>) {
        let what = what.into();
        match &self.audience {
            Audience::Log(lines) => drop(lines.send(what)),
            _ => self.draw(what),
        }
    }

    /// What begins now: a part that is worth a line of a log, however soon after another.
    pub(crate) fn begin(&self, what: &str) {
        match &self.audience {
            Audience::Log(_) => tell(what),
            _ => self.draw(what.to_owned()),
        }
    }

    /// Row `number` of all, which is this one.
    pub(crate) fn begin_row(&self, number: usize, rows: usize, what: &str) {
        self.bar.set_length(rows as u64);
        self.bar.set_position(number as u64 - 1);
        match &self.audience {
            Audience::Log(_) => tell(&format!("row {number} of {rows}: {what}")),
            _ => self.draw(what.to_owned()),
        }
    }

    /// Draws what was begun before, where others had their turn meanwhile.
    pub(crate) fn resume(&self, what: &str) {
        self.draw(what.to_owned());
    }

    fn draw(&self, what: String) {
        self.bar.set_message(what);
        if let Audience::Terminal(from) = self.audience {
            if self.bar.is_hidden() && Instant::now() >= from {
                self.bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            self.bar.tick();
        }
    }

    /// A line that stays, above what is drawn.
    pub(crate) fn line(&self, text: &str) {
        self.bar.suspend(|| tell(text));
    }

    #[cfg(test)]
    pub(crate) fn message(&self) -> String {
        self.bar.message()
    }

    /// Leaves no trace on a terminal.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Writes to standard error. Whoever reads it may stop before its end.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes the newest message whenever `interval` has passed since the last line, until nobody can send more.
fn write_calmly(messages: &Receiver<String>, interval: Duration, write: impl Fn(&str)) {
    let mut due = Instant::now() + interval;
    while let Ok(mut newest) = messages.recv() {
        loop {
            match messages.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(newer) => newest = newer,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        write(&newest);
        due = Instant::now() + interval;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_log_has_the_newest_message_at_a_calm_rate() {
        let interval = Duration::from_millis(50);
        let (sender, messages) = mpsc::channel();
        let lines = Mutex::new(Vec::new());
        thread::scope(|scope| {
            let write = |line: &str| lines.lock().unwrap().push(line.to_owned());
            let log = scope.spawn(move || write_calmly(&messages, interval, write));
            for step in 0..1000 {
                sender.send(step.to_string()).unwrap();
            }
            // The last one is not lost, though nothing comes after it.
            while lines.lock().unwrap().last().map(String::as_str) != Some("999") {
                thread::sleep(interval / 5);
            }
            sender
                .send("never shown: the run ends before its time".to_owned())
                .unwrap();
            drop(sender);
            log.join().unwrap();
        });
        let lines = lines.into_inner().unwrap();
        assert!(lines.len() <= 20, "{} lines", lines.len());
        assert_eq!(lines.last().unwrap(), "999");
    }

    #[test]
    fn what_is_hidden_keeps_its_message() {
        let progress = Progress::hidden();
        progress.step("making weights");
        assert_eq!(progress.message(), "making weights");
        assert!(progress.bar.is_hidden());
    }
}
