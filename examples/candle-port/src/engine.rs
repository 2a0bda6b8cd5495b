//! The parts of the engine around its attention, which a port does not change.

use candle_core::{D, DType, Device, Error, Result, Tensor};
use candle_nn::ops::rms_norm;
use mla_runtime::model::{HeadDims, MlaDims, Rope};

/// The number of tokens of a page.
pub const PAGE: usize = 16;

/// The dimensions of the model.
#[derive(Clone, Copy)]
pub struct Config {
    /// The width of hidden states.
    pub hidden: usize,
    /// The number of query heads.
    pub heads: usize,
    /// L and (P, R, V).
    pub dims: MlaDims,
    /// The maximum number of tokens of a sequence.
    pub max_len: usize,
}

impl Config {
    /// Returns L, P, R and V.
    pub fn widths(&self) -> [usize; 4] {
        let HeadDims { nope, rope, v, .. } = self.dims.head;
        [self.dims.latent, nope, rope, v].map(|width| width as usize)
    }

    /// Returns the factor of scores before the softmax.
    pub fn scale(&self) -> f64 {
        1.0 / f64::from(self.dims.head.qk()).sqrt()
    }
}

/// A step, in the form in which the engine's scheduler gives it to every layer. Requests are padded
/// to the longest.
#[derive(Clone)]
pub struct Batch {
    /// The number of rows of each request. Its new tokens come first.
    pub max_len: usize,
    /// The number of requests in the padded batch. It includes rows of a graph's batch size without
    /// a request.
    pub rows: usize,
    /// The new tokens of each request.
    pub new: Vec<usize>,
    /// The tokens of each request that are in the cache.
    pub cached: Vec<usize>,
    /// The pages of each request.
    pub block_tables: Vec<Vec<usize>>,
}

impl Batch {
    /// Returns the slot of each row, or −1 for padding: `[rows · max_len]`.
    pub fn slots(&self) -> Vec<i64> {
        let mut slots = vec![-1; self.rows * self.max_len];
        for (index, table) in self.block_tables.iter().enumerate() {
            for at in 0..self.new[index] {
                let position = self.cached[index] + at;
                let slot = table[position / PAGE] * PAGE + position % PAGE;
                slots[index * self.max_len + at] = slot as i64;
            }
        }
        slots
    }

    /// Returns the position of each row, or 0 for padding.
    fn positions(&self, device: &Device) -> Result<Tensor> {
        let mut positions = vec![0u32; self.rows * self.max_len];
        for (index, (&new, &cached)) in self.new.iter().zip(&self.cached).enumerate() {
            for at in 0..new {
                positions[index * self.max_len + at] = (cached + at) as u32;
            }
        }
        Tensor::new(positions, device)
    }
}

/// The cache of a layer, in two tensors.
pub struct PagedCache {
    /// Latents, `[pages, 16, L]`.
    pub latent: Tensor,
    /// Rotary keys, `[pages, 16, R]`.
    pub rope: Tensor,
}

impl PagedCache {
    /// Makes empty pages. Unwritten slots hold NaN, which must not reach a result.
    pub fn new(config: &Config, pages: usize, dtype: DType, device: &Device) -> Result<Self> {
        let [latent, _, rope, _] = config.widths();
        let tensor = |width| Tensor::full(f32::NAN, (pages, PAGE, width), device)?.to_dtype(dtype);
        Ok(Self {
            latent: tensor(latent)?,
            rope: tensor(rope)?,
        })
    }
}

/// The weights of a layer under the names of a checkpoint, and the tables of the rotation.
pub struct Weights {
    /// The dimensions of the model.
    pub config: Config,
    /// Query projection, `[H·(P+R), hidden]`.
    pub q_proj: Tensor,
    /// Projection to latents and rotary keys, `[L + R, hidden]`.
    pub kv_a_proj: Tensor,
    /// Weights of the latents' norm, `[L]`.
    pub kv_a_norm: Tensor,
    /// Expansion of latents to keys and values, `[H·(P+V), L]`.
    pub kv_b_proj: Tensor,
    /// Output projection, `[hidden, H·V]`.
    pub o_proj: Tensor,
    /// Cosines and sines, `[max_len, R/2]` each, in f32.
    pub angles: [Tensor; 2],
}

/// Queries and cache rows for each row of the padded batch.
pub struct Projected {
    /// Rotated queries, `[rows, max_len, H, P+R]`.
    pub query: Tensor,
    /// Normalised latents, `[rows, max_len, L]`.
    pub latent: Tensor,
    /// Rotated rotary keys, `[rows, max_len, R]`.
    pub rope: Tensor,
}

impl Weights {
    /// Makes weights that are multiples of `1 / 256`, which bf16 can represent, too.
    pub fn new(config: Config, dtype: DType, device: &Device) -> Result<Self> {
        let [latent, nope, rope, v] = config.widths();
        let mut seed = 0;
        let mut weight = |rows, columns| {
            seed += 1;
            noise(seed, &[rows, columns], device)?.to_dtype(dtype)
        };
        let tables = Rope::plain(1e4).cos_sin(rope as u32, config.max_len);
        let [cos, sin] = tables
            .map_err(Error::wrap)?
            .map(|table| Tensor::from_vec(table, (config.max_len, rope / 2), device));
        Ok(Self {
            config,
            q_proj: weight(config.heads * (nope + rope), config.hidden)?,
            kv_a_proj: weight(latent + rope, config.hidden)?,
            kv_a_norm: Tensor::ones(latent, dtype, device)?,
            kv_b_proj: weight(config.heads * (nope + v), latent)?,
            o_proj: weight(config.hidden, config.heads * v)?,
            angles: [cos?, sin?],
        })
    }

    /// Computes queries and new rows of the cache from `hidden`, `[rows, max_len, hidden]`.
    pub fn project(&self, hidden: &Tensor, batch: &Batch) -> Result<Projected> {
        let [latent, nope, rope, _] = self.config.widths();
        let (rows, max_len) = (batch.rows, batch.max_len);
        let positions = batch.positions(hidden.device())?;
        let query = linear(hidden, &self.q_proj)?;
        let query = query.reshape((rows, max_len, self.config.heads, nope + rope))?;
        let turned = self.rotate(&query.narrow(D::Minus1, nope, rope)?, &positions)?;
        let kv = linear(hidden, &self.kv_a_proj)?;
        let key = kv.narrow(D::Minus1, latent, rope)?.unsqueeze(2)?;
        Ok(Projected {
            query: Tensor::cat(&[query.narrow(D::Minus1, 0, nope)?, turned], D::Minus1)?,
            latent: rms_norm(
                &kv.narrow(D::Minus1, 0, latent)?.contiguous()?,
                &self.kv_a_norm,
                1e-6,
            )?,
            rope: self.rotate(&key, &positions)?.squeeze(2)?,
        })
    }

    /// Rotates pairs (2i, 2i + 1) of `[rows, max_len, heads, R]`.
    fn rotate(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let (rows, max_len, heads, width) = x.dims4()?;
        let angle = |table: &Tensor| {
            let of_rows = table.index_select(positions, 0)?;
            of_rows.reshape((rows, max_len, 1, width / 2))
        };
        let [cos, sin] = &self.angles;
        let (cos, sin) = (angle(cos)?, angle(sin)?);
        let pairs = x.to_dtype(DType::F32)?;
        let pairs = pairs.reshape((rows, max_len, heads, width / 2, 2))?;
        let part = |at| pairs.narrow(D::Minus1, at, 1)?.squeeze(D::Minus1);
        let (a, b) = (part(0)?, part(1)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
        Tensor::stack(&[first, second], D::Minus1)?
            .reshape((rows, max_len, heads, width))?
            .to_dtype(x.dtype())
    }

    /// Computes the output projection of `[rows, max_len, H, V]`.
    pub fn project_out(&self, attended: &Tensor) -> Result<Tensor> {
        linear(&attended.flatten_from(2)?, &self.o_proj)
    }
}

/// Computes x · Wᵀ over the last axis.
pub fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.broadcast_matmul(&weight.t()?)
}

/// Makes multiples of `1 / 256`, in rows with a norm of about 1. The same seed gives the same
/// numbers.
pub fn noise(seed: u64, shape: &[usize], device: &Device) -> Result<Tensor> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let width = shape.last().copied().unwrap_or(1);
    let largest = (256.0 * (3.0 / width as f32).sqrt()).max(1.0);
    let mut number = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let within = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        (within * largest).round() / 256.0
    };
    let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| number()).collect();
    Tensor::from_vec(numbers, shape, device)
}
