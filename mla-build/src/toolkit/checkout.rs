//! Sources of another repository, pinned by the package that compiles them.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    Found, NotFound, Search,
    pinned::{FoundHeaders, Pinned},
};
use crate::Error;

/// Sources of another repository that a package compiles or includes, at exactly one commit.
///
/// They lie in a checkout. The environment variable `MLA_CHECKOUT_<NAME>` gives its absolute path.
/// An unpacked archive will do as well. No build downloads anything: the error names the Git
/// command that does. If the folder is a checkout, its commit is compared with the pinned one. The
/// [contents](Self::contents) of the include roots are compared in any case.
///
/// To compile one of these sources, the package has a small source in one of its families' folders
/// that includes it: `#include <sm90/decode/dense.cu>`.
///
/// ```
/// use mla_build::{Checkout, Kernels};
///
/// let kernels = Kernels::new().checkout(
///     Checkout::new("FlashMLA", "9241ae3ef9bac614dd25e45e507e089f888280e0")
///         .repository("https://github.com/deepseek-ai/FlashMLA")
///         .include("csrc")
///         // A submodule, which is there or not.
///         .without("csrc/cutlass"),
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkout {
    name: String,
    commit: String,
    repository: Option<String>,
    pinned: Pinned,
}

impl Checkout {
    /// Pins the repository of this name to the commit of this full hash. It has no include root
    /// yet.
    pub fn new(name: impl Into<String>, commit: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            commit: commit.into(),
            repository: None,
            pinned: Pinned::default(),
        }
    }

    /// Sets the repository's address, for the command that downloads it.
    #[must_use]
    pub fn repository(mut self, repository: impl Into<String>) -> Self {
        self.repository = Some(repository.into());
        self
    }

    /// Pins the contents of the include roots to a hash. If the contents differ, the error shows
    /// their hash.
    #[must_use]
    pub fn contents(mut self, hash: impl Into<String>) -> Self {
        self.pinned.contents = Some(hash.into());
        self
    }

    /// Adds an include root (`-I`), relative to the checkout. Roots are searched in the order of
    /// the calls, after the package's own and before CUTLASS.
    #[must_use]
    pub fn include(mut self, folder: impl Into<String>) -> Self {
        self.pinned.add(folder.into(), false);
        self
    }

    /// Adds an include root whose headers the compilers do not warn about (`-isystem`), searched
    /// after every root that [`include`](Self::include) adds, and after CUDA's headers.
    #[must_use]
    pub fn system(mut self, folder: impl Into<String>) -> Self {
        self.pinned.add(folder.into(), true);
        self
    }

    /// Excludes a folder within the include roots from the pinned contents, such as a submodule
    /// that nothing includes.
    #[must_use]
    pub fn without(mut self, folder: impl Into<String>) -> Self {
        self.pinned.left_out.push(folder.into());
        self
    }

    /// Returns the environment variable that names the folder.
    pub(crate) fn variable(&self) -> String {
        let is_sign = |c: char| !c.is_ascii_alphanumeric();
        format!(
            "MLA_CHECKOUT_{}",
            self.name.replace(is_sign, "_").to_ascii_uppercase()
        )
    }

    /// Finds the checkout, and checks its commit and its contents.
    pub(crate) fn find(&self, search: &Search) -> Result<FoundHeaders, Error> {
        let variable = self.variable();
        let Some(given) = search.variable(&variable) else {
            return Err(NotFound {
                part: format!("the checkout of {} at {}", self.name, self.commit),
                looked: vec![format!("{variable}: not set")],
                command: self.command(&variable),
            }
            .into());
        };
        let folder = PathBuf::from(&given);
        if let Some(missing) = self.pinned.missing(&folder) {
            let lacks = format!("{missing}, a folder of {}", self.name);
            return Err(super::unusable(&variable, &given, &lacks));
        }
        if let Some(other) = commit_of(&folder).filter(|other| *other != self.commit) {
            return Err(Error::setting(
                format!("the commit of {}", self.name),
                format!("{other} in {}", folder.display()),
                format!("{}: git -C {} checkout {0}", self.commit, folder.display()),
            ));
        }
        let name = format!("{} at {}", self.name, self.commit);
        let found = Found {
            part: self.name.clone(),
            path: folder,
            version: Some(self.commit.clone()),
            place: variable,
        };
        let role = format!("checkout {}", self.name);
        let remedy = "check the commit out anew, unchanged";
        self.pinned.found((role, name, remedy), found)
    }

    /// Returns the commands that download it and set the variable.
    fn command(&self, variable: &str) -> String {
        let (name, commit) = (&self.name, &self.commit);
        let repository = self.repository.as_deref().unwrap_or("<its repository>");
        format!(
            "git clone {repository} {name} && git -C {name} checkout {commit} && \
             export {variable}=\"$PWD/{name}\""
        )
    }
}

/// Returns the commit of a checkout. An unpacked archive has none, and Git may refuse to read a
/// checkout. The contents then decide.
fn commit_of(folder: &Path) -> Option<String> {
    if !folder.join(".git").exists() {
        return None;
    }
    let mut git = Command::new("git");
    git.arg("-C").arg(folder).args(["rev-parse", "HEAD"]);
    let output = git.output().ok().filter(|output| output.status.success())?;
    let commit = String::from_utf8(output.stdout).ok()?;
    Some(commit.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const COMMIT: &str = "9241ae3ef9bac614dd25e45e507e089f888280e0";

    fn checkout() -> Checkout {
        Checkout::new("Flash-MLA", COMMIT)
            .repository("https://example.org/flash")
            .include("csrc")
            .without("csrc/cutlass")
    }

    fn find(checkout: Checkout, folder: &Path) -> Result<FoundHeaders, String> {
        let search = Search::for_test(&[("MLA_CHECKOUT_FLASH_MLA", folder)]);
        checkout.find(&search).map_err(|error| error.to_string())
    }

    fn sources() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("csrc/cutlass")).unwrap();
        fs::write(folder.path().join("csrc/a.cu"), "one").unwrap();
        folder
    }

    fn git(folder: &Path, arguments: &[&str]) -> String {
        let mut git = Command::new("git");
        git.arg("-C")
            .arg(folder)
            .args(["-c", "user.name=a", "-c", "user.email=a@b"]);
        let output = git.args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    #[test]
    fn without_a_checkout_the_error_says_how_to_get_one() {
        let error = checkout().find(&Search::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "the checkout of Flash-MLA at {COMMIT} is nowhere to be found. Looked, in this \
                 order, at:\n  MLA_CHECKOUT_FLASH_MLA: not set\nTo install it, run:\n  git clone \
                 https://example.org/flash Flash-MLA && git -C Flash-MLA checkout {COMMIT} && \
                 export MLA_CHECKOUT_FLASH_MLA=\"$PWD/Flash-MLA\""
            )
        );
        let empty = tempfile::tempdir().unwrap();
        let error = find(checkout(), empty.path()).unwrap_err();
        assert!(
            error.starts_with("MLA_CHECKOUT_FLASH_MLA: given")
                && error.ends_with(
                    "a place that holds csrc, a folder of Flash-MLA; unset it to search elsewhere"
                ),
            "{error}"
        );
    }

    #[test]
    fn other_contents_are_refused_and_a_submodule_does_not_count() {
        let here = sources();
        let error = find(checkout().contents("0123"), here.path()).unwrap_err();
        let told = format!("the contents of Flash-MLA at {COMMIT}: given \"");
        let hash = error.strip_prefix(&told).and_then(|rest| rest.get(..64));
        let hash = hash.unwrap_or_else(|| panic!("{error}"));
        assert!(
            error.contains("accepted 0123: check the commit out anew, unchanged"),
            "{error}"
        );
        let pinned = || checkout().contents(hash);
        let found = find(pinned(), here.path()).unwrap();
        assert_eq!(found.includes[0].role, "checkout Flash-MLA/csrc");
        fs::write(here.path().join("csrc/cutlass/a.h"), "").unwrap();
        assert!(find(pinned(), here.path()).is_ok());
        fs::write(here.path().join("csrc/a.cu"), "two").unwrap();
        assert!(find(pinned(), here.path()).is_err());
    }

    #[test]
    fn a_checkout_of_another_commit_is_refused() {
        let here = sources();
        git(here.path(), &["init", "--quiet"]);
        git(here.path(), &["add", "."]);
        git(here.path(), &["commit", "--quiet", "--message=one"]);
        let commit = git(here.path(), &["rev-parse", "HEAD"]);
        let error = find(checkout(), here.path()).unwrap_err();
        assert!(
            error.starts_with(&format!("the commit of Flash-MLA: given \"{commit} in "))
                && error.ends_with(&format!("checkout {COMMIT}")),
            "{error}"
        );
        let right = Checkout::new("Flash-MLA", commit).include("csrc");
        assert!(find(right, here.path()).is_ok());
    }
}
