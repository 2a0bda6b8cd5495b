//! The progress of a run, shown to someone who waits at a terminal or reads a log.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The time after which a run first shows that it is working.
const FIRST_LOG_AFTER: Duration = Duration::from_millis(700);
/// The interval between lines of a log.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Shows on standard error what is being done. A terminal gets a bar that is removed at the end; a
/// pipe or a file gets lines.
#[derive(Clone)]
pub struct Progress {
    bar: ProgressBar,
    output: ProgressOutput,
}

/// The output of the progress.
#[derive(Clone)]
enum ProgressOutput {
    None,
    /// The bar is drawn from the first step after this moment on.
    Terminal(Instant),
    /// A channel for steps, and for `None` if another line was written. The newest step is written
    /// when it is time.
    Log(Sender<Option<String>>),
}

impl ProgressOutput {
    fn find(first_after: Duration) -> Self {
        if io::stderr().is_terminal() {
            return Self::Terminal(Instant::now() + first_after);
        }
        let (sender, messages) = mpsc::channel();
        thread::spawn(move || write_at_intervals(&messages, [FIRST_LOG_AFTER, LOG_INTERVAL], tell));
        Self::Log(sender)
    }
}

impl Progress {
    /// Makes a spinner, for runs that may take long.
    pub fn spinner() -> Self {
        Self::new(
            "{spinner} {elapsed} {msg}",
            ProgressOutput::find(FIRST_LOG_AFTER),
        )
    }

    /// Makes a bar with the number of finished rows and the time left.
    pub fn rows() -> Self {
        let template = "{bar:24} {pos}/{len} rows, {eta} left, {msg}";
        Self::new(template, ProgressOutput::find(Duration::ZERO))
    }

    /// Makes a progress that never shows, for programs with their own.
    pub fn hidden() -> Self {
        Self::new("{msg}", ProgressOutput::None)
    }

    fn new(template: &str, output: ProgressOutput) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar, output }
    }

    /// Shows the present step. A log gets such a line after `FIRST_LOG_AFTER` if it has none yet,
    /// and then one whenever `LOG_INTERVAL` has passed since the last line.
    pub fn step(&self, what: impl Into<String>) {
        let what = what.into();
        match &self.output {
            ProgressOutput::Log(lines) => drop(lines.send(Some(what))),
            _ => self.draw(what),
        }
    }

    /// Shows the start of a part. A log always gets a line for it, even soon after another line.
    pub fn begin(&self, what: &str) {
        match &self.output {
            ProgressOutput::Log(lines) => tell_at_once(what, lines),
            _ => self.draw(what.to_owned()),
        }
    }

    /// Begins row `number` of `rows`.
    pub fn begin_row(&self, number: usize, rows: usize, what: &str) {
        self.bar.set_length(rows as u64);
        self.bar.set_position(number as u64 - 1);
        match &self.output {
            ProgressOutput::Log(lines) => {
                tell_at_once(&format!("row {number} of {rows}: {what}"), lines);
            }
            _ => self.draw(what.to_owned()),
        }
    }

    /// Draws the present step again after other output.
    pub fn resume(&self, what: &str) {
        self.draw(what.to_owned());
    }

    fn draw(&self, what: String) {
        self.bar.set_message(what);
        if let ProgressOutput::Terminal(from) = self.output {
            if self.bar.is_hidden() && Instant::now() >= from {
                self.bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            self.bar.tick();
        }
    }

    /// Writes a permanent line above the bar.
    pub fn line(&self, text: &str) {
        self.bar.suspend(|| tell(text));
    }

    /// Returns the present step.
    #[must_use]
    pub fn message(&self) -> String {
        self.bar.message()
    }

    /// Removes the bar from a terminal.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Writes a line of a log at once, without waiting for the interval.
fn tell_at_once(line: &str, steps: &Sender<Option<String>>) {
    tell(line);
    let _ = steps.send(None);
}

/// Writes to standard error. Its reader may have stopped reading.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes the newest step after `first_after`, and then whenever `interval` has passed since the
/// last line, until all senders are dropped. `None` means that another line was written.
fn write_at_intervals(
    messages: &Receiver<Option<String>>,
    [first_after, interval]: [Duration; 2],
    write: impl Fn(&str),
) {
    let mut due = Instant::now() + first_after;
    let mut newest: Option<String> = None;
    loop {
        let message = match newest {
            None => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(_) => messages.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        match message {
            Ok(step @ Some(_)) => newest = step,
            Ok(None) => {
                newest = None;
                due = Instant::now() + interval;
            }
            Err(RecvTimeoutError::Timeout) => {
                newest.take().iter().for_each(|line| write(line));
                due = Instant::now() + interval;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
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
            let log = scope.spawn(move || write_at_intervals(&messages, [interval; 2], write));
            for step in 0..1000 {
                sender.send(Some(step.to_string())).unwrap();
            }
            // The last step is written even if no other follows.
            while lines.lock().unwrap().last().map(String::as_str) != Some("999") {
                thread::sleep(interval / 5);
            }
            let late = "never shown: the run ends before its time";
            sender.send(Some(late.to_owned())).unwrap();
            drop(sender);
            log.join().unwrap();
        });
        let lines = lines.into_inner().unwrap();
        assert!(lines.len() <= 20, "{} lines", lines.len());
        assert_eq!(lines.last().unwrap(), "999");
    }

    #[test]
    fn a_log_s_first_line_does_not_wait_as_long_as_the_others() {
        let hour = Duration::from_secs(3600);
        let (sender, messages) = mpsc::channel();
        let (written, lines) = mpsc::channel();
        let write = move |line: &str| written.send(line.to_owned()).unwrap();
        let log =
            thread::spawn(move || write_at_intervals(&messages, [Duration::ZERO, hour], write));
        sender.send(Some("allocating".to_owned())).unwrap();
        assert_eq!(lines.recv().unwrap(), "allocating");
        sender.send(Some("never shown".to_owned())).unwrap();
        drop(sender);
        log.join().unwrap();
        assert_eq!(lines.recv().ok(), None);
    }

    #[test]
    fn a_step_is_not_told_soon_after_another_line() {
        let hour = Duration::from_secs(3600);
        let (sender, messages) = mpsc::channel();
        let log = thread::spawn(move || {
            write_at_intervals(&messages, [Duration::ZERO, hour], |line| {
                panic!("{line} was written")
            });
        });
        sender.send(None).unwrap();
        sender.send(Some("timing".to_owned())).unwrap();
        thread::sleep(Duration::from_millis(50));
        drop(sender);
        log.join().unwrap();
    }

    #[test]
    fn what_is_hidden_keeps_its_message() {
        let progress = Progress::hidden();
        progress.step("making weights");
        assert_eq!(progress.message(), "making weights");
        assert!(progress.bar.is_hidden());
    }
}
