//! A device's memory, in which tensors lie.

use std::ops::Range;

use crate::Result;

/// A device's memory: what is owned, what is borrowed to read and to write, and the copies from and
/// to the host.
///
/// A handle is cheap to clone and refers to the same memory and stream.
pub trait Memory: Clone + Send + Sync + 'static {
    /// Memory that a holder owns.
    type Buffer: Send + Sync + 'static;
    /// Borrowed bytes, to read.
    type Bytes<'a>: Copy + Send + Sync;
    /// Borrowed bytes, to write: one holder at a time.
    type BytesMut<'a>: Send;

    /// `bytes` bytes of zeros, aligned for every dtype and for vector access.
    ///
    /// # Errors
    ///
    /// If the device does not have as much memory left.
    fn allocate(&self, bytes: usize) -> Result<Self::Buffer>;

    /// All bytes of a buffer, to read.
    fn bytes(buffer: &Self::Buffer) -> Self::Bytes<'_>;

    /// All bytes of a buffer, to write.
    fn bytes_mut(buffer: &mut Self::Buffer) -> Self::BytesMut<'_>;

    /// The number of bytes.
    fn byte_len(bytes: Self::Bytes<'_>) -> usize;

    /// The number of bytes.
    fn byte_len_mut(bytes: &Self::BytesMut<'_>) -> usize;

    /// The address of the first of the bytes, for its alignment.
    fn address(bytes: Self::Bytes<'_>) -> usize;

    /// The bytes of `range`.
    ///
    /// # Panics
    ///
    /// If the range does not lie within the bytes, as slicing does.
    fn byte_range(bytes: Self::Bytes<'_>, range: Range<usize>) -> Self::Bytes<'_>;

    /// The bytes before `at` and those from there on.
    ///
    /// # Panics
    ///
    /// If there are fewer than `at` bytes, as splitting a slice does.
    fn split_mut(bytes: Self::BytesMut<'_>, at: usize) -> (Self::BytesMut<'_>, Self::BytesMut<'_>);

    /// The same bytes with a shorter lifetime. The compiler does not shorten a lifetime by itself
    /// if a trait names the type; every implementation is just `bytes`.
    fn shorten<'short, 'long: 'short>(bytes: Self::Bytes<'long>) -> Self::Bytes<'short>;

    /// The same bytes with a shorter lifetime.
    fn reborrow<'a>(bytes: &'a mut Self::BytesMut<'_>) -> Self::BytesMut<'a>;

    /// The same bytes, read.
    fn freeze<'a>(bytes: &'a Self::BytesMut<'_>) -> Self::Bytes<'a>;

    /// Refuses bytes that this handle's work must not access: those of a handle whose work is not
    /// ordered with this one's, such as that of another stream. `field` is their name. A layer asks
    /// before it enqueues anything. A device that is done when a call returns refuses none.
    ///
    /// # Errors
    ///
    /// If the bytes belong to another handle.
    fn check_bytes(&self, field: &'static str, bytes: Self::Bytes<'_>) -> Result<()> {
        let _ = (field, bytes);
        Ok(())
    }

    /// Copies from the host. The source may be reused when this returns.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn upload(&self, from: &[u8], to: Self::BytesMut<'_>) -> Result<()>;

    /// Copies to the host, after everything enqueued before. This waits.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn download(&self, from: Self::Bytes<'_>, to: &mut [u8]) -> Result<()>;

    /// Waits for everything enqueued so far.
    ///
    /// # Errors
    ///
    /// If something enqueued before failed.
    fn synchronize(&self) -> Result<()>;
}
