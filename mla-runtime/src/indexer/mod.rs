//! The lightning indexer of sparse attention: which cached tokens each query token attends to.
//!
//! DeepSeek-V3.2 and GLM-5 score every cached token for every query token with a small attention of
//! its own, and attend to the `topk` tokens of the highest scores. Beside the layer's cache stands
//! an [index cache](IndexCacheLayout) of one quantised key per token. With index heads h, index
//! keys of D values of which the first R are rotary, and a token t of a request:
//!
//! ```text
//! key      k[t]      = quantise(H(rope(LayerNorm(W_k · x[t]))))            [D] e4m3, one f32 scale
//! query    q[t, h]   = quantise(H(rope(W_qb · q_latent[t])))               [D] e4m3, one f32 scale
//! weight   w[t, h]   = (W_w · x[t])[h] · heads^-½ · D^-½ · q_scale[t, h]   f32
//! logit    I[t, s]   = k_scale[s] · Σ_h w[t, h] · relu(q[t, h] · k[s])     f32, s ≤ t
//! list     the topk positions s of the largest I[t, s], as slots of the cache
//! ```
//!
//! (DeepSeek-V3.2-Exp, `inference/model.py`.) LayerNorm has a weight and a bias. H is a Hadamard
//! transform divided by √D, or nothing: since it is orthogonal it changes the quantisation alone,
//! but a cache that was written with it has to be read with it. A scale is the smallest power of
//! two that is not below max(|x|, 1e-4) / 448. Values are rounded once, when they are quantised.
//!
//! # What a list is
//!
//! The selection is exact and deterministic, given the logits: the `topk` largest, and among equal
//! ones those of the lowest positions. −0 equals +0, −inf is the smallest number, and NaN ranks
//! below it. A token that sees no more than `topk` tokens gets them all. A list is in ascending
//! order of position, with −1 behind its last entry, and serves every head; the layers that
//! [share](crate::model::ModelConfig::list_source) it, too.
//!
//! # Pools
//!
//! GLM-5.3-Flash has one key for each K tokens of a request, positions K·j to K·j + K − 1. With a
//! gate `g[t]` = W_g · `x[t]` and a table a `[K, D]`, of each value by itself:
//!
//! ```text
//! key      k[t]      = LayerNorm(W_k · x[t])                               [D] bf16
//! share    p[m]      = softmax over m of g[K·j + m] + a[m]                 [K, D]
//! pool     k[j]      = quantise(H(Σ_m p[m] · k[K·j + m]))                  [D] e4m3, one f32 scale
//! list     the K tokens of each of the topk / K best pools that a token sees whole, and the
//!          tokens of the last pool that is not complete
//! ```
//!
//! Keys and gates are rounded to bf16, and so is a row before and behind H. A pool lies within a
//! page, whose [tail](IndexCacheLayout::tail_at) keeps the keys and gates of its last tokens, so a
//! page may be shared or copied as any other.
//!
//! # Objects
//!
//! | object | made | holds |
//! |---|---|---|
//! | [`Indexer`] | once per layer that has one | the configuration |
//! | [`IndexerWorkspace`] | once per engine | the scratch of a selection, and the lists that it made |
//! | [`IndexCall`] | per layer and step | views of the engine's own tensors |
//!
//! [`Indexer::select`] writes the new tokens' index keys and makes the lists of a step that a
//! layer's [`Workspace`](crate::layer::Workspace) was prepared for. The layer takes them as
//! [`LayerCall::slot_lists`](crate::layer::LayerCall::slot_lists). It only enqueues, as the layer
//! does. [`MlaLayer::forward_selecting`](crate::layer::MlaLayer::forward_selecting) does both in
//! one call. A device that can do it implements [`IndexDevice`].

mod cache;
mod device;
mod layer;
mod select;
mod workspace;

pub use cache::{IndexCacheLayout, IndexCacheMut, IndexCacheRef};
pub use device::{IndexDevice, IndexKeys, IndexQueries, IndexRows};
pub use select::{IndexCall, Indexer};
pub use workspace::IndexerWorkspace;
