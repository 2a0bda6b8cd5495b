//! Memory of a GPU: owned, borrowed, and lent by other owners.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaStream, DriverError, result};
use mla_runtime::tensor::Memory;
use mla_runtime::{Error, Result};

#[cfg(feature = "faults")]
use super::faults::{Faults, Operation};
use super::stream::{self, StreamId};
use super::{Cuda, failed};

/// Device memory that was allocated through a [`Cuda`]. Dropping it frees the memory.
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
        Bytes::at(self.address, self.len, Some(StreamId::of(&self.stream)))
    }

    /// Borrows all bytes for writing.
    pub fn bytes_mut(&mut self) -> BytesMut<'_> {
        BytesMut::of(self.bytes())
    }

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
    /// [`Cuda::stream`].
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
}

/// A view of device memory for writing.
pub struct BytesMut<'a> {
    bytes: Bytes<'a>,
    owner: PhantomData<&'a mut [u8]>,
}

impl<'a> BytesMut<'a> {
    const fn of(bytes: Bytes<'a>) -> Self {
        Self {
            bytes,
            owner: PhantomData,
        }
    }

    /// Views memory of another owner.
    ///
    /// # Safety
    ///
    /// The conditions of [`Bytes::from_raw`] hold, and nothing else reads the bytes either.
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self::of(Bytes::at(address, len, None))
    }

    /// Views memory that `stream` orders.
    ///
    /// # Safety
    ///
    /// The contract of [`from_raw`](Self::from_raw) holds on that stream.
    pub(super) const unsafe fn ordered(address: u64, len: usize, stream: StreamId) -> Self {
        Self::of(Bytes::at(address, len, Some(stream)))
    }

    /// Returns the device address.
    pub fn address(&self) -> u64 {
        self.bytes.address
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Memory for Cuda {
    type Buffer = Buffer;
    type Bytes<'a> = Bytes<'a>;
    type BytesMut<'a> = BytesMut<'a>;

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Buffer::zeroed(self.stream(), bytes, self.account())
    }

    fn bytes(buffer: &Buffer) -> Self::Bytes<'_> {
        buffer.bytes()
    }

    fn bytes_mut(buffer: &mut Buffer) -> Self::BytesMut<'_> {
        buffer.bytes_mut()
    }

    fn byte_len(bytes: Self::Bytes<'_>) -> usize {
        bytes.len()
    }

    fn byte_len_mut(bytes: &Self::BytesMut<'_>) -> usize {
        bytes.len()
    }

    fn address(bytes: Self::Bytes<'_>) -> usize {
        bytes.address() as usize
    }

    fn byte_range(bytes: Self::Bytes<'_>, range: Range<usize>) -> Self::Bytes<'_> {
        assert!(
            range.start <= range.end && range.end <= bytes.len,
            "{range:?} of {} bytes",
            bytes.len
        );
        let address = bytes.address + range.start as u64;
        Bytes::at(address, range.len(), bytes.stream)
    }

    fn split_mut(bytes: Self::BytesMut<'_>, at: usize) -> (Self::BytesMut<'_>, Self::BytesMut<'_>) {
        let (bytes, len) = (bytes.bytes, bytes.len());
        (
            BytesMut::of(Self::byte_range(bytes, 0..at)),
            BytesMut::of(Self::byte_range(bytes, at..len)),
        )
    }

    fn shorten<'short, 'long: 'short>(bytes: Self::Bytes<'long>) -> Self::Bytes<'short> {
        bytes
    }

    fn reborrow<'a>(bytes: &'a mut Self::BytesMut<'_>) -> Self::BytesMut<'a> {
        BytesMut::of(bytes.bytes)
    }

    fn freeze<'a>(bytes: &'a Self::BytesMut<'_>) -> Self::Bytes<'a> {
        bytes.bytes
    }

    fn check_bytes(&self, field: &'static str, bytes: Bytes<'_>) -> Result<()> {
        bytes
            .stream
            .map_or(Ok(()), |stream| self.check_stream(field, stream))
    }

    fn upload(&self, from: &[u8], to: BytesMut<'_>) -> Result<()> {
        same_length(from.len(), to.len())?;
        self.check_bytes("device bytes", to.bytes)?;
        if from.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "faults")]
        self.account().faults().reach(Operation::Upload)?;
        self.make_current()?;
        refuse_capture(self)?;
        // SAFETY: the destination is as long as the source. No graph is being captured, so the
        // driver has copied from ordinary host memory when the call returns. A copy from memory
        // that is registered with the driver may still be running, so it is waited for.
        unsafe { result::memcpy_htod_async(to.address(), from, self.stream().cu_stream()) }
            .map_err(failed("upload"))?;
        match is_registered(from) {
            true => self.synchronize(),
            false => Ok(()),
        }
    }

    fn download(&self, from: Bytes<'_>, to: &mut [u8]) -> Result<()> {
        same_length(to.len(), from.len())?;
        self.check_bytes("device bytes", from)?;
        if to.is_empty() {
            return self.synchronize();
        }
        self.make_current()?;
        // SAFETY: the source is as long as the destination. The destination is borrowed until the
        // copy is done.
        unsafe { result::memcpy_dtoh_async(to, from.address(), self.stream().cu_stream()) }
            .map_err(failed("download"))?;
        self.synchronize()
    }

    fn synchronize(&self) -> Result<()> {
        self.make_current()?;
        stream::synchronize(self.stream()).map_err(failed("synchronize"))
    }
}

/// Refuses a capture. A graph would read the host's memory at each replay, when that memory may be
/// freed.
fn refuse_capture(device: &Cuda) -> Result<()> {
    if !device.is_capturing()? {
        return Ok(());
    }
    Err(Error::Device {
        device: "cuda",
        operation: "upload",
        message:
            "given a stream that captures a graph, accepted one that does not: prepare a step \
                  before it is captured"
                .to_owned(),
    })
}

fn same_length(host: usize, device: usize) -> Result<()> {
    if host == device {
        Ok(())
    } else {
        Err(Error::argument(
            "host bytes",
            host,
            format!("the device's {device}"),
        ))
    }
}

// Returns true if the driver knows these host bytes. It may then copy from them without staging.
fn is_registered(bytes: &[u8]) -> bool {
    let mut kind = 0u32;
    let mut attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let mut value: *mut c_void = (&raw mut kind).cast();
    // SAFETY: the call asks for one attribute, which is 32 bits wide. It may ask about any address:
    // for one that the driver does not know, the attribute is 0.
    let status = unsafe {
        sys::cuPointerGetAttributes(1, &raw mut attribute, &raw mut value, bytes.as_ptr() as u64)
    };
    status == sys::CUresult::CUDA_SUCCESS && kind != 0
}
