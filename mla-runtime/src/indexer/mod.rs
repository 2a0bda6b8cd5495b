//! The indexer of sparse attention, which chooses the cached tokens that each query token attends
//! to.
//!
//! DeepSeek-V3.2 and GLM-5 score every cached token for every query token, with a small attention
//! of their own. They attend to the `topk` tokens with the highest scores. In addition to the
//! layer's cache there is an [index cache](IndexCacheLayout) with one quantised key per token.
//! Index heads are numbered h, and t is a token of a request. Index keys have D values, and the
//! first R of them are rotary:
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
//! transform divided by √D, or nothing. The transform is orthogonal, so it changes only the effect
//! of quantisation. A cache that was written with it must be read with it. A scale is the smallest
//! power of two that is at least max(|x|, 1e-4) / 448. Values are rounded once, when they are
//! quantised.
//!
//! # Contents of a list
//!
//! For given logits, the selection is exact and deterministic. It takes the `topk` largest logits,
//! and among equal ones those of the lowest positions. −0 equals +0, −inf is the smallest number,
//! and NaN ranks below it. If a token sees at most `topk` tokens, its list has them all. A list is
//! in ascending order of position, with −1 after its last entry. All heads use the same list, and
//! so do the layers that [share](crate::model::ModelConfig::list_source) it.
//!
//! # Pools
//!
//! GLM-5.3-Flash has one key for every K tokens of a request, at the positions K·j to K·j + K − 1.
//! There is a gate `g[t]` = W_g · `x[t]`, and a table a `[K, D]`. The softmax is separate for each
//! of the D values:
//!
//! ```text
//! key      k[t]      = LayerNorm(W_k · x[t])                               [D] bf16
//! share    p[m]      = softmax over m of g[K·j + m] + a[m]                 [K, D]
//! pool     k[j]      = quantise(H(Σ_m p[m] · k[K·j + m]))                  [D] e4m3, one f32 scale
//! list     the K tokens of each of the topk / K best pools that a token sees whole, and the
//!          tokens of the last pool that is not complete
//! ```
//!
//! Keys and gates are rounded to bf16. Rows are also rounded to bf16 before and after H. A pool
//! lies within a page. The page's [tail](IndexCacheLayout::tail_at) has the keys and gates of its
//! last tokens, so a page may be shared or copied like any other.
//!
//! # Objects
//!
//! | object | made | holds |
//! |---|---|---|
//! | [`Indexer`] | once per layer that has one | the configuration |
//! | [`IndexerWorkspace`] | once per engine | the scratch of a selection, and the lists that it made |
//! | [`IndexCall`] | per layer and step | views of the engine's own tensors |
//!
//! [`Indexer::select`] writes the new tokens' index keys, and makes the lists of the step for which
//! a layer's [`Workspace`](crate::layer::Workspace) was prepared. The layer takes them as
//! [`LayerCall::slot_lists`](crate::layer::LayerCall::slot_lists). The call only enqueues, as the
//! layer does. [`MlaLayer::forward_selecting`](crate::layer::MlaLayer::forward_selecting) does both
//! in one call. A device with these operations implements [`IndexDevice`].

mod cache;
mod device;
mod layer;
mod select;
mod workspace;

pub use cache::{IndexCacheLayout, IndexCacheMut};
pub use device::{IndexDevice, IndexKeys, IndexQueries, IndexRows};
pub use select::{IndexCall, Indexer};
pub use workspace::IndexerWorkspace;
