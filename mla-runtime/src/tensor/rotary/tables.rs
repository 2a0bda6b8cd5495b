//! The cosines and sines of a model, in a device's memory.

use super::{Rotary, RotaryStyle};
use crate::model::{DType, Rope};
use crate::tensor::{Layout, Memory, TensorRef};
use crate::{Error, Result};

/// The cosines and sines for every position that an engine serves, in a device's memory. They are
/// made once and used by every layer and step.
pub struct RotaryTables<D: Memory> {
    buffer: D::Buffer,
    layout: Layout,
    style: RotaryStyle,
}

impl<D: Memory> RotaryTables<D> {
    /// Tables for the positions from 0 up to `positions`, for rotary parts of `width` = R elements.
    ///
    /// # Errors
    ///
    /// The errors of [`Rope::cos_sin`]. Also if `positions` is 0, or if the device has too little
    /// free memory.
    pub fn new(device: &D, rope: &Rope, width: u32, positions: usize) -> Result<Self> {
        if positions == 0 {
            return Err(Error::argument("positions", 0, "1 and up"));
        }
        let [cos, sin] = rope.cos_sin(width, positions)?;
        let layout = Layout::contiguous(DType::F32, [1, positions, width as usize / 2]);
        let mut buffer = device.allocate(size_of_val(&cos[..]) + size_of_val(&sin[..]))?;
        let (first, second) = D::split_mut(D::bytes_mut(&mut buffer), size_of_val(&cos[..]));
        device.upload(bytemuck::cast_slice(&cos), first)?;
        device.upload(bytemuck::cast_slice(&sin), second)?;
        Ok(Self {
            buffer,
            layout,
            style: rope.style,
        })
    }

    /// The number of positions.
    pub fn positions(&self) -> usize {
        self.layout.shape[1]
    }

    /// Returns the rotation for a layer's call. The positions are those of the step.
    ///
    /// # Errors
    ///
    /// Never: the views lie within the buffer. The result is a `Result` because the checks of a
    /// tensor return one.
    pub fn rotation(&self) -> Result<Rotary<'_, D>> {
        let bytes = D::bytes(&self.buffer);
        let half = D::byte_len(bytes) / 2;
        Ok(Rotary {
            positions: None,
            cos: TensorRef::new(D::byte_range(bytes, 0..half), self.layout)?,
            sin: TensorRef::new(D::byte_range(bytes, half..2 * half), self.layout)?,
            style: self.style,
        })
    }
}
