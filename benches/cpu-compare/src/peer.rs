//! PyTorch in a child process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use mla_runtime::model::Element;

use crate::Failure;
use crate::work::Work;

pub(crate) struct Peer {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    folder: tempfile::TempDir,
    pub(crate) version: String,
    pub(crate) variants: Vec<String>,
}

impl Peer {
    pub(crate) fn start<T: Element>(work: &Work<T>, threads: usize) -> Result<Self, Failure> {
        let folder = tempfile::tempdir()?;
        for (name, data) in work.files() {
            std::fs::write(
                folder.path().join(name),
                bytemuck::cast_slice::<T, u8>(data),
            )?;
        }
        let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let mut child = Command::new(&python)
            .args(["-c", include_str!("../peer.py")])
            .args(work.case.arguments(folder.path(), T::DTYPE.name()))
            .arg(threads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("{python} does not start: {error}"))?;
        let requests = child.stdin.take().ok_or("no pipe")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut peer = Self {
            child,
            requests,
            answers,
            folder,
            version: String::new(),
            variants: Vec::new(),
        };
        let greeting = peer
            .answer()
            .map_err(|_| format!("{python} cannot import torch"))?;
        let mut words = greeting.split_whitespace().map(str::to_owned);
        peer.version = words.next().ok_or("no version")?;
        peer.variants = words.collect();
        Ok(peer)
    }

    pub(crate) fn run(&mut self, variant: &str) -> Result<f64, Failure> {
        writeln!(self.requests, "{variant}")?;
        Ok(self.answer()?.parse()?)
    }

    pub(crate) fn output(&mut self, variant: &str) -> Result<Vec<f32>, Failure> {
        let path = self.folder.path().join("out");
        writeln!(self.requests, "check {variant} {}", path.display())?;
        self.answer()?;
        let bytes = std::fs::read(path)?;
        Ok(bytes
            .chunks_exact(4)
            .map(bytemuck::pod_read_unaligned)
            .collect())
    }

    fn answer(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err("torch's process ended".into());
        }
        Ok(line.trim().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The child may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
