//! The folder in which compilers work, and the process that ends them when the build is killed.
//!
//! A build that dies of SIGKILL cannot clean up. All its compilers and their subprocesses therefore
//! share the process group of a *watcher*. It is a shell that reads a pipe, and only the build
//! holds the other end. The system closes that end whenever the build dies. The watcher then ends
//! the group and removes the folder in which the compilers work.

use std::{
    fs,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::{Error, process, shell::Place};

/// Reads until the build announces its end or dies. The shell first ignores the signals that it
/// will send to its own group.
const WATCHER: &str = "trap '' HUP INT TERM\n\
                       read -r _ && exit\n\
                       kill -TERM 0\n\
                       rm -rf -- \"$1\"\n\
                       kill -KILL 0\n";

/// The prefix of folders in which compilers work. It identifies those that a crash left.
const PREFIX: &str = "nvcc-";

/// The folder of a build's compilers, and their process group.
#[derive(Debug)]
pub(crate) struct WorkFolder {
    folder: tempfile::TempDir,
    watcher: Child,
}

impl WorkFolder {
    /// Opens a work folder in `out_dir`, or in the system's folder for temporary files if nvcc
    /// cannot be given that path.
    pub(crate) fn open(out_dir: &Path) -> Result<Self, Error> {
        let system = std::env::temp_dir();
        let parent = if Place::Temporary.takes(out_dir) {
            remove_left_over(out_dir);
            out_dir
        } else {
            let because = format!(
                "TMPDIR (as OUT_DIR, {}, has the same problem)",
                out_dir.display()
            );
            Place::Temporary.check(&because, &system)?;
            &system
        };
        let folder = tempfile::Builder::new()
            .prefix(PREFIX)
            .tempdir_in(parent)
            .map_err(Error::file("make a folder in", parent))?;
        let watcher = Command::new("sh")
            .args(["-c", WATCHER, "sh"])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| Error::tool("sh", error))?;
        Ok(Self { folder, watcher })
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Makes a new folder in it for one compilation. Remains of an earlier compilation of the same
    /// unit are removed first.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.path().join(name);
        if path.is_dir() {
            fs::remove_dir_all(&path).map_err(Error::file("empty", &path))?;
        }
        fs::create_dir(&path).map_err(Error::file("make", &path))?;
        Ok(path)
    }

    /// Ends the compilers that run now. The watcher ignores the signal.
    pub(crate) fn stop(&self) {
        let group = rustix::process::Pid::from_child(&self.watcher);
        // If the group has no process, the compilers have ended.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::TERM);
    }

    /// Runs a compiler in the watched group.
    pub(crate) fn run(&self, command: &mut Command) -> std::io::Result<process::Finished> {
        process::run(command.process_group(self.watcher.id().cast_signed()))
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // A watcher that has already ended need not be told.
        if let Some(mut pipe) = self.watcher.stdin.take() {
            let _ = pipe.write_all(b"ended\n");
        }
        let _ = self.watcher.wait();
    }
}

/// Removes what a build left in its output folder when the machine crashed.
fn remove_left_over(out_dir: &Path) {
    for entry in fs::read_dir(out_dir).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(PREFIX.as_bytes())
        {
            // A folder that cannot be removed does no harm.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Asks the system to end this process when its parent dies, since a build script without Cargo is
/// of no use.
pub(crate) fn end_with_parent() {
    // If the system cannot do it, the build still works.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_that_ends_leaves_neither_folder_nor_watcher() {
        let out_dir = tempfile::tempdir().unwrap();
        fs::create_dir(out_dir.path().join("nvcc-old")).unwrap();
        let work_folder = WorkFolder::open(out_dir.path()).unwrap();
        assert!(!out_dir.path().join("nvcc-old").exists());
        let watcher = work_folder.watcher.id();
        let finished = work_folder
            .run(Command::new("sh").args(["-c", "ps -o pgid= -p $$"]))
            .unwrap();
        assert_eq!(finished.log.trim(), watcher.to_string());
        let folder = work_folder.folder("unit").unwrap();
        assert!(folder.is_dir());
        drop(work_folder);
        assert_eq!(fs::read_dir(out_dir.path()).unwrap().count(), 0);
        assert!(!Path::new(&format!("/proc/{watcher}")).exists());
    }

    #[test]
    fn a_folder_that_nvcc_cannot_be_given_is_not_worked_in() {
        let parent = tempfile::tempdir().unwrap();
        let out_dir = parent.path().join("a,b $(c)");
        fs::create_dir(&out_dir).unwrap();
        let work_folder = WorkFolder::open(&out_dir).unwrap();
        assert!(work_folder.path().starts_with(std::env::temp_dir()));
        assert_eq!(fs::read_dir(&out_dir).unwrap().count(), 0);
    }
}
