//! Lists of backend types.

use super::decode::DecodeBackend;
use super::entry::Entry;
use super::prefill::PrefillBackend;
use crate::spec::{BackendSpec, Cause, KernelFacts, Phase};

/// A list of backend types: `backends![A, B]`. The list `backends![A, B, ..Rest]` ends with the
/// list `Rest`.
///
/// The type is `(A, (B, ()))`. The order does not matter: priorities decide.
#[macro_export]
macro_rules! backends {
    () => { () };
    (..$rest:ty $(,)?) => { $rest };
    ($backend:ty $(, $($more:tt)*)?) => { ($backend, $crate::backends!($($($more)*)?)) };
}

/// A backend of a list, in a form from which the compiler can choose.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// The problems that the backend supports.
    pub spec: &'static BackendSpec,
    /// The facts of its kernels.
    pub kernels: KernelFacts,
    /// Tells if this build contains the backend.
    pub availability: Result<(), Cause>,
    /// The next backend of the list.
    pub next: Option<&'static Listed>,
}

impl Listed {
    const fn new(member: &'static Member, next: Option<&'static Self>) -> Self {
        Self {
            spec: &member.entry.spec,
            kernels: member.entry.kernels,
            availability: member.availability,
            next,
        }
    }
}

/// A backend of a list. This build may leave it out.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    entry: Entry,
    availability: Result<(), Cause>,
}

impl Member {
    /// The problems that the backend supports.
    pub const fn spec(&self) -> &BackendSpec {
        &self.entry.spec
    }

    const fn present(entry: Entry) -> Self {
        Self {
            entry,
            availability: Ok(()),
        }
    }

    /// The member for a backend that this build leaves out.
    ///
    /// # Panics
    ///
    /// If the backend is of another phase. In a constant this is a compile error.
    pub const fn absent<A: Absent>(phase: Phase) -> Self {
        assert!(
            A::SPEC.phase as u8 == phase as u8,
            "phase: given a backend of the other phase, accepted one of the list's"
        );
        Self {
            entry: A::ENTRY,
            availability: Err(A::CAUSE),
        }
    }
}

/// An element of a list of prefill backends. Every [`PrefillBackend`] is one. So is every backend
/// that `#[mla_backend(feature = "…")]` leaves out of this build.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no prefill backend",
    note = "write `#[mla_backend(sm = \"…\", dtypes = \"…\")] \
            impl PrefillBackend for {Self} {{ … }}`"
)]
pub trait PrefillMember {
    /// The facts that the list needs.
    const MEMBER: Member;
}

/// An element of a list of decode backends. Every [`DecodeBackend`] is one. So is every backend
/// that `#[mla_backend(feature = "…")]` leaves out of this build.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no decode backend",
    note = "write `#[mla_backend(sm = \"…\", dtypes = \"…\")] \
            impl DecodeBackend for {Self} {{ … }}`"
)]
pub trait DecodeMember {
    /// The facts that the list needs.
    const MEMBER: Member;
}

impl<B: PrefillBackend> PrefillMember for B {
    const MEMBER: Member = Member::present(B::ENTRY);
}

impl<B: DecodeBackend> DecodeMember for B {
    const MEMBER: Member = Member::present(B::ENTRY);
}

/// A backend that this build leaves out: its spec, and the feature that would add it. The attribute
/// implements this trait if the backend's `feature` is off.
pub trait Absent {
    /// The problems that the backend would support.
    const SPEC: BackendSpec;
    /// The reason why the backend is absent.
    const CAUSE: Cause;
    /// The facts of its kernels.
    const KERNELS: KernelFacts = KernelFacts::UNKNOWN;

    /// The registry entry.
    const ENTRY: Entry = Entry::known(Self::SPEC, || Err(Self::CAUSE)).with_kernels(Self::KERNELS);
}

/// A list of prefill backends: `()`, or `(B, list)`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no list of prefill backends",
    note = "a list is `backends![A, B]`, each with `#[mla_backend(…)] impl PrefillBackend for …`"
)]
pub trait PrefillList {
    /// The first backend of the list.
    const LISTED: Option<&'static Listed>;

    /// Calls `take` with the registry entry of each backend, until a call fails.
    ///
    /// # Errors
    ///
    /// The error that `take` returns.
    fn each<E>(take: &mut impl FnMut(Entry) -> Result<(), E>) -> Result<(), E>;
}

/// A list of decode backends: `()`, or `(B, list)`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no list of decode backends",
    note = "a list is `backends![A, B]`, each with `#[mla_backend(…)] impl DecodeBackend for …`"
)]
pub trait DecodeList {
    /// The first backend of the list.
    const LISTED: Option<&'static Listed>;

    /// Calls `take` with the registry entry of each backend, until a call fails.
    ///
    /// # Errors
    ///
    /// The error that `take` returns.
    fn each<E>(take: &mut impl FnMut(Entry) -> Result<(), E>) -> Result<(), E>;
}

impl PrefillList for () {
    const LISTED: Option<&'static Listed> = None;

    fn each<E>(_: &mut impl FnMut(Entry) -> Result<(), E>) -> Result<(), E> {
        Ok(())
    }
}

impl DecodeList for () {
    const LISTED: Option<&'static Listed> = None;

    fn each<E>(_: &mut impl FnMut(Entry) -> Result<(), E>) -> Result<(), E> {
        Ok(())
    }
}

impl<M: PrefillMember, T: PrefillList> PrefillList for (M, T) {
    const LISTED: Option<&'static Listed> = Some(&Listed::new(&M::MEMBER, T::LISTED));

    fn each<E>(take: &mut impl FnMut(Entry) -> Result<(), E>) -> Result<(), E> {
        take(M::MEMBER.entry)?;
        T::each(take)
    }
}

impl<M: DecodeMember, T: DecodeList> DecodeList for (M, T) {
    const LISTED: Option<&'static Listed> = Some(&Listed::new(&M::MEMBER, T::LISTED));

    fn each<E>(take: &mut impl FnMut(Entry) -> Result<(), E>) -> Result<(), E> {
        take(M::MEMBER.entry)?;
        T::each(take)
    }
}

/// The backend at an index of a list. The first has the index 0.
pub trait Nth<const INDEX: usize> {
    /// The backend.
    type Backend;
}

impl<B, T> Nth<0> for (B, T) {
    type Backend = B;
}

// Implements an index by the index before it. The language cannot yet compute with an index that is
// a parameter.
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

/// The maximum number of backends in a list. [`Nth`] reaches each of them.
pub(crate) const CAPACITY: usize = 32;
