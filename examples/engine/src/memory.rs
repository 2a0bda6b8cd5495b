//! The library's layer and workspace, and the other device memory of a step.

use mla_runtime::prelude::*;

use crate::config::{Config, widths};
use crate::operations::Operations;
use crate::tensor::{Ids, Tensor};

/// The library's layer, with the backends that were selected for the device.
pub type Layer<D> = SelectedLayer<D>;
/// The library's workspace, which all decoder layers share.
pub type Shared<D> = SelectedWorkspace<D>;

/// All device memory that a step uses, except weights and the workspace.
pub struct Memory<D: Device> {
    /// The step's token ids.
    pub ids: Ids<D>,
    /// The likeliest token after each token.
    pub best: Ids<D>,
    /// The intermediate values of layers.
    pub scratch: Scratch<D>,
    /// The caches, one for each decoder layer.
    pub caches: Vec<D::Buffer>,
    /// The layout of each cache.
    pub cache_layout: CacheLayout,
}

/// The intermediate values of a step. All layers use the same memory, one after the other.
#[expect(missing_docs, reason = "each is named by what it holds")]
pub struct Scratch<D: Device> {
    pub hidden: Tensor<D>,
    pub normed: Tensor<D>,
    pub delta: Tensor<D>,
    pub q_a: Tensor<D>,
    pub q_normed: Tensor<D>,
    pub query: Tensor<D>,
    pub kv_a: Tensor<D>,
    pub latent: Tensor<D>,
    pub attended: Tensor<D>,
    pub gate_up: Tensor<D>,
    pub inside: Tensor<D>,
    pub router_logits: Tensor<D>,
    pub expert_weights: Tensor<D>,
    pub expert_out: Tensor<D>,
    pub logits: Tensor<D>,
}

impl<D: Operations> Scratch<D> {
    /// Allocates memory for `tokens` tokens.
    ///
    /// # Errors
    ///
    /// If the device has no memory left.
    pub fn new(device: &D, config: &Config, tokens: usize) -> mla_runtime::Result<Self> {
        let [hidden, heads, rank, latent, rope, qk, v, _] = widths(config);
        let room = |width: usize| Tensor::zeros(device, tokens * width);
        Ok(Self {
            hidden: room(hidden)?,
            normed: room(hidden)?,
            delta: room(hidden)?,
            q_a: room(rank)?,
            q_normed: room(rank)?,
            query: room(heads * qk)?,
            kv_a: room(latent + rope)?,
            latent: room(latent)?,
            attended: room(heads * v)?,
            gate_up: room(2 * config.inner())?,
            inside: room(config.inner())?,
            router_logits: room(config.experts())?,
            expert_weights: room(config.experts())?,
            expert_out: room(config.experts() * hidden)?,
            logits: room(config.widths.vocab_size)?,
        })
    }
}
