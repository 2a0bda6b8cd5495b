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

/// A set of backends: a value of its own, without global state.
///
/// [`Registry::linked`] is what most programs want. Several entries may have the same name; the
/// first of these kinds that exists is used:
///
/// 1. an override, by [`replace`](Self::replace), until [`reset`](Self::reset);
/// 2. an entry that was linked, or added by [`add`](Self::add);
/// 3. a known name without an implementation ([`known`](crate::select::known)).
///
/// A linked entry takes the place of the known one only on hardware that it accepts. If the known
/// backend accepts the hardware and the linked one does not, the known one stays, because its
/// reason ("not built in this version") tells the user more. An override was asked for by name, so
/// it is used on all hardware.
#[derive(Clone, Debug)]
pub struct Registry {
    // Each holds a phase and name at most once. There are a few dozen: searching them in line is
    // as fast as any map.
    overrides: Vec<Entry>,
    entries: Vec<Entry>,
    known: &'static [Entry],
}

fn is(entry: &Entry, phase: Phase, name: &str) -> bool {
    entry.spec.phase == phase && entry.spec.name == name
}

impl Registry {
    /// Nothing, not even known names.
    pub const fn empty() -> Self {
        Self {
            overrides: Vec::new(),
            entries: Vec::new(),
            known: &[],
        }
    }

    /// The known names, none of them implemented.
    pub const fn known() -> Self {
        Self {
            overrides: Vec::new(),
            entries: Vec::new(),
            known: KNOWN,
        }
    }

    /// The backends of two lists of types, and no others; those that a build leaves out with the
    /// reason why.
    ///
    /// # Errors
    ///
    /// If two backends of one list claim one name.
    pub fn of<P: PrefillList, D: DecodeList>() -> Result<Self, SelectionError> {
        let mut registry = Self::empty();
        P::each(&mut |entry| registry.add(entry))?;
        D::each(&mut |entry| registry.add(entry))?;
        Ok(registry)
    }

    /// The known names, and every backend that `#[mla_backend]` linked into this program. (Under
    /// Miri, which does not link, there are none.)
    ///
    /// # Errors
    ///
    /// If two linked backends of one phase claim one name. Their order in the error depends on
    /// linking.
    pub fn linked() -> Result<Self, SelectionError> {
        Self::linked_by(Some)
    }

    /// Collects the backends as [`linked`](Self::linked) does, but passes each linked entry to
    /// `settle`, which returns it as it is, [under another name](Entry::named), or `None` to leave
    /// it out. A program that links two crates which claim one name settles that here:
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

    /// Adds a backend under a new name, or under a known one that has no implementation.
    ///
    /// # Errors
    ///
    /// If a backend of this phase and name was linked or added before.
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

    /// Puts `entry` in the place of the backend of its phase and name, until
    /// [`reset`](Self::reset). An earlier override is forgotten.
    ///
    /// # Errors
    ///
    /// If there is no such name to override.
    pub fn replace(&mut self, entry: Entry) -> Result<(), SelectionError> {
        self.reset(entry.spec.phase, entry.spec.name)?;
        self.overrides.push(entry);
        Ok(())
    }

    /// Undoes [`replace`](Self::replace), and says whether there was anything to undo.
    ///
    /// # Errors
    ///
    /// If there is no such name.
    pub fn reset(&mut self, phase: Phase, name: &str) -> Result<bool, SelectionError> {
        let overridden = self.is_overridden(phase, name)?;
        self.overrides.retain(|entry| !is(entry, phase, name));
        Ok(overridden)
    }

    /// Returns true if the name stands for an override.
    ///
    /// # Errors
    ///
    /// If there is no such name.
    pub fn is_overridden(&self, phase: Phase, name: &str) -> Result<bool, SelectionError> {
        self.get(phase, name)?;
        Ok(self.overrides.iter().any(|entry| is(entry, phase, name)))
    }

    /// The backend of this name, whatever the hardware.
    ///
    /// # Errors
    ///
    /// If there is no such name; the error lists those that exist and suggests a similar one.
    pub fn get(&self, phase: Phase, name: &str) -> Result<&Entry, SelectionError> {
        self.resolve(phase, name, |_| true)
    }

    /// The backend that the name stands for on this hardware.
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

    /// Returns the entry of every name, prefill first, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        [Phase::Prefill, Phase::Decode]
            .into_iter()
            .flat_map(|phase| self.names(phase).into_iter().map(move |name| (phase, name)))
            .filter_map(|(phase, name)| self.get(phase, name).ok())
    }

    /// Returns the entry of every name of `phase` on this hardware, by name.
    pub fn iter_on(&self, target: Target, phase: Phase) -> impl Iterator<Item = &Entry> {
        self.names(phase)
            .into_iter()
            .filter_map(move |name| self.get_on(target, phase, name).ok())
    }

    /// The names of a phase, in order.
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

    /// Returns all reasons against `entry` for `problem` on `target`, including that it cannot run
    /// there. A backend that was `asked` for by name is not refused because it has run nowhere yet.
    pub(crate) fn reasons_against(
        entry: &Entry,
        target: Target,
        problem: &Problem,
        asked: bool,
    ) -> Reasons {
        let availability = entry.availability_on(target, asked);
        entry.spec.reasons(target, problem, availability)
    }

    // The entry of the highest rank that `fits`; where none does, that of the highest rank.
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

// Returns true if the hardware alone speaks for the entry, which decides between a linked and a
// known one.
fn runs_on(entry: &Entry, target: Target) -> bool {
    entry.spec.platform == target.platform
        && (target.platform == Platform::Cpu || entry.spec.accepts_capability(target))
}

impl fmt::Display for Registry {
    /// One line per phase: its names.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for phase in [Phase::Prefill, Phase::Decode] {
            let names = self.names(phase);
            writeln!(f, "{phase}: {}", accepted_names(&names))?;
        }
        Ok(())
    }
}
