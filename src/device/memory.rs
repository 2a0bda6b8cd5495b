//! Memory of a GPU: owned, borrowed, and lent by other owners.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop, result};
use mla_runtime::error::{Error, Result};

use super::{Cuda, failed};

/// Device memory that was allocated through a [`Cuda`], and is freed with it.
///
/// It is a plain allocation, at one address for its whole life: what a captured graph needs, and
/// peer access and NCCL as well. Freeing waits for the stream on which it was allocated.
pub struct Buffer {
    address: u64,
    len: usize,
    stream: Arc<CudaStream>,
    account: Account,
}

/// The bytes of the buffers that a device has handed out and not got back.
#[derive(Clone, Default)]
pub(super) struct Account(Arc<AtomicU64>);

impl Account {
    pub(super) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What an allocation's failure means: mostly, that too little memory is free.
fn not_allocated(len: usize) -> impl FnOnce(DriverError) -> Error {
    move |error| match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory {
            device: "cuda",
            bytes: len as u64,
            free: result::mem_get_info().ok().map(|(free, _)| free as u64),
        },
        _ => failed("allocate")(error),
    }
}

impl Buffer {
    pub(super) fn zeroed(stream: &Arc<CudaStream>, len: usize, account: &Account) -> Result<Self> {
        stream
            .context()
            .bind_to_thread()
            .map_err(failed("bind context"))?;
        // SAFETY: the context is bound; `cuMemAlloc` refuses 0 bytes, so an empty buffer has one.
        let address = unsafe { result::malloc_sync(len.max(1)) }.map_err(not_allocated(len))?;
        let buffer = Self {
            address,
            len,
            stream: stream.clone(),
            account: account.clone(),
        };
        account.0.fetch_add(len as u64, Ordering::Relaxed);
        // SAFETY: the range is the allocation above, which nobody else knows yet.
        unsafe { result::memset_d8_async(address, 0, len.max(1), stream.cu_stream()) }
            .map_err(failed("clear"))?;
        Ok(buffer)
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All bytes, to read.
    pub fn bytes(&self) -> Bytes<'_> {
        Bytes {
            address: self.address,
            len: self.len,
            owner: PhantomData,
        }
    }

    /// All bytes, to write.
    pub fn bytes_mut(&mut self) -> BytesMut<'_> {
        BytesMut {
            address: self.address,
            len: self.len,
            owner: PhantomData,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let context = self.stream.context();
        context.record_err(context.bind_to_thread());
        context.record_err(self.stream.synchronize());
        // SAFETY: the address came from `malloc_sync`, is freed once, and the stream has passed
        // every launch that was given it.
        context.record_err(unsafe { result::free_sync(self.address) });
        self.account.0.fetch_sub(self.len as u64, Ordering::Relaxed);
    }
}

/// Device memory that is read.
#[derive(Clone, Copy)]
pub struct Bytes<'a> {
    address: u64,
    len: usize,
    owner: PhantomData<&'a [u8]>,
}

impl Bytes<'_> {
    /// Memory of another owner.
    ///
    /// # Safety
    ///
    /// `address` is that of `len` bytes of memory of the device that the bytes are used on. Until
    /// the stream has passed every launch that reads them, they stay allocated and nothing else
    /// writes them.
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self {
            address,
            len,
            owner: PhantomData,
        }
    }

    /// The device address.
    pub fn address(self) -> u64 {
        self.address
    }

    /// The number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    pub(super) fn range(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {} bytes",
            self.len
        );
        Self {
            address: self.address + range.start as u64,
            len: range.len(),
            owner: PhantomData,
        }
    }
}

/// Device memory that is written.
pub struct BytesMut<'a> {
    address: u64,
    len: usize,
    owner: PhantomData<&'a mut [u8]>,
}

impl BytesMut<'_> {
    /// Memory of another owner.
    ///
    /// # Safety
    ///
    /// As [`Bytes::from_raw`], and nothing else reads the bytes either.
    pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
        Self {
            address,
            len,
            owner: PhantomData,
        }
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn split(self, at: usize) -> (Self, Self) {
        assert!(at <= self.len, "{at} of {} bytes", self.len);
        (
            Self {
                address: self.address,
                len: at,
                owner: PhantomData,
            },
            Self {
                address: self.address + at as u64,
                len: self.len - at,
                owner: PhantomData,
            },
        )
    }

    pub(super) fn reborrow(&mut self) -> BytesMut<'_> {
        BytesMut {
            address: self.address,
            len: self.len,
            owner: PhantomData,
        }
    }

    pub(super) fn freeze(&self) -> Bytes<'_> {
        Bytes {
            address: self.address,
            len: self.len,
            owner: PhantomData,
        }
    }
}

/// A slice of cudarc's, lent to be read. Where cudarc tracks events, the device's stream waits for
/// the slice's last write, and the slice's next writer waits for everything enqueued before this is
/// dropped.
pub struct Lent<'a> {
    bytes: Bytes<'a>,
    // Records its event when it is dropped, so after the launches that borrow from this.
    _guard: SyncOnDrop<'a>,
}

impl Lent<'_> {
    /// All bytes of the slice.
    pub fn bytes(&self) -> Bytes<'_> {
        self.bytes
    }
}

/// A slice of cudarc's, lent to be written; otherwise as [`Lent`].
pub struct LentMut<'a> {
    bytes: BytesMut<'a>,
    _guard: SyncOnDrop<'a>,
}

impl LentMut<'_> {
    /// All bytes of the slice, to write.
    pub fn bytes_mut(&mut self) -> BytesMut<'_> {
        self.bytes.reborrow()
    }

    /// All bytes of the slice, to read.
    pub fn bytes(&self) -> Bytes<'_> {
        self.bytes.freeze()
    }
}

impl Cuda {
    /// Borrows a slice or view of cudarc's, to read it.
    pub fn lend<'a, T>(&'a self, slice: &'a impl DevicePtr<T>) -> Lent<'a> {
        let len = slice.num_bytes();
        let (address, guard) = slice.device_ptr(self.stream());
        Lent {
            bytes: Bytes {
                address,
                len,
                owner: PhantomData,
            },
            _guard: guard,
        }
    }

    /// Borrows a slice or view of cudarc's, to write it.
    pub fn lend_mut<'a, T>(&'a self, slice: &'a mut impl DevicePtrMut<T>) -> LentMut<'a> {
        let len = slice.num_bytes();
        let (address, guard) = slice.device_ptr_mut(self.stream());
        LentMut {
            bytes: BytesMut {
                address,
                len,
                owner: PhantomData,
            },
            _guard: guard,
        }
    }
}
