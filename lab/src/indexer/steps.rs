//! The steps of a selection. Each is timed alone, in its own memory.

use fastrand::Rng;
use mla_cli::parts::{CliError, Data, Indexed, Lists, Stopwatch, Workload, upload};
use mla_runtime::Result;
use mla_runtime::backend::DecodeBatch;
use mla_runtime::device::CacheRows;
use mla_runtime::indexer::{IndexCall, IndexDevice, IndexKeys, IndexQueries, IndexRows};
use mla_runtime::layer::{LayerCall, SelectedLayer, SelectedWorkspace};
use mla_runtime::model::{DType, IndexerConfig, RotaryStyle};
use mla_runtime::tensor::{ArrayRef, BlockTable, Layout, Rotary, TensorMut, TensorRef};

use crate::timing::Timer;

/// The parts of a selection, with their own memory.
pub(crate) struct Steps<D: IndexDevice> {
    config: IndexerConfig,
    page_size: usize,
    columns: usize,
    /// The number of pairs of a scored row and a position that it sees, and the number of cached
    /// tokens.
    pairs: f64,
    cached: f64,
    scored: Scored<D>,
    /// Memory for the projected queries.
    product: D::Buffer,
    head_weights: D::Buffer,
    values: D::Buffer,
    weights: D::Buffer,
    logits: D::Buffer,
    lists: D::Buffer,
    slots: D::Buffer,
    positions: D::Buffer,
}

/// The scored rows, and their requests.
struct Scored<D: IndexDevice> {
    rows: usize,
    requests: usize,
    max_pages: usize,
    longest: usize,
    query_len: usize,
    lens: D::Buffer,
    starts: D::Buffer,
    tables: D::Buffer,
}

impl<D: IndexDevice> Scored<D> {
    fn batch(&self) -> Result<IndexRows<'_, D>> {
        let entries = ArrayRef::new(D::bytes(&self.tables), self.requests * self.max_pages)?;
        let lens = ArrayRef::new(D::bytes(&self.lens), self.requests)?;
        let starts = ArrayRef::new(D::bytes(&self.starts), self.requests + 1)?;
        Ok(IndexRows::new(
            DecodeBatch::new(
                BlockTable::new(entries, self.requests, self.max_pages)?,
                (lens, self.longest),
                (starts, self.query_len),
            ),
            0..self.rows,
        ))
    }
}

impl<D: IndexDevice + Stopwatch> Steps<D> {
    pub(crate) fn new(
        device: &D,
        indexed: &mut Indexed<D>,
        workload: &Workload,
        seed: u32,
    ) -> std::result::Result<Self, CliError> {
        let (indexer, lists, _) = indexed.call()?;
        let config = *indexer.config();
        let IndexerConfig {
            heads, width, topk, ..
        } = config;
        let [heads, width, topk] = [heads, width, topk].map(|n| n as usize);
        let rows = lists.rows().min(workload.tokens());
        let mut rng = Rng::with_seed(u64::from(seed) ^ 0x57e9);
        let mut random = |count: usize| {
            let values: Vec<f32> = (0..count).map(|_| 2.0 * rng.f32() - 1.0).collect();
            upload(device, &values)
        };
        let head_weights = random(rows * heads)?;
        let (tables, max_pages, slots) = workload.entries();
        let requests = &workload.requests;
        let lens: Vec<i32> = requests.iter().map(|r| r.kv as i32).collect();
        let starts: Vec<i32> = workload.token_starts.iter().map(|at| *at as i32).collect();
        let positions: Vec<i64> = requests
            .iter()
            .flat_map(|r| i64::from(r.context_len())..i64::from(r.kv))
            .collect();
        let [pairs, cached] = pairs_and_cached(workload, rows);
        let longest = requests.iter().map(|r| r.kv).max().unwrap_or(0) as usize;
        let columns = longest.next_multiple_of(256).max(256);
        let page_size = workload.tables()?.page_size() as usize;
        Ok(Self {
            config,
            page_size,
            columns,
            pairs,
            cached,
            scored: Scored {
                rows,
                requests: requests.len(),
                max_pages,
                longest,
                query_len: requests.iter().map(|r| r.q).max().unwrap_or(0) as usize,
                lens: upload(device, &lens)?,
                starts: upload(device, &starts)?,
                tables: upload(device, tables)?,
            },
            product: device.allocate(rows * heads * width * indexed.query_dtype().bytes())?,
            head_weights,
            values: device.allocate(rows * heads * width)?,
            weights: device.allocate(rows * heads * 4)?,
            logits: device.allocate(rows * columns * 4)?,
            lists: device.allocate(rows * topk * 4)?,
            slots: upload(device, slots)?,
            positions: upload(device, &positions)?,
        })
    }

    pub(crate) fn rows(&self) -> usize {
        self.scored.rows
    }

    pub(crate) fn time(
        &mut self,
        timer: &mut Timer<'_, D>,
        indexed: &mut Indexed<D>,
        data: &mut Data<D>,
        layer: &SelectedLayer<D>,
    ) -> std::result::Result<(), CliError> {
        let config = self.config;
        let [heads, width] = [config.heads, config.width].map(|n| n as usize);
        let topk = f64::from(config.topk);
        let rows = self.scored.rows as f64;
        timer.time("rows of both caches", [0.0; 2], &mut |device| {
            let (_, _, index) = indexed.call()?;
            self.write(device, index, data.call(layer.config())?)
        })?;
        let weights = (indexed.query_rank() * heads * width) as f64;
        let bytes = weights * indexed.query_dtype().bytes() as f64;
        timer.time(
            "index queries",
            [2.0 * rows * weights, bytes],
            &mut |device| self.project(device, indexed),
        )?;
        let products = 2.0 * (heads * width) as f64 * self.pairs;
        let bytes = (width + 4) as f64 * self.cached + 4.0 * self.pairs;
        timer.time("logits", [products, bytes], &mut |device| {
            self.score(device, indexed)
        })?;
        let bytes = 4.0 * (self.pairs + rows * topk);
        timer.time("lists of slots", [0.0, bytes], &mut |device| {
            self.select(device)
        })?;
        Ok(())
    }

    fn write(
        &self,
        device: &D,
        mut index: IndexCall<'_, D>,
        mut call: LayerCall<'_, D>,
    ) -> Result<()> {
        let tokens = call.latent.shape()[0];
        let slots = ArrayRef::new(D::bytes(&self.slots), tokens)?;
        let positions = ArrayRef::new(D::bytes(&self.positions), tokens)?;
        let rotary = rotary(positions, index.rotary.as_ref(), self.config.rotary);
        let rows = CacheRows::new(
            call.latent.shorten(),
            call.rope.shorten(),
            slots,
            call.cache.reborrow(),
        );
        let slots = ArrayRef::new(D::bytes(&self.slots), tokens)?;
        device.write_cache_and_index_keys(
            &self.config,
            rows,
            None,
            IndexKeys::new(
                index.keys.shorten(),
                index.norm.each_ref().map(TensorRef::shorten),
                slots,
                index.cache.reborrow(),
            )
            .with_rotary(rotary),
            None,
        )
    }

    fn project(&mut self, device: &D, indexed: &mut Indexed<D>) -> Result<()> {
        let [heads, width] = [self.config.heads, self.config.width].map(|n| n as usize);
        let rows = self.scored.rows;
        let (_, _, index) = indexed.call()?;
        let positions = ArrayRef::new(D::bytes(&self.positions), rows)?;
        let rotary = rotary(positions, index.rotary.as_ref(), self.config.rotary);
        let latent = index.query_latent.shorten().narrow(0, 0..rows)?;
        let dtype = latent.dtype();
        let flat = Layout::contiguous(dtype, [1, rows, heads * width]);
        device.gemm(
            latent.transpose(0, 1),
            index.query_weights.shorten(),
            TensorMut::new(D::bytes_mut(&mut self.product), flat)?,
        )?;
        let by_head = Layout::contiguous(dtype, [rows, heads, width]);
        let of_heads = Layout::contiguous(DType::F32, [rows, 1, heads]);
        device.quantise_index_queries(
            &self.config,
            IndexQueries::new(
                [
                    TensorRef::new(D::bytes(&self.product), by_head)?,
                    TensorRef::new(D::bytes(&self.head_weights), of_heads)?,
                ],
                D::bytes_mut(&mut self.values),
                TensorMut::new(D::bytes_mut(&mut self.weights), of_heads)?,
            )
            .with_rotary(rotary),
        )
    }

    fn logits_layout(&self) -> Layout {
        Layout::contiguous(DType::F32, [1, self.scored.rows, self.columns])
    }

    fn score(&mut self, device: &D, indexed: &mut Indexed<D>) -> Result<()> {
        let heads = self.config.heads as usize;
        let of_heads = Layout::contiguous(DType::F32, [self.scored.rows, 1, heads]);
        let layout = self.logits_layout();
        let (_, _, index) = indexed.call()?;
        device.index_logits(
            &self.config,
            D::bytes(&self.values),
            TensorRef::new(D::bytes(&self.weights), of_heads)?,
            &index.cache,
            &self.scored.batch()?,
            TensorMut::new(D::bytes_mut(&mut self.logits), layout)?,
        )
    }

    fn select(&mut self, device: &D) -> Result<()> {
        let layout = self.logits_layout();
        let width = self.config.topk as usize;
        device.select_slots(
            TensorRef::new(D::bytes(&self.logits), layout)?,
            &self.scored.batch()?,
            self.page_size,
            D::bytes_mut(&mut self.lists),
            width,
        )
    }
}

/// Times the selection, attention to existing lists, and the layer.
pub(super) fn whole<D: IndexDevice + Stopwatch>(
    timer: &mut Timer<'_, D>,
    layer: &SelectedLayer<D>,
    workspace: &mut SelectedWorkspace<D>,
    indexed: &mut Indexed<D>,
    data: &mut Data<D>,
) -> Result<()> {
    timer.time("the whole selection", [0.0; 2], &mut |_| {
        let (indexer, lists, call) = indexed.call()?;
        indexer.select(workspace, lists, call)
    })?;
    timer.time("the layer by shared lists", [0.0; 2], &mut |_| {
        let mut call = data.call(layer.config())?;
        call.slot_lists = indexed.lists(workspace)?;
        layer.forward(workspace, call)
    })?;
    timer.time("the layer with its indexer", [0.0; 2], &mut |_| {
        let (indexer, lists, index) = indexed.call()?;
        layer.forward_selecting(workspace, lists, indexer, index, data.call(layer.config())?)
    })?;
    Ok(())
}

/// Returns the number of pairs of a query token and a position that it sees, and the number of
/// cached tokens. Only the first `rows` query tokens and their requests count.
fn pairs_and_cached(workload: &Workload, rows: usize) -> [f64; 2] {
    let (mut pairs, mut cached) = (0.0, 0.0);
    for (request, start) in workload.requests.iter().zip(&workload.token_starts) {
        let tokens = rows.saturating_sub(*start).min(request.q as usize);
        let first = f64::from(request.context_len()) + 1.0;
        pairs += tokens as f64 * (first + (tokens as f64 - 1.0) / 2.0);
        if tokens > 0 {
            cached += f64::from(request.kv);
        }
    }
    [pairs, cached]
}

/// Returns the rotation of tokens at these positions.
fn rotary<'a, D: IndexDevice>(
    positions: ArrayRef<'a, D, i64>,
    rotation: Option<&'a Rotary<'_, D>>,
    style: RotaryStyle,
) -> Option<Rotary<'a, D>> {
    let rotation = rotation?;
    let tables = [rotation.cos.shorten(), rotation.sin.shorten()];
    Some(Rotary::new(positions, tables, style))
}
