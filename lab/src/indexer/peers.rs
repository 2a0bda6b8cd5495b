//! Third-party kernels of the indexer on the same batch. A Python script times them by the same
//! protocol.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use mla_cli::parts::{CliError, DeviceName, Progress, read_program};
use serde::Serialize;

use crate::peers::{Line, PeerOutput, refused_python};

/// The script: the helpers of `cargo lab peers`, with its main part skipped, and the timed
/// functions.
const SCRIPT: &str = concat!(
    "__name__ = 'peers'\n",
    include_str!("../../peers/peers.py"),
    "\n__name__ = '__main__'\n",
    include_str!("../../peers/indexer.py"),
);

#[derive(clap::Args)]
pub(crate) struct PeerArgs {
    /// Peers to time after our kernels: deepgemm (logits), vllm and torch (lists), and vllm-layer
    /// (a decode step of the whole layer).
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        value_parser = ["deepgemm", "vllm", "torch", "vllm-layer"]
    )]
    peers: Vec<String>,
    /// Folder with their libraries and packages, if these are not installed.
    #[arg(long, value_name = "DIR", requires = "peers")]
    wheels: Option<PathBuf>,
    /// Python that has torch.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
}

/// The input of the script.
#[derive(Serialize)]
pub(crate) struct Case {
    /// The numbers of query and kv tokens of each request.
    pub(crate) requests: Vec<[u32; 2]>,
    pub(crate) heads: u32,
    pub(crate) topk: u32,
    pub(crate) samples: u32,
    pub(crate) warm_up: u32,
    pub(crate) layer: LayerCase,
}

/// The layer that contains the indexer.
#[derive(Serialize)]
pub(crate) struct LayerCase {
    pub(crate) heads: u32,
    /// The width of the latent from which queries are made.
    pub(crate) query_rank: usize,
    /// The format of the layer's cache.
    pub(crate) kv: &'static str,
}

#[derive(Serialize)]
struct Given<'a> {
    #[serde(flatten)]
    case: &'a Case,
    peers: &'a [String],
    wheels: Option<&'a PathBuf>,
}

impl PeerArgs {
    /// Refuses peers on a device that does not run them, before anything is measured.
    pub(crate) fn check(&self, device: DeviceName) -> Result<(), CliError> {
        match (self.peers.is_empty(), device) {
            (true, _) | (_, DeviceName::Cuda) => Ok(()),
            (false, DeviceName::Cpu) => Err(CliError::Argument {
                argument: "--peers",
                given: format!("{} on the CPU", self.peers.join(",")),
                accepted: "--device cuda beside it".to_owned(),
            }),
        }
    }

    /// Times the peers. `listed` is the number of query tokens with which our kernels were timed.
    /// Returns `None` if no peer is asked for.
    pub(crate) fn time(&self, case: &Case, listed: usize) -> Result<Option<PeerOutput>, CliError> {
        if self.peers.is_empty() {
            return Ok(None);
        }
        let tokens: u32 = case.requests.iter().map(|[q, _]| q).sum();
        if listed < tokens as usize {
            return Err(CliError::Argument {
                argument: "--peers",
                given: format!("{tokens} query tokens, whose logits ours has in several chunks"),
                accepted: format!("at most {listed}"),
            });
        }
        let given = Given {
            case,
            peers: &self.peers,
            wheels: self.wheels.as_ref(),
        };
        // Strings and numbers can always be written as JSON.
        let json = serde_json::to_string(&given).expect("a case is JSON");
        let name = self.python.display();
        let mut python = Command::new(&self.python);
        python.args(["-c", SCRIPT, &json]).stdout(Stdio::piped());
        let (status, output) = read_program(&mut python, |child| child.stdout.take())
            .map_err(|error| refused_python(format!("{name}, which cannot be started: {error}")))?;
        let mut theirs = PeerOutput::default();
        let is_done = |line: &Line| matches!(line, Line::Done { .. });
        match theirs.read(&output[..], &Progress::spinner(), is_done)? {
            true => Ok(Some(theirs)),
            false => Err(refused_python(format!(
                "{name}, whose run of the peers ended with {}",
                status
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(python: PathBuf) -> PeerArgs {
        PeerArgs {
            peers: vec!["deepgemm".to_owned(), "torch".to_owned()],
            wheels: None,
            python,
        }
    }

    const CASE: fn() -> Case = || Case {
        requests: vec![[1, 4096], [1, 100]],
        heads: 64,
        topk: 2048,
        samples: 3,
        warm_up: 1,
        layer: LayerCase {
            heads: 16,
            query_rank: 1536,
            kv: "bf16",
        },
    };

    /// Runs a program in place of Python. It prints `lines`, and fails if it does not get the case.
    #[cfg(unix)]
    fn time(name: &str, lines: &str, listed: usize) -> Result<Option<PeerOutput>, CliError> {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("mla-index-{}-{name}", std::process::id()));
        let given = concat!(
            r#"{"requests":[[1,4096],[1,100]],"heads":64,"topk":2048,"samples":3,"warm_up":1,"#,
            r#""layer":{"heads":16,"query_rank":1536,"kv":"bf16"},"#,
            r#""peers":["deepgemm","torch"],"wheels":null}"#
        );
        let script = format!("#!/bin/sh\n[ \"$3\" = '{given}' ] || exit 7\n{lines}\n");
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let theirs = args(path.clone()).time(&CASE(), listed);
        std::fs::remove_file(path).unwrap();
        theirs
    }

    #[cfg(unix)]
    #[test]
    fn what_the_script_says_is_read_to_its_end() {
        let lines = r#"echo 'compiling…'
            echo '{"torch": "2.11", "loaded": ["deepgemm", "torch"]}'
            echo '{"peer": "deepgemm", "id": "logits", "e2e_us": [3.0, 1.0, 2.0]}'
            echo '{"peer": "torch", "refused": "contexts of less than 2048 tokens"}'
            echo '{"done": ""}'"#;
        let theirs = time("works", lines, 2).unwrap().unwrap();
        assert_eq!(theirs.torch.as_deref(), Some("2.11"));
        assert_eq!(theirs.peers[0].e2e_us, Some(2.0));
        assert_eq!(
            theirs.refusals,
            ["torch: contexts of less than 2048 tokens"]
        );

        let error = time("ends", "exit 3", 2).err().unwrap().to_string();
        assert!(error.contains("ended with exit status: 3"), "{error}");
        let error = time("chunks", "exit 3", 1).err().unwrap().to_string();
        let expected = "--peers: given 2 query tokens, whose logits ours has in several chunks, \
                        accepted at most 1";
        assert_eq!(error, expected);
    }

    const BUILTIN: [&str; 23] = [
        "FileNotFoundError",
        "ValueError",
        "bool",
        "enumerate",
        "getattr",
        "hasattr",
        "int",
        "len",
        "list",
        "max",
        "min",
        "next",
        "print",
        "range",
        "repr",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "type",
        "vars",
        "zip",
    ];

    /// No test runs the script, since it needs torch and a GPU.
    #[test]
    fn every_function_that_the_script_calls_by_name_is_there() {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut calls = 0;
        for (at, _) in SCRIPT.match_indices('(') {
            let before = &SCRIPT[..at];
            let name = &before[before.trim_end_matches(is_name).len()..];
            let is_method = before[..at - name.len()].ends_with('.');
            if name.is_empty() || is_method || BUILTIN.contains(&name) {
                continue;
            }
            calls += 1;
            let is_there = [
                format!("def {name}("),
                format!("class {name}"),
                format!(" {name} = "),
                format!(" {name}="),
            ]
            .iter()
            .any(|place| SCRIPT.contains(place));
            assert!(
                is_there,
                "{name}, which line {} calls",
                before.lines().count()
            );
        }
        assert!(calls > 50, "{calls} calls");
    }

    #[test]
    fn peers_run_on_gpus_alone() {
        let args = args("python3".into());
        assert!(args.check(DeviceName::Cuda).is_ok());
        let error = args.check(DeviceName::Cpu).unwrap_err().to_string();
        let expected = "--peers: given deepgemm,torch on the CPU, accepted --device cuda beside it";
        assert_eq!(error, expected);
    }
}
