//! The variables and paths that Cargo is told to watch.
//!
//! Cargo runs a build script again if a variable has another value, or if a path is newer than the
//! script's last start. The time of a folder is that of the newest file in it. A path that does not
//! exist always counts as newer. Files that this build writes itself must therefore not be watched.
//! Paths that do not exist yet are watched through [`watch_absent`](Plan::watch_absent).

use std::{
    collections::BTreeSet,
    env, fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use super::Plan;
use crate::{Error, compiler, toolkit, unit};

impl Plan {
    /// Tells Cargo everything that is known before compiling. This comes first, since a failed
    /// build must run again once the cause is removed.
    pub(super) fn watch_settings(&self) -> Result<(), Error> {
        self.library.watch_variables();
        let (kernels, tools) = (&self.library.kernels, &self.tools);
        let inside = |path: &Path| self.library.root.join(path);
        let named = env::vars_os();
        let named =
            named.filter(|(name, _)| compiler::INCLUDE_VARIABLES.iter().any(|it| name == it));
        let prebuilt = kernels.prebuilt.iter().map(|it| inside(it));
        // Watching a folder of sources also notices a new source. A new header in an include root
        // may hide another header.
        let sources = kernels
            .sources
            .iter()
            .map(|glob| inside(&unit::fixed_part(glob)));
        for folder in sources
            .chain(prebuilt.filter(|folder| folder.exists()))
            .chain(
                tools
                    .own_includes
                    .iter()
                    .chain(&tools.named.folders)
                    .cloned(),
            )
            .chain(named.flat_map(|(_, value)| Vec::from_iter(env::split_paths(&value))))
        {
            self.watch_folder(&folder);
        }
        let programs = tools.compiler.cuda.programs();
        for path in programs
            .iter()
            .map(|(_, path)| path)
            .chain(&tools.named.files)
        {
            self.watch_file(path);
        }
        let host = &tools.compiler.host.path;
        if host.is_absolute() {
            self.watch_file(host);
        } else if let Ok(path) = which::which(host) {
            self.watch_file(&path);
        }
        for found in &tools.found {
            watch_links(&found.path);
        }
        let earlier = toolkit::earlier(&tools.search, &tools.compiler.cuda);
        if earlier.on_path {
            println!("cargo::rerun-if-env-changed=PATH");
        }
        for folder in &earlier.folders {
            self.watch_folder(folder);
        }
        self.watch_absent(&earlier.absent)
    }

    /// Watches the files from which the library was made.
    pub(super) fn watch_files(&self, files: &[PathBuf]) {
        let files: BTreeSet<_> = files
            .iter()
            // Each file gets one spelling, so that Cargo does not check it twice.
            .filter_map(|path| self.tools.roles.locate(&self.tools.roles.name(path)))
            .collect();
        for path in files {
            self.watch_file(&path);
        }
    }

    fn watch_file(&self, path: &Path) {
        // Files that the build script generates are always newer than its start.
        if !path.starts_with(&self.library.out_dir) && path.exists() {
            tell(path);
        }
    }

    /// Watches a folder with its content, except for what builds write.
    fn watch_folder(&self, folder: &Path) {
        let Ok(folder) = folder.canonicalize() else {
            return;
        };
        let written = [
            &*self.library.out_dir,
            &self.library.target_dir,
            self.cache.folder(),
        ];
        if written.iter().any(|written| folder.starts_with(written)) {
            return;
        }
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let (made, folders): (Vec<_>, Vec<_>) = entries
            .filter(|entry| entry.path().is_dir())
            // Even with a separate build folder, Cargo writes to the target folder as well.
            .partition(|entry| unit::is_target_folder(&entry.path()));
        if made.is_empty() && !written.iter().any(|written| written.starts_with(&folder)) {
            tell(&folder);
            return;
        }
        // A new file directly in such a folder is noticed only when something else changes, too.
        for entry in folders {
            if !entry.file_name().as_encoded_bytes().starts_with(b".") {
                self.watch_folder(&entry.path());
            }
        }
    }

    /// Watches paths that do not exist. Cargo is given a folder with links to them. It follows
    /// links, ignores one to a missing path, and notices when that path comes to exist.
    fn watch_absent(&self, paths: &BTreeSet<PathBuf>) -> Result<(), Error> {
        let folder = self.library.file("-absent");
        super::empty(&folder)?;
        // The links themselves must not be newer than the start of this script.
        let long_ago = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        let times = Timestamps {
            last_access: long_ago,
            last_modification: long_ago,
        };
        let write = || {
            for (number, path) in paths.iter().enumerate() {
                let link = folder.join(number.to_string());
                symlink(path, &link)?;
                utimensat(CWD, &link, &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            utimensat(CWD, &folder, &times, AtFlags::empty())?;
            io::Result::Ok(())
        };
        write().map_err(Error::file("write links into", &folder))?;
        tell(&folder);
        Ok(())
    }
}

/// Watches every link on the way to a path. Cargo notices a changed link only if it is told of the
/// link itself, since the files of the toolkit behind it may be old.
fn watch_links(path: &Path) {
    // A longer chain of links counts as a loop.
    let mut left = 40;
    let mut rest = vec![path.to_owned()];
    while let Some(path) = rest.pop() {
        for part in path.ancestors() {
            if let Ok(target) = fs::read_link(part)
                && left > 0
            {
                left -= 1;
                tell(part);
                rest.push(part.parent().unwrap_or(Path::new("/")).join(target));
            }
        }
    }
}

fn tell(path: &Path) {
    // A line of Cargo's protocol cannot hold a path with a line break.
    if let Some(path) = path.to_str().filter(|path| !path.contains('\n')) {
        println!("cargo::rerun-if-changed={path}");
    }
}
