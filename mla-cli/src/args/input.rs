//! Readers of text files that arguments name, and of the output of programs. Both are read up to a
//! maximum size, and opening a file never waits for a writer.

use std::fs::{File, OpenOptions};
#[cfg(feature = "bench")]
use std::io::BufRead;
use std::io::{ErrorKind, Read};
use std::path::Path;
#[cfg(any(feature = "bench", feature = "build-report"))]
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

/// The largest file that is read, in bytes: a thousand times a large configuration, and ten times
/// the results of a long benchmark.
const MAX_BYTES: u64 = 64 << 20;

/// The longest line that is read of a program, in bytes: a thousand times those of the peers.
#[cfg(feature = "bench")]
const MAX_LINE: u64 = 1 << 20;

/// The pause before a pipe whose writer is slow is tried again.
const PAUSE: Duration = Duration::from_millis(5);

/// Returns the text of a file, or the reason why it cannot be read together with what is accepted.
pub(crate) fn read_text(path: &Path, accepted: &str) -> Result<String, String> {
    let bytes = read(path).map_err(|why| format!("{why}; accepted: {accepted}"))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!("cannot read it: byte {at} is not UTF-8; accepted: {accepted}")
    })
}

/// Returns the value in a JSON file, or the reason why there is none together with what is
/// accepted.
#[cfg(feature = "bench")]
pub(crate) fn read_json<T: serde::de::DeserializeOwned>(
    path: &Path,
    accepted: &str,
) -> Result<T, String> {
    serde_json::from_str(&read_text(path, accepted)?)
        .map_err(|error| format!("given what is no such file ({error}), accepted {accepted}"))
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |error| format!("cannot read it: {error}");
    let mut file = open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_file() && metadata.len() > MAX_BYTES {
        return Err(too_large(&format!("{} bytes", metadata.len())));
    }
    let bytes = read_bounded(&mut file).map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(too_large(&format!("more than {MAX_BYTES} bytes")));
    }
    if bytes.is_empty() && is_pipe(&metadata) {
        return Err("cannot read it: it is a pipe that nothing is written to".into());
    }
    Ok(bytes)
}

fn too_large(given: &str) -> String {
    format!("cannot read it: it has {given}, and at most {MAX_BYTES} are read")
}

/// Opens a file without waiting for the writer of a pipe.
fn open(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    options.open(path)
}

#[cfg(unix)]
fn is_pipe(metadata: &std::fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_fifo(&metadata.file_type())
}

#[cfg(not(unix))]
fn is_pipe(_: &std::fs::Metadata) -> bool {
    false
}

/// Reads up to [`MAX_BYTES`] and one byte more.
fn read_bounded(file: &mut File) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut from = file.take(MAX_BYTES + 1);
    loop {
        match from.read_to_end(&mut bytes) {
            Ok(_) => return Ok(bytes),
            // The writer of the pipe has not written anything more yet.
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
    }
}

/// Returns the exit status of a program, and its output on the pipe that `stream` takes. A program
/// that writes more than the maximum is ended.
#[cfg(any(feature = "bench", feature = "build-report"))]
pub fn read_program<R: Read>(
    command: &mut Command,
    stream: impl FnOnce(&mut Child) -> Option<R>,
) -> std::io::Result<(ExitStatus, Vec<u8>)> {
    let mut child = command.stdin(Stdio::null()).spawn()?;
    let mut bytes = Vec::new();
    let read = match stream(&mut child) {
        Some(stream) => stream.take(MAX_BYTES + 1).read_to_end(&mut bytes),
        None => Ok(0),
    };
    let is_too_long = bytes.len() as u64 > MAX_BYTES;
    if is_too_long || read.is_err() {
        // The program may have ended by itself.
        let _ = child.kill();
    }
    let status = child.wait()?;
    read?;
    if is_too_long {
        return Err(too_long("output", MAX_BYTES));
    }
    Ok((status, bytes))
}

/// Returns the lines of a program's output, without their ends. A line that is too long gives an
/// error, and nothing follows it.
#[cfg(feature = "bench")]
pub fn lines(mut from: impl BufRead) -> impl Iterator<Item = std::io::Result<Vec<u8>>> {
    let mut is_over = false;
    std::iter::from_fn(move || {
        let mut line = Vec::new();
        let read = if is_over {
            Ok(0)
        } else {
            from.by_ref()
                .take(MAX_LINE + 1)
                .read_until(b'\n', &mut line)
        };
        if line.ends_with(b"\n") {
            line.pop();
        }
        let read = read.and_then(|read| match line.len() as u64 > MAX_LINE {
            true => Err(too_long("a line", MAX_LINE)),
            false => Ok(read),
        });
        is_over |= read.is_err();
        match read {
            Ok(0) => None,
            Ok(_) => Some(Ok(line)),
            Err(error) => Some(Err(error)),
        }
    })
}

#[cfg(any(feature = "bench", feature = "build-report"))]
fn too_long(what: &str, max: u64) -> std::io::Error {
    std::io::Error::other(format!(
        "{what}: given more than {max} bytes, accepted at most {max}"
    ))
}

#[cfg(all(test, unix))]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    /// Returns a path for this test alone, where no file exists.
    fn path(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("mla-input-{}-{name}", std::process::id()));
        // An earlier process of the same number may have left a file.
        std::fs::remove_file(&path).ok();
        path
    }

    fn refused(path: &Path) -> String {
        read_text(path, "text").unwrap_err()
    }

    #[test]
    fn endless_and_large_files_are_refused_by_their_size() {
        assert_eq!(
            refused(Path::new("/dev/zero")),
            "cannot read it: it has more than 67108864 bytes, and at most 67108864 are read; \
             accepted: text"
        );
        let path = path("sparse");
        let file = File::create(&path).unwrap();
        file.set_len(MAX_BYTES).unwrap();
        assert_eq!(read_text(&path, "text").unwrap().len() as u64, MAX_BYTES);
        file.set_len(1 << 40).unwrap();
        assert_eq!(
            refused(&path),
            "cannot read it: it has 1099511627776 bytes, and at most 67108864 are read; accepted: \
             text"
        );
        std::fs::remove_file(path).unwrap();
    }

    #[cfg(any(feature = "bench", feature = "build-report"))]
    #[test]
    fn a_program_that_prints_without_end_is_ended() {
        let shell = |script: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]).stdout(Stdio::piped());
            read_program(&mut shell, |child| child.stdout.take())
        };
        assert_eq!(
            shell("exec yes").unwrap_err().to_string(),
            "output: given more than 67108864 bytes, accepted at most 67108864"
        );
        let (status, bytes) = shell("echo one; exit 3").unwrap();
        assert_eq!((status.code(), &bytes[..]), (Some(3), &b"one\n"[..]));
    }

    #[cfg(feature = "bench")]
    #[test]
    fn a_line_without_end_is_refused() {
        let text = |bytes: &'static [u8]| lines(bytes).collect::<std::io::Result<Vec<_>>>();
        let wanted: [&[u8]; 3] = [b"one", b"", b"three"];
        assert_eq!(text(b"one\n\nthree").unwrap(), wanted);
        assert_eq!(text(b"one\n\nthree\n").unwrap(), wanted);
        let endless = std::io::BufReader::new(std::io::repeat(b'x'));
        let read: Vec<_> = lines(endless).collect();
        assert_eq!(read.len(), 1);
        assert_eq!(
            read[0].as_ref().unwrap_err().to_string(),
            "a line: given more than 1048576 bytes, accepted at most 1048576"
        );
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let path = path("binary");
        std::fs::write(&path, b"{}\xff").unwrap();
        assert_eq!(
            refused(&path),
            "cannot read it: byte 2 is not UTF-8; accepted: text"
        );
        std::fs::remove_file(path).unwrap();
        assert_eq!(
            refused(Path::new(".")),
            "cannot read it: Is a directory (os error 21); accepted: text"
        );
    }

    #[test]
    fn a_pipe_is_read_if_it_has_a_writer() {
        let path = path("pipe");
        assert!(
            Command::new("mkfifo")
                .arg(&path)
                .status()
                .unwrap()
                .success()
        );
        assert_eq!(
            refused(&path),
            "cannot read it: it is a pipe that nothing is written to; accepted: text"
        );
        // Opening for reading and writing does not wait for a reader.
        let mut writer = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        writer.write_all(b"first ").unwrap();
        let slow = thread::spawn(move || {
            thread::sleep(20 * PAUSE);
            writer.write_all(b"second").unwrap();
        });
        assert_eq!(read_text(&path, "text").unwrap(), "first second");
        slow.join().unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
