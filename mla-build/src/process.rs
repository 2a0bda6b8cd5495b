//! Running a compiler: its output in the order in which it was printed, its processor time and its
//! peak memory.

use std::{
    io,
    os::unix::process::ExitStatusExt,
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use wait4::Wait4;

use crate::bounded;

#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    /// Standard output and standard error as one stream.
    pub(crate) log: String,
    /// Processor time of the compiler and its subprocesses. Other work on the machine changes it
    /// little.
    pub(crate) processor: Duration,
    /// The largest resident set of any single process among the compiler and its subprocesses, in
    /// bytes. nvcc runs its passes one after another, so this is the unit's peak.
    pub(crate) peak: u64,
}

impl Finished {
    pub(crate) fn signal(&self) -> Option<i32> {
        self.status.signal()
    }
}

pub(crate) fn run(command: &mut Command) -> io::Result<Finished> {
    let (reader, writer) = io::pipe()?;
    command
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer);
    let mut child = command.spawn()?;
    // The command holds the writing ends. They must be dropped, or the reader never sees the end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let read = bounded::read_stream(reader, bounded::MAX_STREAM);
    let bytes = bounded::ended_unless(&mut child, read)?;
    let used = child.wait4()?;
    Ok(Finished {
        status: used.status,
        log: String::from_utf8_lossy(&bytes).into_owned(),
        processor: used.rusage.utime + used.rusage.stime,
        peak: used.rusage.maxrss,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_keeps_its_order_and_the_peak_is_measured() {
        let mut shell = Command::new("sh");
        shell.args([
            "-c",
            "echo one; echo two >&2; echo three; head -c 30000000 /dev/zero | sort \
             >/dev/null; exit 3",
        ]);
        let finished = run(&mut shell).unwrap();
        assert_eq!(finished.log, "one\ntwo\nthree\n");
        assert_eq!(finished.status.code(), Some(3));
        assert!(
            finished.peak > 1 << 20 && finished.peak < 1 << 34,
            "{}",
            finished.peak
        );
    }

    #[test]
    fn a_signal_is_told() {
        let finished = run(Command::new("sh").args(["-c", "kill -9 $$"])).unwrap();
        assert_eq!(finished.signal(), Some(9));
    }
}
