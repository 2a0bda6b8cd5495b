//! A backend's place in a registry.

use std::any::Any;

use crate::spec::{BackendSpec, Cause, KernelFacts, Target, both, on};

/// The entries that `#[mla_backend]` linked into this program, in no particular order.
#[linkme::distributed_slice]
pub static LINKED: [Entry];

/// A backend by name: what it supports, whether it can run, and how to make it.
#[derive(Clone, Copy)]
pub struct Entry {
    /// The problems that it supports.
    pub spec: BackendSpec,
    /// The facts of its kernels.
    pub kernels: KernelFacts,
    availability: fn() -> Result<(), Cause>,
    // The phase's own maker for the backend's device; `None` where there is no implementation.
    pub(super) maker: Option<&'static (dyn Any + Send + Sync)>,
    type_name: Option<fn() -> &'static str>,
}

impl Entry {
    /// The entry of an implementation.
    pub(super) const fn implemented(
        spec: BackendSpec,
        kernels: KernelFacts,
        availability: fn() -> Result<(), Cause>,
        maker: &'static (dyn Any + Send + Sync),
        type_name: fn() -> &'static str,
    ) -> Self {
        Self {
            spec,
            kernels,
            availability,
            maker: Some(maker),
            type_name: Some(type_name),
        }
    }

    /// The same backend under another name: that of the backend whose place it takes by
    /// [`Registry::replace`](crate::select::Registry::replace).
    #[must_use]
    pub const fn named(mut self, name: &'static str) -> Self {
        self.spec.name = name;
        self
    }

    /// The entry with what is known of its kernels.
    #[must_use]
    pub const fn with_kernels(mut self, kernels: KernelFacts) -> Self {
        self.kernels = kernels;
        self
    }

    /// The entry of a backend that is known by name but has no implementation in this program.
    pub const fn known(spec: BackendSpec, availability: fn() -> Result<(), Cause>) -> Self {
        Self {
            spec,
            kernels: KernelFacts::UNKNOWN,
            availability,
            maker: None,
            type_name: None,
        }
    }

    /// Tells if the backend can run on this machine.
    pub fn availability(&self) -> Result<(), Cause> {
        (self.availability)()
    }

    /// Checks by the facts of this machine and this build that it can run on `target`, and, unless
    /// it was `asked` for by name, that it has run there.
    pub fn availability_on(&self, target: Target, asked: bool) -> Result<(), Cause> {
        let kernels = self.kernels.availability(target, asked);
        both(on(self.availability(), target), kernels)
    }

    /// Returns true if this program has its implementation.
    pub const fn is_implemented(&self) -> bool {
        self.maker.is_some()
    }

    /// Returns the origin of the backend, for messages: the path of its type, or its provider where
    /// it has no implementation.
    pub fn origin(&self) -> &'static str {
        self.type_name
            .map_or(self.spec.provider, |type_name| type_name())
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Entry({} {})", self.spec.phase, self.spec.name)
    }
}

/// No implementation, whatever the machine.
pub(crate) fn not_built() -> Result<(), Cause> {
    Err(Cause::NotBuilt)
}

/// A name kept for whatever a third party registers.
pub(crate) fn not_registered() -> Result<(), Cause> {
    Err(Cause::NotRegistered)
}
