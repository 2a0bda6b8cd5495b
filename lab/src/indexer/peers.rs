//! Third-party kernels of the indexer on the same batch. A Python script times them by the same
//! protocol.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use mla_cli::parts::{CliError, DeviceName, Progress, read_program};
use serde_json::{Value, json};

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

    /// Times the peers on the script's input, a case of this number of query tokens. `listed` is
    /// the number with which our kernels were timed. Returns `None` if no peer is asked for.
    pub(crate) fn time(
        &self,
        mut case: Value,
        tokens: usize,
        listed: usize,
    ) -> Result<Option<PeerOutput>, CliError> {
        if self.peers.is_empty() {
            return Ok(None);
        }
        if listed < tokens {
            return Err(CliError::Argument {
                argument: "--peers",
                given: format!("{tokens} query tokens, whose logits ours has in several chunks"),
                accepted: format!("at most {listed}"),
            });
        }
        case["peers"] = json!(self.peers);
        case["wheels"] = json!(self.wheels);
        let name = self.python.display();
        let mut python = Command::new(&self.python);
        python
            .args(["-c", SCRIPT, &case.to_string()])
            .stdout(Stdio::piped());
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
    #[cfg(unix)]
    use crate::peers::stand_in;

    fn args(python: PathBuf) -> PeerArgs {
        PeerArgs {
            peers: vec!["deepgemm".to_owned(), "torch".to_owned()],
            wheels: None,
            python,
        }
    }

    /// Runs a program in place of Python. It prints `lines`, and fails if it does not get the case.
    #[cfg(unix)]
    fn time(name: &str, lines: &str, listed: usize) -> Result<Option<PeerOutput>, CliError> {
        let given = r#"{"heads":64,"peers":["deepgemm","torch"],"wheels":null}"#;
        let script = format!("[ \"$3\" = '{given}' ] || exit 7\n{lines}");
        let path = stand_in(&format!("index-{name}"), &script);
        let theirs = args(path.clone()).time(json!({"heads": 64}), 2, listed);
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

    /// Names of Python itself that the script calls.
    const BUILTIN: &str = "FileNotFoundError ValueError bool enumerate getattr hasattr int len \
        list max min next print range repr set sorted str sum tuple type vars zip";

    /// No test runs the script, since it needs torch and a GPU.
    #[test]
    fn every_function_that_the_script_calls_by_name_is_there() {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut calls = 0;
        for (at, _) in SCRIPT.match_indices('(') {
            let before = &SCRIPT[..at];
            let name = &before[before.trim_end_matches(is_name).len()..];
            let is_method = before[..at - name.len()].ends_with('.');
            if name.is_empty() || is_method || BUILTIN.split(' ').any(|known| known == name) {
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
