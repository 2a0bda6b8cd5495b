//! The files that results are written to.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::error::CliError;

/// The progress of a run at which a file is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Until {
    Row,
    End,
}

/// Refuses files that cannot be written, and two paths that lead to the same file.
pub fn check_files<const N: usize>(paths: [&Option<PathBuf>; N]) -> Result<(), CliError> {
    let paths: Vec<&PathBuf> = paths.into_iter().flatten().collect();
    for (index, path) in paths.iter().enumerate() {
        let folder = path.parent().filter(|path| !path.as_os_str().is_empty());
        let accepted = if folder.is_some_and(|folder| !folder.is_dir()) || path.is_dir() {
            "a file in a folder that exists"
        } else if paths[..index].contains(path) && !is_written_in_place(path) {
            "a file for each output"
        } else if let Err(error) = try_to_write(path) {
            return Err(unwritable(path, &error));
        } else {
            continue;
        };
        let message = format!("accepted: {accepted}");
        return Err(CliError::file("output", path, message));
    }
    Ok(())
}

/// Creates and removes the file that [`replace`] writes first.
fn try_to_write(path: &Path) -> io::Result<()> {
    let place = place(path);
    if is_written_in_place(&place) {
        return Ok(());
    }
    let part = part(path, &place);
    let is_there = part.exists();
    fs::File::options().append(true).create(true).open(&part)?;
    if is_there {
        return Ok(());
    }
    fs::remove_file(part)
}

fn unwritable(path: &Path, error: &io::Error) -> CliError {
    let message = format!("cannot be written: {error}; accepted: a file in a writable folder");
    CliError::file("output", path, message)
}

/// Returns the file that a link leads to. This file is written, and the link stays a link.
fn place(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// True if the path exists but is not a file, such as a pipe. No file may replace it.
fn is_written_in_place(place: &Path) -> bool {
    place.exists() && !place.is_file()
}

/// Returns the temporary file that is renamed to `place` once it is complete. It keeps the
/// extension of `path`, which names the format of a drawing.
fn part(path: &Path, place: &Path) -> PathBuf {
    let part = place.with_added_extension("part");
    match path.extension() {
        Some(extension) => part.with_added_extension(extension),
        None => part,
    }
}

/// Writes a file completely or not at all. If writing is interrupted, the previous file is kept.
///
/// `write` is called with the path to write to. A path that is not a file, such as a pipe, is
/// written to directly.
pub(crate) fn replace<E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let place = place(path);
    if is_written_in_place(&place) {
        return write(path);
    }
    let part = part(path, &place);
    write(&part)?;
    Ok(fs::rename(part, place)?)
}

/// Replaces a file by a text, completely or not at all. A pipe gets the text only at the end of the
/// run.
pub fn save(path: &Path, until: Until, text: &str) -> Result<(), CliError> {
    if until == Until::Row && is_written_in_place(path) {
        return Ok(());
    }
    replace(path, |path| fs::write(path, text)).map_err(|error| unwritable(path, &error))
}
