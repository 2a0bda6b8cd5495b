//! DeepSeek's attention as a candle module: projections, norms and rotary embedding by candle, everything
//! between the projected queries and `o_proj` by the MLA layer, on candle's own memory.
//!
//! It runs on the CPU in f32. Tensors are lent to the layer as the slices that they are, so nothing is
//! copied on the way in; the cache and the workspace are made once, when the module is.
//!
//! `tests/deepseek2.rs` checks it against candle-transformers' own DeepSeek-V2 on random weights:
//!
//! ```console
//! $ cargo test --manifest-path examples/candle/Cargo.toml
//! ```

use candle_core::{CpuStorage, D, Error, Result, Storage, Tensor};
use candle_nn::rotary_emb::rope_i;
use candle_nn::{Linear, Module, RmsNorm, VarBuilder, linear_no_bias, rms_norm};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::cache::{CacheLayout, CacheMut};
use mla_runtime::cpu::{Buffer, Cpu, CpuDecode, CpuPrefill};
use mla_runtime::device::Device;
use mla_runtime::dims::{HeadDims, MlaDims};
use mla_runtime::dtype::DType;
use mla_runtime::layer::{LayerCall, MlaLayer, StepBatch, Weights, Workspace};
use mla_runtime::plan::slots::BlockTables;
use mla_runtime::problem::Problem;
use mla_runtime::spec::QueryLen;
use mla_runtime::tensor::{TensorMut, TensorRef};

const PAGE: usize = 16;

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
    layer: MlaLayer<CpuPrefill, CpuDecode>,
    workspace: Workspace<CpuPrefill, CpuDecode>,
    cache: Buffer,
    cache_layout: CacheLayout,
    /// Sequence after sequence.
    block_tables: Vec<i32>,
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
            batch,
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

        let problem = Problem {
            page_size: PAGE as u32,
            query_len: QueryLen::Ragged,
            ..Problem::new(dims, heads as u32, DType::F32)
        };
        let layer_config = LayerConfig {
            problem,
            softmax_scale: 1.0 / (head.qk() as f32).sqrt(),
        };
        let cpu = Cpu::new();
        let layer = MlaLayer::of(&cpu, &layer_config).map_err(Error::wrap)?;
        let pages = max_len.div_ceil(PAGE);
        let workspace = layer
            .workspace(&StepLimits {
                requests: batch,
                tokens: batch * max_len,
                decode_query_len: 1,
                pages_per_request: pages,
                context_rows: max_len.next_multiple_of(PAGE),
            })
            .map_err(Error::wrap)?;
        let cache_layout = CacheLayout::contiguous(dims, problem.kv_format, batch * pages, PAGE);
        let cache = cpu
            .allocate(cache_layout.pages * cache_layout.page_stride)
            .map_err(Error::wrap)?;
        Ok(Self {
            config,
            query,
            kv_a: linear_no_bias(hidden, latent + rope, kv_a)?,
            kv_a_norm: rms_norm(latent, config.rms_norm_eps, weights.pp("kv_a_layernorm"))?,
            kv_b: weights.pp("kv_b_proj").get(kv_b, "weight")?,
            out: linear_no_bias(heads * head.v as usize, hidden, weights.pp("o_proj"))?,
            cos: angles.cos()?,
            sin: angles.sin()?,
            layer,
            workspace,
            cache,
            cache_layout,
            block_tables: (0..(batch * pages) as i32).collect(),
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

        let tokens = batch * len;
        let mut attended = vec![0f32; tokens * heads * v];
        lend(&query.contiguous()?, |query| {
            lend(&normed, |latents| {
                lend(&key, |keys| {
                    lend(&self.kv_b, |kv_b| {
                        attend(
                            &self.layer,
                            &mut self.workspace,
                            (&mut self.cache, self.cache_layout),
                            &self.block_tables,
                            Step {
                                batch,
                                len,
                                offset,
                                query,
                                latents,
                                keys,
                                kv_b,
                            },
                            &mut attended,
                        )
                        .map_err(Error::wrap)
                    })
                })
            })
        })?;
        let attended = Tensor::from_vec(attended, (batch, len, heads * v), hidden.device())?;
        self.out.forward(&attended)
    }
}

/// The elements of a contiguous f32 tensor on the CPU, where candle keeps them.
fn lend<R>(tensor: &Tensor, work: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(elements)), Some((start, end))) => {
            work(&elements[start..end])
        }
        _ => candle_core::bail!("given {tensor:?}, accepted a contiguous f32 tensor on the CPU"),
    }
}

/// What one call brings: B sequences of `len` new tokens behind `offset` earlier ones.
struct Step<'a> {
    batch: usize,
    len: usize,
    offset: usize,
    query: &'a [f32],
    latents: &'a [f32],
    keys: &'a [f32],
    kv_b: &'a [f32],
}

fn attend(
    layer: &MlaLayer<CpuPrefill, CpuDecode>,
    workspace: &mut Workspace<CpuPrefill, CpuDecode>,
    (cache, cache_layout): (&mut Buffer, CacheLayout),
    block_tables: &[i32],
    step: Step<'_>,
    out: &mut [f32],
) -> mla_runtime::Result<()> {
    let config = layer.config();
    let Problem { dims, heads, .. } = config.problem;
    let [heads, latent, rope, qk, v, kv_b] = [
        heads,
        dims.latent,
        dims.head.rope,
        dims.head.qk(),
        dims.head.v,
        dims.head.kv_b(),
    ]
    .map(|extent| extent as usize);
    let requests = vec![
        Request {
            q: step.len as u32,
            kv: (step.offset + step.len) as u32,
        };
        step.batch
    ];
    let pages = workspace.limits().pages_per_request;
    let block_tables = BlockTables::new(block_tables, pages, PAGE as u32)?;
    let slots = block_tables.new_token_slots(&requests)?;
    workspace.prepare(
        layer,
        &StepBatch {
            requests: &requests,
            block_tables,
            slots: &slots,
            threshold: None,
            max_len: None,
        },
    )?;
    let tokens = step.batch * step.len;
    // Published [H·(P+V), L], seen as [1, L, H·(P+V)].
    let kv_b = TensorRef::from_slice(step.kv_b, [1, heads * kv_b, latent])?.transpose(1, 2);
    layer.forward(
        workspace,
        LayerCall {
            weights: Weights::new(kv_b, config)?,
            query: TensorRef::from_slice(step.query, [tokens, heads, qk])?,
            latent: TensorRef::from_slice(step.latents, [tokens, 1, latent])?,
            rope: TensorRef::from_slice(step.keys, [tokens, 1, rope])?,
            cache: CacheMut::new(Cpu::bytes_mut(cache), cache_layout)?,
            out: TensorMut::from_slice(out, [tokens, heads, v])?,
            lse: None,
            slot_lists: None,
            rotary: None,
        },
    )
}
