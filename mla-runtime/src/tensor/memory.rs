//! The memory of a device, which holds tensors.

use std::ops::Range;

use crate::Result;

/// The memory of a device: owned buffers, bytes borrowed for reading or writing, and copies from
/// and to the host.
///
/// A handle is cheap to clone and refers to the same memory and stream.
pub trait Memory: Clone + Send + Sync + 'static {
    /// Memory that a holder owns.
    type Buffer: Send + Sync + 'static;
    /// Borrowed bytes for reading.
    type Bytes<'a>: Copy + Send + Sync;
    /// Borrowed bytes for writing. Only one holder has them at a time.
    type BytesMut<'a>: Send;

    /// Allocates `bytes` bytes of zeros, aligned for every dtype and for vector access.
    ///
    /// # Errors
    ///
    /// If the device has too little free memory.
    fn allocate(&self, bytes: usize) -> Result<Self::Buffer>;

    /// All bytes of a buffer for reading.
    fn bytes(buffer: &Self::Buffer) -> Self::Bytes<'_>;

    /// All bytes of a buffer for writing.
    fn bytes_mut(buffer: &mut Self::Buffer) -> Self::BytesMut<'_>;

    /// The number of bytes.
    fn byte_len(bytes: Self::Bytes<'_>) -> usize;

    /// The number of bytes.
    fn byte_len_mut(bytes: &Self::BytesMut<'_>) -> usize;

    /// The address of the first byte, from which its alignment follows.
    fn address(bytes: Self::Bytes<'_>) -> usize;

    /// The bytes of `range`.
    ///
    /// # Panics
    ///
    /// If the range does not lie within the bytes.
    fn byte_range(bytes: Self::Bytes<'_>, range: Range<usize>) -> Self::Bytes<'_>;

    /// The bytes before `at`, and the bytes from there on.
    ///
    /// # Panics
    ///
    /// If there are fewer than `at` bytes.
    fn split_mut(bytes: Self::BytesMut<'_>, at: usize) -> (Self::BytesMut<'_>, Self::BytesMut<'_>);

    /// The same bytes with a shorter lifetime. The compiler does not shorten a lifetime by itself
    /// if a trait names the type. Every implementation just returns `bytes`.
    fn shorten<'short, 'long: 'short>(bytes: Self::Bytes<'long>) -> Self::Bytes<'short>;

    /// The same bytes with a shorter lifetime.
    fn reborrow<'a>(bytes: &'a mut Self::BytesMut<'_>) -> Self::BytesMut<'a>;

    /// The same bytes for reading.
    fn freeze<'a>(bytes: &'a Self::BytesMut<'_>) -> Self::Bytes<'a>;

    /// Refuses bytes that work of this handle must not access. Such bytes belong to a handle whose
    /// work is not ordered with this one's, for example that of another stream. The layer calls
    /// this before it enqueues anything. `field` is the name of the bytes. A device whose calls
    /// return only when they are done refuses nothing.
    ///
    /// # Errors
    ///
    /// If the bytes belong to another handle.
    fn check_bytes(&self, field: &'static str, bytes: Self::Bytes<'_>) -> Result<()> {
        let _ = (field, bytes);
        Ok(())
    }

    /// Copies from the host. The source may be reused as soon as the call returns.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn upload(&self, from: &[u8], to: Self::BytesMut<'_>) -> Result<()>;

    /// Waits for everything enqueued before, then copies to the host.
    ///
    /// # Errors
    ///
    /// If the lengths differ, or the device fails.
    fn download(&self, from: Self::Bytes<'_>, to: &mut [u8]) -> Result<()>;

    /// Waits for everything enqueued so far.
    ///
    /// # Errors
    ///
    /// If work that was enqueued before failed.
    fn synchronize(&self) -> Result<()>;
}
