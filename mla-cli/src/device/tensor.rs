//! Tensors of random numbers on a device, and tensors for results.

use mla_conformance::reference::decode_row;
use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{ArrayRef, Layout, TensorMut, TensorRef};

use super::memory::{CacheBuffer, upload};
use super::random::Normal;

/// The number of cache rows that are made at a time.
pub(crate) const BLOCK: usize = 1 << 16;

/// A tensor on the device, with its numbers if they are random.
pub struct Tensor<D: Device> {
    buffer: D::Buffer,
    layout: Layout,
    numbers: Option<Normal>,
}

impl<D: Device> Tensor<D> {
    /// Makes a tensor of normally distributed numbers with this standard deviation.
    pub fn random(
        device: &D,
        seed: u64,
        dtype: DType,
        shape: [usize; 3],
        deviation: f32,
    ) -> Result<Self> {
        let layout = Layout::contiguous(dtype, shape);
        let numbers = Normal::of(seed, dtype, deviation, layout.elements());
        let buffer = numbers.buffer(device, 0, layout.elements())?;
        device.synchronize()?;
        Ok(Self {
            buffer,
            layout,
            numbers: Some(numbers),
        })
    }

    /// Makes a tensor of NaN, so that memory that was not written does not look like a result.
    pub fn unwritten(device: &D, dtype: DType, shape: [usize; 3]) -> Result<Self> {
        let layout = Layout::contiguous(dtype, shape);
        Ok(Self {
            buffer: upload(device, &vec![0xff_u8; layout.elements() * dtype.bytes()])?,
            layout,
            numbers: None,
        })
    }

    pub fn view(&self) -> Result<TensorRef<'_, D>> {
        TensorRef::new(D::bytes(&self.buffer), self.layout)
    }

    /// Returns a view for writing. The tensor then no longer counts as random numbers.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_, D>> {
        self.numbers = None;
        TensorMut::new(D::bytes_mut(&mut self.buffer), self.layout)
    }

    /// Returns a view for reading, marked as constant if the tensor holds random numbers.
    pub fn constant_view(&self) -> Result<TensorRef<'_, D>> {
        let view = self.view()?;
        Ok(match self.numbers {
            // SAFETY: `random` waits for its upload. Later writes go through `view_mut` alone,
            // which removes the numbers.
            Some(_) => unsafe { view.assume_constant() },
            None => view,
        })
    }

    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// Returns the extent of the last axis.
    pub fn width(&self) -> usize {
        self.layout.shape[2]
    }

    /// Returns `[i, j, 0..]` of the random numbers.
    pub fn row(&self, i: usize, j: usize) -> Vec<f64> {
        let [_, rows, width] = self.layout.shape;
        let numbers = self.numbers.as_ref();
        numbers.map_or_else(Vec::new, |it| it.row((i * rows + j) * width, width))
    }

    /// Reads `[i, j, 0..]` from the device.
    pub fn read(&self, device: &D, i: usize, j: usize) -> Result<Vec<f64>> {
        let [_, rows, width] = self.layout.shape;
        let mut row = vec![0; width * self.layout.dtype.bytes()];
        let start = (i * rows + j) * row.len();
        let bytes = D::byte_range(D::bytes(&self.buffer), start..start + row.len());
        device.download(bytes, &mut row)?;
        // The row is decoded like a cache row without a rotary part.
        let format = KvFormat::of(self.layout.dtype);
        Ok(decode_row(format, width, 0, &row, 1.0))
    }
}

/// Makes a layer's cache with random rows. They use two seeds, beginning with `seed`.
pub(crate) fn filled_cache<D: Device>(
    device: &D,
    problem: &Problem,
    pages: usize,
    seed: u64,
    deviation: f32,
) -> Result<CacheBuffer<D>> {
    // Few numbers are more than four standard deviations away. Those saturate.
    let mut cache = CacheBuffer::new(device, problem, pages, 4.0 * deviation)?;
    let (layout, dtype) = (cache.layout, problem.dtype);
    let [latent, rope] = [layout.dims.latent, layout.dims.head.rope].map(|n| n as usize);
    let numbers = |seed, width| Normal::of(seed, dtype, deviation, layout.slots() * width);
    let (latents, ropes) = (numbers(seed, latent), numbers(seed + 1, rope));
    let slots: Vec<i64> = (0..layout.slots() as i64).collect();
    for block in slots.chunks(BLOCK) {
        let (first, rows) = (block[0] as usize, block.len());
        let latents = latents.buffer(device, first * latent, rows * latent)?;
        let ropes = ropes.buffer(device, first * rope, rows * rope)?;
        let slots = upload(device, block)?;
        let shape = |width| Layout::contiguous(dtype, [rows, 1, width]);
        device.write_cache(
            TensorRef::new(D::bytes(&latents), shape(latent))?,
            TensorRef::new(D::bytes(&ropes), shape(rope))?,
            ArrayRef::new(D::bytes(&slots), rows)?,
            cache.view_mut()?,
        )?;
        // The memory of the block is freed here.
        device.synchronize()?;
    }
    Ok(cache)
}
