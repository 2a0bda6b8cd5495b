//! The indexer's part of a step: makes lists from index keys and queries.

use std::ops::Range;

use super::device::{check_gates, check_pools};
use super::{IndexCacheMut, IndexDevice, IndexKeys, IndexQueries, IndexRows, IndexerWorkspace};
use crate::backend::{DecodeBatch, DecodeStage, PrefillStage, StepLimits};
use crate::device::{Device, for_problem};
use crate::layer::{PreparedStep, Workspace, regions};
use crate::model::{DType, IndexerConfig};
use crate::plan::index::IndexNeeds;
use crate::plan::memory::{self, MemoryNeeds, MemoryPlan, RegionName};
use crate::setters::options;
use crate::spec::Problem;
use crate::tensor::{ArrayRef, Layout, Rotary, TensorMut, TensorRef};
use crate::{Error, Result, named};

/// One layer's indexer.
#[derive(Clone, Debug)]
pub struct Indexer<D> {
    device: D,
    config: IndexerConfig,
    pub(super) problem: Problem,
}

/// One selection: views of the engine's tensors, for the T tokens of the prepared step.
#[non_exhaustive]
pub struct IndexCall<'a, D: Device> {
    /// The normalised latent of the queries, which is also the input of the layer's own query
    /// projection: `[T, 1, Q]`.
    pub query_latent: TensorRef<'a, D>,
    /// The indexer's W_qb: `[1, Q, heads · D]`.
    pub query_weights: TensorRef<'a, D>,
    /// The new tokens' index keys W_k · x, neither normalised nor rotated, of any dtype: `[T, 1,
    /// D]`.
    pub keys: TensorRef<'a, D>,
    /// The weight and the bias of the LayerNorm of keys, each `[1, 1, D]` of any dtype.
    pub norm: [TensorRef<'a, D>; 2],
    /// The heads' weights W_w · x, of any dtype: `[T, 1, heads]`.
    pub head_weights: TensorRef<'a, D>,
    /// The rotation of keys and queries by the layer's own tables; `None` if the model has none.
    /// Its pairing of elements is ignored, because the indexer's configuration has its own.
    pub rotary: Option<Rotary<'a, D>>,
    /// The layer's index cache.
    pub cache: IndexCacheMut<'a, D>,
    /// The gates of the new tokens, `[T, 1, D]`, and the table of a pool's positions, `[1, K, D]`,
    /// as in [`IndexKeys`]. They must be present if keys are pooled.
    pub pool: Option<[TensorRef<'a, D>; 2]>,
}

impl<'a, D: Device> IndexCall<'a, D> {
    /// A call without a rotation. The fields describe the shapes.
    pub const fn new(
        [query_latent, query_weights]: [TensorRef<'a, D>; 2],
        keys: TensorRef<'a, D>,
        norm: [TensorRef<'a, D>; 2],
        head_weights: TensorRef<'a, D>,
        cache: IndexCacheMut<'a, D>,
    ) -> Self {
        Self {
            query_latent,
            query_weights,
            keys,
            norm,
            head_weights,
            rotary: None,
            cache,
            pool: None,
        }
    }

    options! {
        with_rotary(rotary: Rotary<'a, D>);
        with_pool(pool: [TensorRef<'a, D>; 2]);
    }

    /// Returns the inputs of the index queries.
    pub(crate) fn queries(&self) -> Queries<'a, D> {
        Queries {
            latent: self.query_latent.shorten(),
            weights: self.query_weights.shorten(),
            head_weights: self.head_weights.shorten(),
            rotary: self.rotary.as_ref().map(Rotary::shorten),
        }
    }
}

/// The inputs of index queries. These are the fields of [`IndexCall`] that are only read.
pub(crate) struct Queries<'a, D: Device> {
    latent: TensorRef<'a, D>,
    weights: TensorRef<'a, D>,
    head_weights: TensorRef<'a, D>,
    rotary: Option<Rotary<'a, D>>,
}

impl<D: IndexDevice> Indexer<D> {
    /// An indexer for a layer of `problem`.
    ///
    /// # Errors
    ///
    /// If the configuration contradicts itself, or the problem is not sparse.
    pub fn new(device: &D, config: &IndexerConfig, problem: &Problem) -> Result<Self> {
        config.check()?;
        check_pools::<D>(config.pool)?;
        if !problem.page_size.is_multiple_of(config.pool) {
            let accepted = format!("a multiple of index_kpool, {}", config.pool);
            return Err(Error::argument("page_size", problem.page_size, accepted));
        }
        if !problem.sparse {
            return Err(Error::argument(
                "problem.sparse",
                false,
                "true: an indexer makes the lists of a sparse layer",
            ));
        }
        Ok(Self {
            device: for_problem(device, problem)?,
            config: *config,
            problem: *problem,
        })
    }

    /// Writes the new tokens' index keys to the cache, and makes the list of every new token on the
    /// absorbed path. The call only enqueues. Afterwards [`IndexerWorkspace::lists`] returns the
    /// lists.
    ///
    /// # Errors
    ///
    /// If the call does not fit the prepared step or the indexer, or if the device fails.
    pub fn select<P, B>(
        &self,
        workspace: &Workspace<P, B>,
        own: &mut IndexerWorkspace<D>,
        mut call: IndexCall<'_, D>,
    ) -> Result<()>
    where
        P: PrefillStage<Device = D>,
        B: DecodeStage<Device = D>,
    {
        own.forget();
        let step = workspace.prepared_for(&self.device, &self.problem)?;
        self.check(&step, own, &call)?;
        self.device.profile_range(c"mla: select slots", || {
            if step.tokens > 0 {
                let keys = self.keys(&mut call, step.slots.shorten(), step.positions.shorten())?;
                self.device.write_index_keys(&self.config, keys)?;
            }
            self.select_written(&step, own, &call, 0..0)
        })
    }

    /// The tokens that are scored first, limited by the workspace's rows; empty if nothing needs a
    /// score.
    pub(crate) fn first_scored(
        &self,
        step: &PreparedStep<'_, D>,
        own: &IndexerWorkspace<D>,
    ) -> Range<usize> {
        let tokens = match self.scores(&step.batch) {
            true => step.absorbed_tokens,
            false => 0,
        };
        0..tokens.min(own.rows().max(1))
    }

    /// Makes the lists of a step whose index keys have been written. The queries of the tokens in
    /// `quantised` have been quantised, too.
    pub(crate) fn select_written(
        &self,
        step: &PreparedStep<'_, D>,
        own: &mut IndexerWorkspace<D>,
        call: &IndexCall<'_, D>,
        quantised: Range<usize>,
    ) -> Result<()> {
        // Tokens are processed in groups whose logits fit. Tokens on the expanded path need no
        // lists.
        let listed = step.absorbed_tokens;
        for first in (0..listed).step_by(own.rows().max(1)) {
            let chunk = first..listed.min(first + own.rows().max(1));
            if chunk != quantised && self.scores(&step.batch) {
                let queries = call.queries();
                self.project(own, &queries, chunk.clone())?;
                self.with_queries(own, &queries, step.positions, chunk.clone(), |queries| {
                    self.device.quantise_index_queries(&self.config, queries)
                })?;
            }
            self.select_chunk(step, own, call, chunk)?;
        }
        own.selected = Some(step.id);
        Ok(())
    }

    /// Returns the index keys of the step's tokens, with their slots in the index cache.
    pub(crate) fn keys<'b>(
        &self,
        call: &'b mut IndexCall<'_, D>,
        slots: ArrayRef<'b, D, i64>,
        positions: ArrayRef<'b, D, i64>,
    ) -> Result<IndexKeys<'b, D>> {
        let rotary = self.rotary(positions, call.rotary.as_ref());
        let (keys, norm) = (
            call.keys.shorten(),
            call.norm.each_ref().map(TensorRef::shorten),
        );
        let pool = call.pool.as_ref();
        let pool = pool.map(|pool| pool.each_ref().map(TensorRef::shorten));
        let keys = IndexKeys::new(keys, norm, slots, call.cache.reborrow());
        Ok(keys.with_rotary(rotary).with_pool(pool))
    }

    /// The rotation of the step's tokens.
    fn rotary<'b>(
        &self,
        positions: ArrayRef<'b, D, i64>,
        rotation: Option<&'b Rotary<'_, D>>,
    ) -> Option<Rotary<'b, D>> {
        let rotary = rotation?.with_style(self.config.rotary);
        Some(rotary.at(positions))
    }

    fn select_chunk(
        &self,
        step: &PreparedStep<'_, D>,
        own: &mut IndexerWorkspace<D>,
        call: &IndexCall<'_, D>,
        tokens: Range<usize>,
    ) -> Result<()> {
        let scored = self.scores(&step.batch);
        let rows = IndexRows::new(step.batch, tokens.clone()).with_pool(self.config.pool);
        // SAFETY: `score` enqueues the queries and the logits, and the selection follows here. The
        // arrays belong to the workspace, and only `prepare` writes them.
        let rows = unsafe { rows.with_in_turn(scored) };
        let columns = own.needs.columns as usize;
        let logits = Layout::contiguous(DType::F32, [1, tokens.len(), columns]);
        if scored {
            self.score(own, call, &rows, logits)?;
        }
        // The lists come after the logits.
        let width = self.config.list_width() as usize;
        let at = own.plan.range(RegionName::SlotLists).start + tokens.start * width * 4;
        let regions = own.plan.range(RegionName::IndexLogits);
        let (scratch, lists) = D::split_mut(D::bytes_mut(&mut own.buffer), at);
        let (slots, _) = D::split_mut(lists, tokens.len() * width * 4);
        let logits = TensorRef::new(D::byte_range(D::freeze(&scratch), regions), logits)?;
        let page_size = self.problem.page_size as usize;
        self.device
            .select_slots(logits, &rows, page_size, slots, width)
    }

    /// Returns true if tokens need scores. If no token sees more than a list can hold, they do not.
    fn scores(&self, batch: &DecodeBatch<'_, D>) -> bool {
        batch.max_seq_len > self.config.topk as usize
    }

    /// Computes W_qb · q_latent of these tokens.
    pub(crate) fn project(
        &self,
        own: &mut IndexerWorkspace<D>,
        queries: &Queries<'_, D>,
        tokens: Range<usize>,
    ) -> Result<()> {
        let columns = (self.config.heads * self.config.width) as usize;
        let names = [RegionName::IndexProjection];
        let [to] = regions::<D, _>(&mut own.buffer, &own.plan, names);
        let layout = Layout::contiguous(self.problem.dtype, [1, tokens.len(), columns]);
        let latent = named("query latent", queries.latent.shorten().narrow(0, tokens))?;
        self.device.gemm(
            latent.transpose(0, 1),
            queries.weights.shorten(),
            TensorMut::new(to, layout)?,
        )
    }

    /// Calls `quantise` with the projected queries of these tokens and with their destination.
    pub(crate) fn with_queries(
        &self,
        own: &mut IndexerWorkspace<D>,
        queries: &Queries<'_, D>,
        positions: ArrayRef<'_, D, i64>,
        tokens: Range<usize>,
        quantise: impl FnOnce(IndexQueries<'_, D>) -> Result<()>,
    ) -> Result<()> {
        let [heads, width] = [self.config.heads, self.config.width].map(|n| n as usize);
        let names = [
            RegionName::IndexProjection,
            RegionName::IndexQueries,
            RegionName::IndexHeadWeights,
        ];
        let [projected, mut values, weights] = regions::<D, _>(&mut own.buffer, &own.plan, names);
        let by_head = Layout::contiguous(self.problem.dtype, [tokens.len(), heads, width]);
        let projected = TensorMut::<D>::new(projected, by_head)?;
        let scaled = Layout::contiguous(DType::F32, [tokens.len(), 1, heads]);
        let rotation = queries.rotary.as_ref().map(Rotary::shorten);
        let rotary = match self.rotary(positions.shorten(), rotation.as_ref()) {
            Some(rotary) => Some(rotary.tokens(tokens.clone())?),
            None => None,
        };
        let head_weights = queries.head_weights.shorten().narrow(0, tokens);
        let head_weights = named("index head weights", head_weights)?;
        let mut weights = TensorMut::<D>::new(weights, scaled)?;
        let from = [projected.as_ref(), head_weights.shorten()];
        let queries = IndexQueries::new(from, D::reborrow(&mut values), weights.reborrow());
        quantise(queries.with_rotary(rotary))
    }

    /// Computes the logits of rows whose queries have been quantised.
    fn score(
        &self,
        own: &mut IndexerWorkspace<D>,
        call: &IndexCall<'_, D>,
        rows: &IndexRows<'_, D>,
        logits: Layout,
    ) -> Result<()> {
        let names = [
            RegionName::IndexQueries,
            RegionName::IndexHeadWeights,
            RegionName::IndexLogits,
        ];
        let [values, weights, scores] = regions::<D, _>(&mut own.buffer, &own.plan, names);
        let scaled = Layout::contiguous(
            DType::F32,
            [rows.tokens.len(), 1, self.config.heads as usize],
        );
        let weights = TensorMut::<D>::new(weights, scaled)?;
        self.device.index_logits(
            &self.config,
            D::freeze(&values),
            weights.as_ref(),
            &call.cache,
            rows,
            TensorMut::new(scores, logits)?,
        )
    }

    /// Refuses a call that does not fit the prepared step or the indexer.
    pub(crate) fn check(
        &self,
        step: &PreparedStep<'_, D>,
        own: &IndexerWorkspace<D>,
        call: &IndexCall<'_, D>,
    ) -> Result<()> {
        if own.needs.config.extents() != self.config.extents() {
            let given = format!("one for {}", own.needs.config);
            return Err(Error::argument("indexer workspace", given, self.config));
        }
        if own.dtype != self.problem.dtype {
            let [given, accepted] =
                [own.dtype, self.problem.dtype].map(|dtype| format!("one for queries in {dtype}"));
            return Err(Error::argument("indexer workspace", given, accepted));
        }
        let columns = own.needs.columns as usize * self.config.pool as usize;
        let (longest, tokens) = (step.batch.max_seq_len, step.tokens);
        for (field, given, max) in [
            ("new tokens", tokens, own.needs.tokens as usize),
            ("sequence length", longest, columns),
        ] {
            if given > max {
                let accepted = format!("at most the indexer workspace's limit of {max}");
                return Err(Error::argument(field, given, accepted));
            }
        }
        self.check_memory(own, call)?;
        self.check_tensors(tokens, call)?;
        self.check_cache(step.pages_end, call)
    }

    /// Refuses memory that the device's work must not access.
    fn check_memory(&self, own: &IndexerWorkspace<D>, call: &IndexCall<'_, D>) -> Result<()> {
        let device = &self.device;
        device.check_bytes("indexer workspace", D::bytes(&own.buffer))?;
        device.check_bytes("query latent", call.query_latent.bytes())?;
        device.check_bytes("index query weights", call.query_weights.bytes())?;
        device.check_bytes("index keys", call.keys.bytes())?;
        device.check_bytes("index norm weight", call.norm[0].bytes())?;
        device.check_bytes("index norm bias", call.norm[1].bytes())?;
        device.check_bytes("index head weights", call.head_weights.bytes())?;
        device.check_bytes("index cache", call.cache.bytes())?;
        if let Some([gates, table]) = &call.pool {
            device.check_bytes("index gates", gates.bytes())?;
            device.check_bytes("index pool table", table.bytes())?;
        }
        match &call.rotary {
            Some(rotary) => rotary.check_memory(device),
            None => Ok(()),
        }
    }

    fn check_tensors(&self, tokens: usize, call: &IndexCall<'_, D>) -> Result<()> {
        let [heads, width] = [self.config.heads, self.config.width].map(|n| n as usize);
        let dtype = self.problem.dtype;
        let rank = call.query_latent.shape()[2];
        for (field, tensor, dtype, shape) in [
            ("query latent", &call.query_latent, dtype, [tokens, 1, rank]),
            (
                "index query weights",
                &call.query_weights,
                dtype,
                [1, rank, heads * width],
            ),
            (
                "index keys",
                &call.keys,
                call.keys.dtype(),
                [tokens, 1, width],
            ),
            (
                "index head weights",
                &call.head_weights,
                call.head_weights.dtype(),
                [tokens, 1, heads],
            ),
        ] {
            tensor.layout().require(field, dtype, shape)?;
        }
        check_gates(&self.config, call.pool.as_ref(), tokens)
    }

    /// Checks the index cache. `pages_end` is one more than the largest page number in the step's
    /// block tables.
    fn check_cache(&self, pages_end: usize, call: &IndexCall<'_, D>) -> Result<()> {
        let width = self.config.width as usize;
        let cache = call.cache.layout();
        let page_size = (self.problem.page_size / self.config.pool) as usize;
        let tail = self.config.tail as usize;
        if cache.width != width || cache.page_size != page_size || cache.tail != tail {
            let shown = |page_size, width, tail| match tail {
                0 => format!("pages of {page_size} keys of {width} values"),
                tail => format!("pages of {page_size} keys of {width} values, tails of {tail}"),
            };
            return Err(Error::argument(
                "index cache",
                shown(cache.page_size, cache.width, cache.tail),
                shown(page_size, width, tail),
            ));
        }
        if pages_end > cache.pages {
            return Err(Error::argument(
                "block_tables",
                format!("page {}", pages_end - 1),
                format!("below the index cache's {} pages", cache.pages),
            ));
        }
        Ok(())
    }
}

impl<D: Device> Indexer<D> {
    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Returns the indexer's configuration.
    pub fn config(&self) -> &IndexerConfig {
        &self.config
    }

    /// Plans the memory of an indexer workspace, of one layer's cache with `pages` pages, and of
    /// `layers` index caches with the same number of pages.
    ///
    /// # Errors
    ///
    /// If a limit or size is out of range.
    pub fn memory_plan(&self, limits: &StepLimits, layers: u32, pages: u64) -> Result<MemoryPlan> {
        let needs = MemoryNeeds::of(&self.problem)?.with_pages(pages);
        memory::plan(&needs.with_indexer(&self.config, limits, layers)?)
    }

    /// Allocates the scratch and the lists of steps within `limits`. All layers share them.
    ///
    /// # Errors
    ///
    /// If a limit is out of range, or if the device has too little free memory.
    pub fn workspace(&self, limits: &StepLimits) -> Result<IndexerWorkspace<D>> {
        let plan = self.memory_plan(limits, 1, 0)?;
        let needs = IndexNeeds::of(&self.config, limits, self.problem.page_size)?;
        IndexerWorkspace::new(&self.device, needs, self.problem.dtype, plan)
    }
}
