//! Memory of the CPU device.

use bytemuck::Pod;

use mla_runtime::{Error, Result};

// The unit of allocation. For its alignment, the system provides pages of zeros that take no memory
// until they are written. For a larger alignment, it would write the zeros at once.
type Unit = u128;

/// Owned bytes, aligned for every dtype and every vector register. They are zero when allocated.
pub struct Buffer {
    units: Box<[Unit]>,
    // The offset of the first byte, at a multiple of the alignment.
    start: usize,
    len: usize,
}

impl Buffer {
    /// The alignment in bytes.
    pub const ALIGNMENT: usize = 64;

    /// Allocates `len` bytes of zeros.
    ///
    /// # Errors
    ///
    /// If the allocator refuses the memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        let bytes = len.saturating_add(Self::ALIGNMENT);
        let units = bytemuck::try_zeroed_slice_box::<Unit>(bytes.div_ceil(size_of::<Unit>()))
            .map_err(|()| out_of_memory(len))?;
        let start = units.as_ptr().addr().wrapping_neg() % Self::ALIGNMENT;
        Ok(Self { units, start, len })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Borrows the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.units)[self.start..][..self.len]
    }

    /// Borrows the bytes for writing.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.units)[self.start..][..self.len]
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// Refuses rows that are too long to allocate, because each thread has a copy of a row as f32. A
/// row may be very wide if there are no rows, or if all of its elements are the same one in memory.
pub(crate) fn check_row(width: usize) -> Result<()> {
    let mut row = Vec::<f32>::new();
    let refused = row.try_reserve_exact(width);
    refused.map_err(|_| out_of_memory(width.saturating_mul(size_of::<f32>())))
}

pub(crate) fn out_of_memory(bytes: usize) -> Error {
    Error::OutOfMemory {
        device: "cpu",
        bytes: bytes as u64,
        free: None,
    }
}

// Scratch memory of a kernel: elements of one type with the alignment of a buffer. It may be empty.
pub(crate) struct Scratch<T> {
    buffer: Buffer,
    element: std::marker::PhantomData<T>,
}

impl<T> Default for Scratch<T> {
    fn default() -> Self {
        Self {
            buffer: Buffer {
                units: Box::default(),
                start: 0,
                len: 0,
            },
            element: std::marker::PhantomData,
        }
    }
}

impl<T: Pod> Scratch<T> {
    pub(crate) fn new(len: usize) -> Result<Self> {
        // The allocation refuses a saturated size.
        let bytes = len.saturating_mul(size_of::<T>());
        Ok(Self {
            buffer: Buffer::zeroed(bytes)?,
            element: std::marker::PhantomData,
        })
    }

    // Grows to `len` elements if there are fewer. The contents are lost then.
    pub(crate) fn reserve(&mut self, len: usize) -> Result<()> {
        if self.buffer.len() / size_of::<T>() < len {
            *self = Self::new(len)?;
        }
        Ok(())
    }
}

impl<T: Pod> std::ops::Deref for Scratch<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(self.buffer.as_bytes())
    }
}

impl<T: Pod> std::ops::DerefMut for Scratch<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.buffer.as_bytes_mut())
    }
}
