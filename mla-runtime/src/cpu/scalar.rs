//! One element at a time, whatever the dtype, format and alignment: for backends that are to be simple,
//! and for tests.

use super::Cpu;
use super::cache::{decode_row, row_offset};
use crate::cache::CacheRef;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::kv_format::KvFormat;
use crate::lse::LseMut;
use crate::tensor::{ArrayRef, Index, Layout, Shape, TensorMut, TensorRef};

fn offset(layout: &Layout, index: Shape) -> usize {
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

impl TensorRef<'_, Cpu> {
    /// One element.
    ///
    /// # Panics
    ///
    /// Where the index lies outside the shape, as with a slice.
    pub fn at(&self, index: Shape) -> f32 {
        let at = offset(self.layout(), index);
        match self.dtype() {
            DType::F32 => get::<f32>(self.bytes(), at),
            DType::F16 => get::<half::f16>(self.bytes(), at),
            DType::BF16 => get::<half::bf16>(self.bytes(), at),
        }
    }
}

impl TensorMut<'_, Cpu> {
    /// Writes one element, rounded.
    ///
    /// # Panics
    ///
    /// Where the index lies outside the shape, as with a slice.
    pub fn set(&mut self, index: Shape, value: f32) {
        let at = offset(self.layout(), index);
        let dtype = self.dtype();
        let bytes = self.reborrow().into_bytes();
        match dtype {
            DType::F32 => put::<f32>(bytes, at, value),
            DType::F16 => put::<half::f16>(bytes, at, value),
            DType::BF16 => put::<half::bf16>(bytes, at, value),
        }
    }
}

impl<T: Index> ArrayRef<'_, Cpu, T> {
    /// One element.
    ///
    /// # Panics
    ///
    /// Where there are not as many, as with a slice.
    pub fn at(&self, index: usize) -> T {
        bytemuck::pod_read_unaligned(&self.bytes()[index * size_of::<T>()..][..size_of::<T>()])
    }
}

impl LseMut<'_, Cpu> {
    /// Writes one element.
    ///
    /// # Panics
    ///
    /// Where there is no such head or token, as with a slice.
    pub fn set(&mut self, head: usize, token: usize, value: f32) {
        let layout = self.layout();
        assert!(
            head < layout.heads && token < layout.tokens,
            "index: given [{head}, {token}], accepted below {layout:?}"
        );
        let at = 4 * (head * layout.row_stride + token);
        put::<f32>(self.reborrow().into_bytes(), at, value);
    }
}

impl CacheRef<'_, Cpu> {
    /// Reads the L + R values of the row in a slot, dequantised.
    ///
    /// # Errors
    ///
    /// Where the cache has no such slot, or `row` has another length.
    pub fn read_row(&self, slot: usize, row: &mut [f32]) -> Result<()> {
        let layout = self.layout();
        if slot >= layout.slots() {
            return Err(Error::argument(
                "slot",
                slot,
                format!("below {}", layout.slots()),
            ));
        }
        let width = layout.dims.row() as usize;
        if row.len() != width {
            return Err(Error::argument("row", row.len(), width));
        }
        let from = &self.bytes()[row_offset(layout, slot)..];
        decode_row(layout, &from[..layout.format.row_bytes(layout.dims)], row);
        if layout.format == KvFormat::Fp8 {
            row.iter_mut().for_each(|value| *value *= layout.scale);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheLayout, CacheMut};
    use crate::device::Device as _;
    use crate::dims::MlaDims;

    #[test]
    fn elements_are_found_by_strides() -> Result<()> {
        let data: Vec<half::bf16> = (0..24).map(|i| half::bf16::from_f32(i as f32)).collect();
        let tensor = TensorRef::from_slice(&data, [2, 3, 4])?.transpose(0, 1);
        assert_eq!(tensor.at([2, 1, 3]), 23.0);
        assert_eq!(tensor.at([1, 0, 2]), 6.0);
        let mut written = [0.0f32; 24];
        let mut tensor = TensorMut::from_slice(&mut written, [2, 3, 4])?.transpose(0, 1);
        tensor.set([2, 1, 3], 7.0);
        assert_eq!(written[23], 7.0);
        assert_eq!(ArrayRef::<Cpu, i32>::from_slice(&[3, -4]).at(1), -4);
        let mut lse = [0.0; 6];
        LseMut::from_slice(&mut lse, 2, 3)?.set(1, 2, 9.0);
        assert_eq!(lse[5], 9.0);
        Ok(())
    }

    #[test]
    fn rows_are_dequantised() -> Result<()> {
        for format in KvFormat::ALL {
            let mut layout = CacheLayout::contiguous(MlaDims::R1, *format, 2, 3);
            layout.scale = 0.5;
            let mut bytes = vec![0xff; 2 * layout.page_stride];
            let (latent, rope) = ([2.0f32; 512], [-0.5f32; 64]);
            Cpu::new().write_cache(
                TensorRef::from_slice(&latent, [1, 1, 512])?,
                TensorRef::from_slice(&rope, [1, 1, 64])?,
                ArrayRef::from_slice(&[4]),
                CacheMut::new(&mut bytes[..], layout)?,
            )?;
            let cache = CacheRef::<Cpu>::new(&bytes[..], layout)?;
            let mut row = [0.0; 576];
            cache.read_row(4, &mut row)?;
            assert!(row[..512].iter().all(|x| *x == 2.0), "{format}");
            assert!(row[512..].iter().all(|x| *x == -0.5), "{format}");
            assert!(cache.read_row(6, &mut row).is_err());
            assert!(cache.read_row(4, &mut row[1..]).is_err());
        }
        Ok(())
    }
}
