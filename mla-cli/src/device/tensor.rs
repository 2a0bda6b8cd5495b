//! Tensors of random numbers on a device, and those that results are written to.

use mla_conformance::reference::decode_row;
use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::model::{DType, KvFormat};
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{ArrayRef, Layout, TensorMut, TensorRef};

use super::memory::{CacheBuffer, upload};
use super::random::Normal;

/// Cache rows that are made at a time.
pub(crate) const BLOCK: usize = 1 << 16;

/// A tensor on the device, and its numbers if it holds random ones.
pub struct Tensor<D: Device> {
    buffer: D::Buffer,
    layout: Layout,
    numbers: Option<Normal>,
}

impl<D: Device> Tensor<D> {
    /// Normally distributed numbers of this standard deviation.
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

    /// NaN, so that nothing passes for a result that was not written.
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

    /// The view of a tensor that is written: it is not one of the random numbers any more.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_, D>> {
        self.numbers = None;
        TensorMut::new(D::bytes_mut(&mut self.buffer), self.layout)
    }

    /// The same view of weights.
    pub fn constant_view(&self) -> Result<TensorRef<'_, D>> {
        let view = self.view()?;
        Ok(match self.numbers {
            // SAFETY: `random` waits for its upload, and `view_mut`, through which alone a tensor
            // is written after that, takes the numbers away.
            Some(_) => unsafe { view.assume_constant() },
            None => view,
        })
    }

    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// The extent of the last axis.
    pub fn width(&self) -> usize {
        self.layout.shape[2]
    }

    /// `[i, j, 0..]` as it was written.
    pub fn row(&self, i: usize, j: usize) -> Vec<f64> {
        let [_, rows, width] = self.layout.shape;
        let numbers = self.numbers.as_ref();
        numbers.map_or_else(Vec::new, |it| it.row((i * rows + j) * width, width))
    }

    /// `[i, j, 0..]` as it is on the device now.
    pub fn read(&self, device: &D, i: usize, j: usize) -> Result<Vec<f64>> {
        let [_, rows, width] = self.layout.shape;
        let mut row = vec![0; width * self.layout.dtype.bytes()];
        let start = (i * rows + j) * row.len();
        let bytes = D::byte_range(D::bytes(&self.buffer), start..start + row.len());
        device.download(bytes, &mut row)?;
        // A row without a rotary part.
        let format = KvFormat::of(self.layout.dtype);
        Ok(decode_row(format, width, 0, &row, 1.0))
    }
}

/// A layer's cache, every row of it random, of two seeds from `seed` on.
pub(crate) fn filled_cache<D: Device>(
    device: &D,
    problem: &Problem,
    pages: usize,
    seed: u64,
    deviation: f32,
) -> Result<CacheBuffer<D>> {
    // Few numbers are more than four standard deviations away; those saturate.
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
        // The block's memory is given back here.
        device.synchronize()?;
    }
    Ok(cache)
}
