//! Typed access to borrowed tensors, and typed slices as tensors.

use std::marker::PhantomData;

use bytemuck::{Pod, PodCastError};
use multiversion::multiversion;

use super::Cpu;
use mla_runtime::model::{DType, Element};
use mla_runtime::tensor::{ArrayRef, LseConvention, LseMut, LseRef, TensorMut, TensorRef};
use mla_runtime::{Error, Result};

/// The elements of a tensor for reading.
#[derive(Clone, Copy)]
pub(crate) struct Elements<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) shape: [usize; 3],
    pub(crate) strides: [usize; 3],
}

impl<'a, T: Element> Elements<'a, T> {
    pub(crate) fn of(field: &'static str, tensor: &TensorRef<'a, Cpu>) -> Result<Self> {
        debug_assert_eq!(tensor.dtype(), T::DTYPE);
        Ok(Self {
            data: typed(field, tensor.bytes())?,
            shape: tensor.shape(),
            strides: tensor.layout().strides,
        })
    }

    pub(crate) fn at(&self, i: usize, j: usize) -> usize {
        i * self.strides[0] + j * self.strides[1]
    }

    // Returns the first element of `[i, j, 0..]`.
    pub(crate) fn first(&self, i: usize, j: usize) -> T {
        self.data[self.at(i, j)]
    }

    // Returns the columns from `start` on.
    pub(crate) fn columns(&self, start: usize, count: usize) -> Self {
        let offset = (start * self.strides[2]).min(self.data.len());
        Self {
            data: &self.data[offset..],
            shape: [self.shape[0], self.shape[1], count],
            strides: self.strides,
        }
    }

    // Copies `[i, j, 0..]` into `row` and converts the elements.
    pub(crate) fn read_row<S: Lane>(&self, i: usize, j: usize, row: &mut [S]) {
        if self.shape[2] == 0 {
            return;
        }
        let from = &self.data[self.at(i, j)..];
        if self.strides[2] == 1 || self.shape[2] == 1 {
            S::convert(&from[..self.shape[2]], row);
        } else {
            for (k, to) in row.iter_mut().take(self.shape[2]).enumerate() {
                *to = S::from_f32(from[k * self.strides[2]].to_f32());
            }
        }
    }
}

/// Rows in one tensor, or in two whose columns follow each other.
pub(crate) struct Parts<'a, T> {
    pub(crate) first: Elements<'a, T>,
    pub(crate) second: Option<Elements<'a, T>>,
}

impl<T: Element> Parts<'_, T> {
    pub(crate) fn read_row<S: Lane>(&self, i: usize, j: usize, row: &mut [S]) {
        let Some(second) = &self.second else {
            return self.first.read_row(i, j, row);
        };
        let (row, rest) = row.split_at_mut(self.first.shape[2]);
        self.first.read_row(i, j, row);
        second.read_row(i, j, rest);
    }
}

/// A type in which kernels compute: f32, or bf16 if the processor can multiply it.
pub(crate) trait Lane: Element {
    /// Converts the elements of `from`.
    fn convert<T: Element>(from: &[T], to: &mut [Self]);

    /// Decodes e4m3 codes and multiplies by `scale`.
    fn decode_fp8(from: &[u8], scale: f32, to: &mut [Self]);
}

/// Converts a slice to f32 exactly.
pub(crate) fn widen<T: Element>(from: &[T], to: &mut [f32]) {
    use half::slice::HalfFloatSliceExt;
    let to = &mut to[..from.len()];
    match T::DTYPE {
        DType::F32 => to.copy_from_slice(bytemuck::cast_slice(from)),
        // The crate `half` uses a conversion instruction if the processor has one.
        DType::F16 => bytemuck::cast_slice::<T, half::f16>(from).convert_to_f32_slice(to),
        DType::BF16 => {
            for (to, from) in to.iter_mut().zip(bytemuck::cast_slice::<T, u16>(from)) {
                *to = f32::from_bits(u32::from(*from) << 16);
            }
        }
    }
}

/// Converts a slice from f32, rounded to nearest, ties to even.
pub(crate) fn narrow<T: Element>(from: &[f32], to: &mut [T]) {
    use half::slice::HalfFloatSliceExt;
    let from = &from[..to.len()];
    match T::DTYPE {
        DType::F32 => to.copy_from_slice(bytemuck::cast_slice(from)),
        DType::F16 => bytemuck::cast_slice_mut::<T, half::f16>(to).convert_from_f32_slice(from),
        DType::BF16 => narrow_bf16(from, bytemuck::cast_slice_mut(to)),
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2"))]
fn narrow_bf16(from: &[f32], to: &mut [u16]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = bf16_bits(*from);
    }
}

// The rounding has no branch, so that it vectorises. A NaN stays a NaN and keeps its sign.
#[inline(always)]
pub(crate) fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = (bits >> 16) as u16 | 0x40;
    if value.is_nan() { nan } else { rounded }
}

/// A tensor to which several threads write, each to its own elements.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a, T> {
    data: *mut T,
    len: usize,
    pub(crate) shape: [usize; 3],
    pub(crate) strides: [usize; 3],
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer represents a `&mut [T]`, which may be sent to another thread if `T` may.
// Every access is through `slice`, `read` or `write`, whose callers promise that no two threads
// access the same element in conflict.
unsafe impl<T: Send> Send for Places<'_, T> {}
// SAFETY: the contracts of `slice`, `read` and `write`, as for `Send`.
unsafe impl<T: Send> Sync for Places<'_, T> {}

impl<'a, T: Pod> Places<'a, T> {
    pub(crate) fn of(field: &'static str, tensor: TensorMut<'a, Cpu>) -> Result<Self> {
        debug_assert_eq!(tensor.dtype().bytes(), size_of::<T>());
        let (shape, strides) = (tensor.shape(), tensor.layout().strides);
        Ok(Self::new(
            typed_mut(field, tensor.into_bytes())?,
            shape,
            strides,
        ))
    }

    pub(crate) fn new(data: &'a mut [T], shape: [usize; 3], strides: [usize; 3]) -> Self {
        Self {
            len: data.len(),
            data: data.as_mut_ptr(),
            shape,
            strides,
            borrow: PhantomData,
        }
    }

    pub(crate) fn at(&self, i: usize, j: usize, k: usize) -> usize {
        i * self.strides[0] + j * self.strides[1] + k * self.strides[2]
    }

    /// Returns the `len` elements from `offset` on.
    ///
    /// # Panics
    ///
    /// If they are out of bounds.
    ///
    /// # Safety
    ///
    /// While the slice lives, nothing else reads or writes these elements.
    #[expect(clippy::mut_from_ref, reason = "the caller promises exclusive places")]
    pub(crate) unsafe fn slice(&self, offset: usize, len: usize) -> &mut [T] {
        assert!(offset <= self.len && len <= self.len - offset);
        // SAFETY: the contract of `from_raw_parts_mut`: in bounds of the slice that `new` was
        // given, which is borrowed for 'a; exclusive by this function's own contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(offset), len) }
    }

    /// Writes one element.
    ///
    /// # Panics
    ///
    /// If it is out of bounds.
    ///
    /// # Safety
    ///
    /// Nothing else reads or writes the element at the same time.
    pub(crate) unsafe fn write(&self, offset: usize, value: T) {
        assert!(offset < self.len);
        // SAFETY: the contract of the pointer's `write`: in bounds, as asserted; exclusive by this
        // function's own contract.
        unsafe { self.data.add(offset).write(value) }
    }

    /// Reads one element.
    ///
    /// # Panics
    ///
    /// If it is out of bounds.
    ///
    /// # Safety
    ///
    /// Nothing else writes the element at the same time.
    pub(crate) unsafe fn read(&self, offset: usize) -> T {
        assert!(offset < self.len);
        // SAFETY: the contract of the pointer's `read`: in bounds, as asserted; by this function's
        // own contract, nothing writes it.
        unsafe { self.data.add(offset).read() }
    }
}

impl<'a, T: Element> Places<'a, T> {
    // Returns the columns from `start` on.
    pub(crate) fn columns(&self, start: usize, count: usize) -> Self {
        let offset = (start * self.strides[2]).min(self.len);
        Self {
            // SAFETY: at most the end of the elements.
            data: unsafe { self.data.add(offset) },
            len: self.len - offset,
            shape: [self.shape[0], self.shape[1], count],
            strides: self.strides,
            borrow: PhantomData,
        }
    }

    /// Copies `[i, j, 0..]` into `row` and converts the elements.
    ///
    /// # Safety
    ///
    /// Nothing else writes these elements at the same time.
    pub(crate) unsafe fn read_row(&self, i: usize, j: usize, row: &mut [f32]) {
        let offset = self.at(i, j, 0);
        if self.strides[2] == 1 {
            // SAFETY: the contract of `slice`, which is this function's own.
            widen(unsafe { self.slice(offset, self.shape[2]) }, row);
        } else {
            for (k, value) in row.iter_mut().take(self.shape[2]).enumerate() {
                // SAFETY: the contract of `read`, which is this function's own.
                *value = unsafe { self.read(offset + k * self.strides[2]) }.to_f32();
            }
        }
    }

    /// Rounds `row` and writes it to `[i, j, 0..]`.
    ///
    /// # Safety
    ///
    /// Nothing else reads or writes these elements at the same time.
    pub(crate) unsafe fn write_row(&self, i: usize, j: usize, row: &[f32]) {
        let width = self.shape[2];
        let offset = self.at(i, j, 0);
        if width == 0 {
            return;
        }
        if self.strides[2] == 1 || width == 1 {
            // SAFETY: the contract of `slice`, which is this function's own.
            narrow(row, unsafe { self.slice(offset, width) });
        } else {
            for (k, value) in row.iter().take(width).enumerate() {
                // SAFETY: the contract of `write`, which is this function's own.
                unsafe { self.write(offset + k * self.strides[2], T::from_f32(*value)) };
            }
        }
    }
}

/// Views a log-sum-exp as `[heads, tokens, 1]`, in either order in memory.
pub(crate) fn lse_elements<'a, C: LseConvention>(
    lse: &LseRef<'a, Cpu, C>,
) -> Result<Elements<'a, f32>> {
    let layout = lse.layout();
    Ok(Elements {
        data: typed("lse", lse.bytes())?,
        shape: [layout.heads, layout.tokens, 1],
        strides: match C::HEADS_FIRST {
            true => [layout.row_stride, 1, 1],
            false => [1, layout.row_stride, 1],
        },
    })
}

/// Returns the places of a natural log-sum-exp, as `[heads, tokens, 1]`.
pub(crate) fn lse_places<'a>(lse: LseMut<'a, Cpu>) -> Result<Places<'a, f32>> {
    let layout = lse.layout();
    let data = typed_mut("lse", lse.into_bytes())?;
    let shape = [layout.heads, layout.tokens, 1];
    Ok(Places::new(data, shape, [layout.row_stride, 1, 1]))
}

/// Returns the elements of an array.
pub(crate) fn scalars<'a, T: bytemuck::Pod>(
    field: &'static str,
    array: &ArrayRef<'a, Cpu, T>,
) -> Result<&'a [T]> {
    Ok(&typed(field, array.bytes())?[..array.len()])
}

// Views bytes as elements. An incomplete element at the end is cut off.
fn typed<'a, T: Pod>(field: &'static str, bytes: &'a [u8]) -> Result<&'a [T]> {
    if bytes.is_empty() {
        return Ok(&[]);
    }
    let whole = bytes.len() / size_of::<T>() * size_of::<T>();
    bytemuck::try_cast_slice(&bytes[..whole]).map_err(|error| misaligned::<T>(field, error))
}

// Views bytes as elements for writing, in the same way.
pub(crate) fn typed_mut<'a, T: Pod>(
    field: &'static str,
    bytes: &'a mut [u8],
) -> Result<&'a mut [T]> {
    if bytes.is_empty() {
        return Ok(&mut []);
    }
    let whole = bytes.len() / size_of::<T>() * size_of::<T>();
    bytemuck::try_cast_slice_mut(&mut bytes[..whole]).map_err(|error| misaligned::<T>(field, error))
}

#[cold]
fn misaligned<T>(field: &'static str, error: PodCastError) -> Error {
    Error::argument(
        field,
        format!("bytes that cannot be read as elements ({error})"),
        format!("bytes aligned to {}", align_of::<T>()),
    )
}

/// Evaluates an expression in which `$t` is the Rust type of a dtype.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            mla_runtime::model::DType::F32 => {
                type $t = f32;
                $body
            }
            mla_runtime::model::DType::F16 => {
                type $t = half::f16;
                $body
            }
            mla_runtime::model::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
        }
    };
}
pub(crate) use with_element;
