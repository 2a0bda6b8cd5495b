//! Many random normal numbers. Each can be computed again from its index.

use fastrand::Rng;
use half::{bf16, f16};
use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::model::DType;
use rayon::prelude::*;

/// A prime, so that rows of any width repeat only after this many rows.
const POOL: usize = 1_048_573;

/// The number of values that a thread makes one after the other, from their own seed.
const OF_ONE_SEED: usize = 1 << 15;

/// Normally distributed numbers, rounded to a dtype. A pool of them is repeated.
pub struct Normal {
    dtype: DType,
    values: Vec<f32>,
    bytes: Vec<u8>,
}

impl Normal {
    /// Makes numbers with this standard deviation.
    pub fn new(seed: u64, dtype: DType, deviation: f32) -> Self {
        Self::of(seed, dtype, deviation, POOL)
    }

    /// Makes the first `count` of these numbers, but at most the whole pool.
    pub fn of(seed: u64, dtype: DType, deviation: f32, count: usize) -> Self {
        let (size, count) = (dtype.bytes(), count.clamp(1, POOL));
        let (mut values, mut bytes) = (vec![0.0; count], vec![0; count * size]);
        let seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let chunks = values.par_chunks_mut(OF_ONE_SEED);
        let chunks = chunks.zip(bytes.par_chunks_mut(OF_ONE_SEED * size));
        chunks.enumerate().for_each(|(number, (values, bytes))| {
            let mut rng = Rng::with_seed(seed.wrapping_add(number as u64));
            for (values, bytes) in values.chunks_mut(2).zip(bytes.chunks_mut(2 * size)) {
                // Box and Muller's transform makes two normal numbers from two uniform ones.
                let even = (1.0 - rng.f32()).max(f32::MIN_POSITIVE);
                let radius = (-2.0 * even.ln()).sqrt() * deviation;
                let (sin, cos) = (std::f32::consts::TAU * rng.f32()).sin_cos();
                let pair = [radius * cos, radius * sin];
                for ((value, to), from) in values.iter_mut().zip(bytes.chunks_mut(size)).zip(pair) {
                    *value = round(dtype, from, to);
                }
            }
        });
        Self {
            dtype,
            values,
            bytes,
        }
    }

    /// Returns number `index`.
    pub fn at(&self, index: usize) -> f64 {
        self.values[index % self.values.len()].into()
    }

    /// Returns the numbers `start .. start + count`.
    pub fn row(&self, start: usize, count: usize) -> Vec<f64> {
        (start..start + count).map(|index| self.at(index)).collect()
    }

    /// Copies `count` numbers from `start` on to a device's memory.
    pub fn buffer<D: Device>(&self, device: &D, start: usize, count: usize) -> Result<D::Buffer> {
        let size = self.dtype.bytes();
        let mut buffer = device.allocate(count * size)?;
        let mut done = 0;
        while done < count * size {
            let (_, rest) = D::split_mut(D::bytes_mut(&mut buffer), done);
            let from = (start * size + done) % self.bytes.len();
            let len = D::byte_len_mut(&rest).min(self.bytes.len() - from);
            let (now, _) = D::split_mut(rest, len);
            device.upload(&self.bytes[from..from + len], now)?;
            done += len;
        }
        Ok(buffer)
    }
}

/// Writes a number in a dtype, and returns the rounded number.
fn round(dtype: DType, value: f32, to: &mut [u8]) -> f32 {
    match dtype {
        DType::F32 => {
            to.copy_from_slice(&value.to_ne_bytes());
            value
        }
        DType::F16 => {
            let rounded = f16::from_f32(value);
            to.copy_from_slice(&rounded.to_ne_bytes());
            rounded.to_f32()
        }
        DType::BF16 => {
            let rounded = bf16::from_f32(value);
            to.copy_from_slice(&rounded.to_ne_bytes());
            rounded.to_f32()
        }
    }
}

#[cfg(test)]
mod tests {
    use mla_cpu::Cpu;
    use mla_runtime::tensor::Memory as _;

    use super::*;

    #[test]
    fn numbers_are_normal_and_the_same_in_memory() {
        let normal = Normal::new(3, DType::BF16, 0.5);
        let count = POOL as f64;
        let mean = normal.row(0, POOL).iter().sum::<f64>() / count;
        let square = normal.row(0, POOL).iter().map(|x| x * x).sum::<f64>() / count;
        let within = normal.row(0, POOL).iter().filter(|x| x.abs() < 0.5).count();
        assert!(mean.abs() < 2e-3, "{mean}");
        assert!((square - 0.25).abs() < 2e-3, "{square}");
        // This is the share within one standard deviation.
        assert!((within as f64 / count - 0.6827).abs() < 3e-3, "{within}");

        let (device, start, elements) = (Cpu::new(), POOL - 3, POOL + 10);
        let buffer = normal.buffer(&device, start, elements).unwrap();
        let mut bytes = vec![0; 2 * elements];
        device.download(Cpu::bytes(&buffer), &mut bytes).unwrap();
        for (index, pair) in bytes.chunks_exact(2).enumerate() {
            let stored = bf16::from_ne_bytes([pair[0], pair[1]]).to_f64();
            assert_eq!(stored, normal.at(start + index), "{index}");
        }
    }
}
