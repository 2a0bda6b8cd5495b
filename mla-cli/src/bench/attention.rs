//! One backend's attention on random data: absorbed or expanded, one or several layers at a time.

use std::time::Instant;

use fastrand::Rng;
use mla_conformance::reference::{attend, decode_row};
use mla_runtime::Result;
use mla_runtime::backend::{
    Chunk, DecodeBatch, DecodeCall, DecodeStage, HostLens, Keys, LayerConfig, Output, PrefillBatch,
    PrefillCall, PrefillStage, Query, SelectedDecode, SelectedPrefill, SlotLists, StepLimits,
};
use mla_runtime::batch::Request;
use mla_runtime::cache::{BlockTable, CacheLayout, CacheMut, CacheRef};
use mla_runtime::device::Device;
use mla_runtime::dtype::DType;
use mla_runtime::kv_format::KvFormat;
use mla_runtime::lse::{LseLayout, LseMut};
use mla_runtime::plan::context::ContextChunk;
use mla_runtime::registry::Registry;
use mla_runtime::spec::{KeyLayout, QueryFormat};
use mla_runtime::tensor::{ArrayRef, Layout, Shape, TensorMut, TensorRef};
use rayon::prelude::*;

use super::check::{Errors, Row};
use super::lists::{Lists, distinct_rows};
use super::random::Normal;
use crate::cost::{Cost, query_tokens};
use crate::deviation::choose;
use crate::error::CliError;
use crate::stored::stored_rows;
use crate::upload::upload;

/// Cache rows that are made at a time.
const BLOCK: usize = 1 << 16;

/// What is attended to, and by whom.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    pub(super) backend: &'static str,
    pub(super) kind: Kind,
    pub(super) config: LayerConfig,
    /// Where expanded and not causal, `kv` counts keys alone.
    pub(super) requests: Vec<Request>,
    /// The standard deviation of queries, keys and values.
    pub(super) deviation: f32,
    /// How many layers run one after another, each with a cache, or keys and values, of its own.
    pub(super) layers: usize,
    /// Parts into which a decode backend is told to divide rows.
    pub(super) num_splits: Option<u32>,
    pub(super) seed: u64,
    /// What each query token of a sparse attention attends to.
    pub(super) lists: Option<Lists>,
}

/// The form of an attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Absorbed, to the cache.
    Decode,
    /// Expanded; causal for new tokens, not for a chunk of context.
    Prefill { causal: bool },
}

impl Attention {
    pub(super) fn tokens(&self) -> usize {
        self.requests.iter().map(|r| r.q as usize).sum()
    }

    /// Of one layer.
    pub(super) fn cost(&self) -> Cost {
        let problem = &self.config.problem;
        if let Some(lists) = self.lists {
            let positions = self.positions();
            let pairs = positions.iter().map(Vec::len).sum::<usize>() as f64;
            let rows = distinct_rows(&self.requests, &positions) as f64;
            return Cost::sparse(problem, &self.requests, pairs, rows, lists.topk);
        }
        match self.kind {
            Kind::Decode => Cost::decode(problem, &self.requests),
            Kind::Prefill { causal } => Cost::prefill(problem, &self.requests, causal),
        }
    }

    /// The positions in its request that each query token's list names; none where attention is dense.
    fn positions(&self) -> Vec<Vec<u32>> {
        let page_size = self.config.problem.page_size;
        let lists = self.lists;
        lists.map_or_else(Vec::new, |lists| {
            lists.positions(&self.requests, page_size, self.seed)
        })
    }

    fn longest(&self, of: fn(&Request) -> u32) -> usize {
        self.requests.iter().map(of).max().unwrap_or(0) as usize
    }

    /// Where each request's tokens begin, and the end of the last.
    fn starts(&self, of: fn(&Request) -> u32) -> Vec<i32> {
        let mut starts = vec![0];
        for request in &self.requests {
            starts.push(starts[starts.len() - 1] + of(request) as i32);
        }
        starts
    }

    fn pages_of(&self, request: &Request) -> usize {
        request.kv.div_ceil(self.config.problem.page_size) as usize
    }

    fn max_pages(&self) -> usize {
        let pages = self.requests.iter().map(|r| self.pages_of(r));
        pages.max().unwrap_or(0).max(1)
    }

    pub(super) fn limits(&self) -> StepLimits {
        StepLimits::new(self.requests.len(), self.tokens(), self.max_pages())
            .with_decode_query_len(match self.kind {
                Kind::Decode => self.longest(|r| r.q),
                Kind::Prefill { .. } => 1,
            })
            .with_context_rows(match self.kind {
                Kind::Decode => 0,
                Kind::Prefill { .. } => self.requests.iter().map(|r| r.kv as usize).sum(),
            })
    }

    /// The bytes that the inputs and outputs take on the device. In floating point, which nothing overflows.
    pub(super) fn bytes(&self) -> f64 {
        let problem = &self.config.problem;
        let dims = problem.dims;
        let [heads, latent, rope, nope, v] = [
            problem.heads,
            dims.latent,
            dims.head.rope,
            dims.head.nope,
            dims.head.v,
        ]
        .map(f64::from);
        let element = problem.dtype.bytes() as f64;
        let tokens = query_tokens(&self.requests);
        let layers = self.layers as f64;
        match self.kind {
            Kind::Decode => {
                let pages: f64 = self.requests.iter().map(|r| self.pages_of(r) as f64).sum();
                let slots = pages * f64::from(problem.page_size);
                let row = problem.kv_format.row_bytes(dims) as f64;
                let width = self.lists.map_or(0, |lists| lists.topk);
                let table = self.requests.len() as f64 * self.max_pages() as f64 * 4.0
                    + tokens * f64::from(width) * 4.0;
                layers * slots * row + table + tokens * heads * (2.0 * latent + rope) * element
            }
            Kind::Prefill { .. } => {
                let keys: f64 = self.requests.iter().map(|r| f64::from(r.kv)).sum();
                // Packed keys repeat the rotary part for every head.
                let packed = keys * heads * (nope + rope + v) * element;
                layers * packed + tokens * heads * (nope + rope + v) * element
            }
        }
    }

    /// The decode backend, told how to divide rows.
    pub(super) fn decode_backend<D: Device>(
        &self,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<SelectedDecode<D>, CliError> {
        let mut backend = registry.instantiate_decode(self.backend, device, &self.config)?;
        if let Some(parts) = self.num_splits {
            backend.set_num_splits(parts)?;
        }
        Ok(backend)
    }

    /// The attention with everything that it needs on `device`.
    pub(super) fn set_up<D: Device>(
        &self,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<Work<'_, D>, CliError> {
        Ok(match self.kind {
            Kind::Decode => Work::Decode(Decode::new(self, registry, device)?),
            Kind::Prefill { causal } => {
                Work::Prefill(Prefill::new(self, causal, registry, device)?)
            }
        })
    }
}

/// An attention that is ready to run.
pub(super) enum Work<'a, D: Device> {
    Decode(Decode<'a, D>),
    Prefill(Prefill<'a, D>),
}

impl<D: Device> Work<'_, D> {
    /// Enqueues all layers, with what has to be prepared from lengths on the device unless that is
    /// `planned` already.
    pub(super) fn enqueue(&mut self, device: &D, planned: bool) -> Result<()> {
        match self {
            Self::Decode(work) => {
                if !planned {
                    work.prepare(device)?;
                }
                work.attend(device)
            }
            Self::Prefill(work) => work.attend(device),
        }
    }

    /// Seconds that a plan takes which is made on the host, so that no graph can hold it: the fastest of some, until
    /// it has arrived on the device. None where the device plans.
    pub(super) fn planning(&mut self, device: &D) -> Result<Option<f64>> {
        let Self::Decode(work) = self else {
            return Ok(None);
        };
        if !work.backend.spec().plans_on_host {
            return Ok(None);
        }
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            device.synchronize()?;
            let begin = Instant::now();
            work.prepare(device)?;
            device.synchronize()?;
            fastest = fastest.min(begin.elapsed().as_secs_f64());
        }
        Ok(Some(fastest))
    }

    /// Whether there is anything to plan ahead.
    pub(super) const fn has_plan(&self) -> bool {
        matches!(self, Self::Decode(_))
    }

    /// Compares `count` rows of the last layer's output with attention in f64.
    pub(super) fn check(&self, device: &D, count: usize) -> std::result::Result<Errors, CliError> {
        match self {
            Self::Decode(work) => work.check(device, count),
            Self::Prefill(work) => work.check(device, count),
        }
    }
}

/// Results, and where they are.
struct Outcome<D: Device> {
    out: D::Buffer,
    out_layout: Layout,
    lse: D::Buffer,
    lse_layout: LseLayout,
}

impl<D: Device> Outcome<D> {
    fn new(device: &D, dtype: DType, shape: Shape) -> Result<Self> {
        let out_layout = Layout::contiguous(dtype, shape);
        // NaN, so that nothing passes for a result that was not written.
        let poison = |bytes: usize| upload(device, &vec![0xff_u8; bytes]);
        Ok(Self {
            out: poison(out_layout.elements() * dtype.bytes())?,
            out_layout,
            lse: poison(shape[0] * shape[1] * 4)?,
            lse_layout: LseLayout::heads_first(shape[1], shape[0]),
        })
    }

    fn write(&mut self) -> Result<(Output<'_, D>, LseMut<'_, D>)> {
        let out = TensorMut::new(D::bytes_mut(&mut self.out), self.out_layout)?;
        let lse = LseMut::new(D::bytes_mut(&mut self.lse), self.lse_layout)?;
        Ok((Output::Plain(out), lse))
    }

    /// One head's output and log-sum-exp for one token.
    fn row(&self, device: &D, token: usize, head: usize) -> Result<(Vec<f64>, f64)> {
        let [tokens, heads, width] = self.out_layout.shape;
        let mut row = vec![0; width * self.out_layout.dtype.bytes()];
        let start = (token * heads + head) * row.len();
        let bytes = D::byte_range(D::bytes(&self.out), start..start + row.len());
        device.download(bytes, &mut row)?;
        let mut lse = [0; 4];
        let start = (head * tokens + token) * 4;
        device.download(
            D::byte_range(D::bytes(&self.lse), start..start + 4),
            &mut lse,
        )?;
        let format = KvFormat::of(self.out_layout.dtype);
        // A row without a rotary part.
        let row = decode_row(format, width, 0, &row, 1.0);
        Ok((row, f32::from_ne_bytes(lse).into()))
    }
}

/// The rows that are compared with the reference.
fn chosen(what: &Attention, count: usize) -> Vec<(usize, usize)> {
    let heads = what.config.problem.heads as usize;
    choose(
        &mut Rng::with_seed(what.seed ^ 0x5eed),
        &(0..what.tokens()),
        heads,
        count,
    )
}

/// The request that a token belongs to.
fn request_of(starts: &[i32], token: usize) -> usize {
    starts.partition_point(|start| *start as usize <= token) - 1
}

/// Absorbed attention.
pub(super) struct Decode<'a, D: Device> {
    what: &'a Attention,
    backend: SelectedDecode<D>,
    state: <SelectedDecode<D> as DecodeStage>::State,
    metadata: <SelectedDecode<D> as DecodeStage>::Metadata,
    query_numbers: Normal,
    query: D::Buffer,
    /// One per layer.
    caches: Vec<D::Buffer>,
    cache_layout: CacheLayout,
    table: Vec<i32>,
    block_table: D::Buffer,
    lens: D::Buffer,
    query_starts: D::Buffer,
    /// The query tokens and all tokens of each request.
    host_lens: [Vec<u32>; 2],
    /// Of a sparse attention: what each query token's list names, and the lists.
    positions: Vec<Vec<u32>>,
    slots: Option<D::Buffer>,
    outcome: Outcome<D>,
}

impl<'a, D: Device> Decode<'a, D> {
    fn new(
        what: &'a Attention,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<Self, CliError> {
        let problem = &what.config.problem;
        let (dims, dtype) = (problem.dims, problem.dtype);
        let backend = what.decode_backend(registry, device)?;
        let limits = what.limits();
        let (tokens, heads) = (what.tokens(), problem.heads as usize);
        let row = dims.row() as usize;

        let max_pages = what.max_pages();
        let pages: usize = what.requests.iter().map(|r| what.pages_of(r)).sum();
        // Pages lie anywhere, as in a cache that has been in use.
        let mut free: Vec<i32> = (0..pages as i32).collect();
        Rng::with_seed(what.seed).shuffle(&mut free);
        let mut free = free.into_iter();
        let mut table = Vec::with_capacity(what.requests.len() * max_pages);
        for request in &what.requests {
            table.extend(free.by_ref().take(what.pages_of(request)));
            table.resize(table.len().next_multiple_of(max_pages), -1);
        }

        let cache_layout =
            CacheLayout::contiguous(dims, problem.kv_format, pages, problem.page_size as usize)
                // Few numbers are more than four standard deviations away; those saturate.
                .with_scale(match problem.kv_format.has_tensor_scale() {
                    true => 4.0 * what.deviation / 448.0,
                    false => 1.0,
                });
        let caches = (0..what.layers)
            .map(|layer| fill(what, device, cache_layout, layer))
            .collect::<Result<_>>()?;
        let query_numbers = Normal::new(what.seed + 1, dtype, what.deviation);
        let lens: Vec<i32> = what.requests.iter().map(|r| r.kv as i32).collect();
        let positions = what.positions();
        let slots = match what.lists {
            None => None,
            Some(lists) => {
                let slots = slots_of(what, lists, &positions, &table);
                Some(upload(device, &slots)?)
            }
        };
        let host_lens = [|r: &Request| r.q, |r: &Request| r.kv]
            .map(|of| what.requests.iter().map(of).collect());
        let mut work = Self {
            positions,
            slots,
            host_lens,
            state: backend.state(device, &limits)?,
            metadata: backend.metadata(device, &limits)?,
            query: query_numbers.buffer(device, 0, tokens * heads * row)?,
            query_numbers,
            caches,
            cache_layout,
            block_table: upload(device, &table)?,
            table,
            lens: upload(device, &lens)?,
            query_starts: upload(device, &what.starts(|r| r.q))?,
            outcome: Outcome::new(device, dtype, [tokens, heads, dims.latent as usize])?,
            what,
            backend,
        };
        work.prepare(device)?;
        Ok(work)
    }

    fn batch(&self) -> Result<DecodeBatch<'_, D>> {
        batch(
            self.what,
            [&self.block_table, &self.lens, &self.query_starts],
        )
    }

    fn prepare(&mut self, device: &D) -> Result<()> {
        let batch = batch(
            self.what,
            [&self.block_table, &self.lens, &self.query_starts],
        )?;
        let [query_lens, lens] = &self.host_lens;
        let batch = match self.backend.spec().plans_on_host {
            true => batch.with_host(HostLens::new(query_lens, lens)),
            false => batch,
        };
        self.backend
            .prepare(device, &batch, &mut self.state, &mut self.metadata)
    }

    fn attend(&mut self, device: &D) -> Result<()> {
        let problem = &self.what.config.problem;
        let latent = problem.dims.latent as usize;
        let row = problem.dims.row() as usize;
        let shape = [self.what.tokens(), problem.heads as usize, row];
        let layout = Layout::contiguous(problem.dtype, shape);
        let query = TensorRef::new(D::bytes(&self.query), layout)?;
        for cache in &self.caches {
            let batch = batch(
                self.what,
                [&self.block_table, &self.lens, &self.query_starts],
            )?;
            let (out, lse) = self.outcome.write()?;
            let slots = match (&self.slots, self.what.lists) {
                (Some(slots), Some(lists)) => {
                    let width = lists.topk as usize;
                    let entries = self.what.tokens() * width;
                    let slots = ArrayRef::new(D::bytes(slots), entries)?;
                    Some(SlotLists::new(slots, width))
                }
                _ => None,
            };
            let call = DecodeCall::new(
                match self.backend.spec().query_format {
                    QueryFormat::Concatenated => Query::Concatenated(query.shorten()),
                    QueryFormat::Split => Query::Split {
                        latent: query.shorten().narrow(2, 0..latent)?,
                        rope: query.shorten().narrow(2, latent..row)?,
                    },
                },
                CacheRef::new(D::bytes(cache), self.cache_layout)?,
                batch,
                out,
            )
            .with_lse(lse)
            .with_slots(slots);
            self.backend
                .decode(device, call, &mut self.state, &self.metadata)?;
        }
        Ok(())
    }

    fn check(&self, device: &D, count: usize) -> std::result::Result<Errors, CliError> {
        let what = self.what;
        let problem = &what.config.problem;
        let heads = problem.heads as usize;
        let [latent, rope] = [problem.dims.latent, problem.dims.head.rope].map(|n| n as usize);
        let starts = what.starts(|r| r.q);
        let layout = &self.cache_layout;
        let max_pages = self.batch()?.block_table.max_pages();
        let cache = &self.caches[self.caches.len() - 1];
        // Not of `self`, which threads cannot share.
        let (query_numbers, positions) = (&self.query_numbers, &self.positions);
        let mut compared = Vec::new();
        for rows in chosen(what, count)
            .chunk_by(|a, b| request_of(&starts, a.0) == request_of(&starts, b.0))
        {
            let index = request_of(&starts, rows[0].0);
            let request = what.requests[index];
            let kv = request.kv as usize;
            let table = &self.table[index * max_pages..][..what.pages_of(&request)];
            let pages: Vec<usize> = table.iter().map(|page| *page as usize).collect();
            let stored = stored_rows(device, cache, layout, &pages, kv)?;
            let keys: Vec<&[f64]> = stored.iter().map(Vec::as_slice).collect();
            let values: Vec<&[f64]> = stored.iter().map(|row| &row[..latent]).collect();
            let expected: Vec<_> = rows
                .par_iter()
                .map(|&(token, head)| {
                    let width = latent + rope;
                    let query = query_numbers.row((token * heads + head) * width, width);
                    let own = token - starts[index] as usize;
                    let seen = kv - request.q as usize + own + 1;
                    let scale = what.config.softmax_scale.into();
                    let Some(list) = positions.get(token) else {
                        return attend(&query, &keys[..seen], &values[..seen], scale);
                    };
                    let listed = list.iter().map(|at| *at as usize);
                    let own_keys: Vec<_> = listed.clone().map(|at| keys[at]).collect();
                    let own_values: Vec<_> = listed.map(|at| values[at]).collect();
                    attend(&query, &own_keys, &own_values, scale)
                })
                .collect();
            for (&(token, head), expected) in rows.iter().zip(expected) {
                compared.push(Row {
                    given: self.outcome.row(device, token, head)?,
                    expected,
                });
            }
        }
        Ok(Errors::of(&compared, problem.dtype))
    }
}

/// The lists as a backend takes them: a token's position is a slot of its request's pages.
fn slots_of(what: &Attention, lists: Lists, positions: &[Vec<u32>], table: &[i32]) -> Vec<i32> {
    let (page_size, max_pages) = (what.config.problem.page_size, what.max_pages());
    let width = lists.topk as usize;
    let starts = what.starts(|r| r.q);
    let mut slots = Vec::with_capacity(positions.len() * width);
    for (token, list) in positions.iter().enumerate() {
        let pages = &table[request_of(&starts, token) * max_pages..];
        slots.extend(list.iter().map(|position| {
            let page = pages[(position / page_size) as usize];
            page * page_size as i32 + (position % page_size) as i32
        }));
        slots.resize((token + 1) * width, -1);
    }
    slots
}

fn batch<'b, D: Device>(
    what: &Attention,
    [block_table, lens, starts]: [&'b D::Buffer; 3],
) -> Result<DecodeBatch<'b, D>> {
    let (requests, max_pages) = (what.requests.len(), what.max_pages());
    let table = ArrayRef::new(D::bytes(block_table), requests * max_pages)?;
    Ok(DecodeBatch::new(
        BlockTable::new(table, requests, max_pages)?,
        (
            ArrayRef::new(D::bytes(lens), requests)?,
            what.longest(|r| r.kv),
        ),
        (
            ArrayRef::new(D::bytes(starts), requests + 1)?,
            what.longest(|r| r.q),
        ),
    ))
}

/// A layer's cache, every row of it random.
fn fill<D: Device>(
    what: &Attention,
    device: &D,
    layout: CacheLayout,
    layer: usize,
) -> Result<D::Buffer> {
    let (dims, dtype) = (layout.dims, what.config.problem.dtype);
    let [latent, rope] = [dims.latent, dims.head.rope].map(|n| n as usize);
    let seed = what.seed + 2 + 2 * layer as u64;
    let latent_numbers = Normal::new(seed, dtype, what.deviation);
    let rope_numbers = Normal::new(seed + 1, dtype, what.deviation);
    let mut cache = device.allocate(layout.pages * layout.page_stride)?;
    let slots: Vec<usize> = (0..layout.slots()).collect();
    for block in slots.chunks(BLOCK) {
        let rows = block.len();
        let latents = latent_numbers.buffer(device, block[0] * latent, rows * latent)?;
        let ropes = rope_numbers.buffer(device, block[0] * rope, rows * rope)?;
        let numbers: Vec<i64> = block.iter().map(|slot| *slot as i64).collect();
        let slots = upload(device, &numbers)?;
        device.write_cache(
            TensorRef::new(
                D::bytes(&latents),
                Layout::contiguous(dtype, [rows, 1, latent]),
            )?,
            TensorRef::new(D::bytes(&ropes), Layout::contiguous(dtype, [rows, 1, rope]))?,
            ArrayRef::new(D::bytes(&slots), rows)?,
            CacheMut::new(D::bytes_mut(&mut cache), layout)?,
        )?;
        // The block's memory is given back here.
        device.synchronize()?;
    }
    Ok(cache)
}

/// Expanded attention.
pub(super) struct Prefill<'a, D: Device> {
    what: &'a Attention,
    causal: bool,
    backend: SelectedPrefill<D>,
    state: <SelectedPrefill<D> as PrefillStage>::State,
    metadata: <SelectedPrefill<D> as PrefillStage>::Metadata,
    query_lens: Vec<u32>,
    key_lens: Vec<u32>,
    query_numbers: Normal,
    query: D::Buffer,
    /// One of each per layer.
    layers: Vec<KeysAndValues<D>>,
    starts: [D::Buffer; 2],
    outcome: Outcome<D>,
}

/// Of one layer.
struct KeysAndValues<D: Device> {
    nope_numbers: Normal,
    rope_numbers: Normal,
    value_numbers: Normal,
    /// `[Tk, H, P]`, and `[Tk, 1, R]` beside it; or both as `[Tk, H, P+R]`.
    keys: D::Buffer,
    rope: Option<D::Buffer>,
    values: D::Buffer,
}

impl<'a, D: Device> Prefill<'a, D> {
    fn new(
        what: &'a Attention,
        causal: bool,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<Self, CliError> {
        let problem = &what.config.problem;
        let head = problem.dims.head;
        let backend = registry.instantiate_prefill(what.backend, device, &what.config)?;
        let limits = what.limits();
        let mut state = backend.state(device, &limits)?;
        let mut metadata = backend.metadata(device, &limits)?;
        let (tokens, heads) = (what.tokens(), problem.heads as usize);
        let key_lens: Vec<u32> = what.requests.iter().map(|r| r.kv).collect();
        let query_lens: Vec<u32> = what.requests.iter().map(|r| r.q).collect();
        let chunks: Vec<ContextChunk> = match causal {
            true => Vec::new(),
            false => {
                let starts = vec![0; key_lens.len()];
                vec![ContextChunk::new(
                    0..key_lens.len(),
                    starts,
                    key_lens.clone(),
                )]
            }
        };
        let batch = PrefillBatch::new(&query_lens, &query_lens).with_chunks(&chunks);
        backend.prepare(device, &batch, &mut state, &mut metadata)?;
        let query_numbers = Normal::new(what.seed + 1, problem.dtype, what.deviation);
        let query_len = tokens * heads * head.qk() as usize;
        let layout = backend.spec().key_layout;
        Ok(Self {
            query: query_numbers.buffer(device, 0, query_len)?,
            query_numbers,
            layers: (0..what.layers)
                .map(|layer| KeysAndValues::new(what, device, layout, layer))
                .collect::<Result<_>>()?,
            starts: [
                upload(device, &what.starts(|r| r.q))?,
                upload(device, &what.starts(|r| r.kv))?,
            ],
            outcome: Outcome::new(device, problem.dtype, [tokens, heads, head.v as usize])?,
            query_lens,
            key_lens,
            what,
            causal,
            backend,
            state,
            metadata,
        })
    }

    fn attend(&mut self, device: &D) -> Result<()> {
        let what = self.what;
        let problem = &what.config.problem;
        let head = problem.dims.head;
        let dtype = problem.dtype;
        let (tokens, heads) = (what.tokens(), problem.heads as usize);
        let keys = self.key_lens.iter().map(|len| *len as usize).sum();
        let [nope, rope, qk, v] = [head.nope, head.rope, head.qk(), head.v].map(|n| n as usize);
        let count = what.requests.len() + 1;
        for layer in &self.layers {
            let view = |buffer, shape| {
                TensorRef::<D>::new(D::bytes(buffer), Layout::contiguous(dtype, shape))
            };
            let (out, lse) = self.outcome.write()?;
            let call = PrefillCall::new(
                view(&self.query, [tokens, heads, qk])?,
                match &layer.rope {
                    Some(shared) => Keys::Split {
                        nope: view(&layer.keys, [keys, heads, nope])?,
                        rope: view(shared, [keys, 1, rope])?,
                    },
                    None => Keys::Packed(view(&layer.keys, [keys, heads, qk])?),
                },
                view(&layer.values, [keys, heads, v])?,
                out,
                (
                    ArrayRef::new(D::bytes(&self.starts[0]), count)?,
                    what.longest(|r| r.q),
                ),
                (
                    ArrayRef::new(D::bytes(&self.starts[1]), count)?,
                    what.longest(|r| r.kv),
                ),
            )
            .with_lse(lse);
            let (state, metadata) = (&mut self.state, &self.metadata);
            let chunk = (!self.causal).then_some(Chunk::new(0, &self.query_lens, &self.key_lens));
            self.backend
                .prefill(device, call.with_chunk(chunk), state, metadata)?;
        }
        Ok(())
    }

    fn check(&self, device: &D, count: usize) -> std::result::Result<Errors, CliError> {
        let what = self.what;
        let problem = &what.config.problem;
        let head = problem.dims.head;
        let heads = problem.heads as usize;
        let [nope, rope, qk, v] = [head.nope, head.rope, head.qk(), head.v].map(|n| n as usize);
        let (starts, key_starts) = (what.starts(|r| r.q), what.starts(|r| r.kv));
        let layer = &self.layers[self.layers.len() - 1];
        // Not of `self`, which threads cannot share.
        let (query_numbers, causal) = (&self.query_numbers, self.causal);
        let KeysAndValues {
            nope_numbers,
            rope_numbers,
            value_numbers,
            ..
        } = layer;
        let expected: Vec<_> = chosen(what, count)
            .into_par_iter()
            .map(|(token, head)| {
                let index = request_of(&starts, token);
                let request = what.requests[index];
                let own = token - starts[index] as usize;
                let seen = match causal {
                    true => (request.kv - request.q) as usize + own + 1,
                    false => request.kv as usize,
                };
                let first = key_starts[index] as usize;
                let row = |numbers: &Normal, at, width| numbers.row(at * width, width);
                let keys: Vec<Vec<f64>> = (first..first + seen)
                    .map(|at| {
                        let mut key = row(nope_numbers, at * heads + head, nope);
                        key.extend(row(rope_numbers, at, rope));
                        key
                    })
                    .collect();
                let values: Vec<Vec<f64>> = (first..first + seen)
                    .map(|at| row(value_numbers, at * heads + head, v))
                    .collect();
                let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
                let query = row(query_numbers, token * heads + head, qk);
                let scale = what.config.softmax_scale.into();
                ((token, head), attend(&query, &keys, &values, scale))
            })
            .collect();
        let mut compared = Vec::with_capacity(expected.len());
        for ((token, head), expected) in expected {
            compared.push(Row {
                given: self.outcome.row(device, token, head)?,
                expected,
            });
        }
        Ok(Errors::of(&compared, problem.dtype))
    }
}

impl<D: Device> KeysAndValues<D> {
    fn new(what: &Attention, device: &D, layout: KeyLayout, layer: usize) -> Result<Self> {
        let problem = &what.config.problem;
        let (head, dtype) = (problem.dims.head, problem.dtype);
        let heads = problem.heads as usize;
        let [nope, rope, qk, v] = [head.nope, head.rope, head.qk(), head.v].map(|n| n as usize);
        let keys: usize = what.requests.iter().map(|r| r.kv as usize).sum();
        let seed = what.seed + 2 + 3 * layer as u64;
        let numbers = |number| Normal::new(seed + number, dtype, what.deviation);
        let (nope_numbers, rope_numbers, value_numbers) = (numbers(0), numbers(1), numbers(2));
        let head_part = nope_numbers.buffer(device, 0, keys * heads * nope)?;
        let shared = rope_numbers.buffer(device, 0, keys * rope)?;
        let (keys_buffer, rope_buffer) = match layout {
            KeyLayout::Split => (head_part, Some(shared)),
            KeyLayout::Packed => {
                let whole = Layout::contiguous(dtype, [keys, heads, qk]);
                let mut packed = device.allocate(whole.elements() * dtype.bytes())?;
                let to = TensorMut::<D>::new(D::bytes_mut(&mut packed), whole)?;
                let from = Layout::contiguous(dtype, [keys, heads, nope]);
                let from = TensorRef::new(D::bytes(&head_part), from)?;
                device.copy(from, to.narrow(2, 0..nope)?)?;
                let to = TensorMut::<D>::new(D::bytes_mut(&mut packed), whole)?;
                let from = Layout::contiguous(dtype, [keys, 1, rope]);
                let from = TensorRef::new(D::bytes(&shared), from)?.broadcast(1, heads)?;
                device.copy(from, to.narrow(2, nope..qk)?)?;
                device.synchronize()?;
                (packed, None)
            }
        };
        Ok(Self {
            keys: keys_buffer,
            rope: rope_buffer,
            values: value_numbers.buffer(device, 0, keys * heads * v)?,
            nope_numbers,
            rope_numbers,
            value_numbers,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_in_their_requests() {
        let starts = [0, 2, 3, 7];
        let found: Vec<_> = (0..7).map(|token| request_of(&starts, token)).collect();
        assert_eq!(found, [0, 0, 1, 2, 2, 2, 2]);
    }
}
