//! Reads with an upper bound. A device, an endless pipe or a wrong file then gives an error that
//! names the bound, instead of filling the machine's memory.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread,
};

/// The maximum number of bytes read from a file: several times the largest object.
const MAX_FILE: u64 = 2 << 30;

/// The maximum number of bytes read from a stream, such as a compiler's output.
pub(crate) const MAX_STREAM: u64 = 64 << 20;

/// Returns the content of a file.
pub(crate) fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let (max, length) = match metadata.is_file() {
        true => (MAX_FILE, metadata.len()),
        false => (MAX_STREAM, 0),
    };
    match length > max {
        true => Err(too_large(&format!("{length} bytes"), max)),
        false => read_stream(file, max),
    }
}

/// Returns the text of a file.
pub(crate) fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    String::from_utf8(read(path)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Reads a stream to its end.
pub(crate) fn read_stream(from: impl Read, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        return Err(too_large(&format!("more than {max} bytes"), max));
    }
    Ok(bytes)
}

/// Returns the output of a program. The program is ended if it prints too much.
pub(crate) fn output(command: &mut Command) -> io::Result<Output> {
    output_of(command, MAX_STREAM)
}

fn output_of(command: &mut Command, max: u64) -> io::Result<Output> {
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    // Both streams are read at the same time, so that neither fills up.
    let aside = thread::spawn(move || stderr.map_or(Ok(Vec::new()), |it| read_stream(it, max)));
    let stdout = stdout.map_or(Ok(Vec::new()), |it| read_stream(it, max));
    let stdout = ended_unless(&mut child, stdout)?;
    let stderr = aside.join();
    let stderr = stderr.map_err(|_| io::Error::other("its errors cannot be read"))?;
    let stderr = ended_unless(&mut child, stderr)?;
    let status = child.wait()?;
    Ok(Output {
        status,
        stdout,
        stderr,
    })
}

/// Returns the value that was read, or ends the program and returns the error.
pub(crate) fn ended_unless<T>(child: &mut Child, read: io::Result<T>) -> io::Result<T> {
    if read.is_err() {
        // The program may have ended by itself.
        let _ = child.kill();
        child.wait()?;
    }
    read
}

fn too_large(given: &str, max: u64) -> io::Error {
    io::Error::other(format!("given {given}, accepted at most {max}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_endless_or_too_large_is_refused_by_the_bound() {
        let endless = read("/dev/zero").unwrap_err().to_string();
        assert_eq!(
            endless,
            "given more than 67108864 bytes, accepted at most 67108864"
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(
            read_to_string(&path).unwrap_err().to_string(),
            "given 1099511627776 bytes, accepted at most 2147483648"
        );
        File::create(&path).unwrap().set_len(3).unwrap();
        assert_eq!(read(&path).unwrap(), [0; 3]);
    }

    #[test]
    fn a_program_that_prints_too_much_is_ended() {
        let shell = |script: &str| output_of(Command::new("sh").args(["-c", script]), 10);
        for endless in ["exec yes", "exec yes >&2"] {
            let error = shell(endless).unwrap_err().to_string();
            assert_eq!(error, "given more than 10 bytes, accepted at most 10");
        }
        let both = shell("echo one; echo two >&2; exit 3").unwrap();
        assert_eq!(
            (both.stdout, both.stderr),
            (b"one\n".to_vec(), b"two\n".to_vec())
        );
        assert_eq!(both.status.code(), Some(3));
    }
}
