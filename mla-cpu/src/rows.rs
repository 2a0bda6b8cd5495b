//! Reads dequantised rows of the cache one at a time. This serves simple backends and tests.

use mla_runtime::tensor::CacheRef;
use mla_runtime::{Error, Result};

use crate::Cpu;
use crate::cache::Rows;

/// Reads cache rows by slot.
pub trait ReadRow {
    /// Reads the L + R values of the row in a slot, dequantised.
    ///
    /// # Errors
    ///
    /// If the cache has no such slot, or if the length of `row` is not L + R.
    fn read_row(&self, slot: usize, row: &mut [f32]) -> Result<()>;
}

impl ReadRow for CacheRef<'_, Cpu> {
    fn read_row(&self, slot: usize, row: &mut [f32]) -> Result<()> {
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
        Rows::of(self).decode(slot, row);
        if layout.format.has_tensor_scale() {
            row.iter_mut().for_each(|value| *value *= layout.scale);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mla_runtime::device::Device as _;
    use mla_runtime::model::{KvFormat, MlaDims};
    use mla_runtime::tensor::{ArrayRef, CacheLayout, CacheMut, TensorRef};

    use super::*;

    #[test]
    fn rows_are_dequantised() -> Result<()> {
        for format in KvFormat::ALL {
            let mut layout = CacheLayout::contiguous(MlaDims::R1, *format, 2, 3);
            if format.has_tensor_scale() {
                layout.scale = 0.5;
            }
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
