//! The engine's attention before the port. Keys and values of every head are computed from a
//! request's cache, and each request attends separately.

use candle_core::{D, DType, Result, Tensor};
use candle_nn::ops::softmax_last_dim;

use crate::engine::{Batch, PAGE, PagedCache, Weights, linear};

/// The attention of a layer.
pub struct Attention {
    weights: Weights,
}

impl Attention {
    /// Makes the attention with these weights.
    pub fn new(weights: Weights) -> Self {
        Self { weights }
    }

    /// Computes `[rows, max_len, hidden]` from a tensor of the same shape.
    pub fn forward(&self, hidden: &Tensor, batch: &Batch, cache: &PagedCache) -> Result<Tensor> {
        let projected = self.weights.project(hidden, batch)?;
        write(&projected.latent, &cache.latent, batch)?;
        write(&projected.rope, &cache.rope, batch)?;
        let [.., v] = self.weights.config.widths();
        let heads = self.weights.config.heads;
        let mut outs = Vec::with_capacity(batch.rows);
        for index in 0..batch.rows {
            let new = batch.new.get(index).copied().unwrap_or(0);
            let padding = (batch.max_len - new, heads, v);
            let padding = Tensor::zeros(padding, hidden.dtype(), hidden.device())?;
            outs.push(match new {
                0 => padding,
                new => {
                    let query = projected.query.get(index)?.narrow(0, 0, new)?;
                    let out = self.attend(&query, batch, index, cache)?;
                    Tensor::cat(&[out, padding], 0)?
                }
            });
        }
        self.weights.project_out(&Tensor::stack(&outs, 0)?)
    }

    /// Computes the output `[new, H, V]` of one request.
    fn attend(
        &self,
        query: &Tensor,
        batch: &Batch,
        index: usize,
        cache: &PagedCache,
    ) -> Result<Tensor> {
        let [_, nope, rope, v] = self.weights.config.widths();
        let heads = self.weights.config.heads;
        let (new, cached) = (batch.new[index], batch.cached[index]);
        let total = cached + new;
        let table = &batch.block_tables[index];
        let slots: Vec<u32> = (0..total)
            .map(|at| (table[at / PAGE] * PAGE + at % PAGE) as u32)
            .collect();
        let slots = Tensor::new(slots, query.device())?;
        let rows = |tensor: &Tensor| tensor.flatten_to(1)?.index_select(&slots, 0);
        let kv = linear(&rows(&cache.latent)?, &self.weights.kv_b_proj)?;
        let kv = kv.reshape((total, heads, nope + v))?;
        let shared = rows(&cache.rope)?.unsqueeze(1)?;
        let shared = shared.broadcast_as((total, heads, rope))?;
        let key = Tensor::cat(&[kv.narrow(2, 0, nope)?, shared.contiguous()?], 2)?;
        let by_head = |x: &Tensor| x.transpose(0, 1)?.contiguous();
        let value = by_head(&kv.narrow(2, nope, v)?)?;
        let scores = by_head(query)?.matmul(&by_head(&key)?.transpose(1, 2)?.contiguous()?)?;
        let scores = (scores.to_dtype(DType::F32)? * self.weights.config.scale())?;
        // A new token sees the cached ones, the new ones before it, and itself.
        let mask: Vec<f32> = (0..new)
            .flat_map(|at| (0..total).map(move |key| (at, key)))
            .map(|(at, key)| match key <= cached + at {
                true => 0.0,
                false => f32::NEG_INFINITY,
            })
            .collect();
        let mask = Tensor::from_vec(mask, (1, new, total), query.device())?;
        let weights = softmax_last_dim(&scores.broadcast_add(&mask)?)?;
        let out = weights.to_dtype(query.dtype())?.matmul(&value)?;
        debug_assert_eq!(out.dim(D::Minus1)?, v);
        by_head(&out)
    }
}

/// Writes the new rows to their slots.
fn write(rows: &Tensor, cache: &Tensor, batch: &Batch) -> Result<()> {
    let (rows, cache) = (rows.flatten_to(1)?, cache.flatten_to(1)?);
    for (row, slot) in batch.slots().into_iter().enumerate() {
        if let Ok(slot) = usize::try_from(slot) {
            cache.slice_set(&rows.narrow(0, row, 1)?.contiguous()?, 0, slot)?;
        }
    }
    Ok(())
}
