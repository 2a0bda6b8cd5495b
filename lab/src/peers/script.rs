//! The Python script that times the peers, and its output.

use std::io::{BufRead, BufReader, Read, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};

use mla_cli::parts::{
    Case, CaseKind, CliError, DeviceName, Progress, SEED, Summary, lines, read_program,
};
use serde::{Deserialize, Serialize};

use super::Args;

/// The script is in the program, so that no file is needed beside the installed command.
const SCRIPT: &str = include_str!("../../peers/peers.py");

/// The peers that the script can time: four for Hopper, four for every GPU since Ampere, and five
/// for a CPU.
pub(crate) const PEERS: [&str; 13] = [
    "flashmla",
    "fa3",
    "flashinfer",
    "cudnn",
    "flashinfer-fa2",
    "triton",
    "torch-flash",
    "torch-efficient",
    "sdpa-folded",
    "sdpa-expanded",
    "sdpa-products",
    "sdpa-plain",
    "sdpa-padded",
];

/// The script's output about its torch and the peers.
#[derive(Default, Serialize)]
pub(crate) struct PeerOutput {
    pub(crate) torch: Option<String>,
    pub(crate) peers: Vec<PeerRow>,
    pub(crate) refusals: Vec<String>,
}

/// One peer on one case: the medians of its samples.
#[derive(Default, Serialize)]
pub(crate) struct PeerRow {
    pub(crate) peer: String,
    pub(crate) id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) e2e_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) planned_us: Option<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    e2e_samples_us: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    planned_samples_us: Vec<f64>,
}

impl PeerRow {
    fn add(&mut self, times: Times) {
        self.e2e_samples_us.extend(times.e2e_us);
        self.planned_samples_us.extend(times.planned_us);
        let median = |samples: &[f64]| (!samples.is_empty()).then(|| Summary::of(samples).median);
        self.e2e_us = median(&self.e2e_samples_us);
        self.planned_us = median(&self.planned_samples_us);
    }
}

/// The times of one peer for one case in one round.
#[derive(Deserialize)]
pub(crate) struct Times {
    pub(crate) peer: String,
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) e2e_us: Vec<f64>,
    #[serde(default)]
    pub(crate) planned_us: Vec<f64>,
}

/// A line of the script.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum Line {
    Refused {
        peer: String,
        id: Option<String>,
        refused: String,
    },
    Times(Times),
    /// The running peer, and its case.
    Progress {
        progress: String,
    },
    /// The peers that were loaded.
    Loaded {
        torch: String,
        loaded: Vec<String>,
    },
    Done {
        done: String,
    },
}

/// A round of a case in the script's form.
#[derive(Serialize)]
struct Round<'a> {
    samples: usize,
    id: &'a str,
    kind: &'static str,
    heads: u32,
    dtype: &'static str,
    /// L, P, R, V.
    dims: [u32; 4],
    causal: bool,
    /// The numbers of query and kv tokens of each request.
    requests: Vec<[u32; 2]>,
    #[serde(flatten)]
    sparse: Option<RoundLists>,
}

/// The further input of a round of sparse attention.
#[derive(Serialize)]
struct RoundLists {
    cache: &'static str,
    topk: u32,
    /// The positions in its request that each query token attends to. Absent if the case is that of
    /// the preceding round, since there are many positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    positions: Option<Vec<Vec<u32>>>,
}

/// Tokens in a page of the cache, for all cases.
const PAGE: u32 = 64;

impl<'a> Round<'a> {
    fn new(case: &'a Case, samples: usize, is_new: bool) -> Self {
        let (kind, causal) = match case.kind {
            CaseKind::Decode => ("decode", true),
            CaseKind::Sparse { .. } => ("sparse", true),
            CaseKind::Prefill { causal } => ("prefill", causal),
            CaseKind::Layer => ("layer", true),
        };
        Self {
            samples,
            id: &case.id,
            kind,
            heads: case.heads,
            dtype: case.dtype.name(),
            dims: [
                case.dims.latent,
                case.dims.head.nope,
                case.dims.head.rope,
                case.dims.head.v,
            ],
            causal,
            requests: case.requests.iter().map(|r| [r.q, r.kv]).collect(),
            sparse: match case.kind {
                CaseKind::Sparse { kv_format, lists } => Some(RoundLists {
                    cache: kv_format.name(),
                    topk: lists.topk,
                    positions: is_new.then(|| lists.positions(&case.requests, PAGE, SEED.into())),
                }),
                _ => None,
            },
        }
    }
}

pub(crate) fn refused_python(given: String) -> CliError {
    CliError::Argument {
        argument: "--python",
        given,
        accepted: "a Python with torch and a GPU that it can use; lab/peers/requirements.txt \
                   says what to install"
            .to_owned(),
    }
}

fn cannot_start(args: &Args, error: &std::io::Error) -> CliError {
    let name = args.python.display();
    refused_python(format!("{name}, which cannot be started: {error}"))
}

/// Refuses a Python without torch or without a GPU, before anything is measured.
pub(crate) fn check_python(args: &Args) -> Result<(), CliError> {
    let check = match args.device {
        DeviceName::Cpu => "import torch",
        DeviceName::Cuda => {
            "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'torch finds no GPU')"
        }
    };
    let mut python = Command::new(&args.python);
    python.args(["-c", check]);
    python.stdout(Stdio::null()).stderr(Stdio::piped());
    let (status, errors) = read_program(&mut python, |child| child.stderr.take())
        .map_err(|error| cannot_start(args, &error))?;
    if status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&errors);
    let last = message.lines().last().unwrap_or("it fails");
    Err(refused_python(format!("{}: {last}", args.python.display())))
}

/// The running script. It loads the peers once, and times them on each case that it gets.
pub(crate) struct Script {
    python: PathBuf,
    child: Child,
    /// The script's input. It is closed when there are no more rounds.
    rounds: Option<ChildStdin>,
    lines: BufReader<ChildStdout>,
    /// A thread that shows messages of libraries until they end.
    aside: Option<JoinHandle<()>>,
    progress: Progress,
    theirs: PeerOutput,
    /// The case of the preceding round.
    current: Option<String>,
}

impl Script {
    /// Starts the script and waits until the peers are loaded, so that loading does not affect our
    /// times.
    pub(crate) fn start(args: &Args, progress: &Progress) -> Result<Self, CliError> {
        let mut python = Command::new(&args.python);
        python.args(["-c", SCRIPT, "--peers", &args.peers().join(",")]);
        python.args(["--warm-up", &args.warm_up.to_string()]);
        if args.device == DeviceName::Cpu {
            // The peers get the same number of threads as our backends.
            let threads = mla_cpu::Cpu::new().threads();
            python.args(["--device", "cpu", "--threads", &threads.to_string()]);
        }
        if let Some(wheels) = &args.wheels {
            python.arg("--wheels").arg(wheels);
        }
        let mut child = python
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| cannot_start(args, &error))?;
        let rounds = child.stdin.take();
        // Both are pipes, as asked for above.
        let lines = child.stdout.take().expect("the script's output is a pipe");
        let errors = child.stderr.take().expect("the script's errors are a pipe");
        let beside = progress.clone();
        let mut script = Self {
            python: args.python.clone(),
            child,
            rounds,
            lines: BufReader::new(lines),
            aside: Some(thread::spawn(move || show(errors, &beside))),
            progress: progress.clone(),
            theirs: PeerOutput::default(),
            current: None,
        };
        let mut peers = 0;
        let is_loaded = script.read(|line| match line {
            Line::Loaded { loaded, .. } => {
                peers = loaded.len();
                true
            }
            _ => false,
        })?;
        match (is_loaded, peers) {
            (false, _) => Err(script.failed()),
            (true, 0) => Err(CliError::Argument {
                argument: "--peers",
                given: args.peers().join(","),
                accepted: format!(
                    "at least one that can be loaded: {}",
                    script.theirs.refusals.join("; ")
                ),
            }),
            (true, _) => Ok(script),
        }
    }

    /// Times the peers on a case, for one round.
    pub(crate) fn time(&mut self, case: &Case, samples: usize) -> Result<(), CliError> {
        let is_new = self.current.as_ref() != Some(&case.id);
        self.current = Some(case.id.clone());
        // Strings and numbers can always be written as JSON.
        let json =
            serde_json::to_string(&Round::new(case, samples, is_new)).expect("a round is JSON");
        let written = self
            .rounds
            .as_mut()
            .map(|rounds| writeln!(rounds, "{json}"));
        let is_done = match written {
            Some(Ok(())) => {
                self.read(|line| matches!(line, Line::Done { done } if *done == case.id))?
            }
            // The script has ended early.
            _ => false,
        };
        if is_done { Ok(()) } else { Err(self.failed()) }
    }

    /// Returns the output so far.
    pub(crate) const fn theirs(&self) -> &PeerOutput {
        &self.theirs
    }

    /// Waits for the script's end, and returns its whole output.
    pub(crate) fn finish(mut self) -> Result<PeerOutput, CliError> {
        self.rounds = None;
        self.read(|_| false)?;
        match self.wait()?.success() {
            true => Ok(self.theirs),
            false => Err(self.failed()),
        }
    }

    /// Reads up to the `last` line or to the end. Returns true if there was such a line.
    fn read(&mut self, last: impl FnMut(&Line) -> bool) -> Result<bool, CliError> {
        self.theirs.read(&mut self.lines, &self.progress, last)
    }

    /// Waits for the script's end, after showing everything that it printed.
    fn wait(&mut self) -> std::io::Result<ExitStatus> {
        let status = self.child.wait();
        if let Some(aside) = self.aside.take() {
            // The thread only prints.
            let _ = aside.join();
        }
        status
    }

    fn failed(&mut self) -> CliError {
        // Without further rounds, the script ends by itself.
        self.rounds = None;
        let status = match self.wait() {
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

/// Shows lines above the progress bar.
fn show(from: impl Read, progress: &Progress) {
    for line in lines(BufReader::new(from)) {
        // An error of the pipe is not an error of ours.
        let Ok(line) = line else { return };
        progress.line(&String::from_utf8_lossy(&line));
    }
}

impl PeerOutput {
    /// Reads up to the `last` line or to the end. Returns true if there was such a line.
    pub(crate) fn read(
        &mut self,
        from: impl BufRead,
        progress: &Progress,
        mut last: impl FnMut(&Line) -> bool,
    ) -> Result<bool, CliError> {
        for line in lines(from) {
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            // Libraries may print other lines.
            let Ok(line) = serde_json::from_str(&line) else {
                progress.line(&line);
                continue;
            };
            let is_last = last(&line);
            match line {
                Line::Progress { progress: what } => progress.step(what),
                Line::Loaded { torch, .. } => self.torch = Some(torch),
                Line::Times(times) => self.add(times),
                Line::Refused { peer, id, refused } => {
                    let case = id.map(|id| format!(" on {id}")).unwrap_or_default();
                    self.refusals.push(format!("{peer}{case}: {refused}"));
                }
                Line::Done { .. } => {}
            }
            if is_last {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn add(&mut self, times: Times) {
        let known = self
            .peers
            .iter()
            .position(|figures| figures.peer == times.peer && figures.id == times.id);
        let place = known.unwrap_or_else(|| {
            self.peers.push(PeerRow {
                peer: times.peer.clone(),
                id: times.id.clone(),
                ..PeerRow::default()
            });
            self.peers.len() - 1
        });
        self.peers[place].add(times);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mla_cli::parts::OutputArgs;

    use crate::peers::default_cases;
    #[cfg(unix)]
    use crate::peers::stand_in;

    #[test]
    fn the_script_knows_every_peer_that_can_be_asked_for() {
        let (_, table) = SCRIPT.split_once("\nPEERS = {\n").unwrap();
        let (table, _) = table.split_once("\n}\n").unwrap();
        let names = table.lines().filter_map(|line| line.split('"').nth(1));
        let names: Vec<_> = names.collect();
        assert_eq!(names, PEERS);
    }

    #[test]
    fn lines_of_the_script_are_told_apart() {
        let read = |line: &str| serde_json::from_str::<Line>(line);
        assert!(matches!(
            read(r#"{"torch": "2.11", "loaded": ["fa3"]}"#),
            Ok(Line::Loaded { torch, loaded }) if torch == "2.11" && loaded == ["fa3"]
        ));
        assert!(matches!(
            read(r#"{"progress": "fa3 runs d"}"#),
            Ok(Line::Progress { progress }) if progress == "fa3 runs d"
        ));
        assert!(matches!(
            read(r#"{"peer": "fa3", "id": "d", "e2e_us": [1.5]}"#),
            Ok(Line::Times(Times { e2e_us, planned_us, .. }))
                if e2e_us == [1.5] && planned_us.is_empty()
        ));
        assert!(matches!(
            read(r#"{"peer": "fa3", "refused": "cannot be loaded"}"#),
            Ok(Line::Refused { id: None, .. })
        ));
        assert!(read("Loading kernels…").is_err());
    }

    #[test]
    fn a_round_is_read_to_its_end_and_added_to_those_before() {
        let mut lines = &br#"{"progress": "flashinfer loads"}
{"peer": "flashinfer", "refused": "cannot be loaded"}
{"torch": "2.11", "loaded": ["cudnn", "fa3"]}
{"peer": "cudnn", "id": "a", "refused": "too long"}
{"peer": "fa3", "id": "a", "e2e_us": [1.5, 2.5]}
{"peer": "fa3", "id": "a", "planned_us": [1.0, 1.25]}
{"done": "a"}
{"peer": "fa3", "id": "a", "e2e_us": [3.5]}
{"done": "a"}
{"peer": "fa3", "id": "b", "e2e_us": [4.5]}
"#[..];
        let progress = Progress::hidden();
        let mut theirs = PeerOutput::default();
        let is_loaded = |line: &Line| matches!(line, Line::Loaded { .. });
        assert!(theirs.read(&mut lines, &progress, is_loaded).unwrap());
        assert_eq!(progress.message(), "flashinfer loads");
        let is_done =
            |id: &'static str| move |line: &Line| matches!(line, Line::Done { done } if done == id);
        assert!(theirs.read(&mut lines, &progress, is_done("a")).unwrap());
        assert_eq!(theirs.torch.as_deref(), Some("2.11"));
        assert_eq!(
            theirs.refusals,
            ["flashinfer: cannot be loaded", "cudnn on a: too long"]
        );
        assert_eq!(theirs.peers.len(), 1);
        assert_eq!(theirs.peers[0].e2e_us, Some(2.0));
        assert!(theirs.read(&mut lines, &progress, is_done("a")).unwrap());
        assert_eq!(theirs.peers.len(), 1);
        assert_eq!(theirs.peers[0].e2e_us, Some(2.5));
        assert_eq!(theirs.peers[0].planned_us, Some(1.125));
        // The script ended before this case was done.
        assert!(!theirs.read(&mut lines, &progress, is_done("b")).unwrap());
        assert_eq!(theirs.peers.len(), 2);
    }

    /// Starts a program in place of Python that prints `lines`.
    #[cfg(unix)]
    fn start(name: &str, lines: &str) -> Result<Script, CliError> {
        let path = stand_in(
            &format!("peers-{name}"),
            &format!("echo compiling >&2\n{lines}"),
        );
        let args = Args {
            cases: None,
            only: Vec::new(),
            device: DeviceName::Cuda,
            peers: Some(vec!["fa3".to_owned(), "cudnn".to_owned()]),
            wheels: None,
            python: path.clone(),
            samples: 1,
            rounds: 1,
            warm_up: 0,
            record: None,
            regions: None,
            output: OutputArgs::default(),
        };
        let script = Script::start(&args, &Progress::hidden());
        std::fs::remove_file(path).unwrap();
        script
    }

    #[cfg(unix)]
    #[test]
    fn nothing_is_timed_before_a_peer_is_loaded() {
        let cases = default_cases(DeviceName::Cuda, &["d-b1-h16-8k".to_owned()]).unwrap();
        let works = r#"echo 'loading…'
            echo '{"torch": "2.11", "loaded": ["fa3"]}'
            read round
            echo '{"peer": "fa3", "id": "d-b1-h16-8k", "e2e_us": [1.5]}'
            echo '{"done": "d-b1-h16-8k"}'"#;
        let mut script = start("works", works).unwrap();
        script.time(&cases[0], 1).unwrap();
        let theirs = script.finish().unwrap();
        assert_eq!(theirs.peers[0].e2e_us, Some(1.5));

        let refusals = [
            (
                "none",
                r#"echo '{"peer": "fa3", "refused": "no such library"}'
                   echo '{"torch": "2.11", "loaded": []}'"#,
                "--peers: given fa3,cudnn, accepted at least one that can be loaded: fa3: no such \
                 library",
            ),
            (
                "ends",
                "exit 3",
                "whose run of the peers ended with exit status: 3",
            ),
        ];
        for (name, lines, message) in refusals {
            let error = start(name, lines).err().unwrap().to_string();
            assert!(error.contains(message), "{error}");
        }
        let mut gone = start("gone", r#"echo '{"torch": "2.11", "loaded": ["fa3"]}'"#).unwrap();
        let error = gone.time(&cases[0], 1).unwrap_err().to_string();
        assert!(error.contains("ended with exit status: 0"), "{error}");
    }
}
