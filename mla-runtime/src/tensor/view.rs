//! Borrowed tensors in a device's memory: bytes, a dtype, and three axes with strides.
//!
//! Attention passes only tensors of at most three axes, so the rank is fixed: `[tokens, heads,
//! width]` for queries and outputs, `[tokens, 1, width]` for rows without heads, `[batch, rows,
//! columns]` for products. Strides count elements. A view is checked once, when it is made: every
//! index within its shape lies within its bytes.

use std::any::type_name;
use std::fmt;
use std::marker::PhantomData;

use bytemuck::Pod;

use crate::model::DType;
use crate::setters::copies;
use crate::tensor::Memory;
use crate::{Error, Result, check_range, named};

/// The location of each element: the dtype, the shape, and the strides in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// The element type.
    pub dtype: DType,
    /// The extent of each axis.
    pub shape: [usize; 3],
    /// The distances between neighbours along each axis, in elements.
    pub strides: [usize; 3],
}

impl Layout {
    /// Row-major without gaps.
    pub const fn contiguous(dtype: DType, shape: [usize; 3]) -> Self {
        Self {
            dtype,
            shape,
            // A saturated length exceeds any memory, so no view is made with it.
            strides: [shape[1].saturating_mul(shape[2]), shape[2], 1],
        }
    }

    /// The number of elements; `usize::MAX` if there are more.
    pub const fn elements(&self) -> usize {
        let [tokens, heads, width] = self.shape;
        if tokens == 0 || heads == 0 || width == 0 {
            return 0;
        }
        tokens.saturating_mul(heads).saturating_mul(width)
    }

    // An axis with at most one index may have any stride, and so may every axis of a tensor without
    // elements. Such a stride is replaced by that of a tensor without gaps, because kernels and
    // libraries refuse some others.
    fn settled(mut self) -> Self {
        let gapless = Self::contiguous(self.dtype, self.shape);
        let is_empty = self.shape.contains(&0);
        for axis in 0..3 {
            if is_empty || self.shape[axis] == 1 {
                self.strides[axis] = gapless.strides[axis];
            }
        }
        self
    }

    /// The bytes from the first element to the end of the last, or `None` if that overflows.
    pub fn span_bytes(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last = 0usize;
        for (extent, stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add((extent - 1).checked_mul(*stride)?)?;
        }
        last.checked_add(1)?.checked_mul(self.dtype.bytes())
    }

    /// Returns true if neighbours along the last axis are adjacent in memory. Most kernels require
    /// that.
    pub const fn has_unit_columns(&self) -> bool {
        self.strides[2] == 1 || self.shape[2] <= 1
    }

    /// Checks the dtype and the shape that a backend relies on.
    ///
    /// # Errors
    ///
    /// If the dtype or the shape differs. The error calls the tensor `field`.
    pub fn require(&self, field: &'static str, dtype: DType, shape: [usize; 3]) -> Result<()> {
        if self.dtype == dtype && self.shape == shape {
            return Ok(());
        }
        Err(Error::argument(field, self, format!("{dtype} {shape:?}")))
    }

    // In a broadcast input two indices may name one element. In an output that would be a race.
    // With the axes of an output sorted by stride, each axis must therefore step over the whole
    // extent of the smaller ones.
    fn is_injective(&self) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let mut axes = [0, 1, 2];
        axes.sort_unstable_by_key(|axis| self.strides[*axis]);
        let mut reach = 0;
        for axis in axes {
            if self.shape[axis] > 1 && self.strides[axis] <= reach {
                return false;
            }
            reach += (self.shape[axis] - 1) * self.strides[axis];
        }
        true
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {:?} strides {:?}",
            self.dtype, self.shape, self.strides
        )
    }
}

/// Refuses memory whose first byte is not at a multiple of `alignment` bytes. Memory without bytes
/// may be anywhere.
pub(crate) fn check_alignment<D: Memory>(bytes: D::Bytes<'_>, alignment: usize) -> Result<()> {
    let address = D::address(bytes);
    if D::byte_len(bytes) == 0 || address.is_multiple_of(alignment) {
        return Ok(());
    }
    Err(Error::argument(
        "address",
        format!(
            "{} bytes past a multiple of {alignment}",
            address % alignment
        ),
        format!("a multiple of {alignment} bytes"),
    ))
}

fn check_span(layout: &Layout, available: usize) -> Result<()> {
    match layout.span_bytes() {
        Some(bytes) if bytes <= available => Ok(()),
        _ => Err(Error::argument(
            "layout",
            layout,
            format!("one that lies within {available} bytes"),
        )),
    }
}

/// A view of a tensor for reading.
pub struct TensorRef<'a, D: Memory> {
    bytes: D::Bytes<'a>,
    layout: Layout,
    constant: bool,
}

copies!([D: Memory] TensorRef<'_, D>);

impl<D: Memory> fmt::Debug for TensorRef<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorRef({})", self.layout)
    }
}

impl<'a, D: Memory> TensorRef<'a, D> {
    /// A view whose first element is at the first of `bytes`. An axis of at most one index may have
    /// any stride. [`named`](crate::named) adds the name of the tensor to an error.
    ///
    /// # Errors
    ///
    /// If an element of the layout lies outside `bytes`, or if `bytes` is not aligned for the
    /// dtype.
    pub fn new(bytes: D::Bytes<'a>, layout: Layout) -> Result<Self> {
        check_span(&layout, D::byte_len(bytes))?;
        check_alignment::<D>(bytes, layout.dtype.bytes())?;
        let layout = layout.settled();
        Ok(Self {
            bytes,
            layout,
            constant: false,
        })
    }

    /// Marks the elements as constant: no work that is already enqueued writes them, so a device
    /// may read them before earlier work is done. The call waits for the device. It is meant for
    /// the time when weights are loaded. Views made from the result are constant, too.
    ///
    /// # Errors
    ///
    /// If the memory does not belong to this device, if the device fails, or if it cannot wait
    /// because it captures a graph.
    pub fn constant(self, device: &D) -> Result<Self> {
        device.check_bytes("constant", self.bytes)?;
        device.synchronize()?;
        // SAFETY: everything enqueued is done, and for the lifetime of the borrow no other code may
        // enqueue a write of these bytes.
        Ok(unsafe { self.assume_constant() })
    }

    /// Marks a view as [`constant`](Self::constant) does, but without waiting. This serves views
    /// that are made anew for each call.
    ///
    /// # Safety
    ///
    /// No work that is enqueued and not yet done writes the elements.
    #[must_use]
    pub unsafe fn assume_constant(mut self) -> Self {
        self.constant = true;
        self
    }

    /// Returns true if no enqueued work writes the elements; see [`constant`](Self::constant).
    pub fn is_constant(&self) -> bool {
        self.constant
    }

    /// The bytes, beginning at the first element. They may continue beyond the last one.
    pub fn bytes(&self) -> D::Bytes<'a> {
        self.bytes
    }

    /// The dtype, shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The extent of each axis.
    pub fn shape(&self) -> [usize; 3] {
        self.layout.shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// The same view with a shorter lifetime.
    pub fn shorten<'short>(&self) -> TensorRef<'short, D>
    where
        'a: 'short,
    {
        TensorRef {
            bytes: D::shorten(self.bytes),
            layout: self.layout,
            constant: self.constant,
        }
    }

    /// Another view of the same bytes.
    pub(crate) fn with_layout(self, layout: Layout) -> Result<Self> {
        let view = Self::new(self.bytes, layout)?;
        Ok(Self {
            constant: self.constant,
            ..view
        })
    }

    /// Checks the properties that a kernel needs if it reads `alignment` bytes at a time. Rows must
    /// have no gaps and must begin at multiples of `alignment`. A row must not be repeated by a
    /// stride of 0. An alignment of 1 requires nothing, and a tensor without elements has no rows.
    ///
    /// # Errors
    ///
    /// If a property does not hold. The error calls the tensor `field`.
    pub fn require_aligned(&self, field: &'static str, alignment: usize) -> Result<()> {
        if alignment <= 1 || self.layout.elements() == 0 {
            return Ok(());
        }
        let Layout { shape, strides, .. } = self.layout;
        let apart = |axis: usize| {
            // A single row may have any stride, since no second row follows.
            if shape[axis] == 1 {
                return true;
            }
            let bytes = strides[axis] * self.dtype().bytes();
            bytes > 0 && bytes.is_multiple_of(alignment)
        };
        if !(self.layout.has_unit_columns() && apart(0) && apart(1)) {
            let accepted = format!(
                "a last axis of stride 1, and rows apart by multiples of {alignment} bytes"
            );
            return Err(Error::argument(field, self.layout, accepted));
        }
        named(field, check_alignment::<D>(self.bytes, alignment))
    }

    /// The part of the tensor with `range` along `axis`.
    ///
    /// # Errors
    ///
    /// If the range does not lie within the axis.
    ///
    /// # Panics
    ///
    /// If `axis` is above 2.
    pub fn narrow(&self, axis: usize, range: std::ops::Range<usize>) -> Result<Self> {
        let (layout, offset) = narrowed(&self.layout, axis, range)?;
        let bytes = D::byte_range(self.bytes, offset..D::byte_len(self.bytes));
        Ok(Self {
            bytes,
            layout,
            constant: self.constant,
        })
    }

    /// The same elements with axes `a` and `b` exchanged.
    ///
    /// # Panics
    ///
    /// If `a` or `b` is above 2.
    #[must_use]
    pub fn transpose(mut self, a: usize, b: usize) -> Self {
        self.layout.shape.swap(a, b);
        self.layout.strides.swap(a, b);
        self
    }

    /// Repeats an axis of extent one `count` times, without a copy.
    ///
    /// # Errors
    ///
    /// If the extent of the axis is not one.
    ///
    /// # Panics
    ///
    /// If `axis` is above 2.
    pub fn broadcast(mut self, axis: usize, count: usize) -> Result<Self> {
        if self.layout.shape[axis] != 1 {
            return Err(Error::argument(
                "broadcast axis",
                self.layout.shape[axis],
                "an extent of 1",
            ));
        }
        self.layout.shape[axis] = count;
        self.layout.strides[axis] = 0;
        Ok(self)
    }
}

/// A view of a tensor for writing.
pub struct TensorMut<'a, D: Memory> {
    pub(super) bytes: D::BytesMut<'a>,
    layout: Layout,
}

impl<D: Memory> fmt::Debug for TensorMut<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorMut({})", self.layout)
    }
}

impl<'a, D: Memory> TensorMut<'a, D> {
    /// A view whose first element is at the first of `bytes`. An axis of at most one index may have
    /// any stride. [`named`](crate::named) adds the name of the tensor to an error.
    ///
    /// # Errors
    ///
    /// If an element of the layout lies outside `bytes`, if `bytes` is not aligned for the dtype,
    /// or if two indices name one element.
    pub fn new(bytes: D::BytesMut<'a>, layout: Layout) -> Result<Self> {
        check_span(&layout, D::byte_len_mut(&bytes))?;
        check_alignment::<D>(D::freeze(&bytes), layout.dtype.bytes())?;
        if !layout.is_injective() {
            return Err(Error::argument(
                "layout",
                layout,
                "an output in which no two indices share an element",
            ));
        }
        let layout = layout.settled();
        Ok(Self { bytes, layout })
    }

    /// The bytes, beginning at the first element. They may continue beyond the last one.
    pub fn into_bytes(self) -> D::BytesMut<'a> {
        self.bytes
    }

    /// The dtype, shape and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The extent of each axis.
    pub fn shape(&self) -> [usize; 3] {
        self.layout.shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// The same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> TensorMut<'_, D> {
        TensorMut {
            bytes: D::reborrow(&mut self.bytes),
            layout: self.layout,
        }
    }

    /// The same view for reading.
    pub fn as_ref(&self) -> TensorRef<'_, D> {
        TensorRef {
            bytes: D::freeze(&self.bytes),
            layout: self.layout,
            constant: false,
        }
    }

    /// The part of the tensor with `range` along `axis`.
    ///
    /// # Errors
    ///
    /// If the range does not lie within the axis.
    ///
    /// # Panics
    ///
    /// If `axis` is above 2.
    pub fn narrow(self, axis: usize, range: std::ops::Range<usize>) -> Result<Self> {
        let (layout, offset) = narrowed(&self.layout, axis, range)?;
        let (_, bytes) = D::split_mut(self.bytes, offset);
        Ok(Self { bytes, layout })
    }

    /// The same elements with axes `a` and `b` exchanged.
    ///
    /// # Panics
    ///
    /// If `a` or `b` is above 2.
    #[must_use]
    pub fn transpose(mut self, a: usize, b: usize) -> Self {
        self.layout.shape.swap(a, b);
        self.layout.strides.swap(a, b);
        self
    }
}

fn narrowed(
    layout: &Layout,
    axis: usize,
    range: std::ops::Range<usize>,
) -> Result<(Layout, usize)> {
    let extent = layout.shape[axis];
    check_range("range", &range, extent)?;
    let mut part = *layout;
    part.shape[axis] = range.len();
    part = part.settled();
    // An empty part has no first element, so it begins where the whole begins. The whole may have
    // fewer bytes than the offset.
    let offset = if part.shape.contains(&0) {
        0
    } else {
        range.start * layout.strides[axis]
    };
    Ok((part, offset * layout.dtype.bytes()))
}

/// A contiguous list of indices, lengths or scores in a device's memory.
pub struct ArrayRef<'a, D: Memory, T: Pod> {
    bytes: D::Bytes<'a>,
    len: usize,
    element: PhantomData<fn() -> T>,
}

copies!([D: Memory, T: Pod] ArrayRef<'_, D, T>);

impl<D: Memory, T: Pod> fmt::Debug for ArrayRef<'_, D, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ArrayRef([{}; {}])", type_name::<T>(), self.len)
    }
}

impl<'a, D: Memory, T: Pod> ArrayRef<'a, D, T> {
    /// The first `len` elements of `bytes`.
    ///
    /// # Errors
    ///
    /// If `bytes` holds fewer elements, or is not aligned for them.
    pub fn new(bytes: D::Bytes<'a>, len: usize) -> Result<Self> {
        const { assert!(size_of::<T>() > 0, "an element has a size") };
        check_alignment::<D>(bytes, align_of::<T>())?;
        let available = D::byte_len(bytes) / size_of::<T>();
        if len > available {
            return Err(Error::argument(
                "array length",
                len,
                format!("at most {available} elements of {}", type_name::<T>()),
            ));
        }
        Ok(Self {
            bytes,
            len,
            element: PhantomData,
        })
    }

    /// The bytes, beginning at the first element. They may continue beyond the last one.
    pub fn bytes(&self) -> D::Bytes<'a> {
        self.bytes
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same array with a shorter lifetime.
    pub fn shorten<'short>(&self) -> ArrayRef<'short, D, T>
    where
        'a: 'short,
    {
        ArrayRef {
            bytes: D::shorten(self.bytes),
            len: self.len,
            element: PhantomData,
        }
    }

    /// The elements of `range`.
    ///
    /// # Errors
    ///
    /// If the range does not lie within the array.
    pub fn range(&self, range: std::ops::Range<usize>) -> Result<Self> {
        check_range("range", &range, self.len)?;
        let width = size_of::<T>();
        let bytes = D::byte_range(self.bytes, range.start * width..range.end * width);
        Ok(Self {
            bytes,
            len: range.len(),
            element: PhantomData,
        })
    }
}
