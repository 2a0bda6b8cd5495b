//! The files that results are written to.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::CliError;

/// How far a run has come when a file is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    Row,
    End,
}

/// Refuses files that could not be written, or of which one would take another's place.
pub(super) fn check_files<const N: usize>(paths: [&Option<PathBuf>; N]) -> Result<(), CliError> {
    let paths: Vec<&PathBuf> = paths.into_iter().flatten().collect();
    for (index, path) in paths.iter().enumerate() {
        let folder = path.parent().filter(|path| !path.as_os_str().is_empty());
        let accepted = if folder.is_some_and(|folder| !folder.is_dir()) || path.is_dir() {
            "a file in a folder that exists"
        } else if paths[..index].contains(path) && (path.is_file() || !path.exists()) {
            "a file for each output"
        } else if let Err(error) = try_to_write(path) {
            return Err(unwritable(path, &error));
        } else {
            continue;
        };
        return Err(CliError::File {
            argument: "output",
            path: path.to_path_buf(),
            message: format!("accepted: {accepted}"),
        });
    }
    Ok(())
}

/// Begins and drops the file that [`save`] writes first.
fn try_to_write(path: &Path) -> std::io::Result<()> {
    let place = place(path);
    if is_written_in_place(&place) {
        return Ok(());
    }
    let part = part(&place);
    let is_there = part.exists();
    fs::File::options().append(true).create(true).open(&part)?;
    if is_there {
        return Ok(());
    }
    fs::remove_file(part)
}

fn unwritable(path: &Path, error: &std::io::Error) -> CliError {
    CliError::File {
        argument: "output",
        path: path.to_owned(),
        message: format!("cannot be written: {error}; accepted: a file in a writable folder"),
    }
}

/// Where a link leads: it stays one.
fn place(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Whether it is there and no file, such as a pipe: no other file may take its place.
fn is_written_in_place(place: &Path) -> bool {
    place.exists() && !place.is_file()
}

fn part(place: &Path) -> PathBuf {
    place.with_added_extension("part")
}

/// A result as JSON.
pub(super) fn json(result: &impl Serialize) -> String {
    // Strings, numbers, lists and structs: nothing that JSON cannot hold.
    serde_json::to_string_pretty(result).expect("the result is JSON") + "\n"
}

/// Writes a file whole or not at all: who is interrupted meanwhile has the one before. What is no
/// file, such as a pipe, takes the text at the end alone.
pub(super) fn save(path: &Path, until: Until, text: &str) -> Result<(), CliError> {
    let failed = |error: std::io::Error| unwritable(path, &error);
    let place = place(path);
    if is_written_in_place(&place) {
        return match until {
            Until::Row => Ok(()),
            Until::End => fs::write(&place, text).map_err(failed),
        };
    }
    let part = part(&place);
    fs::write(&part, text)
        .and_then(|()| fs::rename(&part, &place))
        .map_err(failed)
}
