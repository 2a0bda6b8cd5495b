//! Folders of objects that other users may write to. A user who changes an object there decides
//! what programs do that are linked with it.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::Path,
};

/// Other users who may write to a folder or file, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Exposure {
    /// A sentence that names the users and the remedy.
    pub(crate) sentence: String,
    /// True if every user may write. If only some users may, they are named and trusted.
    pub(crate) is_to_all: bool,
}

/// Returns the users, except this one and the administrator, that may write to one of these paths.
/// Returns `None` if there are none. A path that does not exist has none.
pub(crate) fn of<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Option<Exposure> {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let found = paths.into_iter().filter_map(|path| {
        let data = fs::metadata(path).ok()?;
        let owners = (data.uid(), data.gid());
        of_one(path, data.mode(), owners, (user.as_raw(), group.as_raw()))
    });
    // Access for everyone is reported before access for some users.
    found.max_by_key(|exposure| exposure.is_to_all)
}

/// Returns which users other than this user and group may write to a file of this mode, owner and
/// group.
fn of_one(
    path: &Path,
    mode: u32,
    (owner, owning): (u32, u32),
    (user, group): (u32, u32),
) -> Option<Exposure> {
    const GROUP_WRITES: u32 = 0o020;
    const ALL_WRITE: u32 = 0o002;
    let (mode, path) = (mode & 0o7777, path.display());
    let is_to_all = mode & ALL_WRITE != 0;
    let sentence = if is_to_all {
        format!("every user may write to {path} (mode {mode:04o}): chmod -R go-w {path}")
    } else if owner != user && owner != 0 {
        format!("{path} belongs to another user ({owner}), who may change it")
    } else if mode & GROUP_WRITES != 0 && owning != group {
        format!("the group {owning} may write to {path} (mode {mode:04o}): chmod -R g-w {path}")
    } else {
        return None;
    };
    Some(Exposure {
        sentence,
        is_to_all,
    })
}

/// Makes a folder and its parents so that only this user may read and write them. An existing
/// folder is not changed.
pub(crate) fn make_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_writer_is_named_and_a_folder_that_all_may_write_to_is_refused() {
        let of = |mode, owner, group| of_one(Path::new("/cache"), mode, (owner, group), (7, 70));
        for own in [(0o755, 7, 70), (0o755, 0, 0), (0o775, 7, 70), (0o700, 7, 9)] {
            assert_eq!(of(own.0, own.1, own.2), None, "{own:?}");
        }
        for (mode, owner, group, is_to_all, part) in [
            (
                0o777,
                7,
                70,
                true,
                "every user may write to /cache (mode 0777)",
            ),
            (0o1777, 0, 0, true, "(mode 1777)"),
            (0o755, 8, 70, false, "belongs to another user (8)"),
            (0o775, 7, 71, false, "the group 71 may write to /cache"),
        ] {
            let exposure = of(mode, owner, group).unwrap();
            assert_eq!(exposure.is_to_all, is_to_all);
            assert!(exposure.sentence.contains(part), "{}", exposure.sentence);
        }
    }
}
