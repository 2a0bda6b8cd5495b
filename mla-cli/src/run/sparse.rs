//! The lists of a sparse layer. An indexer makes them from random data, and they are compared with
//! f64.

use std::ops::Range;

use half::{bf16, f16};
use mla_conformance::reference::{Turn, decode_e4m3, hadamard, largest, quantise_index};
use mla_runtime::Result;
use mla_runtime::backend::{SlotLists, StepLimits};
use mla_runtime::device::Device;
use mla_runtime::indexer::{
    IndexCacheLayout, IndexCacheMut, IndexCall, IndexDevice, IndexKeys, Indexer, IndexerWorkspace,
};
use mla_runtime::layer::SelectedWorkspace;
use mla_runtime::model::{DType, IndexerConfig, ModelConfig, Rope};
use mla_runtime::plan::memory::MemoryNeeds;
use mla_runtime::tensor::{ArrayRef, Layout, Rotary, RotaryTables, TensorRef};
use rayon::prelude::*;
use serde::Serialize;

use super::data::{HostLists, seed_of};
use super::step::Step;
use crate::device::memory::upload;
use crate::device::progress::Progress;
use crate::device::random::Normal;
use crate::device::tensor::{BLOCK, Tensor};
use crate::error::CliError;

/// The source of the lists of slots that a layer attends to.
pub trait Lists<D: Device>: Sized {
    /// True if there are lists.
    const SPARSE: bool;

    /// Returns the memory needs of the layer, including those of making the lists.
    fn needs(layer: MemoryNeeds, _: &ModelConfig, _: &StepLimits) -> Result<MemoryNeeds> {
        Ok(layer)
    }

    /// Makes everything that an engine would own, on the device.
    fn new(
        model: &ModelConfig,
        step: &Step<D>,
        progress: &Progress,
    ) -> std::result::Result<Self, CliError>;

    /// Makes the lists of the prepared step.
    fn select(&mut self, _: &SelectedWorkspace<D>) -> Result<()> {
        Ok(())
    }

    /// Returns the lists of the prepared step.
    fn lists(&self, _: &SelectedWorkspace<D>) -> Result<Option<SlotLists<'_, D>>> {
        Ok(None)
    }

    /// Compares the lists of `samples` tokens with f64.
    fn compare(
        &self,
        _: &Step<D>,
        _: Option<&HostLists>,
        _samples: u32,
        _: &Progress,
    ) -> std::result::Result<Option<ListErrors>, CliError> {
        Ok(None)
    }
}

/// No lists, since each token attends to all of its context.
pub(crate) struct Dense;

impl<D: Device> Lists<D> for Dense {
    const SPARSE: bool = false;

    fn new(_: &ModelConfig, _: &Step<D>, _: &Progress) -> std::result::Result<Self, CliError> {
        Ok(Self)
    }
}

/// The comparison of the lists of sampled tokens with those of the f64 reference.
///
/// The reference takes the stored index keys and computes the queries itself. A value may lie so
/// near the middle of two e4m3 codes that f32 rounds it to the other code. Logits then change a
/// little. A list may therefore differ only in tokens whose logits are within that change of the
/// last selected one.
#[derive(Clone, Copy, Serialize)]
pub struct ListErrors {
    /// Number of heads of an index query, and values of each.
    pub index_heads: u32,
    pub index_head_dim: u32,
    pub topk: u32,
    /// The lists that were compared.
    pub lists: usize,
    /// The number of lists that are equal, entry by entry.
    pub identical: usize,
    /// The largest distance between the logit of a wrong or missing token and that of the last
    /// selected token, as a fraction of the row's range.
    pub largest_distance: f64,
    /// The maximum for `largest_distance`.
    pub tolerance: f64,
    /// True if `largest_distance` is within `tolerance`.
    pub pass: bool,
}

/// The wrong rounding of one of 128 values changes it by at most 2⁻³. A logit is a sum of thousands
/// of products.
const TOLERANCE: f64 = 1e-2;

/// An indexer, with the data that an engine would own.
pub struct Indexed<D: IndexDevice> {
    indexer: Indexer<D>,
    workspace: IndexerWorkspace<D>,
    query_latent: Tensor<D>,
    query_weights: Tensor<D>,
    keys: Tensor<D>,
    norm: [Tensor<D>; 2],
    head_weights: Tensor<D>,
    /// The gates of new tokens and the table of positions in a pool, if keys are pooled.
    pool: Option<[Tensor<D>; 2]>,
    tables: Option<RotaryTables<D>>,
    rope: Rope,
    cache: D::Buffer,
    layout: IndexCacheLayout,
}

/// Returns the model's indexer. `mla run` has checked that there is one.
fn indexer_of(model: &ModelConfig) -> Result<IndexerConfig> {
    model.indexer.ok_or_else(|| {
        let accepted = "a model with index_n_heads, index_head_dim and index_topk";
        mla_runtime::Error::argument("indexer", "none", accepted)
    })
}

impl<D: IndexDevice> Lists<D> for Indexed<D> {
    const SPARSE: bool = true;

    fn needs(layer: MemoryNeeds, model: &ModelConfig, limits: &StepLimits) -> Result<MemoryNeeds> {
        layer.with_indexer(&indexer_of(model)?, limits, 1)
    }

    fn new(
        model: &ModelConfig,
        step: &Step<D>,
        progress: &Progress,
    ) -> std::result::Result<Self, CliError> {
        let (device, problem) = (step.layer.device(), &step.layer.config().problem);
        let config = indexer_of(model)?;
        let [heads, width] = [config.heads, config.width].map(|n| n as usize);
        // If queries are projected in one step, they come from the hidden state, whose width is
        // about this.
        let rank = model.q_lora_rank.unwrap_or(2048) as usize;
        let tokens = step.workload.tokens();
        let random = |number, shape, deviation| {
            let seed = seed_of(step.seed, number);
            Tensor::random(device, seed, problem.dtype, shape, deviation)
        };
        let query_latent = random(8, [tokens, 1, rank], 1.0)?;
        let query_weights = random(9, [1, rank, heads * width], 1.0 / (rank as f32).sqrt())?;
        let keys = random(10, [tokens, 1, width], 1.0)?;
        let norm = [
            random(11, [1, 1, width], 1.0)?,
            random(12, [1, 1, width], 0.05)?,
        ];
        let head_weights = random(13, [tokens, 1, heads], 1.0)?;
        let pool = match config.pool {
            1 => None,
            pool => Some([
                random(15, [tokens, 1, width], 1.0)?,
                random(16, [1, pool as usize, width], 1.0)?,
            ]),
        };
        let longest = step.workload.requests.iter().map(|r| r.kv).max();
        let tables = match config.rope {
            0 => None,
            rope => {
                let positions = longest.unwrap_or(0).max(1) as usize;
                Some(RotaryTables::new(device, &model.rope, rope, positions)?)
            }
        };
        let page_size = problem.page_size as usize;
        // The cache has the same number of pages as the layer's cache.
        let layout = IndexCacheLayout::contiguous(&config, step.workload.pages as usize, page_size);
        let indexer = Indexer::new(device, &config, problem)?;
        let mut indexed = Self {
            workspace: indexer.workspace(&step.limits)?,
            cache: device.allocate(layout.pages * layout.page_stride)?,
            indexer,
            query_latent,
            query_weights,
            keys,
            norm,
            head_weights,
            pool,
            tables,
            rope: model.rope,
            layout,
        };
        indexed.fill(step, progress)?;
        Ok(indexed)
    }

    fn select(&mut self, workspace: &SelectedWorkspace<D>) -> Result<()> {
        let (indexer, lists, call) = self.call()?;
        indexer.select(workspace, lists, call)
    }

    fn lists(&self, workspace: &SelectedWorkspace<D>) -> Result<Option<SlotLists<'_, D>>> {
        self.workspace.lists(workspace).map(Some)
    }

    fn compare(
        &self,
        step: &Step<D>,
        lists: Option<&HostLists>,
        samples: u32,
        progress: &Progress,
    ) -> std::result::Result<Option<ListErrors>, CliError> {
        let Some(lists) = lists else {
            return Ok(None);
        };
        let tokens = step.workload.tokens();
        // Samples are the first token, the last one, and others at equal distances.
        let count = tokens.min(samples as usize);
        let sampled = (0..count).map(|i| i * (tokens - 1) / (count - 1).max(1));
        let reference = Reference::new(self)?;
        let config = self.indexer.config();
        let mut errors = ListErrors {
            index_heads: config.heads,
            index_head_dim: config.width,
            topk: config.topk,
            lists: count,
            identical: 0,
            largest_distance: 0.0,
            tolerance: TOLERANCE,
            pass: true,
        };
        for (done, token) in sampled.enumerate() {
            progress.step(format!("checking lists: {} of {count}", done + 1));
            let distance = reference.distance(step, token, lists.of(token))?;
            errors.identical += usize::from(distance.is_none());
            let distance = distance.unwrap_or(0.0);
            errors.largest_distance = super::deviation::worst(errors.largest_distance, distance);
        }
        errors.pass = errors.largest_distance <= TOLERANCE;
        Ok(Some(errors))
    }
}

/// An indexer, the destination of its lists, and a call of it.
pub(crate) type Selecting<'a, D> = (
    &'a Indexer<D>,
    &'a mut IndexerWorkspace<D>,
    IndexCall<'a, D>,
);

impl<D: IndexDevice> Indexed<D> {
    /// Returns the width of the latent from which queries are made.
    pub fn query_rank(&self) -> usize {
        self.query_latent.width()
    }

    /// Returns the dtype of that latent and of the GEMM.
    pub fn query_dtype(&self) -> DType {
        self.query_latent.dtype()
    }

    /// Returns the selection of the prepared step.
    pub fn call(&mut self) -> Result<Selecting<'_, D>> {
        let call = IndexCall::new(
            [
                self.query_latent.view()?,
                self.query_weights.constant_view()?,
            ],
            self.keys.view()?,
            [self.norm[0].view()?, self.norm[1].view()?],
            self.head_weights.view()?,
            IndexCacheMut::new(D::bytes_mut(&mut self.cache), self.layout)?,
        )
        .with_rotary(match &self.tables {
            Some(tables) => Some(tables.rotation()?),
            None => None,
        })
        .with_pool(match &self.pool {
            Some([gates, table]) => Some([gates.view()?, table.view()?]),
            None => None,
        });
        Ok((&self.indexer, &mut self.workspace, call))
    }

    /// Writes the index keys of all context.
    fn fill(&mut self, step: &Step<D>, progress: &Progress) -> std::result::Result<(), CliError> {
        let (device, dtype) = (step.layer.device(), step.layer.config().problem.dtype);
        let width = self.layout.width;
        let requests = step.workload.requests.iter();
        let count = width * requests.map(|r| r.context_len() as usize).sum::<usize>();
        let numbers = Normal::of(seed_of(step.seed, 14), dtype, 1.0, count);
        let gates = Normal::of(seed_of(step.seed, 17), dtype, 1.0, count);
        let mut done = 0;
        let block_tables = step.workload.tables()?;
        for (index, request) in step.workload.requests.iter().enumerate() {
            progress.step(format!("filling the index cache: request {}", index + 1));
            let context: Vec<i64> = (0..i64::from(request.context_len())).collect();
            for block in context.chunks(BLOCK) {
                let slots: std::result::Result<Vec<i64>, _> = block
                    .iter()
                    .map(|position| block_tables.slot(index, *position as u64))
                    .collect();
                let (slots, positions) = (upload(device, &slots?)?, upload(device, block)?);
                let rows = Layout::contiguous(dtype, [block.len(), 1, width]);
                let keys = numbers.buffer(device, done * width, rows.elements())?;
                let gates = gates.buffer(device, done * width, rows.elements())?;
                let pool = match &self.pool {
                    Some([_, table]) => {
                        Some([TensorRef::new(D::bytes(&gates), rows)?, table.view()?])
                    }
                    None => None,
                };
                done += block.len();
                let rotary = match &self.tables {
                    Some(tables) => {
                        let tables = tables.rotation()?;
                        Some(Rotary::new(
                            ArrayRef::new(D::bytes(&positions), block.len())?,
                            [tables.cos, tables.sin],
                            self.indexer.config().rotary,
                        ))
                    }
                    None => None,
                };
                device.write_index_keys(
                    self.indexer.config(),
                    IndexKeys::new(
                        TensorRef::new(D::bytes(&keys), rows)?,
                        [self.norm[0].view()?, self.norm[1].view()?],
                        ArrayRef::new(D::bytes(&slots), block.len())?,
                        IndexCacheMut::new(D::bytes_mut(&mut self.cache), self.layout)?,
                    )
                    .with_rotary(rotary)
                    .with_pool(pool),
                )?;
                // The memory of the block is freed here.
                device.synchronize()?;
            }
        }
        Ok(())
    }
}

/// The operands of the f64 logits.
struct Reference<'a, D: IndexDevice> {
    indexed: &'a Indexed<D>,
    weights: Vec<Vec<f64>>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    codes: Vec<f64>,
}

impl<'a, D: IndexDevice> Reference<'a, D> {
    fn new(indexed: &'a Indexed<D>) -> Result<Self> {
        let rank = indexed.query_latent.width();
        let width = indexed.indexer.config().rope;
        let [cos, sin] = match &indexed.tables {
            Some(tables) => indexed.rope.cos_sin(width, tables.positions())?,
            None => [Vec::new(), Vec::new()],
        };
        Ok(Self {
            weights: (0..rank).map(|k| indexed.query_weights.row(0, k)).collect(),
            cos,
            sin,
            codes: (0..=255).map(decode_e4m3).collect(),
            indexed,
        })
    }

    /// Returns the distance of a list from the reference's list, or `None` if they are equal.
    fn distance(
        &self,
        step: &Step<D>,
        token: usize,
        list: &[i32],
    ) -> std::result::Result<Option<f64>, CliError> {
        let request = step.workload.request_of(token);
        let of = step.workload.requests[request];
        let position = of.context_len() as usize + token - step.workload.token_starts[request];
        let logits = self.logits(step, request, token, position)?;
        let tables = step.workload.tables()?;
        let slots = |positions: Range<usize>| {
            let slots = positions.map(|position| tables.slot(request, position as u64));
            slots
                .map(|slot| slot.map(|slot| slot as i32))
                .collect::<std::result::Result<Vec<i32>, _>>()
        };
        // If keys are pooled, the tokens of a pool share a logit. Tokens of an incomplete last pool
        // follow.
        let pool = self.indexed.indexer.config().pool as usize;
        let of_key = |key: usize| slots(key * pool..(key + 1) * pool);
        let (list, tail) = list.split_at(list.len() / pool * pool);
        let chosen = largest(&logits, list.len() / pool);
        let mut expected = Vec::with_capacity(list.len());
        for key in &chosen {
            expected.extend(of_key(*key)?);
        }
        expected.resize(list.len(), -1);
        let mut behind = slots(logits.len() * pool..position + 1)?;
        behind.resize(tail.len(), -1);
        if behind != tail {
            return Ok(Some(f64::INFINITY));
        }
        if list == expected {
            return Ok(None);
        }
        let min = chosen.iter().map(|at| logits[*at]).fold(f64::MAX, f64::min);
        let (low, high) = logits.iter().fold((f64::MAX, f64::MIN), |(low, high), x| {
            (low.min(*x), high.max(*x))
        });
        // An entry out of order, or one that is not a slot of the request, is infinitely far.
        let mut known = 0;
        let mut distance = 0.0f64;
        let mut entries = list.chunks(pool).peekable();
        for (key, logit) in logits.iter().enumerate() {
            let slots = of_key(key)?;
            let given = entries.next_if(|entry| **entry == slots[..]).is_some();
            known += usize::from(given);
            if given != chosen.binary_search(&key).is_ok() {
                distance = distance.max((logit - min).abs() / (high - low));
            }
        }
        Ok(Some(match known == chosen.len() {
            true => distance,
            false => f64::INFINITY,
        }))
    }

    /// Returns the logits of the keys that a token sees.
    fn logits(
        &self,
        step: &Step<D>,
        request: usize,
        token: usize,
        position: usize,
    ) -> std::result::Result<Vec<f64>, CliError> {
        let indexed = self.indexed;
        let layout = &indexed.layout;
        let queries = self.queries(step.layer.config().problem.dtype, token, position);
        let tables = step.workload.tables()?;
        let pool = indexed.indexer.config().pool as usize;
        let keys = (position + 1) / pool;
        let mut logits = Vec::with_capacity(keys);
        let mut page = vec![0; layout.page_stride];
        for first in (0..keys).step_by(layout.page_size) {
            let slot = tables.slot(request, (first * pool) as u64)? as usize;
            let start = layout.values_at(slot / pool);
            let bytes = D::byte_range(D::bytes(&indexed.cache), start..start + page.len());
            step.layer.device().download(bytes, &mut page)?;
            let count = layout.page_size.min(keys - first);
            let of_page: Vec<f64> = (0..count)
                .into_par_iter()
                .map(|offset| {
                    let key: Vec<f64> = page[layout.values_at(offset)..][..layout.width]
                        .iter()
                        .map(|code| self.codes[usize::from(*code)])
                        .collect();
                    let at = layout.scale_at(offset);
                    let scale =
                        f32::from_ne_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]]);
                    let heads = queries.iter().map(|(query, weight)| {
                        let product: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                        weight * product.max(0.0)
                    });
                    f64::from(scale) * heads.sum::<f64>()
                })
                .collect();
            logits.extend(of_page);
        }
        Ok(logits)
    }

    /// Returns each head's quantised query, decoded, and its weight.
    fn queries(&self, dtype: DType, token: usize, position: usize) -> Vec<(Vec<f64>, f64)> {
        let config = self.indexed.indexer.config();
        let [heads, width] = [config.heads, config.width].map(|n| n as usize);
        let mut projected = vec![0.0; heads * width];
        let latent = self.indexed.query_latent.row(token, 0);
        for (latent, weights) in latent.iter().zip(&self.weights) {
            for (sum, weight) in projected.iter_mut().zip(weights) {
                *sum += latent * weight;
            }
        }
        let pairs = config.rope as usize / 2;
        let turn = Turn {
            style: config.rotary,
            pairs: (0..pairs)
                .map(|pair| {
                    let at = position * pairs + pair;
                    (f64::from(self.cos[at]), f64::from(self.sin[at]))
                })
                .collect(),
        };
        // Pooled keys and their queries are rounded before and after the transform.
        let round = |row: Vec<f64>| -> Vec<f64> {
            match config.pool {
                1 => row,
                _ => row.iter().map(|x| rounded(DType::BF16, *x)).collect(),
            }
        };
        let scale = 1.0 / (heads as f64 * width as f64).sqrt();
        let weights = self.indexed.head_weights.row(token, 0);
        projected
            .chunks(width)
            .zip(weights)
            .map(|(query, weight)| {
                let mut query: Vec<f64> = query.iter().map(|x| rounded(dtype, *x)).collect();
                turn.apply(&mut query);
                if config.hadamard {
                    query = round(hadamard(&round(query)));
                }
                let (codes, query_scale) = quantise_index(&query);
                let query = codes.iter().map(|code| self.codes[usize::from(*code)]);
                (query.collect(), weight * scale * query_scale)
            })
            .collect()
    }
}

fn rounded(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
    }
}
