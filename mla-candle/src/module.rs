//! DeepSeek's attention as a candle module, with a cache of its own.

use candle_core::{D, Error, Result, Tensor};
use candle_nn::rotary_emb::{rope, rope_i};
use candle_nn::{Linear, Module, RmsNorm, VarBuilder, linear_b, linear_no_bias, rms_norm};
use mla_runtime::backend::StepLimits;
use mla_runtime::layer::StepRequest;
use mla_runtime::model::RotaryStyle;
use mla_runtime::spec::{Problem, QueryLen};

use crate::attend::{Attention, Layer, Workspace, attend};
use crate::config::{Config, Limits};
use crate::lend::layer_dtype;

const PAGE: usize = 16;

/// The attention of one decoder layer, with its cache.
pub struct MlaAttention {
    config: Config,
    limits: Limits,
    query: Query,
    kv_a: Linear,
    kv_a_norm: RmsNorm,
    out: Linear,
    /// Cosines and sines, `[max_len, R/2]` each.
    angles: [Tensor; 2],
    layer: Layer,
    step: Workspace,
    /// The cache, `[pages, 16, L + R]`.
    cache: Tensor,
    /// The pages of all sequences, one sequence after the other.
    pages: Vec<i32>,
    /// The number of cached tokens of each sequence.
    cached: usize,
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
    /// Makes the layer from the weights of `self_attn`, under their published names.
    ///
    /// # Errors
    ///
    /// If a weight is missing, the rotary embedding has no tables, or the layer cannot be made.
    pub fn new(config: &Config, limits: Limits, weights: VarBuilder) -> Result<Self> {
        let (model, hidden, eps) = (&config.attention, config.hidden_size, config.rms_norm_eps);
        let (head, latent) = (model.dims.head, model.dims.latent as usize);
        let heads = model.heads as usize;
        let columns = heads * head.qk() as usize;
        let bias = config.attention_bias;
        let query = match model.q_lora_rank.map(|rank| rank as usize) {
            None => Query::Plain(linear_no_bias(hidden, columns, weights.pp("q_proj"))?),
            Some(rank) => Query::LowRank {
                down: linear_b(hidden, rank, bias, weights.pp("q_a_proj"))?,
                norm: rms_norm(rank, eps, weights.pp("q_a_layernorm"))?,
                up: linear_no_bias(rank, columns, weights.pp("q_b_proj"))?,
            },
        };
        let (device, dtype) = (weights.device(), weights.dtype());
        let kv_a = weights.pp("kv_a_proj_with_mqa");
        let kv_b = (heads * head.kv_b() as usize, latent);
        let problem = Problem::new(
            model.dims,
            model.heads,
            layer_dtype(dtype, "dtype").map_err(Error::wrap)?,
        );
        let problem = problem
            .with_page_size(PAGE as u32)
            .with_query_len(QueryLen::Ragged);
        let attention = Attention::new(device, &problem, model.softmax_scale())?;
        let per_sequence = limits.max_len.div_ceil(PAGE);
        let step = StepLimits::new(limits.batch, limits.batch * limits.max_len, per_sequence);
        let step =
            attention.workspace(&step.with_context_rows(limits.max_len.next_multiple_of(PAGE)))?;
        let pages = limits.batch * per_sequence;
        let pairs = head.rope as usize / 2;
        let tables = model
            .rope
            .cos_sin(head.rope, limits.max_len)
            .map_err(Error::wrap)?;
        let [cos, sin] = tables
            .map(|table| Tensor::from_vec(table, (limits.max_len, pairs), device)?.to_dtype(dtype));
        Ok(Self {
            query,
            kv_a: linear_b(hidden, latent + head.rope as usize, bias, kv_a)?,
            kv_a_norm: rms_norm(latent, eps, weights.pp("kv_a_layernorm"))?,
            out: linear_b(heads * head.v as usize, hidden, bias, weights.pp("o_proj"))?,
            angles: [cos?, sin?],
            layer: Layer::new(attention, weights.pp("kv_b_proj").get(kv_b, "weight")?),
            step,
            cache: Tensor::zeros((pages, PAGE, model.dims.row() as usize), dtype, device)?,
            pages: (0..pages as i32).collect(),
            config: *config,
            limits,
            cached: 0,
        })
    }

    /// Computes the attention of `hidden` `[B, T, hidden]`.
    ///
    /// `hidden` holds the tokens from position `offset` on, for each of the B sequences. They
    /// attend to themselves and to all tokens before them, which earlier calls have put into the
    /// cache. Cached tokens from `offset` on are replaced.
    ///
    /// # Errors
    ///
    /// If there are more sequences or tokens than the module has room for, or if fewer than
    /// `offset` tokens are in the cache.
    pub fn forward(&mut self, hidden: &Tensor, offset: usize) -> Result<Tensor> {
        let (batch, len, _) = hidden.dims3()?;
        self.check(batch, len, offset)?;
        let model = &self.config.attention;
        let head = model.dims.head;
        let [heads, latent, nope, width, v] =
            [model.heads, model.dims.latent, head.nope, head.rope, head.v].map(|n| n as usize);
        let query = match &self.query {
            Query::Plain(projection) => projection.forward(hidden)?,
            Query::LowRank { down, norm, up } => {
                up.forward(&norm.forward(&down.forward(hidden)?)?)?
            }
        };
        let query = query.reshape((batch, len, heads, nope + width))?;
        let compressed = self.kv_a.forward(hidden)?;
        let key = compressed
            .narrow(D::Minus1, latent, width)?
            .reshape((batch, len, 1, width))?;
        let turned = self.rotate(&query.narrow(D::Minus1, nope, width)?, offset)?;
        let query = Tensor::cat(&[&query.narrow(D::Minus1, 0, nope)?, &turned], D::Minus1)?;
        let key = self.rotate(&key, offset)?.contiguous()?;
        let normed = self
            .kv_a_norm
            .forward(&compressed.narrow(D::Minus1, 0, latent)?.contiguous()?)?;

        let per_sequence = self.limits.max_len.div_ceil(PAGE);
        let requests: Vec<_> = self.pages.chunks(per_sequence).take(batch).collect();
        let requests: Vec<_> = requests
            .into_iter()
            .map(|pages| StepRequest::new(len as u32, (offset + len) as u32, pages))
            .collect();
        let planned = self.step.plan(&requests)?;
        self.step.prepare(self.layer.attention(), &planned)?;
        let shape = (batch, len, heads, v);
        let attended = Tensor::zeros(shape, hidden.dtype(), hidden.device())?;
        attend(
            &mut self.step,
            &self.layer,
            &query.contiguous()?,
            &normed,
            &key.squeeze(2)?,
            &self.cache,
            &attended,
        )?;
        let attended = attended.reshape((batch, len, heads * v))?;
        self.cached = offset + len;
        self.out.forward(&attended)
    }

    /// Removes all tokens from the cache.
    pub fn clear_kv_cache(&mut self) {
        self.cached = 0;
    }

    /// Rotates `[B, T, heads, R]` by each token's position.
    fn rotate(&self, x: &Tensor, offset: usize) -> Result<Tensor> {
        if x.elem_count() == 0 {
            return Ok(x.clone());
        }
        let len = x.dim(1)?;
        let [cos, sin] = &self.angles;
        let (cos, sin) = (cos.narrow(0, offset, len)?, sin.narrow(0, offset, len)?);
        // candle rotates [B, heads, T, R].
        let x = x.transpose(1, 2)?.contiguous()?;
        match self.config.attention.rope.style {
            RotaryStyle::Interleaved => rope_i(&x, &cos, &sin),
            RotaryStyle::Halves => rope(&x, &cos, &sin),
        }?
        .transpose(1, 2)
    }

    fn check(&self, batch: usize, len: usize, offset: usize) -> Result<()> {
        let Limits {
            batch: max,
            max_len,
            ..
        } = self.limits;
        if batch > max {
            candle_core::bail!("batch: given {batch}, accepted at most {max}");
        }
        if offset > self.cached {
            let cached = self.cached;
            candle_core::bail!(
                "offset: given {offset}, accepted at most the {cached} cached tokens"
            );
        }
        if len == 0 || offset + len > max_len {
            candle_core::bail!(
                "hidden: given {len} tokens from position {offset}, accepted 1 and up within \
                 {max_len}"
            );
        }
        Ok(())
    }
}
