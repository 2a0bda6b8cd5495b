//! `cargo lab peers`: compares the built-in backends with third-party ones. A Python script times
//! the latter by the same protocol on the same GPU or CPU.
//!
//! Each case is timed in rounds, first our backends and then the others. A GPU at its power limit
//! is affected by what it did before. If one contender ran all of its cases first, it would look
//! better than it is.

mod record;
mod regions;
mod script;

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::path::PathBuf;

use comfy_table::{Cell, Table};
use mla_cli::parts::{
    Case, CliError, DeviceName, OutputArgs, Progress, Report, Row, Settings, Until, Watcher, cases,
    check_files, counted, draw_with, json, positive, run_on_device, samples, save, time_cell,
    warm_up, wide_table,
};
use mla_kernels::present_gpu;
use serde::Serialize;

pub(crate) use self::script::{Line, PeerOutput, refused_python};
use self::script::{PEERS, PeerRow, Script, check_python};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Device to time on.
    #[arg(long, default_value = "cuda")]
    device: DeviceName,
    /// Cases in JSON [default: those of lab/cases for Hopper or for a CPU].
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Run only the cases whose ids begin with this text.
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    only: Vec<String>,
    /// Peers to time. For Hopper: flashmla, fa3, flashinfer (which compiles for two minutes) and
    /// cudnn. For every GPU since Ampere: flashinfer-fa2 (which also compiles), triton (vLLM's
    /// decode), torch-flash (FlashAttention-2) and torch-efficient. On a CPU: torch's
    /// scaled_dot_product_attention in five forms [default: on a GPU the four for Hopper, on a CPU
    /// the five forms].
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = PEERS)]
    peers: Option<Vec<String>>,
    /// Folder with their libraries and wheels, if these are not installed.
    #[arg(long, value_name = "DIR")]
    wheels: Option<PathBuf>,
    /// Python that has torch.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    /// Timed runs of each case.
    #[arg(long, value_name = "N", default_value = "30", value_parser = samples)]
    samples: u32,
    /// Number of rounds that these runs are divided into. In each round, all contenders run in
    /// turn.
    #[arg(long, value_name = "N", default_value = "3", value_parser = positive)]
    rounds: u32,
    /// Untimed runs of each case, before each round.
    #[arg(long, value_name = "N", default_value = "3", value_parser = warm_up)]
    warm_up: u32,
    /// File for the table in the form of docs/benchmarks. BENCHMARKS.md is rendered from it.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// File for a similar table of the best peer's time divided by ours, by query tiles and
    /// context. With --plot it is also drawn.
    #[arg(long, value_name = "FILE")]
    regions: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Returns the default cases for a device. If `only` is not empty, their ids must begin with one of
/// its entries.
fn default_cases(device: DeviceName, only: &[String]) -> Result<Vec<Case>, CliError> {
    let text = match device {
        DeviceName::Cpu => include_str!("../../cases/cpu.json"),
        DeviceName::Cuda => include_str!("../../cases/hopper.json"),
    };
    // A test reads both files.
    cases::select(cases::parse(text).expect("the file is right"), only)
}

impl Args {
    /// Returns the peers to time.
    fn peers(&self) -> Vec<&str> {
        match (&self.peers, self.device) {
            (Some(peers), _) => peers.iter().map(String::as_str).collect(),
            (None, DeviceName::Cuda) => PEERS[..4].to_vec(),
            (None, DeviceName::Cpu) => PEERS[8..].to_vec(),
        }
    }
}

/// Our times and the peers' times.
#[derive(Serialize)]
struct Comparison<'a> {
    #[serde(flatten)]
    ours: &'a Report,
    #[serde(flatten)]
    theirs: &'a PeerOutput,
}

/// Times the peers after each round of our backends, and writes both results after each case.
struct Timed<'a> {
    args: &'a Args,
    cases: &'a [Case],
    script: Script,
}

impl Watcher for Timed<'_> {
    fn rounds(&self) -> usize {
        self.args.rounds as usize
    }

    fn after_round(&mut self, id: &str, samples: usize) -> Result<(), CliError> {
        let mut of_row = self.cases.iter().filter(|case| case.id == id);
        of_row.try_for_each(|case| self.script.time(case, samples))
    }

    fn after_row(&mut self, ours: &Report) -> Result<(), CliError> {
        let theirs = self.script.theirs();
        Comparison { ours, theirs }.write(self.args, self.cases, Until::Row)
    }
}

/// Returns the table, and true if our outputs are right.
pub(crate) fn output(args: &Args) -> Result<(String, bool), CliError> {
    args.output.check()?;
    let output = &args.output;
    check_files([
        &output.json,
        &output.csv,
        &output.plot,
        &args.record,
        &args.regions,
    ])?;
    if args.rounds > args.samples {
        return Err(CliError::Argument {
            argument: "--rounds",
            given: args.rounds.to_string(),
            accepted: format!("at most the {} samples", args.samples),
        });
    }
    let cases = match &args.cases {
        Some(path) => cases::read(path, &args.only)?,
        None => default_cases(args.device, &args.only)?,
    };
    check_python(args)?;
    if args.device == DeviceName::Cuda {
        present_gpu().map_err(|cause| CliError::Argument {
            argument: "GPU",
            given: format!("none, because {cause}"),
            accepted: format!("one that the built-in backends run on: {}", cause.remedy()),
        })?;
    }
    let settings = Settings {
        samples: Some(args.samples),
        warm_up: Some(args.warm_up),
        device: Some(args.device),
        ..Settings::default()
    };
    let ceilings = args.output.ceilings.as_deref();
    let progress = Progress::rows();
    let mut timed = Timed {
        args,
        cases: &cases,
        script: Script::start(args, &progress)?,
    };
    let ours = &run_on_device(
        &settings,
        Some(cases.clone()),
        ceilings,
        &mut timed,
        &progress,
    )?;
    let theirs = &timed.script.finish()?;
    let comparison = Comparison { ours, theirs };
    let written = comparison.write(args, &cases, Until::End).and_then(|()| {
        let scatters = || regions::scatters(&comparison.points(&cases));
        match &output.plot {
            Some(path) => draw_with(path, ours, &scatters()),
            None => Ok(()),
        }
    });
    match written {
        Ok(()) => Ok((comparison.describe(), ours.pass())),
        Err(error) => Err(error.behind(comparison.describe())),
    }
}

impl Comparison<'_> {
    /// Writes all files except the plot.
    fn write(&self, args: &Args, cases: &[Case], until: Until) -> Result<(), CliError> {
        let rows = OutputArgs {
            json: None,
            ..args.output.clone()
        };
        rows.write_rows(self.ours, until)?;
        if let Some(path) = &args.output.json {
            save(path, until, &json(self))?;
        }
        let tables = [
            (&args.record, self.table()),
            (&args.regions, regions::table(&self.points(cases))),
        ];
        for (path, table) in tables {
            if let Some(path) = path {
                save(path, until, &record::of(self.ours, &table))?;
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let mut lines = vec![self.ours.describe(), self.table().trim_fmt().to_string()];
        let kinds: BTreeSet<&str> = self.ours.rows.iter().map(|row| &*row.kind).collect();
        let each = kinds.iter().copied().filter(|_| kinds.len() > 1);
        let mut ratios = Vec::new();
        for (name, of_ours, of_theirs) in METRICS {
            for kind in iter::once("").chain(each.clone()) {
                let rows = self.ours.rows.iter();
                let rows = rows.filter(|row| kind.is_empty() || row.kind == kind);
                let ratio = |row: &Row| Some(self.best(&row.id, of_theirs)? / of_ours(row)?);
                let compared: Vec<f64> = rows.filter_map(ratio).collect();
                if !compared.is_empty() {
                    let (mean, min) = regions::mean_and_min(&compared);
                    ratios.push(format!(
                        "{}: {}, the best peer takes {mean:.3} of our time by geometric mean, \
                         {min:.3} at worst.",
                        [name, kind].join(" ").trim_end(),
                        counted(compared.len() as u64, "case")
                    ));
                }
            }
        }
        lines.extend(ratios);
        lines.push(
            "Times in µs; * is the fastest. In e2e a step enqueues everything, in planned its \
             schedule exists."
                .to_owned(),
        );
        if let Some(torch) = &self.theirs.torch {
            lines.push(format!("The others run under torch {torch}."));
        }
        lines.extend(self.theirs.refusals.iter().cloned());
        lines.join("\n") + "\n"
    }

    /// Returns a point for each case that was timed on both sides, with everything that a step
    /// enqueues.
    fn points(&self, cases: &[Case]) -> Vec<regions::Point> {
        let point = |case: &Case| {
            let row = self.ours.rows.iter().find(|row| row.id == case.id)?;
            let best = self.best(&case.id, METRICS[0].2)?;
            Some(regions::Point::new(case, best / row.e2e_us))
        };
        cases.iter().filter_map(point).collect()
    }

    fn best(&self, id: &str, of: fn(&PeerRow) -> Option<f64>) -> Option<f64> {
        let of_case = self.theirs.peers.iter().filter(|peer| peer.id == id);
        of_case.filter_map(of).reduce(f64::min)
    }

    fn table(&self) -> Table {
        let mut peers: Vec<&str> = self
            .theirs
            .peers
            .iter()
            .map(|figures| figures.peer.as_str())
            .collect();
        peers.sort_unstable();
        peers.dedup();
        let figures: BTreeMap<(&str, &str), &PeerRow> = self
            .theirs
            .peers
            .iter()
            .map(|figures| ((figures.id.as_str(), figures.peer.as_str()), figures))
            .collect();
        let columns = ["case", "", "of limit", "ours"].into_iter();
        let columns = columns.chain(peers.iter().copied()).chain(["ratio"]);
        let mut table = wide_table(columns, 2..5 + peers.len());
        for row in &self.ours.rows {
            for (name, of_ours, of_theirs) in METRICS {
                let ours = of_ours(row).filter(|_| row.errors.pass);
                let theirs = peers
                    .iter()
                    .map(|peer| of_theirs(figures.get(&(row.id.as_str(), *peer))?));
                let all: Vec<Option<f64>> = iter::once(ours).chain(theirs).collect();
                if all.iter().flatten().count() == 0 {
                    continue;
                }
                let best = all.iter().flatten().copied().fold(f64::INFINITY, f64::min);
                let cells = all.iter().map(|time| match time {
                    None => Cell::new(""),
                    Some(time) => time_cell(*time, *time == best),
                });
                // The limit is that of the whole step, so a planned step has none.
                let limit = row.of_limit.filter(|_| name == METRICS[0].0);
                let limit = limit.map(|part| format!("{:.0}%", 100.0 * part));
                let limit = limit.unwrap_or_default();
                let ratio = ours.zip(self.best(&row.id, of_theirs));
                let ratio = ratio.map(|(ours, best)| format!("{:.2}", best / ours));
                table.add_row(
                    [Cell::new(&row.id), Cell::new(name), Cell::new(limit)]
                        .into_iter()
                        .chain(cells)
                        .chain([Cell::new(ratio.unwrap_or_default())]),
                );
            }
        }
        table
    }
}

/// A time, defined by the work that it includes: its name, and how to read it from our rows and
/// from a peer's.
type Metric = (
    &'static str,
    fn(&Row) -> Option<f64>,
    fn(&PeerRow) -> Option<f64>,
);

const METRICS: [Metric; 2] = [
    ("e2e", |row| Some(row.e2e_us), |peer| peer.e2e_us),
    ("planned", |row| row.planned_us, |peer| peer.planned_us),
];

/// Writes a program that stands in for Python, from the lines of a shell script.
#[cfg(all(test, unix))]
pub(crate) fn stand_in(name: &str, script: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("mla-{name}-{}", std::process::id()));
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[cfg(test)]
mod tests {
    use mla_cli::parts::CaseKind;

    use super::script::Times;
    use super::*;

    /// The rounds and rows that were reported.
    #[derive(Default)]
    struct Finished {
        rounds: Vec<(String, usize)>,
        rows: Vec<usize>,
    }

    impl Watcher for Finished {
        fn rounds(&self) -> usize {
            2
        }

        fn after_round(&mut self, id: &str, samples: usize) -> Result<(), CliError> {
            self.rounds.push((id.to_owned(), samples));
            Ok(())
        }

        fn after_row(&mut self, report: &Report) -> Result<(), CliError> {
            self.rows.push(report.rows.len());
            Ok(())
        }
    }

    #[test]
    fn every_column_of_the_table_has_a_heading() {
        let only = ["d-b1-h16-8k".to_owned()];
        let settings = Settings {
            samples: Some(3),
            warm_up: Some(0),
            ..Settings::default()
        };
        let mut finished = Finished::default();
        let cases = default_cases(DeviceName::Cuda, &only).unwrap();
        let ours = run_on_device(
            &settings,
            Some(cases),
            None,
            &mut finished,
            &Progress::hidden(),
        )
        .unwrap();
        assert_eq!(
            finished.rounds,
            [(only[0].clone(), 1), (only[0].clone(), 2)]
        );
        assert_eq!(finished.rows, [1]);
        assert_eq!(ours.rows[0].samples_us.len(), 3);

        let mut theirs = PeerOutput::default();
        for (peer, us) in [("fa3", 1e9), ("cudnn", 2e9)] {
            theirs.add(Times {
                peer: peer.to_owned(),
                id: only[0].clone(),
                e2e_us: vec![us],
                planned_us: Vec::new(),
            });
        }
        let comparison = Comparison {
            ours: &ours,
            theirs: &theirs,
        };
        let table = comparison.table();
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

        let record = record::of(&ours, &table);
        let record: serde_json::Value = serde_json::from_str(&record).unwrap();
        assert_eq!(record["columns"], serde_json::json!(header));
        assert_eq!(record["rows"][0][3], row[3]);
        for field in ["card", "date", "commit", "command"] {
            assert!(record[field].is_string(), "{field}: {record}");
        }
    }

    #[test]
    fn every_file_of_cases_can_be_read() {
        let [only, none] = [["d-b128", "p-h16-mix"], ["x", "y"]].map(|ids| ids.map(str::to_owned));
        let cases = default_cases(DeviceName::Cuda, &only).unwrap();
        assert_eq!(cases.len(), 7);
        assert_eq!(cases[6].requests.iter().map(|r| r.q).max(), Some(16384));
        assert!(default_cases(DeviceName::Cuda, &none).is_err());

        let counts = |text| {
            let cases = cases::parse(text).unwrap();
            let of = |kind: fn(&CaseKind) -> bool| cases.iter().filter(|it| kind(&it.kind)).count();
            [
                of(|kind| matches!(kind, CaseKind::Decode)),
                of(|kind| matches!(kind, CaseKind::Prefill { .. })),
                of(|kind| matches!(kind, CaseKind::Sparse { .. })),
            ]
        };
        assert_eq!(counts(include_str!("../../cases/grid.json")), [115, 130, 0]);
        assert_eq!(counts(include_str!("../../cases/random.json")), [44, 44, 0]);
        assert_eq!(counts(include_str!("../../cases/uneven.json")), [0, 67, 0]);
        assert_eq!(counts(include_str!("../../cases/sparse.json")), [0, 0, 44]);
        assert_eq!(counts(include_str!("../../cases/dims.json")), [3, 28, 4]);
        assert_eq!(counts(include_str!("../../cases/cpu.json")), [16, 8, 0]);
        assert_eq!(counts(include_str!("../../cases/layer.json")), [0, 0, 0]);
    }
}
