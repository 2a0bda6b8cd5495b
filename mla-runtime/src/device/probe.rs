//! Means of a device for conformance tests, beside its operations. No part of the public interface.

use super::Memory;
use crate::Result;

/// Kernels that overlap with those before and behind them, on a device whose kernels can.
pub trait Dependents<D: Memory>: Send + Sync {
    /// Copies in a kernel that lets those behind it begin at its own start, and that writes some
    /// hundred microseconds later.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn copy_late(&self, from: D::Bytes<'_>, to: D::BytesMut<'_>) -> Result<()>;

    /// Copies in a kernel that begins as early as the kernel before it allows. It waits for that
    /// kernel alone before it reads.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn copy_dependent(&self, from: D::Bytes<'_>, to: D::BytesMut<'_>) -> Result<()>;

    /// Copies in a kernel that begins as soon as the one before it lets it, waits for nothing, and
    /// lets those behind it begin at its own start, as some kernels from elsewhere do.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn copy_at_once(&self, from: D::Bytes<'_>, to: D::BytesMut<'_>) -> Result<()>;
}

/// Work that a graph is made of, and other inputs for it.
pub trait Replayed {
    /// Enqueues the work: what is captured.
    ///
    /// # Errors
    ///
    /// If the work fails.
    fn enqueue(&mut self) -> Result<()>;

    /// Writes other inputs to the same memory, between the capture and the replays.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn change(&mut self) -> Result<()>;
}

/// Memory in front of and behind each buffer of a device, which no work may write.
pub trait Guards {
    /// Turns guards on or off for buffers that are allocated from now on.
    fn guard(&self, on: bool);

    /// Returns the sum of the sizes that were asked for, over all live buffers with guards.
    fn guarded_bytes(&self) -> u64;

    /// Describes the first guard of a live buffer that something has written to; `None` if there is
    /// none.
    ///
    /// # Errors
    ///
    /// If the device fails.
    fn damage(&self) -> Result<Option<String>>;
}
