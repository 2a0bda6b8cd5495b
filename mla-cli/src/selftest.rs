//! `mla selftest`: checks that every backend of this program is right on this machine's GPU, and
//! times it. An owner of a GPU that was never tried can send back its output.

use std::fmt::Write as _;
use std::time::Instant;

use mla_conformance::{
    DecodeTopic, Failure, PrefillTopic, decode_entry as decode, prefill_entry as prefill,
};
use mla_kernels::FAMILIES;
use mla_runtime::backend::Entry;
use mla_runtime::device::Device;
use mla_runtime::select::Registry;
use mla_runtime::spec::{Availability, Phase};
use serde::Serialize;

use crate::args::Format;
use crate::bench::{self, Environment};
use crate::device::{About, DeviceName, Job};
use crate::error::CliError;
use crate::figures::counted;
use crate::loaded::{Family, by_family};
use crate::progress::tell;
use crate::stopwatch::Stopwatch;

/// The form of the JSON, which changes when a field changes its meaning.
const SCHEMA: u32 = 1;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Device to try.
    #[arg(long, default_value = "cuda")]
    device: DeviceName,
    /// Try these backends alone, and time nothing.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

/// Everything that was found out.
#[derive(Serialize)]
struct Report {
    schema: u32,
    /// True if nothing went wrong.
    pass: bool,
    device: String,
    environment: Environment,
    /// The families of kernels in this program, and what they are compiled for.
    compiled: Vec<Compiled>,
    backends: Vec<Tried>,
    /// The code that the driver loaded for the kernels that were timed.
    loaded: Vec<Family>,
    /// Times, each of which is checked as well.
    times: Vec<bench::Report>,
    /// The reason why there are no times.
    untimed: Option<String>,
}

#[derive(Serialize)]
struct Compiled {
    family: &'static str,
    targets: &'static [&'static str],
}

/// One backend.
#[derive(Serialize)]
struct Tried {
    name: &'static str,
    phase: &'static str,
    provider: &'static str,
    /// The reasons against it on this device, if there are any: then it was not tried.
    not_here: Option<String>,
    topics: Vec<Topic>,
}

/// The cases of one topic.
#[derive(Serialize)]
struct Topic {
    name: &'static str,
    seconds: f64,
    /// The failure, if there was one.
    failure: Option<String>,
}

/// The report, and whether nothing went wrong.
pub(crate) fn output(args: &Args) -> Result<(String, bool), CliError> {
    let (device, backends) = args.device.run(Conformance { only: &args.only })?;
    let timed = match args.only.is_empty() {
        true => bench::for_selftest(args.device).map_err(|error| error.to_string()),
        false => Ok(Vec::new()),
    };
    let (times, untimed) = match timed {
        Ok(times) => (times, None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let families: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
    let report = Report {
        schema: SCHEMA,
        pass: untimed.is_none()
            && times.iter().all(bench::Report::pass)
            && backends.iter().all(|backend| backend.failed() == 0),
        device,
        environment: Environment::here(),
        compiled: FAMILIES
            .iter()
            .map(|family| Compiled {
                family: family.name,
                targets: family.targets,
            })
            .collect(),
        loaded: by_family(times.iter().flat_map(bench::Report::loaded), &families),
        backends,
        times,
        untimed,
    };
    let text = args.format.write(&report, || report.describe());
    Ok((text, report.pass))
}

/// Every topic of the conformance tests, for each backend of the device.
struct Conformance<'a> {
    only: &'a [String],
}

impl Job for Conformance<'_> {
    type Output = (String, Vec<Tried>);

    fn run<D: Stopwatch>(self, device: &D, about: &About) -> Result<Self::Output, CliError> {
        let registry = Registry::linked()?;
        let ours = |entry: &&Entry| entry.is_implemented() && entry.spec.platform == D::PLATFORM;
        let entries: Vec<Entry> = registry.iter().filter(ours).copied().collect();
        for name in self.only {
            if !entries.iter().any(|entry| entry.spec.name == name) {
                let names: Vec<_> = entries.iter().map(|entry| entry.spec.name).collect();
                return Err(CliError::Argument {
                    argument: "--only",
                    given: format!("{name:?}"),
                    accepted: match names.is_empty() {
                        true => "a backend, of which this program has none".to_owned(),
                        false => names.join(", "),
                    },
                });
            }
        }
        let wanted =
            |entry: &Entry| self.only.is_empty() || self.only.iter().any(|n| n == entry.spec.name);
        let backends = entries
            .into_iter()
            .filter(wanted)
            .map(|entry| attempt(entry, device))
            .collect();
        Ok((about.description.clone(), backends))
    }
}

/// Tries all that a backend accepts on the device.
fn attempt<D: Device>(entry: Entry, device: &D) -> Tried {
    let mut tried = Tried {
        name: entry.spec.name,
        phase: entry.spec.phase.name(),
        provider: entry.spec.provider,
        not_here: None,
        topics: Vec::new(),
    };
    if let Availability::Unavailable(cause) = entry.availability_on(device.target(), true) {
        tried.not_here = Some(cause.to_string());
        return tried;
    }
    match entry.spec.phase {
        Phase::Decode => tried.all(DecodeTopic::ALL, DecodeTopic::name, |topic| {
            decode(entry, device, topic)
        }),
        Phase::Prefill => tried.all(PrefillTopic::ALL, PrefillTopic::name, |topic| {
            prefill(entry, device, topic)
        }),
    }
    tried
}

impl Tried {
    fn all<T: Copy>(
        &mut self,
        topics: &[T],
        name: impl Fn(T) -> &'static str,
        run: impl Fn(T) -> Result<(), Failure>,
    ) {
        for topic in topics.iter().copied() {
            tell(&format!("{} {}: {}", self.phase, self.name, name(topic)));
            let start = Instant::now();
            let outcome = run(topic);
            if let Err(Failure::NothingAccepted { reasons, .. }) = &outcome {
                self.not_here = Some(reasons.to_string());
                return;
            }
            self.topics.push(Topic {
                name: name(topic),
                seconds: start.elapsed().as_secs_f64(),
                failure: outcome.err().map(|failure| failure.to_string()),
            });
        }
    }

    fn failed(&self) -> usize {
        let failed = |topic: &&Topic| topic.failure.is_some();
        self.topics.iter().filter(failed).count()
    }

    fn describe(&self) -> String {
        let head = format!("{} {} ({}): ", self.phase, self.name, self.provider);
        if let Some(reason) = &self.not_here {
            return format!("{head}not for this device: {reason}\n");
        }
        let topics = counted(self.topics.len() as u64, "topic");
        let seconds: f64 = self.topics.iter().map(|topic| topic.seconds).sum();
        let mut text = match self.failed() {
            0 => format!("{head}{topics} right, in {seconds:.1} s\n"),
            failed => format!("{head}{failed} of {topics} WRONG, in {seconds:.1} s\n"),
        };
        for topic in &self.topics {
            if let Some(failure) = &topic.failure {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "  {}: {failure}", topic.name);
            }
        }
        text
    }
}

impl Report {
    fn describe(&self) -> String {
        let Environment {
            time,
            versions,
            machine,
            ..
        } = &self.environment;
        let mut text = format!(
            "mla {} ({}{}), {}, {time}\n{}\n",
            versions.mla,
            versions.git_commit,
            match versions.git_dirty.as_str() {
                "true" => " with changes",
                _ => "",
            },
            versions.rustc,
            self.device,
        );
        if let Some(driver) = &machine.gpu_driver {
            let _ = writeln!(text, "driver {driver}");
        }
        for Compiled { family, targets } in &self.compiled {
            let _ = writeln!(text, "built with {family} ({})", targets.join(", "));
        }
        text.push('\n');
        for backend in &self.backends {
            text += &backend.describe();
        }
        for times in &self.times {
            text.push('\n');
            text += &times.describe();
        }
        if !self.loaded.is_empty() {
            text.push_str("\nloaded by the driver:\n");
        }
        for family in &self.loaded {
            let _ = writeln!(text, "{family}");
        }
        if let Some(reason) = &self.untimed {
            let _ = writeln!(text, "\nnothing was timed: {reason}");
        }
        text += match self.pass {
            true => "\nAll is right.\n",
            false => "\nNot all is right: see above.\n",
        };
        text
    }
}
