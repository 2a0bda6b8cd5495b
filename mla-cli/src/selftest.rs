//! `mla selftest`: checks every backend of this program on this machine's GPU, and times it. The
//! owner of a GPU that was never tried can send the output to the authors.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::time::Instant;

use mla_conformance::{
    DecodeTopic, Failure, PrefillTopic, decode_entry as decode, prefill_entry as prefill,
};
use mla_kernels::FAMILIES;
use mla_runtime::backend::Entry;
use mla_runtime::device::Device;
use mla_runtime::select::{Registry, SelectionError};
use mla_runtime::spec::Phase;
use serde::Serialize;

use crate::args::Format;
use crate::bench::environment::Environment;
use crate::bench::plan::rows::ALL;
use crate::bench::record;
use crate::bench::runner::{Unwatched, run_on_device};
use crate::bench::settings::{Measure, Settings};
use crate::device::progress::{Progress, tell};
use crate::device::stopwatch::{Loaded, Stopwatch};
use crate::device::{About, DeviceName, Job};
use crate::error::CliError;
use crate::table::counted;

/// The version of the JSON, raised when a field changes its meaning.
const SCHEMA: u32 = 1;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Device to try.
    #[arg(long, default_value = "cuda")]
    device: DeviceName,
    /// Try only these backends, and time nothing.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Format of the result.
    #[arg(long, default_value = "table")]
    format: Format,
}

/// All findings of a selftest.
#[derive(Serialize)]
struct Report {
    schema: u32,
    /// True if nothing went wrong.
    pass: bool,
    device: String,
    environment: Environment,
    /// The families of kernels in this program, with the targets that they are compiled for.
    compiled: Vec<Compiled>,
    backends: Vec<Tried>,
    /// The code that the driver loaded for the kernels that were timed.
    loaded: Vec<Family>,
    /// Reports of times. The results are checked as well.
    times: Vec<record::Report>,
    /// The reason why there are no times.
    untimed: Option<String>,
}

#[derive(Serialize)]
struct Compiled {
    family: &'static str,
    targets: &'static [&'static str],
}

/// The result for one backend.
#[derive(Serialize)]
struct Tried {
    name: &'static str,
    phase: &'static str,
    provider: &'static str,
    /// The reasons against the backend on this device, if there are any. It was then not tried.
    not_here: Option<String>,
    topics: Vec<Topic>,
}

/// The result of one topic.
#[derive(Serialize)]
struct Topic {
    name: &'static str,
    seconds: f64,
    /// The failure, if there was one.
    failure: Option<String>,
}

/// Returns the report, and true if nothing went wrong.
pub(crate) fn output(args: &Args) -> Result<(String, bool), CliError> {
    let (device, backends) = args.device.run(Conformance { only: &args.only })?;
    let timed = match args.only.is_empty() {
        true => timings(args.device).map_err(|error| error.to_string()),
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
            && times.iter().all(record::Report::pass)
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
        loaded: by_family(times.iter().flat_map(record::Report::loaded), &families),
        backends,
        times,
        untimed,
    };
    let text = args.format.write(&report, || report.describe());
    Ok((text, report.pass))
}

/// All topics of the conformance tests, for each backend of the device.
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

/// Tries everything that a backend accepts on the device.
fn attempt<D: Device>(entry: Entry, device: &D) -> Tried {
    let mut tried = Tried {
        name: entry.spec.name,
        phase: entry.spec.phase.name(),
        provider: entry.spec.provider,
        not_here: None,
        topics: Vec::new(),
    };
    if let Err(cause) = entry.availability_on(device.target(), true) {
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

/// Times a decode, a prefill and a sparse decode of few heads with every backend that fits. A mixed
/// batch is timed through the layer with the best backends. The results are checked as in every
/// benchmark.
fn timings(device: DeviceName) -> Result<Vec<record::Report>, CliError> {
    let settings = |batches: &[&str], measure| Settings {
        batches: batches.iter().map(|batch| (*batch).to_owned()).collect(),
        measure: Some(measure),
        device: Some(device),
        model: Some(vec!["deepseek-v2-lite".to_owned()]),
        backends: (measure == Measure::Attention).then(|| vec![ALL.to_owned()]),
        samples: Some(10),
        ..Settings::default()
    };
    let run = |settings: &_| run_on_device(settings, None, None, &mut Unwatched, &Progress::rows());
    let mut reports = vec![
        run(&settings(&["8q1s4k", "1q2k"], Measure::Attention))?,
        run(&settings(&["2q100_8q1s1k"], Measure::Layer))?,
    ];
    let sparse = Settings {
        topk: Some(vec![512]),
        ..settings(&["8q1s4k"], Measure::Attention)
    };
    match run(&sparse) {
        // A program need not have a backend for lists of slots.
        Err(CliError::Selection(SelectionError::NoneFits { .. })) => {}
        sparse => reports.push(sparse?),
    }
    Ok(reports)
}

/// The kernels of a family for which the same code was loaded.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Family {
    /// The name of the family, `helpers` for kernels of the device, `others` for those of
    /// libraries, or `unnamed` for those whose names the driver does not report.
    family: String,
    machine_code: String,
    ptx: String,
    /// The symbols of the kernels.
    kernels: Vec<String>,
}

/// Groups kernels by family and by the loaded code, each kernel once. `families` are those of this
/// program.
fn by_family<'a>(kernels: impl IntoIterator<Item = &'a Loaded>, families: &[&str]) -> Vec<Family> {
    let mut found: BTreeMap<[&str; 3], Vec<&str>> = BTreeMap::new();
    for kernel in kernels {
        let symbol = kernel.symbol.as_deref();
        let family = symbol.map_or("unnamed", |symbol| family_of(symbol, families));
        let symbols = found.entry([family, &kernel.machine_code, &kernel.ptx]);
        let symbols = symbols.or_default();
        symbols.extend(symbol.filter(|symbol| !symbols.contains(symbol)));
    }
    found
        .into_iter()
        .map(|([family, machine_code, ptx], kernels)| Family {
            family: family.to_owned(),
            machine_code: machine_code.to_owned(),
            ptx: ptx.to_owned(),
            kernels: kernels.into_iter().map(str::to_owned).collect(),
        })
        .collect()
}

/// Returns the family of a mangled name. The kernels of `sm90`, for example, are in the namespace
/// `mla::sm90`.
fn family_of<'a>(symbol: &str, families: &[&'a str]) -> &'a str {
    let Some((_, rest)) = symbol.split_once("3mla") else {
        return "others";
    };
    let is_own = |family: &&&str| rest.starts_with(&format!("{}{family}", family.len()));
    families.iter().find(is_own).copied().unwrap_or("helpers")
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            family,
            machine_code,
            ptx,
            kernels,
        } = self;
        let count = match kernels.len() {
            0 => "kernels".to_owned(),
            number => counted(number as u64, "kernel"),
        };
        write!(
            f,
            "{family}: {count} with code for {machine_code}, made of PTX for {ptx}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(symbol: &str, machine_code: &str, ptx: &str) -> Loaded {
        Loaded {
            symbol: Some(symbol.to_owned()),
            machine_code: machine_code.to_owned(),
            ptx: ptx.to_owned(),
        }
    }

    #[test]
    fn kernels_are_told_apart_by_family_and_by_what_was_loaded() {
        let decode = "_ZN3mla4sm806decode13decode_kernelINS1_6ConfigEEEvNS1_6ParamsE";
        let prefill = "_ZN3mla4sm807prefill14prefill_kernelEv";
        let kernels = [
            loaded(decode, "9.0", "9.0"),
            loaded(prefill, "9.0", "8.0"),
            loaded(decode, "9.0", "9.0"),
            loaded("_ZN3mla4sm905topk6kernelEv", "9.0", "9.0"),
            loaded("_ZN3mla52_GLOBAL__N__copy_cu11copy_kernelEv", "9.0", "9.0"),
            loaded("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "9.0", "9.0"),
        ];
        let found = by_family(&kernels, &["sm80", "sm90"]);
        let lines: Vec<_> = found.iter().map(Family::to_string).collect();
        assert_eq!(
            lines,
            [
                "helpers: 1 kernel with code for 9.0, made of PTX for 9.0",
                "others: 1 kernel with code for 9.0, made of PTX for 9.0",
                "sm80: 1 kernel with code for 9.0, made of PTX for 8.0",
                "sm80: 1 kernel with code for 9.0, made of PTX for 9.0",
                "sm90: 1 kernel with code for 9.0, made of PTX for 9.0",
            ]
        );
        assert_eq!(found[2].kernels, [prefill]);
        // A driver that does not name kernels still reports the code that it loaded.
        let unnamed = Loaded {
            symbol: None,
            ..kernels[0].clone()
        };
        let line = by_family([&unnamed, &unnamed], &["sm80"])[0].to_string();
        assert_eq!(
            line,
            "unnamed: kernels with code for 9.0, made of PTX for 9.0"
        );
        // A kernel of a family that the program does not have counts as a helper.
        assert_eq!(by_family(&kernels[..1], &[])[0].family, "helpers");
    }
}
