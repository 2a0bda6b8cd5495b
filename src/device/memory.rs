//! Memory of a GPU: owned, borrowed, and lent by other owners.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaStream, DriverError, result};
use mla_runtime::{Error, Result};

use super::failed;
#[cfg(feature = "faults")]
use super::faults::{Faults, Operation};
use super::stream::{self, StreamId};

/// Device memory that was allocated through a [`Cuda`](super::Cuda). Dropping it frees the memory.
///
/// It is a plain allocation at one address for its whole life, as captured graphs, peer access and
/// NCCL need it. Freeing waits for the stream on which it was allocated. It cannot wait while the
/// stream captures a graph. Then the memory is not freed, and a `tracing` event says so.
pub struct Buffer {
    address: u64,
    len: usize,
    /// The size in bytes of the guard in front of the buffer, and of the one behind it.
    guard: usize,
    stream: Arc<CudaStream>,
    account: Allocated,
}

/// The number of bytes in a device's live buffers.
#[derive(Clone, Default)]
pub(crate) struct Allocated(Arc<Counts>);

#[derive(Default)]
struct Counts {
    bytes: AtomicU64,
    /// True while a conformance test wants new buffers to have guards.
    guards: AtomicBool,
    /// Addresses and lengths of live buffers with guards.
    guarded: Mutex<Vec<(u64, usize)>>,
    #[cfg(feature = "faults")]
    faults: Faults,
}

/// The size of a guard in bytes, which keeps the alignment of buffers.
pub(super) const GUARD: usize = 256;

/// The value of each byte of a guard.
pub(super) const GUARD_BYTE: u8 = 0xa5;

impl Allocated {
    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Turns guards around new buffers on or off.
    pub(super) fn guard(&self, on: bool) {
        self.0.guards.store(on, Ordering::Relaxed);
    }

    /// Returns the addresses and lengths of live buffers with guards.
    pub(super) fn guarded(&self) -> MutexGuard<'_, Vec<(u64, usize)>> {
        self.0
            .guarded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "faults")]
    pub(super) fn faults(&self) -> &Faults {
        &self.0.faults
    }
}

/// Makes the error of a failed allocation. Usually too little memory is free. Some drivers report a
/// size that no GPU has as an invalid value.
fn not_allocated(len: usize) -> impl FnOnce(DriverError) -> Error {
    move |error| match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY | CUresult::CUDA_ERROR_INVALID_VALUE => {
            Error::OutOfMemory {
                device: "cuda",
                bytes: len as u64,
                free: result::mem_get_info().ok().map(|(free, _)| free as u64),
            }
        }
        _ => failed("allocate")(error),
    }
}

impl Buffer {
    pub(crate) fn zeroed(
        stream: &Arc<CudaStream>,
        len: usize,
        account: &Allocated,
    ) -> Result<Self> {
        #[cfg(feature = "faults")]
        account.faults().reach(Operation::Allocation)?;
        stream::bind(stream.context()).map_err(failed("bind context"))?;
        let guard = match account.0.guards.load(Ordering::Relaxed) {
            true => GUARD,
            false => 0,
        };
        let bytes = len.max(1).saturating_add(2 * guard);
        // SAFETY: the context is bound. `cuMemAlloc` refuses 0 bytes, so an empty buffer has one
        // byte.
        let first = unsafe { result::malloc_sync(bytes) }.map_err(not_allocated(len))?;
        let buffer = Self {
            address: first + guard as u64,
            len,
            guard,
            stream: stream.clone(),
            account: account.clone(),
        };
        account.0.bytes.fetch_add(len as u64, Ordering::Relaxed);
        if guard > 0 {
            account.guarded().push((buffer.address, len));
            // SAFETY: the range is the allocation above, which no other code knows yet.
            unsafe { result::memset_d8_async(first, GUARD_BYTE, bytes, stream.cu_stream()) }
                .map_err(failed("write guards"))?;
        }
        if len > 0 {
            // SAFETY: the range lies in the allocation above, which no other code knows yet.
            unsafe { result::memset_d8_async(buffer.address, 0, len, stream.cu_stream()) }
                .map_err(failed("clear"))?;
        }
        Ok(buffer)
    }

    /// Returns the device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Borrows all bytes for reading.
    pub fn bytes(&self) -> Bytes<'_> {
        let Self { address, len, .. } = *self;
        Bytes::at(address, len, Some(StreamId::of(&self.stream)))
    }

    /// Borrows all bytes for writing.
    pub fn bytes_mut(&mut self) -> BytesMut<'_> {
        let Self { address, len, .. } = *self;
        BytesMut::at(address, len, Some(StreamId::of(&self.stream)))
    }
}

impl Buffer {
    /// Frees the memory once the stream has passed every launch that uses it. After an error the
    /// memory stays allocated, since it may be in use.
    fn free(&self) -> std::result::Result<(), DriverError> {
        stream::bind(self.stream.context())?;
        if stream::is_capturing(&self.stream)? {
            return Err(DriverError(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        }
        stream::synchronize(&self.stream)?;
        // SAFETY: the address came from `malloc_sync` and is freed once. The stream has passed
        // every launch that uses it.
        unsafe { result::free_sync(self.address - self.guard as u64) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.guard > 0 {
            let mut guarded = self.account.guarded();
            guarded.retain(|(address, _)| *address != self.address);
        }
        match self.free() {
            Ok(()) => {
                let bytes = &self.account.0.bytes;
                bytes.fetch_sub(self.len as u64, Ordering::Relaxed);
            }
            Err(error) => stream::log("free", &error),
        }
    }
}

/// A view of device memory for reading.
#[derive(Clone, Copy)]
pub struct Bytes<'a> {
    address: u64,
    len: usize,
    /// The stream that orders accesses, or `None` if the code that made the view orders them.
    stream: Option<StreamId>,
    owner: PhantomData<&'a [u8]>,
}

impl Bytes<'_> {
    const fn at(address: u64, len: usize, stream: Option<StreamId>) -> Self {
        Self {
            address,
            len,
            stream,
            owner: PhantomData,
        }
    }

    /// Views memory of another owner. The view belongs to no stream, so every device accepts it.
    ///
    /// # Safety
    ///
    /// `address` is that of `len` bytes of memory of the device that the bytes are used on. Until
    /// the stream has passed every launch that reads them, they stay allocated and nothing else
    /// writes them. This holds for each device that the bytes are used on. A caller that uses them
    /// on several devices orders their streams, by events through
    /// [`Cuda::stream`](super::Cuda::stream).
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self::at(address, len, None)
    }

    /// Views memory that `stream` orders.
    ///
    /// # Safety
    ///
    /// The contract of [`from_raw`](Self::from_raw) holds on that stream.
    pub(super) const unsafe fn ordered(address: u64, len: usize, stream: StreamId) -> Self {
        Self::at(address, len, Some(stream))
    }

    /// Returns the stream that orders accesses, or `None` if the code that made the view orders
    /// them.
    pub(super) fn stream(self) -> Option<StreamId> {
        self.stream
    }

    /// Returns the device address.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Returns the number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// True if there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    pub(super) fn range(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {} bytes",
            self.len
        );
        let address = self.address + range.start as u64;
        Self::at(address, range.len(), self.stream)
    }
}

/// A view of device memory for writing.
pub struct BytesMut<'a> {
    address: u64,
    len: usize,
    /// The stream that orders accesses, as in [`Bytes`].
    stream: Option<StreamId>,
    owner: PhantomData<&'a mut [u8]>,
}

impl BytesMut<'_> {
    const fn at(address: u64, len: usize, stream: Option<StreamId>) -> Self {
        Self {
            address,
            len,
            stream,
            owner: PhantomData,
        }
    }

    /// Views memory of another owner.
    ///
    /// # Safety
    ///
    /// The conditions of [`Bytes::from_raw`] hold, and nothing else reads the bytes either.
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self::at(address, len, None)
    }

    /// Views memory that `stream` orders.
    ///
    /// # Safety
    ///
    /// The contract of [`from_raw`](Self::from_raw) holds on that stream.
    pub(super) const unsafe fn ordered(address: u64, len: usize, stream: StreamId) -> Self {
        Self::at(address, len, Some(stream))
    }

    /// Returns the device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn split(self, at: usize) -> (Self, Self) {
        assert!(at <= self.len, "{at} of {} bytes", self.len);
        let behind = self.address + at as u64;
        (
            Self::at(self.address, at, self.stream),
            Self::at(behind, self.len - at, self.stream),
        )
    }

    pub(super) fn reborrow(&mut self) -> BytesMut<'_> {
        BytesMut::at(self.address, self.len, self.stream)
    }

    pub(super) fn freeze(&self) -> Bytes<'_> {
        Bytes::at(self.address, self.len, self.stream)
    }
}
