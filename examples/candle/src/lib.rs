//! DeepSeek's attention as a candle module: projections, norms and rotary embedding by candle, everything
//! between the projected queries and `o_proj` by the MLA layer, on candle's own memory.
//!
//! It runs where its weights are: on the CPU in any dtype, and with the feature `cuda` on a Hopper GPU in bf16
//! and f16, on the stream that candle uses. Tensors are lent to the layer as they are, so nothing is copied on
//! the way in or out; the cache and the workspace are made once, when the module is.
//!
//! `tests/deepseek2.rs` checks it against candle-transformers' own DeepSeek-V2 on random weights:
//!
//! ```console
//! $ cargo test --manifest-path examples/candle/Cargo.toml
//! $ cargo test --release --manifest-path examples/candle/Cargo.toml --features cuda -- --include-ignored
//! ```

mod attention;
mod paged;

use candle_core::{D, Result, Tensor};
use candle_nn::rotary_emb::rope_i;
use candle_nn::{Linear, Module, RmsNorm, VarBuilder, linear_no_bias, rms_norm};
use mla_runtime::dims::{HeadDims, MlaDims};

use crate::attention::Attention;
use crate::paged::{Inputs, Span};

/// The widths of a model's attention.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The width of hidden states.
    pub hidden: usize,
    /// H.
    pub heads: usize,
    /// The width between the two projections of queries; `None` where there is one.
    pub q_lora_rank: Option<usize>,
    /// L and (P, R, V).
    pub dims: MlaDims,
    /// Of the norms.
    pub rms_norm_eps: f64,
    /// The base of the rotary frequencies.
    pub rope_theta: f32,
    /// The most sequences of a batch.
    pub batch: usize,
    /// The most tokens of a sequence.
    pub max_len: usize,
}

/// The attention of one decoder layer, with its cache.
pub struct MlaAttention {
    config: Config,
    query: Query,
    kv_a: Linear,
    kv_a_norm: RmsNorm,
    /// `[H·(P+V), L]`, as checkpoints hold it.
    kv_b: Tensor,
    out: Linear,
    cos: Tensor,
    sin: Tensor,
    attention: Attention,
}

enum Query {
    Plain(Linear),
    LowRank {
        down: Linear,
        norm: RmsNorm,
        up: Linear,
    },
}

impl MlaAttention {
    /// With the weights of `self_attn`, by their published names.
    ///
    /// # Errors
    ///
    /// Where a weight is missing, or the layer cannot be made.
    pub fn new(config: Config, weights: VarBuilder) -> Result<Self> {
        let Config {
            hidden,
            heads,
            dims,
            max_len,
            ..
        } = config;
        let head = dims.head;
        let columns = heads * head.qk() as usize;
        let query = match config.q_lora_rank {
            None => Query::Plain(linear_no_bias(hidden, columns, weights.pp("q_proj"))?),
            Some(rank) => Query::LowRank {
                down: linear_no_bias(hidden, rank, weights.pp("q_a_proj"))?,
                norm: rms_norm(rank, config.rms_norm_eps, weights.pp("q_a_layernorm"))?,
                up: linear_no_bias(rank, columns, weights.pp("q_b_proj"))?,
            },
        };
        let latent = dims.latent as usize;
        let rope = head.rope as usize;
        let kv_a = weights.pp("kv_a_proj_with_mqa");
        let kv_b = (heads * head.kv_b() as usize, latent);

        let frequencies: Vec<f32> = (0..rope)
            .step_by(2)
            .map(|i| 1.0 / config.rope_theta.powf(i as f32 / rope as f32))
            .collect();
        let device = weights.device();
        let frequencies = Tensor::from_vec(frequencies, (1, rope / 2), device)?;
        let positions = Tensor::arange(0u32, max_len as u32, device)?
            .to_dtype(candle_core::DType::F32)?
            .reshape((max_len, 1))?;
        let angles = positions.matmul(&frequencies)?;

        Ok(Self {
            config,
            query,
            kv_a: linear_no_bias(hidden, latent + rope, kv_a)?,
            kv_a_norm: rms_norm(latent, config.rms_norm_eps, weights.pp("kv_a_layernorm"))?,
            kv_b: weights.pp("kv_b_proj").get(kv_b, "weight")?,
            out: linear_no_bias(heads * head.v as usize, hidden, weights.pp("o_proj"))?,
            cos: angles.cos()?.to_dtype(weights.dtype())?,
            sin: angles.sin()?.to_dtype(weights.dtype())?,
            attention: Attention::new(device, weights.dtype(), &config)?,
        })
    }

    /// The attention of `hidden` `[B, T, hidden]`, the tokens from position `offset` on of each of the B
    /// sequences, to themselves and to everything before, which earlier calls have put into the cache.
    ///
    /// # Errors
    ///
    /// Where there are more sequences or tokens than the module was made for.
    pub fn forward(&mut self, hidden: &Tensor, offset: usize) -> Result<Tensor> {
        let (batch, len, _) = hidden.dims3()?;
        let HeadDims { nope, rope, v, .. } = self.config.dims.head;
        let [heads, latent, nope, rope, v] = [
            self.config.heads,
            self.config.dims.latent as usize,
            nope as usize,
            rope as usize,
            v as usize,
        ];
        let query = match &self.query {
            Query::Plain(projection) => projection.forward(hidden)?,
            Query::LowRank { down, norm, up } => {
                up.forward(&norm.forward(&down.forward(hidden)?)?)?
            }
        };
        let query = query.reshape((batch, len, heads, nope + rope))?;
        let compressed = self.kv_a.forward(hidden)?;
        let key = compressed
            .narrow(D::Minus1, latent, rope)?
            .reshape((batch, len, 1, rope))?;

        // [B, heads, T, R], as candle's rotation takes it, and back to [B, T, heads, R].
        let cos = self.cos.narrow(0, offset, len)?;
        let sin = self.sin.narrow(0, offset, len)?;
        let rotate =
            |x: Tensor| rope_i(&x.transpose(1, 2)?.contiguous()?, &cos, &sin)?.transpose(1, 2);
        let turned = rotate(query.narrow(D::Minus1, nope, rope)?)?;
        let query = Tensor::cat(&[&query.narrow(D::Minus1, 0, nope)?, &turned], D::Minus1)?;
        let key = rotate(key)?.contiguous()?;
        let normed = self
            .kv_a_norm
            .forward(&compressed.narrow(D::Minus1, 0, latent)?.contiguous()?)?;

        let span = Span { batch, len, offset };
        let inputs = Inputs {
            query: &query.contiguous()?,
            latent: &normed,
            rope: &key,
            kv_b: &self.kv_b,
        };
        let attended = self.attention.attend(span, &inputs, heads * v)?;
        self.out.forward(&attended)
    }
}
