//! Views of memory that the host can access. They are made from typed slices without a copy.
//! Elements are read and written one at a time, with any dtype and alignment. They serve simple
//! backends and tests.

use bytemuck::Pod;

use crate::Result;
use crate::model::{DType, Element};
use crate::tensor::{ArrayRef, Layout, LseLayout, LseMut, LseRef, Memory, TensorMut, TensorRef};

/// The types of borrowed bytes, as slices, for an `impl` of [`Memory`](crate::tensor::Memory) for a
/// device in host memory. The rest of the `impl` consists of the buffer, its allocation and
/// borrows, and the copies.
#[macro_export]
macro_rules! host_bytes {
    () => {
        type Bytes<'a> = &'a [u8];
        type BytesMut<'a> = &'a mut [u8];

        fn byte_len(bytes: Self::Bytes<'_>) -> usize {
            bytes.len()
        }

        fn byte_len_mut(bytes: &Self::BytesMut<'_>) -> usize {
            bytes.len()
        }

        fn address(bytes: Self::Bytes<'_>) -> usize {
            bytes.as_ptr().addr()
        }

        fn byte_range(bytes: Self::Bytes<'_>, range: ::core::ops::Range<usize>) -> Self::Bytes<'_> {
            &bytes[range]
        }

        fn split_mut(
            bytes: Self::BytesMut<'_>,
            at: usize,
        ) -> (Self::BytesMut<'_>, Self::BytesMut<'_>) {
            bytes.split_at_mut(at)
        }

        fn shorten<'short, 'long: 'short>(bytes: Self::Bytes<'long>) -> Self::Bytes<'short> {
            bytes
        }

        fn reborrow<'a>(bytes: &'a mut Self::BytesMut<'_>) -> Self::BytesMut<'a> {
            bytes
        }

        fn freeze<'a>(bytes: &'a Self::BytesMut<'_>) -> Self::Bytes<'a> {
            bytes
        }
    };
}

impl<'a, D: Memory<Bytes<'a> = &'a [u8]>> TensorRef<'a, D> {
    /// A view of a slice, row-major without gaps. Nothing is copied.
    ///
    /// # Errors
    ///
    /// If the shape has more elements than the slice.
    pub fn from_slice<T: Element>(slice: &'a [T], shape: [usize; 3]) -> Result<Self> {
        Self::new(
            bytemuck::cast_slice(slice),
            Layout::contiguous(T::DTYPE, shape),
        )
    }
}

impl<'a, D: Memory<BytesMut<'a> = &'a mut [u8]>> TensorMut<'a, D> {
    /// A view of a slice, row-major without gaps. Nothing is copied.
    ///
    /// # Errors
    ///
    /// If the shape has more elements than the slice.
    pub fn from_slice<T: Element>(slice: &'a mut [T], shape: [usize; 3]) -> Result<Self> {
        Self::new(
            bytemuck::cast_slice_mut(slice),
            Layout::contiguous(T::DTYPE, shape),
        )
    }
}

impl<'a, D: Memory<Bytes<'a> = &'a [u8]>, T: Pod> ArrayRef<'a, D, T> {
    /// A view of the whole slice. Nothing is copied.
    pub fn from_slice(slice: &'a [T]) -> Self {
        match Self::new(bytemuck::cast_slice(slice), slice.len()) {
            Ok(array) => array,
            Err(_) => unreachable!("a slice has as many elements as it has"),
        }
    }
}

impl<'a, D: Memory<Bytes<'a> = &'a [u8]>> LseRef<'a, D> {
    /// A view of a slice as `[heads, tokens]` without gaps. Nothing is copied.
    ///
    /// # Errors
    ///
    /// If the slice has fewer elements than that.
    pub fn from_slice(slice: &'a [f32], heads: usize, tokens: usize) -> Result<Self> {
        Self::new(
            bytemuck::cast_slice(slice),
            LseLayout::heads_first(heads, tokens),
        )
    }
}

impl<'a, D: Memory<BytesMut<'a> = &'a mut [u8]>> LseMut<'a, D> {
    /// A view of a slice as `[heads, tokens]` without gaps. Nothing is copied.
    ///
    /// # Errors
    ///
    /// If the slice has fewer elements than that.
    pub fn from_slice(slice: &'a mut [f32], heads: usize, tokens: usize) -> Result<Self> {
        Self::new(
            bytemuck::cast_slice_mut(slice),
            LseLayout::heads_first(heads, tokens),
        )
    }
}

fn offset(layout: &Layout, index: [usize; 3]) -> usize {
    let inside = index
        .iter()
        .zip(layout.shape)
        .all(|(i, extent)| *i < extent);
    assert!(
        inside,
        "index: given {index:?}, accepted below {:?}",
        layout.shape
    );
    let elements = index
        .iter()
        .zip(layout.strides)
        .map(|(i, stride)| i * stride);
    elements.sum::<usize>() * layout.dtype.bytes()
}

fn get<T: Element>(bytes: &[u8], at: usize) -> f32 {
    bytemuck::pod_read_unaligned::<T>(&bytes[at..at + size_of::<T>()]).to_f32()
}

fn put<T: Element>(bytes: &mut [u8], at: usize, value: f32) {
    bytes[at..at + size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&T::from_f32(value)));
}

impl<'a, D: Memory<Bytes<'a> = &'a [u8]>> TensorRef<'a, D> {
    /// Reads one element.
    ///
    /// # Panics
    ///
    /// If the index lies outside the shape.
    pub fn at(&self, index: [usize; 3]) -> f32 {
        let at = offset(self.layout(), index);
        match self.dtype() {
            DType::F32 => get::<f32>(self.bytes(), at),
            DType::F16 => get::<half::f16>(self.bytes(), at),
            DType::BF16 => get::<half::bf16>(self.bytes(), at),
        }
    }
}

impl<'a, D: Memory<BytesMut<'a> = &'a mut [u8]>> TensorMut<'a, D> {
    /// Rounds a value and writes it to one element.
    ///
    /// # Panics
    ///
    /// If the index lies outside the shape.
    pub fn set(&mut self, index: [usize; 3], value: f32) {
        let at = offset(self.layout(), index);
        match self.dtype() {
            DType::F32 => put::<f32>(self.bytes, at, value),
            DType::F16 => put::<half::f16>(self.bytes, at, value),
            DType::BF16 => put::<half::bf16>(self.bytes, at, value),
        }
    }
}

impl<'a, D: Memory<Bytes<'a> = &'a [u8]>, T: Pod> ArrayRef<'a, D, T> {
    /// Reads one element.
    ///
    /// # Panics
    ///
    /// If the index lies outside the array.
    pub fn at(&self, index: usize) -> T {
        bytemuck::pod_read_unaligned(&self.bytes()[index * size_of::<T>()..][..size_of::<T>()])
    }
}

impl<'a, D: Memory<BytesMut<'a> = &'a mut [u8]>> LseMut<'a, D> {
    /// Writes one element.
    ///
    /// # Panics
    ///
    /// If there is no such head or token.
    pub fn set(&mut self, head: usize, token: usize, value: f32) {
        let layout = self.layout();
        assert!(
            head < layout.heads && token < layout.tokens,
            "index: given [{head}, {token}], accepted below {layout:?}"
        );
        let at = 4 * (head * layout.row_stride + token);
        put::<f32>(self.bytes, at, value);
    }
}
