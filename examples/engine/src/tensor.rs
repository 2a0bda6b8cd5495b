//! A matrix in a device's memory, and the views of it that GEMMs and layers take.

use mla_runtime::Result;
use mla_runtime::prelude::*;

use crate::operations::Operations;

/// Rows of numbers without gaps, in the device's dtype.
pub struct Tensor<D: Device>(D::Buffer);

impl<D: Operations> Tensor<D> {
    /// Makes `elements` zeros.
    ///
    /// # Errors
    ///
    /// If the device has no memory left.
    pub fn zeros(device: &D, elements: usize) -> Result<Self> {
        device.allocate(elements * D::DTYPE.bytes()).map(Self)
    }

    /// Makes random numbers around `mean`, evenly distributed within `spread`.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::zeros`] does.
    pub fn random(
        device: &D,
        elements: usize,
        random: &mut fastrand::Rng,
        [mean, spread]: [f32; 2],
    ) -> Result<Self> {
        let mut bytes = Vec::with_capacity(elements * D::DTYPE.bytes());
        for _ in 0..elements {
            let value = mean + (2.0 * random.f32() - 1.0) * spread;
            match D::DTYPE {
                DType::F32 => bytes.extend(value.to_le_bytes()),
                DType::BF16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
                DType::F16 => bytes.extend(half::f16::from_f32(value).to_le_bytes()),
            }
        }
        let mut tensor = Self::zeros(device, elements)?;
        device.upload(&bytes, D::bytes_mut(&mut tensor.0))?;
        Ok(tensor)
    }

    /// Makes `count` random matrices, each `[from, to]`, whose products keep the magnitude of rows.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::zeros`] does.
    pub fn matrices(
        device: &D,
        random: &mut fastrand::Rng,
        [count, from, to]: [usize; 3],
    ) -> Result<Self> {
        let spread = (3.0 / from as f32).sqrt();
        Self::random(device, count * from * to, random, [0.0, spread])
    }

    /// Returns the first elements as a tensor of this shape.
    ///
    /// # Errors
    ///
    /// If there are fewer elements.
    pub fn view(&self, shape: [usize; 3]) -> Result<TensorRef<'_, D>> {
        TensorRef::new(D::bytes(&self.0), Layout::contiguous(D::DTYPE, shape))
    }

    /// Returns the same view for writing.
    ///
    /// # Errors
    ///
    /// If there are fewer elements.
    pub fn view_mut(&mut self, shape: [usize; 3]) -> Result<TensorMut<'_, D>> {
        TensorMut::new(
            D::bytes_mut(&mut self.0),
            Layout::contiguous(D::DTYPE, shape),
        )
    }
}

/// Token ids in a device's memory.
pub struct Ids<D: Device>(D::Buffer);

impl<D: Device> Ids<D> {
    /// Makes room for `count` ids, which are 0 at first.
    ///
    /// # Errors
    ///
    /// If the device has no memory left.
    pub fn zeros(device: &D, count: usize) -> Result<Self> {
        device.allocate(4 * count).map(Self)
    }

    /// Writes the first ids.
    ///
    /// # Errors
    ///
    /// If there is room for fewer ids, or the device fails.
    pub fn upload(&mut self, device: &D, ids: &[i32]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(ids);
        let (to, _) = D::split_mut(D::bytes_mut(&mut self.0), bytes.len());
        device.upload(bytes, to)
    }

    /// Reads the first `count` ids, after everything that was enqueued before.
    ///
    /// # Errors
    ///
    /// If there are fewer ids, or the device fails.
    pub fn download(&self, device: &D, count: usize) -> Result<Vec<i32>> {
        let mut ids = vec![0; count];
        let from = D::byte_range(D::bytes(&self.0), 0..4 * count);
        device.download(from, bytemuck::cast_slice_mut(&mut ids))?;
        Ok(ids)
    }

    /// Returns all ids.
    pub fn bytes(&self) -> D::Bytes<'_> {
        D::bytes(&self.0)
    }

    /// Returns all ids for writing.
    pub fn bytes_mut(&mut self) -> D::BytesMut<'_> {
        D::bytes_mut(&mut self.0)
    }
}
