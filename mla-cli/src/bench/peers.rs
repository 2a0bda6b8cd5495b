//! `mla bench peers`: the built-in backends beside published ones, which a Python script times by the same
//! protocol on the same GPU.
//!
//! Case by case and in rounds, first ours and then the others: a card at the limit of its power remembers what it did
//! before, so whoever ran all of its cases first would look better than it is.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, Table};
use serde::{Deserialize, Serialize};

use super::cases::{self, Case, CaseKind};
use super::report::{Report, number};
use super::settings::Settings;
use super::statistics::Summary;
use super::{OutputArgs, Rounds, run_on_device, save};
use crate::args::{natural, positive};
use crate::error::CliError;
use crate::table::table;

/// The program, so that no file has to be found where only the command is installed.
const SCRIPT: &str = include_str!("../../peers/peers.py");

#[derive(clap::Args)]
pub(super) struct Args {
    /// Cases in JSON [default: those for Hopper that come with this program].
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Only the cases whose ids begin so.
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    only: Vec<String>,
    /// Who is timed, of flashmla, fa3, flashinfer (which compiles for two minutes) and cudnn.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "flashmla,fa3,flashinfer,cudnn",
        value_parser = ["flashmla", "fa3", "flashinfer", "cudnn"]
    )]
    peers: Vec<String>,
    /// A folder with their libraries and wheels, where they are not installed.
    #[arg(long, value_name = "DIR")]
    wheels: Option<PathBuf>,
    /// A Python that has torch.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    /// Timed runs of each case.
    #[arg(long, value_name = "N", default_value = "30", value_parser = positive)]
    samples: u32,
    /// Rounds that these runs are divided into: in each, all take their turn.
    #[arg(long, value_name = "N", default_value = "3", value_parser = positive)]
    rounds: u32,
    /// Runs of each case that do not count, before each round.
    #[arg(long, value_name = "N", default_value = "3", value_parser = natural)]
    warm_up: u32,
    /// Where to write the table in Markdown, as BENCHMARKS.md has it.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// What ours and the others take.
#[derive(Serialize)]
struct Beside {
    #[serde(flatten)]
    ours: Report,
    #[serde(flatten)]
    said: Said,
}

/// What the script says of its torch and of the peers.
#[derive(Default, Serialize)]
struct Said {
    torch: Option<String>,
    peers: Vec<Figures>,
    refusals: Vec<String>,
}

/// One peer on one case: the medians of its samples.
#[derive(Default, Serialize)]
struct Figures {
    peer: String,
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    e2e_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    planned_us: Option<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    e2e_samples_us: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    planned_samples_us: Vec<f64>,
}

impl Figures {
    fn add(&mut self, times: Times) {
        self.e2e_samples_us.extend(times.e2e_us);
        self.planned_samples_us.extend(times.planned_us);
        let median = |samples: &[f64]| (!samples.is_empty()).then(|| Summary::of(samples).median);
        self.e2e_us = median(&self.e2e_samples_us);
        self.planned_us = median(&self.planned_samples_us);
    }
}

/// What one peer took for one case in one round.
#[derive(Deserialize)]
struct Times {
    peer: String,
    id: String,
    #[serde(default)]
    e2e_us: Vec<f64>,
    #[serde(default)]
    planned_us: Vec<f64>,
}

/// A line of the script.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Refused {
        peer: String,
        id: Option<String>,
        refused: String,
    },
    Times(Times),
    About {
        torch: String,
    },
    Done {
        done: String,
    },
}

/// A round of a case as the script takes it.
#[derive(Serialize)]
struct Round<'a> {
    samples: usize,
    id: &'a str,
    kind: &'static str,
    heads: u32,
    causal: bool,
    /// Query and kv tokens.
    requests: Vec<[u32; 2]>,
}

impl<'a> Round<'a> {
    fn new(case: &'a Case, samples: usize) -> Self {
        let (kind, causal) = match case.kind {
            CaseKind::Decode => ("decode", true),
            CaseKind::Prefill { causal } => ("prefill", causal),
        };
        Self {
            samples,
            id: &case.id,
            kind,
            heads: case.heads,
            causal,
            requests: case.requests.iter().map(|r| [r.q, r.kv]).collect(),
        }
    }
}

/// The table, and whether our outputs are right.
pub(super) fn output(args: &Args) -> Result<(String, bool), CliError> {
    args.output.check()?;
    if args.rounds > args.samples {
        return Err(CliError::Argument {
            argument: "--rounds",
            given: args.rounds.to_string(),
            accepted: format!("at most the {} samples", args.samples),
        });
    }
    check_python(args)?;
    let cases = cases::read(args.cases.as_deref(), &args.only)?;
    let settings = Settings {
        samples: Some(args.samples),
        warm_up: Some(args.warm_up),
        ..Settings::on_gpu()
    };
    let ceilings = args.output.ceilings.as_deref();
    let mut script = Script::start(args)?;
    let rounds = Rounds {
        count: args.rounds as usize,
        after: &mut |id, samples| {
            let mut of_row = cases.iter().filter(|case| case.id == id);
            of_row.try_for_each(|case| script.time(case, samples))
        },
    };
    let ours = run_on_device(&settings, Some(cases.clone()), ceilings, rounds)?;
    let said = script.finish()?;
    let beside = Beside { ours, said };
    super::write(
        &OutputArgs {
            json: None,
            ..args.output.clone()
        },
        &beside.ours,
    )?;
    if let Some(path) = &args.output.json {
        // Strings, numbers, lists and structs.
        let json = serde_json::to_string_pretty(&beside).expect("the result is JSON");
        save(path, &(json + "\n"))?;
    }
    if let Some(path) = &args.markdown {
        let mut table = beside.table();
        table.load_style(comfy_table::presets::ASCII_MARKDOWN);
        save(path, &(table.trim_fmt().to_string() + "\n"))?;
    }
    Ok((beside.describe(), beside.ours.pass()))
}

/// Refuses a Python without torch or without a GPU, before anything is measured.
fn check_python(args: &Args) -> Result<(), CliError> {
    let refused = |given: String| CliError::Argument {
        argument: "--python",
        given,
        accepted:
            "a Python with torch and a GPU that it can use; mla-cli/peers/requirements.txt says \
                   what to install"
                .to_owned(),
    };
    let name = args.python.display();
    let check =
        "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'torch finds no GPU')";
    let output = Command::new(&args.python)
        .args(["-c", check])
        .output()
        .map_err(|error| refused(format!("{name}, which cannot be started: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    let last = message.lines().last().unwrap_or("it fails");
    Err(refused(format!("{name}: {last}")))
}

/// The script at work: it loads the peers once, and times them on each case that it is given.
struct Script {
    python: PathBuf,
    child: Child,
    /// Closed when there are no more.
    rounds: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    said: Said,
}

impl Script {
    fn start(args: &Args) -> Result<Self, CliError> {
        let mut python = Command::new(&args.python);
        python.args(["-c", SCRIPT, "--peers", &args.peers.join(",")]);
        python.args(["--warm-up", &args.warm_up.to_string()]);
        if let Some(wheels) = &args.wheels {
            python.arg("--wheels").arg(wheels);
        }
        let mut child = python
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let rounds = child.stdin.take();
        // It is a pipe: so it was asked for above.
        let lines = child.stdout.take().expect("the script's output is a pipe");
        Ok(Self {
            python: args.python.clone(),
            child,
            rounds,
            lines: BufReader::new(lines).lines(),
            said: Said::default(),
        })
    }

    /// Has the peers timed on a case, for one round.
    fn time(&mut self, case: &Case, samples: usize) -> Result<(), CliError> {
        // Strings and numbers.
        let json = serde_json::to_string(&Round::new(case, samples)).expect("a round is JSON");
        let written = self
            .rounds
            .as_mut()
            .map(|rounds| writeln!(rounds, "{json}"));
        let done = match written {
            Some(Ok(())) => self.said.read(&mut self.lines, Some(&case.id))?,
            // It has ended before its time.
            _ => false,
        };
        match done {
            true => Ok(()),
            false => Err(self.failed()),
        }
    }

    /// Everything that was said.
    fn finish(mut self) -> Result<Said, CliError> {
        self.rounds = None;
        self.said.read(&mut self.lines, None)?;
        match self.child.wait()?.success() {
            true => Ok(self.said),
            false => Err(self.failed()),
        }
    }

    fn failed(&mut self) -> CliError {
        // Without more rounds it ends, if it has not yet.
        self.rounds = None;
        let status = match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        CliError::Argument {
            argument: "--python",
            given: format!(
                "{}, whose run of the peers ended with {status}",
                self.python.display()
            ),
            accepted: "one that runs them; its message stands above".to_owned(),
        }
    }
}

impl Said {
    /// Reads until a round of the case is done, or to the end; says whether it is done.
    fn read(
        &mut self,
        lines: impl Iterator<Item = std::io::Result<String>>,
        case: Option<&str>,
    ) -> Result<bool, CliError> {
        for line in lines {
            let line = line?;
            // Libraries print what they like.
            match serde_json::from_str(&line) {
                Ok(Line::About { torch }) => self.torch = Some(torch),
                Ok(Line::Times(times)) => self.add(times),
                Ok(Line::Refused { peer, id, refused }) => {
                    let case = id.map(|id| format!(" on {id}")).unwrap_or_default();
                    self.refusals.push(format!("{peer}{case}: {refused}"));
                }
                Ok(Line::Done { done }) if Some(done.as_str()) == case => return Ok(true),
                Ok(Line::Done { .. }) => {}
                Err(_) => eprintln!("{line}"),
            }
        }
        Ok(false)
    }

    fn add(&mut self, times: Times) {
        let known = self
            .peers
            .iter()
            .position(|figures| figures.peer == times.peer && figures.id == times.id);
        let place = known.unwrap_or_else(|| {
            self.peers.push(Figures {
                peer: times.peer.clone(),
                id: times.id.clone(),
                ..Figures::default()
            });
            self.peers.len() - 1
        });
        self.peers[place].add(times);
    }
}

impl Beside {
    fn describe(&self) -> String {
        let mut lines = vec![self.ours.describe(), self.table().trim_fmt().to_string()];
        let mut ratios = Vec::new();
        for (metric, name) in METRICS {
            let compared: Vec<f64> = self
                .ours
                .rows
                .iter()
                .filter_map(|row| {
                    let ours = metric.ours(row)?;
                    let best = self.best(&row.id, metric)?;
                    Some((best / ours).ln())
                })
                .collect();
            if !compared.is_empty() {
                let mean = (compared.iter().sum::<f64>() / compared.len() as f64).exp();
                let worst = compared.iter().copied().fold(f64::INFINITY, f64::min).exp();
                ratios.push(format!(
                    "{name}: {} cases, the best peer takes {mean:.3} of our time by geometric mean, {worst:.3} \
                     at worst.",
                    compared.len()
                ));
            }
        }
        lines.extend(ratios);
        lines.push(
            "Times in µs; * is the fastest. In e2e a step enqueues everything, in planned its schedule exists."
                .to_owned(),
        );
        if let Some(torch) = &self.said.torch {
            lines.push(format!("The others run under torch {torch}."));
        }
        lines.extend(self.said.refusals.iter().cloned());
        lines.join("\n") + "\n"
    }

    fn best(&self, id: &str, metric: Metric) -> Option<f64> {
        let of_case = self.said.peers.iter().filter(|peer| peer.id == id);
        of_case
            .filter_map(|peer| metric.theirs(peer))
            .reduce(f64::min)
    }

    fn table(&self) -> Table {
        let mut peers: Vec<&str> = self
            .said
            .peers
            .iter()
            .map(|figures| figures.peer.as_str())
            .collect();
        peers.sort_unstable();
        peers.dedup();
        let figures: BTreeMap<(&str, &str), &Figures> = self
            .said
            .peers
            .iter()
            .map(|figures| ((figures.id.as_str(), figures.peer.as_str()), figures))
            .collect();
        let mut table = table(["case"]);
        table.set_content_arrangement(ContentArrangement::Disabled);
        let header = ["case", "", "of limit", "ours"]
            .into_iter()
            .chain(peers.iter().copied());
        table.set_header(header.chain(["ratio"]));
        for row in &self.ours.rows {
            for (metric, name) in METRICS {
                let ours = metric.ours(row).filter(|_| row.errors.pass);
                let theirs = peers
                    .iter()
                    .map(|peer| metric.theirs(figures.get(&(row.id.as_str(), *peer))?));
                let all: Vec<Option<f64>> = std::iter::once(ours).chain(theirs).collect();
                if all.iter().flatten().count() == 0 {
                    continue;
                }
                let best = all.iter().flatten().copied().fold(f64::INFINITY, f64::min);
                let cells = all.iter().map(|time| match time {
                    None => Cell::new(""),
                    Some(time) if *time == best => {
                        Cell::new(format!("{} *", number(*time))).add_attribute(Attribute::Bold)
                    }
                    Some(time) => Cell::new(format!("{}  ", number(*time))),
                });
                // Of the whole step; what is planned has no other limit.
                let limit = row.of_limit.filter(|_| name == METRICS[0].1);
                let limit = limit.map(|part| format!("{:.0}%", 100.0 * part));
                let limit = limit.unwrap_or_default();
                let ratio = ours.zip(self.best(&row.id, metric));
                let ratio = ratio.map(|(ours, best)| format!("{:.2}", best / ours));
                table.add_row(
                    [Cell::new(&row.id), Cell::new(name), Cell::new(limit)]
                        .into_iter()
                        .chain(cells)
                        .chain([Cell::new(ratio.unwrap_or_default())]),
                );
            }
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

/// What a step has to enqueue for a time to count.
#[derive(Clone, Copy)]
enum Metric {
    Everything,
    Planned,
}

const METRICS: [(Metric, &str); 2] = [(Metric::Everything, "e2e"), (Metric::Planned, "planned")];

impl Metric {
    const fn ours(self, row: &super::report::Row) -> Option<f64> {
        match self {
            Self::Everything => Some(row.e2e_us),
            Self::Planned => row.planned_us,
        }
    }

    const fn theirs(self, figures: &Figures) -> Option<f64> {
        match self {
            Self::Everything => figures.e2e_us,
            Self::Planned => figures.planned_us,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_script_are_told_apart() {
        let read = |line: &str| serde_json::from_str::<Line>(line);
        assert!(matches!(
            read(r#"{"torch": "2.11", "device": "H200"}"#),
            Ok(Line::About { torch }) if torch == "2.11"
        ));
        assert!(matches!(
            read(r#"{"peer": "fa3", "id": "d", "e2e_us": [1.5]}"#),
            Ok(Line::Times(Times { e2e_us, planned_us, .. })) if e2e_us == [1.5] && planned_us.is_empty()
        ));
        assert!(matches!(
            read(r#"{"peer": "fa3", "refused": "cannot be loaded"}"#),
            Ok(Line::Refused { id: None, .. })
        ));
        assert!(read("Loading kernels…").is_err());
    }

    #[test]
    fn a_round_is_read_to_its_end_and_added_to_those_before() {
        let mut lines = [
            r#"{"torch": "2.11", "device": "H200"}"#,
            r#"{"peer": "flashinfer", "refused": "cannot be loaded"}"#,
            r#"{"peer": "cudnn", "id": "a", "refused": "too long"}"#,
            r#"{"peer": "fa3", "id": "a", "e2e_us": [1.5, 2.5]}"#,
            r#"{"peer": "fa3", "id": "a", "planned_us": [1.0, 1.25]}"#,
            r#"{"done": "a"}"#,
            r#"{"peer": "fa3", "id": "a", "e2e_us": [3.5]}"#,
            r#"{"done": "a"}"#,
            r#"{"peer": "fa3", "id": "b", "e2e_us": [4.5]}"#,
        ]
        .into_iter()
        .map(|line| Ok(line.to_owned()));
        let mut said = Said::default();
        assert!(said.read(&mut lines, Some("a")).unwrap());
        assert_eq!(said.torch.as_deref(), Some("2.11"));
        assert_eq!(
            said.refusals,
            ["flashinfer: cannot be loaded", "cudnn on a: too long"]
        );
        assert_eq!(said.peers.len(), 1);
        assert_eq!(said.peers[0].e2e_us, Some(2.0));
        assert!(said.read(&mut lines, Some("a")).unwrap());
        assert_eq!(said.peers.len(), 1);
        assert_eq!(said.peers[0].e2e_us, Some(2.5));
        assert_eq!(said.peers[0].planned_us, Some(1.125));
        // It ended before this one was done.
        assert!(!said.read(&mut lines, Some("b")).unwrap());
        assert_eq!(said.peers.len(), 2);
    }

    #[test]
    fn every_column_of_the_table_has_a_heading() {
        let only = ["d-b1-h16-8k".to_owned()];
        let settings = Settings {
            samples: Some(3),
            warm_up: Some(0),
            ..Settings::default()
        };
        let mut finished = Vec::new();
        let rounds = Rounds {
            count: 2,
            after: &mut |id, samples| {
                finished.push((id.to_owned(), samples));
                Ok(())
            },
        };
        let cases = cases::read(None, &only).unwrap();
        let ours = run_on_device(&settings, Some(cases), None, rounds).unwrap();
        assert_eq!(finished, [(only[0].clone(), 1), (only[0].clone(), 2)]);
        assert_eq!(ours.rows[0].samples_us.len(), 3);

        let mut said = Said::default();
        for (peer, us) in [("fa3", 1e9), ("cudnn", 2e9)] {
            said.add(Times {
                peer: peer.to_owned(),
                id: only[0].clone(),
                e2e_us: vec![us],
                planned_us: Vec::new(),
            });
        }
        let table = Beside { ours, said }.table();
        let texts = |row: &comfy_table::Row| -> Vec<String> {
            row.cell_iter().map(Cell::content).collect()
        };
        let header = texts(table.header().unwrap());
        assert_eq!(
            header,
            ["case", "", "of limit", "ours", "cudnn", "fa3", "ratio"]
        );
        let row = texts(table.row(0).unwrap());
        assert_eq!(row.len(), header.len(), "{row:?}");
        assert_eq!(row[..2], ["d-b1-h16-8k", "e2e"]);
        assert!(row[3].ends_with(" *"), "{row:?}");
    }
}
