//! The whole model, which enqueues a step from token ids to token ids.

use mla_runtime::Result;
use mla_runtime::prelude::*;

use crate::attention::{Attention, Common};
use crate::config::Config;
use crate::memory::{Layer, Memory, Shared};
use crate::mlp::Mlp;
use crate::operations::Operations;
use crate::tensor::Tensor;

/// A decoder layer's weights.
struct Decoder<D: Device> {
    attention_norm: Tensor<D>,
    attention: Attention<D>,
    mlp_norm: Tensor<D>,
    mlp: Mlp<D>,
}

/// A model, on its device.
pub struct Model<D: Operations> {
    common: Common<D>,
    embedding: Tensor<D>,
    decoders: Vec<Decoder<D>>,
    norm: Tensor<D>,
    head: Tensor<D>,
}

impl<D: Operations> Model<D> {
    /// Makes a model with random weights. The same seed gives the same weights.
    ///
    /// # Errors
    ///
    /// If the device has no memory left, or its rotary embedding has no tables.
    pub fn random(layer: Layer<D>, config: &Config, positions: usize, seed: u64) -> Result<Self> {
        let device = layer.device().clone();
        let (widths, mut random) = (config.widths, fastrand::Rng::with_seed(seed));
        let (hidden, vocab) = (widths.hidden_size, widths.vocab_size);
        let norm = |random: &mut _| Tensor::random(&device, hidden, random, [1.0, 0.2]);
        let embedding = Tensor::random(&device, vocab * hidden, &mut random, [0.0, 1.0])?;
        let decoder = |layer: usize, random: &mut fastrand::Rng| {
            Ok(Decoder {
                attention_norm: norm(random)?,
                attention: Attention::random(&device, config, random)?,
                mlp_norm: norm(random)?,
                mlp: Mlp::random(&device, config, layer, random)?,
            })
        };
        let decoders = (0..config.layers()).map(|layer| decoder(layer, &mut random));
        Ok(Self {
            decoders: decoders.collect::<Result<_>>()?,
            embedding,
            norm: norm(&mut random)?,
            head: Tensor::matrices(&device, &mut random, [1, hidden, vocab])?,
            common: Common {
                rotary: RotaryTables::new(
                    &device,
                    &config.attention.rope,
                    config.attention.dims.head.rope,
                    positions,
                )?,
                layer,
                config: *config,
            },
        })
    }

    /// Returns the library's layer. It serves every decoder layer, since weights are passed with
    /// each call.
    pub fn layer(&self) -> &Layer<D> {
        &self.common.layer
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &Config {
        &self.common.config
    }

    /// Enqueues a prepared step of `tokens` tokens from `memory.ids` to `memory.best`, the
    /// likeliest token after each.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn enqueue(
        &self,
        shared: &mut Shared<D>,
        memory: &mut Memory<D>,
        tokens: usize,
    ) -> Result<()> {
        let (device, widths) = (self.layer().device(), self.config().widths);
        let (hidden, vocab, eps) = (widths.hidden_size, widths.vocab_size, widths.rms_norm_eps);
        let rows = [tokens, 1, hidden];
        let Memory {
            ids,
            best,
            scratch: s,
            caches,
            cache_layout,
        } = memory;
        let embedding = self.embedding.view([vocab, 1, hidden])?;
        device.gather(embedding, ids.bytes(), s.hidden.view_mut(rows)?)?;
        for (decoder, cache) in self.decoders.iter().zip(caches) {
            let weight = decoder.attention_norm.view([1, 1, hidden])?;
            device.norm(s.hidden.view(rows)?, weight, eps, s.normed.view_mut(rows)?)?;
            let cache = CacheMut::new(D::bytes_mut(cache), *cache_layout)?;
            decoder
                .attention
                .enqueue(&self.common, shared, s, cache, tokens)?;
            device.add(s.delta.view(rows)?, s.hidden.view_mut(rows)?)?;

            let weight = decoder.mlp_norm.view([1, 1, hidden])?;
            device.norm(s.hidden.view(rows)?, weight, eps, s.normed.view_mut(rows)?)?;
            decoder.mlp.enqueue(device, s, [tokens, hidden])?;
            device.add(s.delta.view(rows)?, s.hidden.view_mut(rows)?)?;
        }
        let weight = self.norm.view([1, 1, hidden])?;
        device.norm(s.hidden.view(rows)?, weight, eps, s.normed.view_mut(rows)?)?;
        let head = self.head.view([1, hidden, vocab])?;
        let logits = s.logits.view_mut([1, tokens, vocab])?;
        device.gemm(s.normed.view([1, tokens, hidden])?, head, logits)?;
        device.argmax(s.logits.view([tokens, 1, vocab])?, best.bytes_mut())
    }
}
