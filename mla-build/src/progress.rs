//! The events of a build, reported while it runs.
//!
//! Cargo shows a build script's output only when it has ended, so a program that runs Cargo and
//! shows progress names a file in [`VARIABLE`]. One JSON [`Event`] is appended per line. Without
//! such a file they are printed as sentences on standard error, where `cargo build -vv` shows them.

use std::{
    fs::{File, OpenOptions},
    io::Write,
};

use serde::{Deserialize, Serialize};

use crate::{report::Outcome, variables};

/// The environment variable that names the file. It is no reason to build again.
pub const VARIABLE: &str = variables::PROGRESS;

/// Something happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// The build knows what it has to do.
    Planned {
        /// The package that is built.
        package: String,
        /// The number of units.
        units: usize,
        /// The number of units that the cache holds.
        cached: usize,
    },
    /// A compiler starts.
    Started {
        /// The unit.
        unit: String,
        /// The reason why it is compiled.
        reason: String,
    },
    /// A unit is done.
    Finished {
        /// The unit.
        unit: String,
        /// The result.
        outcome: Outcome,
        /// Seconds that it took now.
        seconds: f64,
        /// Bytes at its peak.
        peak: u64,
        /// The compiler's first error, of a unit that failed.
        error: Option<String>,
    },
    /// Something that the user should know.
    Noted {
        /// It.
        text: String,
    },
}

/// The output of the events.
pub(crate) struct Progress {
    file: Option<File>,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let name = variables::set(VARIABLE);
        // A failure to report an event must not stop the build.
        let open = |name| OpenOptions::new().append(true).create(true).open(name).ok();
        Self {
            file: name.and_then(open),
        }
    }

    pub(crate) fn tell(&self, event: &Event) {
        if let Some(mut file) = self.file.as_ref()
            && let Ok(mut line) = serde_json::to_string(event)
        {
            line.push('\n');
            // One write per line: appending is atomic between threads and processes.
            let _ = file.write_all(line.as_bytes());
        }
        eprintln!("{}", sentence(event));
    }
}

/// The event in one line.
pub fn sentence(event: &Event) -> String {
    match event {
        Event::Planned {
            package,
            units,
            cached,
        } => {
            let left = units.saturating_sub(*cached);
            format!("{package}: {units} units, {cached} cached, {left} to compile")
        }
        Event::Started { unit, reason } => format!("compiling {unit}: {reason}"),
        Event::Finished {
            unit,
            outcome,
            seconds,
            peak,
            error,
        } => {
            let error = error
                .as_ref()
                .map(|error| format!("\n{error}"))
                .unwrap_or_default();
            match outcome {
                Outcome::Cached => format!("cached    {unit}"),
                _ => {
                    format!(
                        "{outcome:<9} {unit} in {seconds:.1} s, {} MiB{error}",
                        peak >> 20
                    )
                }
            }
        }
        Event::Noted { text } => format!("note: {text}"),
    }
}
