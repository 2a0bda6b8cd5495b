//! The backends that a selection chooses from, by phase and name.

use std::fmt;

use crate::backend::Entry;
#[cfg(not(miri))]
use crate::backend::LINKED;
use crate::backend::list::{DecodeList, PrefillList};
use crate::select::known::KNOWN;
use crate::spec::{Phase, Platform, Problem, Reasons, Target};
use crate::suggestion;

use super::error::{SelectionError, accepted_names};

/// A set of backends. It is an ordinary value without global state.
///
/// Most programs use [`Registry::linked`]. If several entries have the same name, the first
/// existing one of this list is used:
///
/// 1. an override by [`replace`](Self::replace), until [`reset`](Self::reset);
/// 2. an entry that was linked, or added by [`add`](Self::add);
/// 3. a known name without an implementation ([`known`](crate::select::known)).
///
/// A linked entry replaces the known one only on hardware that it accepts. If only the known
/// backend accepts the hardware, the known one stays, because its reason ("not built in this
/// version") tells the user more. An override was asked for by name, so it is used on all hardware.
#[derive(Clone, Debug)]
pub struct Registry {
    // Each list has a phase and name at most once. There are only a few dozen entries, so a linear
    // search is as fast as a map.
    overrides: Vec<Entry>,
    entries: Vec<Entry>,
    known: &'static [Entry],
}

fn is(entry: &Entry, phase: Phase, name: &str) -> bool {
    entry.spec.phase == phase && entry.spec.name == name
}

impl Registry {
    /// A registry without any names, not even known ones.
    pub const fn empty() -> Self {
        Self {
            overrides: Vec::new(),
            entries: Vec::new(),
            known: &[],
        }
    }

    /// The known names. None of them has an implementation.
    pub const fn known() -> Self {
        Self {
            overrides: Vec::new(),
            entries: Vec::new(),
            known: KNOWN,
        }
    }

    /// The backends of two lists of types, and no others. Backends that the build leaves out are
    /// included with the reason.
    ///
    /// # Errors
    ///
    /// If two backends of one list have the same name.
    pub fn of<P: PrefillList, D: DecodeList>() -> Result<Self, SelectionError> {
        let mut registry = Self::empty();
        P::each(&mut |entry| registry.add(entry))?;
        D::each(&mut |entry| registry.add(entry))?;
        Ok(registry)
    }

    /// The known names, and every backend that `#[mla_backend]` linked into this program. (Miri
    /// does not link, so under Miri there are no linked backends.)
    ///
    /// # Errors
    ///
    /// If two linked backends of one phase have the same name. Their order in the error depends on
    /// linking.
    pub fn linked() -> Result<Self, SelectionError> {
        Self::linked_by(Some)
    }

    /// Collects the backends as [`linked`](Self::linked) does, but passes each linked entry to
    /// `settle`. The function returns the entry unchanged, [under another name](Entry::named), or
    /// `None` to leave it out. A program can thus link two crates that use the same name:
    ///
    /// ```
    /// use mla_runtime::backend::Entry;
    /// use mla_runtime::select::Registry;
    ///
    /// let registry = Registry::linked_by(|entry: Entry| {
    ///     match (entry.spec.provider, entry.spec.name) {
    ///         ("their-kernels", "FLASHMLA") => Some(entry.named("THEIR_FLASHMLA")),
    ///         _ => Some(entry),
    ///     }
    /// });
    /// # registry.unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// Same as [`linked`](Self::linked).
    pub fn linked_by(settle: impl FnMut(Entry) -> Option<Entry>) -> Result<Self, SelectionError> {
        let mut registry = Self::known();
        for entry in linked().filter_map(settle) {
            registry.add(entry)?;
        }
        Ok(registry)
    }

    /// Adds a backend under a new name, or under a known name without an implementation.
    ///
    /// # Errors
    ///
    /// If a backend of this phase and name was already linked or added.
    pub fn add(&mut self, entry: Entry) -> Result<(), SelectionError> {
        let (phase, name) = (entry.spec.phase, entry.spec.name);
        if let Some(first) = self.entries.iter().find(|first| is(first, phase, name)) {
            return Err(SelectionError::Duplicate {
                phase,
                name,
                first: first.origin(),
                second: entry.origin(),
            });
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Replaces the backend of the entry's phase and name, until [`reset`](Self::reset). An earlier
    /// override is dropped.
    ///
    /// # Errors
    ///
    /// If there is no such name.
    pub fn replace(&mut self, entry: Entry) -> Result<(), SelectionError> {
        self.reset(entry.spec.phase, entry.spec.name)?;
        self.overrides.push(entry);
        Ok(())
    }

    /// Undoes [`replace`](Self::replace). Returns true if there was an override.
    ///
    /// # Errors
    ///
    /// If there is no such name.
    pub fn reset(&mut self, phase: Phase, name: &str) -> Result<bool, SelectionError> {
        let overridden = self.is_overridden(phase, name)?;
        self.overrides.retain(|entry| !is(entry, phase, name));
        Ok(overridden)
    }

    /// Returns true if the name has an override.
    ///
    /// # Errors
    ///
    /// If there is no such name.
    pub fn is_overridden(&self, phase: Phase, name: &str) -> Result<bool, SelectionError> {
        self.get(phase, name)?;
        Ok(self.overrides.iter().any(|entry| is(entry, phase, name)))
    }

    /// The backend of this name, for any hardware.
    ///
    /// # Errors
    ///
    /// If there is no such name. The error lists the existing names and suggests a similar one.
    pub fn get(&self, phase: Phase, name: &str) -> Result<&Entry, SelectionError> {
        self.resolve(phase, name, |_| true)
    }

    /// The backend of this name on this hardware.
    ///
    /// # Errors
    ///
    /// Same as [`get`](Self::get).
    pub fn get_on(
        &self,
        target: Target,
        phase: Phase,
        name: &str,
    ) -> Result<&Entry, SelectionError> {
        self.resolve(phase, name, |entry| runs_on(entry, target))
    }

    /// Returns the entries of all names, prefill first, each phase sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        [Phase::Prefill, Phase::Decode]
            .into_iter()
            .flat_map(|phase| self.names(phase).into_iter().map(move |name| (phase, name)))
            .filter_map(|(phase, name)| self.get(phase, name).ok())
    }

    /// Returns the entries of all names of `phase` on this hardware, sorted by name.
    pub fn iter_on(&self, target: Target, phase: Phase) -> impl Iterator<Item = &Entry> {
        self.names(phase)
            .into_iter()
            .filter_map(move |name| self.get_on(target, phase, name).ok())
    }

    /// The sorted names of a phase.
    pub fn names(&self, phase: Phase) -> Vec<&'static str> {
        let mut names: Vec<_> = self
            .overrides
            .iter()
            .chain(&self.entries)
            .chain(self.known)
            .filter(|entry| entry.spec.phase == phase)
            .map(|entry| entry.spec.name)
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Returns true if any backend has an implementation in this program.
    pub fn is_implemented(&self) -> bool {
        self.iter().any(Entry::is_implemented)
    }

    /// Returns all reasons against `entry` for `problem` on `target`, including the reason why it
    /// cannot run there. If the backend was `asked` for by name, it need not have run on any GPU
    /// before.
    pub(crate) fn reasons_against(
        entry: &Entry,
        target: Target,
        problem: &Problem,
        asked: bool,
    ) -> Reasons {
        let availability = entry.availability_on(target, asked);
        entry.spec.reasons(target, problem, availability)
    }

    // Returns the first entry in the order above that `fits`, or the first one if none does.
    fn resolve(
        &self,
        phase: Phase,
        name: &str,
        fits: impl Fn(&Entry) -> bool,
    ) -> Result<&Entry, SelectionError> {
        let named = |entry: &&Entry| is(entry, phase, name);
        if let Some(entry) = self.overrides.iter().find(named) {
            return Ok(entry);
        }
        let ranked = || self.entries.iter().chain(self.known).filter(named);
        ranked()
            .find(|entry| fits(entry))
            .or_else(|| ranked().next())
            .ok_or_else(|| self.unknown(phase, name))
    }

    #[cold]
    fn unknown(&self, phase: Phase, name: &str) -> SelectionError {
        let existing = self.names(phase);
        SelectionError::Unknown {
            phase,
            given: suggestion::shortened(name),
            suggestion: suggestion::nearest(name, existing.iter().copied()),
            existing,
        }
    }
}

#[cfg(not(miri))]
fn linked() -> impl Iterator<Item = Entry> {
    LINKED.iter().copied()
}

#[cfg(miri)]
fn linked() -> impl Iterator<Item = Entry> {
    std::iter::empty()
}

// Returns true if the entry accepts the hardware, which decides between a linked and a known entry.
fn runs_on(entry: &Entry, target: Target) -> bool {
    entry.spec.platform == target.platform
        && (target.platform == Platform::Cpu || entry.spec.accepts_capability(target))
}

impl fmt::Display for Registry {
    /// Writes one line per phase with its names.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for phase in [Phase::Prefill, Phase::Decode] {
            let names = self.names(phase);
            writeln!(f, "{phase}: {}", accepted_names(&names))?;
        }
        Ok(())
    }
}
