//! The events of a build, reported while it runs.
//!
//! Cargo shows a build script's output only at its end. A program that runs Cargo and shows
//! progress therefore names a file in [`VARIABLE`], to which one JSON [`Event`] is appended per
//! line. Without such a file, events are printed as sentences on standard error, where `cargo build
//! -vv` shows them.

use std::{
    fs::{File, OpenOptions},
    io::Write,
};

use serde::{Deserialize, Serialize};

use crate::{report::Outcome, variables};

/// The environment variable that names the file. Changing it does not cause a new build.
pub const VARIABLE: &str = variables::PROGRESS;

/// An event of a build.
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
        /// The reason why the unit is compiled.
        reason: String,
    },
    /// A unit is done.
    Finished {
        /// The unit.
        unit: String,
        /// The result.
        outcome: Outcome,
        /// The seconds that it took in this build.
        seconds: f64,
        /// Peak memory in bytes.
        peak: u64,
        /// The compiler's first error, if the unit failed.
        error: Option<String>,
    },
    /// Something that the user should know.
    Noted {
        /// The text of the note.
        text: String,
    },
}

/// The destination of the events.
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
            // Each line is one write, since appending is atomic between threads and processes.
            let _ = file.write_all(line.as_bytes());
        }
        eprintln!("{}", sentence(event));
    }
}

/// Describes the event in one line.
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
