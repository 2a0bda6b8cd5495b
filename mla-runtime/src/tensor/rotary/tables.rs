//! The cosines and sines of a model, on a device.

use super::{Rotary, RotaryStyle};
use crate::model::{DType, Rope};
use crate::tensor::{Layout, Memory, TensorRef};
use crate::{Error, Result};

/// The cosines and sines of every position that an engine serves, in a device's memory: made once,
/// used by every layer and step.
pub struct RotaryTables<D: Memory> {
    buffer: D::Buffer,
    layout: Layout,
    style: RotaryStyle,
}

impl<D: Memory> RotaryTables<D> {
    /// For positions from 0 up to `positions` and rotary parts of `width` = R elements.
    ///
    /// # Errors
    ///
    /// Same as [`Rope::cos_sin`], or if there is no position or the device has no memory left.
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

    /// Returns the rotation that a layer's call takes: the positions are those of the step.
    ///
    /// # Errors
    ///
    /// None: the views lie within the buffer. A tensor's check is a `Result` all the same.
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
