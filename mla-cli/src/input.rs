//! Text files that arguments name: read whole, up to a bound, and never waited for in vain.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// The largest file that is read, in bytes: a thousand times a large configuration, and ten times
/// the results of a long benchmark.
const MAX_BYTES: u64 = 64 << 20;

/// The pause before a pipe whose writer is slow is tried again.
const PAUSE: Duration = Duration::from_millis(5);

/// The text of a file, or why there is none and what is accepted.
pub(crate) fn read_text(path: &Path, accepted: &str) -> Result<String, String> {
    let bytes = read(path).map_err(|why| format!("{why}; accepted: {accepted}"))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!("cannot read it: byte {at} is not UTF-8; accepted: {accepted}")
    })
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

/// Reads at most a byte more than [`MAX_BYTES`].
fn read_bounded(file: &mut File) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut from = file.take(MAX_BYTES + 1);
    loop {
        match from.read_to_end(&mut bytes) {
            Ok(_) => return Ok(bytes),
            // A pipe has a writer that has written nothing more yet.
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    /// A path of this test's own, without a file.
    fn path(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("mla-input-{}-{name}", std::process::id()));
        // It may be left behind by a process of the same number.
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
        // Open for both, so that it does not wait for the reader either.
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
