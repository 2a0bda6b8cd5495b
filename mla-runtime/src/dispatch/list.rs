//! Lists of backend types.

use std::marker::PhantomData;

use crate::availability::{Availability, Cause};
use crate::backend::{DecodeBackend, Entry, PrefillBackend};
use crate::registry::{Registry, RegistryError};
use crate::spec::{BackendSpec, Phase};

/// A list of backend types: `backends![A, B]`, or `backends![A, B, ..Rest]` with another list at its
/// end.
///
/// It is `(A, (B, ()))`. The order says nothing: priorities do.
#[macro_export]
macro_rules! backends {
    () => { () };
    (..$rest:ty $(,)?) => { $rest };
    ($backend:ty $(, $($more:tt)*)?) => { ($backend, $crate::backends!($($($more)*)?)) };
}

/// What a list says of its backends, for the compiler to choose from.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// What the backend supports.
    pub spec: &'static BackendSpec,
    /// Whether this build holds it.
    pub availability: Availability,
    /// What comes after it.
    pub next: Option<&'static Listed>,
}

/// A list of prefill backends: `()`, `(B, list)`, or a list [`Without`] a backend.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no list of prefill backends",
    note = "a list is `backends![A, B]`, each with `#[mla_backend(…)] impl PrefillBackend for …`"
)]
pub trait PrefillList {
    /// The first of the list.
    const LISTED: Option<&'static Listed>;

    /// Adds every entry of the list.
    ///
    /// # Errors
    ///
    /// As [`Registry::add`].
    fn add_to(registry: &mut Registry) -> Result<(), RegistryError>;
}

/// A list of decode backends: `()`, `(B, list)`, or a list [`Without`] a backend.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no list of decode backends",
    note = "a list is `backends![A, B]`, each with `#[mla_backend(…)] impl DecodeBackend for …`"
)]
pub trait DecodeList {
    /// The first of the list.
    const LISTED: Option<&'static Listed>;

    /// Adds every entry of the list.
    ///
    /// # Errors
    ///
    /// As [`Registry::add`].
    fn add_to(registry: &mut Registry) -> Result<(), RegistryError>;
}

/// A backend that this build leaves out: its constraints, and what would bring it back.
pub trait Absent {
    /// What it would support.
    const SPEC: BackendSpec;
    /// Why it is not there.
    const CAUSE: Cause;

    /// Its registry entry.
    const ENTRY: Entry = Entry::known(Self::SPEC, || Availability::Unavailable(Self::CAUSE));
}

/// A list whose first backend is left out of this build: it is never chosen, but where nothing fits,
/// its reasons are told with those of the others.
pub struct Without<A: Absent, T>(PhantomData<(A, T)>);

impl PrefillList for () {
    const LISTED: Option<&'static Listed> = None;

    fn add_to(_: &mut Registry) -> Result<(), RegistryError> {
        Ok(())
    }
}

impl DecodeList for () {
    const LISTED: Option<&'static Listed> = None;

    fn add_to(_: &mut Registry) -> Result<(), RegistryError> {
        Ok(())
    }
}

impl<B: PrefillBackend, T: PrefillList> PrefillList for (B, T) {
    const LISTED: Option<&'static Listed> = Some(&Listed {
        spec: &B::SPEC,
        availability: Availability::Available,
        next: T::LISTED,
    });

    fn add_to(registry: &mut Registry) -> Result<(), RegistryError> {
        registry.add(B::ENTRY)?;
        T::add_to(registry)
    }
}

impl<B: DecodeBackend, T: DecodeList> DecodeList for (B, T) {
    const LISTED: Option<&'static Listed> = Some(&Listed {
        spec: &B::SPEC,
        availability: Availability::Available,
        next: T::LISTED,
    });

    fn add_to(registry: &mut Registry) -> Result<(), RegistryError> {
        registry.add(B::ENTRY)?;
        T::add_to(registry)
    }
}

impl<A: Absent, T: PrefillList> PrefillList for Without<A, T> {
    const LISTED: Option<&'static Listed> = Some(&Listed {
        spec: &of_phase(A::SPEC, Phase::Prefill),
        availability: Availability::Unavailable(A::CAUSE),
        next: T::LISTED,
    });

    fn add_to(registry: &mut Registry) -> Result<(), RegistryError> {
        registry.add(A::ENTRY)?;
        T::add_to(registry)
    }
}

impl<A: Absent, T: DecodeList> DecodeList for Without<A, T> {
    const LISTED: Option<&'static Listed> = Some(&Listed {
        spec: &of_phase(A::SPEC, Phase::Decode),
        availability: Availability::Unavailable(A::CAUSE),
        next: T::LISTED,
    });

    fn add_to(registry: &mut Registry) -> Result<(), RegistryError> {
        registry.add(A::ENTRY)?;
        T::add_to(registry)
    }
}

// A backend's phase is its trait's; what is left out has no trait to say it.
const fn of_phase(spec: BackendSpec, phase: Phase) -> BackendSpec {
    assert!(
        spec.phase as u8 == phase as u8,
        "phase: given a backend of the other phase, accepted one of the list's"
    );
    spec
}

/// The backend at an index of a list, from 0; those that are left out do not count.
pub trait Nth<const INDEX: usize> {
    /// The backend.
    type Backend;
}

impl<B, T> Nth<0> for (B, T) {
    type Backend = B;
}

impl<A: Absent, T: Nth<INDEX>, const INDEX: usize> Nth<INDEX> for Without<A, T> {
    type Backend = T::Backend;
}

// One step further than the index before. The language cannot yet compute an index from another where
// it is a parameter.
macro_rules! nth {
    ($($index:literal after $before:literal),* $(,)?) => {$(
        impl<B, T: Nth<$before>> Nth<$index> for (B, T) {
            type Backend = T::Backend;
        }
    )*};
}

nth! {
    1 after 0, 2 after 1, 3 after 2, 4 after 3, 5 after 4, 6 after 5, 7 after 6, 8 after 7,
    9 after 8, 10 after 9, 11 after 10, 12 after 11, 13 after 12, 14 after 13, 15 after 14,
    16 after 15, 17 after 16, 18 after 17, 19 after 18, 20 after 19, 21 after 20, 22 after 21,
    23 after 22, 24 after 23, 25 after 24, 26 after 25, 27 after 26, 28 after 27, 29 after 28,
    30 after 29, 31 after 30,
}

/// The most backends that a list may hold, so that [`Nth`] reaches each.
pub(super) const CAPACITY: usize = 32;
