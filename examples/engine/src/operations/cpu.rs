//! The operations on the CPU, in f32.

use mla_cpu::Cpu;
use mla_runtime::Result;
use mla_runtime::prelude::*;

use super::Operations;
use crate::config::Routing;

/// Returns the rows of a tensor `[T, 1, W]`.
fn rows<'a>(tensor: &TensorRef<'a, Cpu>) -> impl Iterator<Item = &'a [f32]> {
    let data: &[f32] = bytemuck::cast_slice(tensor.bytes());
    let [count, _, width] = tensor.shape();
    let stride = tensor.layout().strides[0];
    (0..count).map(move |row| &data[row * stride..row * stride + width])
}

/// Calls `each` with every row and its index.
fn rows_mut(tensor: TensorMut<'_, Cpu>, mut each: impl FnMut(usize, &mut [f32])) {
    let layout = *tensor.layout();
    let [count, _, width] = layout.shape;
    let data: &mut [f32] = bytemuck::cast_slice_mut(tensor.into_bytes());
    for row in 0..count {
        let start = row * layout.strides[0];
        each(row, &mut data[start..start + width]);
    }
}

impl Operations for Cpu {
    const DTYPE: DType = DType::F32;

    fn open() -> Result<Self> {
        Ok(Self::new())
    }

    fn norm(
        &self,
        from: TensorRef<'_, Self>,
        weight: TensorRef<'_, Self>,
        eps: f32,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        let weight: Vec<f32> = rows(&weight).flatten().copied().collect();
        let mut from = rows(&from);
        rows_mut(to, |_, to| {
            let from = from.next().unwrap_or_default();
            let squares: f32 = from.iter().map(|x| x * x).sum();
            let scale = 1.0 / (squares / from.len() as f32 + eps).sqrt();
            for ((to, x), weight) in to.iter_mut().zip(from).zip(&weight) {
                *to = x * scale * weight;
            }
        });
        Ok(())
    }

    fn add(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        let mut from = rows(&from);
        rows_mut(to, |_, to| {
            for (to, x) in to.iter_mut().zip(from.next().unwrap_or_default()) {
                *to += x;
            }
        });
        Ok(())
    }

    fn silu_mul(&self, from: TensorRef<'_, Self>, to: TensorMut<'_, Self>) -> Result<()> {
        let mut from = rows(&from);
        rows_mut(to, |_, to| {
            let (gate, up) = from.next().unwrap_or_default().split_at(to.len());
            for ((to, gate), up) in to.iter_mut().zip(gate).zip(up) {
                *to = gate / (1.0 + (-gate).exp()) * up;
            }
        });
        Ok(())
    }

    fn route(
        &self,
        routing: &Routing,
        logits: TensorRef<'_, Self>,
        bias: TensorRef<'_, Self>,
        weights: TensorMut<'_, Self>,
    ) -> Result<()> {
        let bias: Vec<f32> = rows(&bias).flatten().copied().collect();
        let mut logits = rows(&logits);
        rows_mut(weights, |_, weights| {
            let logits = logits.next().unwrap_or_default();
            let scores: Vec<f32> = logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
            routing.weigh(&scores, &bias, weights);
        });
        Ok(())
    }

    fn add_weighted(
        &self,
        from: TensorRef<'_, Self>,
        weights: TensorRef<'_, Self>,
        to: TensorMut<'_, Self>,
    ) -> Result<()> {
        let data: &[f32] = bytemuck::cast_slice(from.bytes());
        let strides = from.layout().strides;
        let mut weights = rows(&weights);
        rows_mut(to, |token, to| {
            let weights = weights.next().unwrap_or_default().iter().enumerate();
            for (expert, weight) in weights.filter(|(_, weight)| **weight != 0.0) {
                let from = &data[expert * strides[0] + token * strides[1]..];
                for (to, x) in to.iter_mut().zip(from) {
                    *to += weight * x;
                }
            }
        });
        Ok(())
    }

    fn gather(&self, from: TensorRef<'_, Self>, ids: &[u8], to: TensorMut<'_, Self>) -> Result<()> {
        let ids: &[i32] = bytemuck::cast_slice(ids);
        let from: Vec<&[f32]> = rows(&from).collect();
        rows_mut(to, |row, to| to.copy_from_slice(from[ids[row] as usize]));
        Ok(())
    }

    fn argmax(&self, from: TensorRef<'_, Self>, to: &mut [u8]) -> Result<()> {
        let to: &mut [i32] = bytemuck::cast_slice_mut(to);
        for (row, to) in rows(&from).zip(to) {
            let first = |best: usize, at: usize| if row[at] > row[best] { at } else { best };
            *to = (0..row.len()).fold(0, first) as i32;
        }
        Ok(())
    }
}
