//! The entries of a registry.

use std::any::Any;

use super::LayerConfig;
use super::stage::Maker;
use crate::Result;
use crate::device::Device;
use crate::spec::{BackendSpec, Cause, KernelFacts, Target, both, on};

/// The entries that `#[mla_backend]` linked into this program, in no particular order.
#[linkme::distributed_slice]
pub static LINKED: [Entry];

/// One backend of a registry: its name, the problems it supports, whether it can run, and a way to
/// make it.
#[derive(Clone, Copy)]
pub struct Entry {
    /// The problems that the backend supports.
    pub spec: BackendSpec,
    /// The facts of its kernels.
    pub kernels: KernelFacts,
    pub(super) availability: fn() -> Result<(), Cause>,
    // The phase's own maker for the backend's device; `None` if there is no implementation.
    pub(super) maker: Option<&'static (dyn Any + Send + Sync)>,
    pub(super) type_name: Option<fn() -> &'static str>,
}

impl Entry {
    /// The same backend under another name. [`Registry::replace`](crate::select::Registry::replace)
    /// gives it the name of the backend that it replaces.
    #[must_use]
    pub const fn named(mut self, name: &'static str) -> Self {
        self.spec.name = name;
        self
    }

    /// The entry with these facts of its kernels.
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

    /// Checks that the backend can run on `target`, from the facts of this machine and this build.
    /// Unless the backend was `asked` for by name, it must also have run on such hardware.
    pub fn availability_on(&self, target: Target, asked: bool) -> Result<(), Cause> {
        let kernels = self.kernels.availability(target, asked);
        both(on(self.availability(), target), kernels)
    }

    /// The backend's implementation for one layer on devices of type `D`. `S` is
    /// [`SelectedPrefill`](super::SelectedPrefill) or [`SelectedDecode`](super::SelectedDecode).
    /// Returns `None` if this is a backend of the other phase or for other devices, or if `S` is
    /// another type.
    pub fn make<D: Device, S: 'static>(
        &self,
        device: &D,
        config: &LayerConfig,
    ) -> Option<Result<S>> {
        let maker = self.maker?.downcast_ref::<Maker<D, S>>()?;
        Some((maker.make)(device, config))
    }

    /// Returns true if this program contains the implementation of the backend.
    pub const fn is_implemented(&self) -> bool {
        self.maker.is_some()
    }

    /// Returns the origin of the backend, for messages: the path of its type. Without an
    /// implementation it is the provider.
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
