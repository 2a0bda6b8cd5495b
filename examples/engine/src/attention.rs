//! The attention of one decoder layer, from hidden states to the values that are added to them.

use mla_runtime::Result;
use mla_runtime::prelude::*;

use crate::config::{Config, widths};
use crate::memory::{Layer, Scratch, Shared};
use crate::operations::Operations;
use crate::tensor::Tensor;

/// The data that the attentions of all decoder layers share.
pub struct Common<D: Device> {
    /// The library's layer. Weights are passed with each call.
    pub layer: Layer<D>,
    /// The model's configuration.
    pub config: Config,
    /// The angles of every position.
    pub rotary: RotaryTables<D>,
}

/// The weights of a layer's attention. Each is `[in, out]`, except `W_kv_b`, which has the layout
/// of checkpoints.
pub struct Attention<D: Device> {
    q_a: Tensor<D>,
    q_norm: Tensor<D>,
    q_b: Tensor<D>,
    kv_a: Tensor<D>,
    kv_norm: Tensor<D>,
    kv_b: Tensor<D>,
    out: Tensor<D>,
}

impl<D: Operations> Attention<D> {
    /// Makes an attention with random weights.
    ///
    /// # Errors
    ///
    /// If the device has no memory left.
    pub fn random(device: &D, config: &Config, random: &mut fastrand::Rng) -> Result<Self> {
        let [hidden, heads, rank, latent, rope, qk, v, kv_b] = widths(config);
        let mut matrix = |from, to| Tensor::matrices(device, random, [1, from, to]);
        let (q_a, q_b) = (matrix(hidden, rank)?, matrix(rank, heads * qk)?);
        let (kv_a, kv_b) = (
            matrix(hidden, latent + rope)?,
            matrix(latent, heads * kv_b)?,
        );
        let out = matrix(heads * v, hidden)?;
        let mut norm = |width| Tensor::random(device, width, random, [1.0, 0.2]);
        Ok(Self {
            q_a,
            q_norm: norm(rank)?,
            q_b,
            kv_a,
            kv_norm: norm(latent)?,
            kv_b,
            out,
        })
    }

    /// Enqueues the attention of `scratch.normed`, `[T, hidden]`, to `scratch.delta`.
    ///
    /// # Errors
    ///
    /// If the device fails, or the call does not fit the prepared step.
    pub fn enqueue(
        &self,
        common: &Common<D>,
        shared: &mut Shared<D>,
        scratch: &mut Scratch<D>,
        mut cache: CacheMut<'_, D>,
        tokens: usize,
    ) -> Result<()> {
        let Common { layer, rotary, .. } = common;
        let [hidden, heads, _, latent, rope, qk, v, kv_b] = widths(&common.config);
        let (device, s) = (layer.device(), scratch);
        let flat = |width: usize| [1, tokens, width];
        let rows = |width: usize| [tokens, 1, width];
        self.enqueue_queries(common, s, tokens)?;
        self.enqueue_latents(common, s, tokens)?;

        // The library, for each layer of a step:
        let weights = self.kv_b.view([1, heads * kv_b, latent])?;
        let unrotated = latent..latent + rope;
        let keys = s.kv_a.view_mut(rows(latent + rope))?.narrow(2, unrotated)?;
        let call = LayerCall::unrotated(
            Weights::from_checkpoint(weights, layer.config())?,
            s.query.view_mut([tokens, heads, qk])?,
            s.latent.view(rows(latent))?,
            keys,
            rotary.rotation()?,
            cache.reborrow(),
            s.attended.view_mut([tokens, heads, v])?,
        );
        layer.forward_unrotated(shared, call)?;
        // End of the library.
        let out = self.out.view([1, heads * v, hidden])?;
        device.gemm(
            s.attended.view(flat(heads * v))?,
            out,
            s.delta.view_mut(flat(hidden))?,
        )
    }

    // Computes the queries of all heads, through a normed row with fewer values.
    fn enqueue_queries(&self, common: &Common<D>, s: &mut Scratch<D>, tokens: usize) -> Result<()> {
        let [hidden, heads, rank, _, _, qk, ..] = widths(&common.config);
        let (device, eps) = (common.layer.device(), common.config.widths.rms_norm_eps);
        let flat = |width: usize| [1, tokens, width];
        let rows = |width: usize| [tokens, 1, width];
        device.gemm(
            s.normed.view(flat(hidden))?,
            self.q_a.view([1, hidden, rank])?,
            s.q_a.view_mut(flat(rank))?,
        )?;
        device.norm(
            s.q_a.view(rows(rank))?,
            self.q_norm.view(rows_of(rank))?,
            eps,
            s.q_normed.view_mut(rows(rank))?,
        )?;
        device.gemm(
            s.q_normed.view(flat(rank))?,
            self.q_b.view([1, rank, heads * qk])?,
            s.query.view_mut(flat(heads * qk))?,
        )
    }

    // Computes the cached values of each token: the normed latent, followed by the rotary key.
    fn enqueue_latents(&self, common: &Common<D>, s: &mut Scratch<D>, tokens: usize) -> Result<()> {
        let [hidden, _, _, latent, rope, ..] = widths(&common.config);
        let (device, eps) = (common.layer.device(), common.config.widths.rms_norm_eps);
        let flat = |width: usize| [1, tokens, width];
        let rows = |width: usize| [tokens, 1, width];
        device.gemm(
            s.normed.view(flat(hidden))?,
            self.kv_a.view([1, hidden, latent + rope])?,
            s.kv_a.view_mut(flat(latent + rope))?,
        )?;
        device.norm(
            s.kv_a.view(rows(latent + rope))?.narrow(2, 0..latent)?,
            self.kv_norm.view(rows_of(latent))?,
            eps,
            s.latent.view_mut(rows(latent))?,
        )
    }
}

fn rows_of(width: usize) -> [usize; 3] {
    [1, 1, width]
}
