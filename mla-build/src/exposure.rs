//! Folders of objects that others may write to. A user who changes an object there decides what the
//! programs do that are linked with it.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::Path,
};

/// Other users who may write to a folder or file, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Exposure {
    /// The users, and the remedy.
    pub(crate) sentence: String,
    /// True if every user may. Others are named, and trusted.
    pub(crate) is_to_all: bool,
}

/// Other users than this one and the administrator that may write to one of these paths, if there
/// are any. A path that does not exist has none.
pub(crate) fn of<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Option<Exposure> {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let found = paths.into_iter().filter_map(|path| {
        let data = fs::metadata(path).ok()?;
        of_one(path, &data, user.as_raw(), group.as_raw())
    });
    // The widest first.
    found.max_by_key(|exposure| exposure.is_to_all)
}

fn of_one(path: &Path, data: &impl Owned, user: u32, group: u32) -> Option<Exposure> {
    const GROUP_WRITES: u32 = 0o020;
    const ALL_WRITE: u32 = 0o002;
    let (mode, owner) = (data.mode() & 0o7777, data.owner());
    let path = path.display();
    let (is_to_all, sentence) = if mode & ALL_WRITE != 0 {
        let sentence =
            format!("every user may write to {path} (mode {mode:04o}): chmod -R go-w {path}");
        (true, sentence)
    } else if owner != user && owner != 0 {
        let sentence = format!("{path} belongs to another user ({owner}), who may change it");
        (false, sentence)
    } else if mode & GROUP_WRITES != 0 && data.group() != group {
        let sentence = format!(
            "the group {} may write to {path} (mode {mode:04o}): chmod -R g-w {path}",
            data.group()
        );
        (false, sentence)
    } else {
        return None;
    };
    Some(Exposure {
        sentence,
        is_to_all,
    })
}

/// The mode and owners of a file.
trait Owned {
    fn mode(&self) -> u32;
    fn owner(&self) -> u32;
    fn group(&self) -> u32;
}

impl Owned for fs::Metadata {
    fn mode(&self) -> u32 {
        MetadataExt::mode(self)
    }

    fn owner(&self) -> u32 {
        self.uid()
    }

    fn group(&self) -> u32 {
        self.gid()
    }
}

/// Makes a folder, and those above it, that this user alone may read and write. One that exists
/// stays what it is.
pub(crate) fn make_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Given(u32, u32, u32);

    impl Owned for Given {
        fn mode(&self) -> u32 {
            self.0
        }

        fn owner(&self) -> u32 {
            self.1
        }

        fn group(&self) -> u32 {
            self.2
        }
    }

    #[test]
    fn another_writer_is_named_and_a_folder_that_all_may_write_to_is_refused() {
        let of =
            |mode, owner, group| of_one(Path::new("/cache"), &Given(mode, owner, group), 7, 70);
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
