//! Operations of a device for conformance tests only. They are no part of the public interface.

use super::Memory;
use crate::Result;

/// Kernels that overlap with earlier and later ones, on a device that supports that.
pub trait Dependents<D: Memory>: Send + Sync {
    /// Copies in a kernel that allows the kernels after it to begin at its own start, and that
    /// writes some hundred microseconds later.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn copy_late(&self, from: D::Bytes<'_>, to: D::BytesMut<'_>) -> Result<()>;

    /// Copies in a kernel that begins as early as the kernel before it allows. It waits only for
    /// that kernel before it reads.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn copy_dependent(&self, from: D::Bytes<'_>, to: D::BytesMut<'_>) -> Result<()>;

    /// Copies in a kernel that begins as early as the kernel before it allows, and waits for
    /// nothing. It allows the kernels after it to begin at its own start, as some third-party
    /// kernels do.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn copy_at_once(&self, from: D::Bytes<'_>, to: D::BytesMut<'_>) -> Result<()>;
}

/// Work that is captured into a graph, and other inputs for it.
pub trait Replayed {
    /// Enqueues the work that is captured.
    ///
    /// # Errors
    ///
    /// If the work fails.
    fn enqueue(&mut self) -> Result<()>;

    /// Writes other inputs to the same memory. Called between the capture and the replays.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn change(&mut self) -> Result<()>;
}

/// Memory before and after each buffer of a device, which no work may write.
pub trait Guards {
    /// Turns guards on or off for buffers that are allocated later.
    fn guard(&self, on: bool);

    /// Returns the sum of the requested sizes of all live buffers with guards.
    fn guarded_bytes(&self) -> u64;

    /// Describes the first guard of a live buffer that was written to; `None` if there is none.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn damage(&self) -> Result<Option<String>>;
}
