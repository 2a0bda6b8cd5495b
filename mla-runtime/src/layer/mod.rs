//! The MLA layer: from queries and new latent rows to attention outputs, on any device with any
//! backends.
//!
//! A step's tokens take one of two paths. With q = [q_nope | q_rope] and a cache row [c | k_pe]:
//!
//! ```text
//! both        cache[slot]  ← [c | k_pe] of every new token
//!
//! absorbed    q_lat        = q_nope · W_UK                        per head, [T, H, L]
//! (few new    o_lat        = attention([q_lat | q_rope], cache)   one key and value head
//!  tokens)    out          = o_lat · W_UV                         per head, [T, H, V]
//!
//! expanded    [k_nope | v] = c · W_kv_b                           of the new tokens
//! (many new   out, lse     = causal attention(q, [k_nope | k_pe], v)
//!  tokens)    for each chunk of cached context:
//!                 c, k_pe      = gather(cache)
//!                 [k_nope | v] = c · W_kv_b
//!                 out, lse     = merge((out, lse), attention(q, [k_nope | k_pe], v))
//! ```
//!
//! If the workspace has room for the rows of context and new tokens at the same time, and the cache
//! holds rows in the format of the queries, the expanded path gathers both from the cache, and one
//! causal attention takes the place of two and a merge.
//!
//! A new token's own rows enter the expanded path as they were given, and the absorbed path as the
//! cache holds them, that is quantised where the cache is.
//!
//! Three objects, by how long they live:
//!
//! | object | made | holds |
//! |---|---|---|
//! | [`MlaLayer`] | once per layer | the backends' implementations |
//! | [`Workspace`] | once per engine, [prepared](Workspace::prepare) once per step | all memory: scratch, step arrays, the backends' states and metadata |
//! | [`LayerCall`] | per layer and step | views of the engine's own tensors: weights, queries, new rows, cache, outputs |
//!
//! [`MlaLayer::forward`] only enqueues: it allocates nothing, waits for nothing and reads nothing
//! back. What it enqueues depends on the prepared step's counts alone (tokens and requests of the
//! absorbed path, chunks); lengths, pages and slots are read on the device from arrays that never
//! move. So a step of decodes can be captured into a graph and replayed after another
//! [`prepare`](Workspace::prepare) of as many requests with as many tokens, those that are missing
//! being padding.
//!
//! The layer is one implementation for backends chosen by type ([`MlaLayer::of`]) and at run time
//! ([`SelectedPrefill`] and [`SelectedDecode`] in [`MlaLayer::new`]).
//!
//! # Example
//!
//! A request that decodes its sixth token, and a prompt of three:
//!
//! ```
//! use mla_runtime::backend::{LayerConfig, StepLimits};
//! use mla_runtime::batch::Request;
//! use mla_runtime::cache::{CacheLayout, CacheMut};
//! use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
//! use mla_runtime::device::Memory;
//! use mla_runtime::dims::{HeadDims, MlaDims};
//! use mla_runtime::dtype::DType;
//! use mla_runtime::layer::{LayerCall, MlaLayer, StepBatch, Weights};
//! use mla_runtime::plan::slots::BlockTables;
//! use mla_runtime::problem::Problem;
//! use mla_runtime::tensor::{TensorMut, TensorRef};
//!
//! // L = 64, (P, R, V) = (32, 16, 32), two heads, pages of 64.
//! let dims = MlaDims::new(64, HeadDims::new(32, 16, 32));
//! let config = LayerConfig::new(Problem::new(dims, 2, DType::F32), 1.0 / 48f32.sqrt());
//! let device = Cpu::new();
//! let layer = MlaLayer::<CpuPrefill, CpuDecode>::of(&device, &config)?;
//!
//! // Once: all memory, to be used by every layer of the model.
//! let mut workspace = layer.workspace(&StepLimits::new(8, 32, 4).with_context_rows(64))?;
//!
//! // Once per step. The first request is in page 1, the second in page 0.
//! let requests = [Request::new(1, 6), Request::new(3, 3)];
//! let block_tables = BlockTables::new(&[1, 0], 1, 64)?;
//! workspace.prepare(&layer, &StepBatch::new(&requests, block_tables))?;
//! assert_eq!((workspace.absorbed_tokens(), workspace.tokens()), (1, 4));
//!
//! // Once per layer and step, on the engine's own tensors.
//! let layout = CacheLayout::contiguous(dims, config.problem.kv_format, 2, 64);
//! let mut cache = device.allocate(2 * layout.page_stride)?;
//! let kv_b = vec![0.01; 64 * 2 * (32 + 32)];
//! let (query, latent, rope) = ([0.5; 4 * 2 * 48], [1.0; 4 * 64], [0.5; 4 * 16]);
//! let mut out = [0.0f32; 4 * 2 * 32];
//! layer.forward(
//!     &mut workspace,
//!     LayerCall::new(
//!         Weights::new(TensorRef::from_slice::<f32>(&kv_b, [1, 64, 128])?, &config)?,
//!         TensorRef::from_slice::<f32>(&query, [4, 2, 48])?,
//!         [
//!             TensorRef::from_slice::<f32>(&latent, [4, 1, 64])?,
//!             TensorRef::from_slice::<f32>(&rope, [4, 1, 16])?,
//!         ],
//!         CacheMut::new(Cpu::bytes_mut(&mut cache), layout)?,
//!         TensorMut::from_slice(&mut out, [4, 2, 32])?,
//!     ),
//! )?;
//! // Every token of the prompt has the same latent, and so the value 64 · 1 · 0.01.
//! assert!(out[2 * 32..].iter().all(|value| (value - 0.64).abs() < 1e-6));
//! # Ok::<(), mla_runtime::Error>(())
//! ```

mod absorbed;
mod arena;
mod expanded;
mod plan;
mod rotation;
mod selected;
mod step;
mod weights;
mod workspace;

pub use plan::{Step, StepRequest};
pub use rotation::UnrotatedCall;
pub use selected::SelectedLayer;
pub use step::StepBatch;
pub use weights::Weights;
pub use workspace::{Workspace, WorkspaceId};

pub(crate) use self::arena::Arena;
use self::step::Step as PreparedStep;
use crate::backend::{
    DecodeBackend, DecodeStage, LayerConfig, PrefillBackend, PrefillStage, SelectedDecode,
    SelectedPrefill, SlotLists, StepLimits, check_cache, check_gaps, check_lists, check_rows,
    check_sinks,
};
use crate::cache::{CacheLayout, CacheMut};
use crate::device::{AbsorbedQueries, CacheRows, Device, Memory};
use crate::dims::MAX_DIM;
use crate::error::{Error, Result};
use crate::lse::LseMut;
use crate::plan::crossover::{Attention, ExpansionTraffic, Machine, threshold};
use crate::plan::memory::{self, MemoryNeeds, MemoryPlan};
use crate::problem::Problem;
use crate::rotary::{RotaryQuery, Rotation};
use crate::spec::{BackendSpec, KeyLayout, Phase, QueryFormat, QueryLen};
use crate::tensor::{ArrayRef, Layout, Shape, TensorMut, TensorRef};

/// One layer's attention with its backends.
pub struct MlaLayer<P: PrefillStage, D: DecodeStage<Device = P::Device>> {
    device: P::Device,
    config: LayerConfig,
    prefill: P,
    decode: D,
}

/// One call of a layer: views of the engine's tensors, for the T tokens of the prepared step.
#[non_exhaustive]
pub struct LayerCall<'a, D: Device> {
    /// The layer's weights.
    pub weights: Weights<'a, D>,
    /// `[T, H, P+R]`, the rotary part already rotated but where `rotary` is given.
    pub query: TensorRef<'a, D>,
    /// The new tokens' normalised latents, `[T, 1, L]`.
    pub latent: TensorRef<'a, D>,
    /// The new tokens' rotary keys, `[T, 1, R]`, already rotated but where `rotary` is given.
    pub rope: TensorRef<'a, D>,
    /// The layer's cache.
    pub cache: CacheMut<'a, D>,
    /// `[T, H, V]`.
    pub out: TensorMut<'a, D>,
    /// `[H, T]`, where the caller wants it: −inf where a token attends to nothing.
    pub lse: Option<LseMut<'a, D>>,
    /// The slots that each token attends to: present where the problem is sparse, and only there.
    /// An [`Indexer`](crate::indexer::Indexer) makes them.
    pub slot_lists: Option<SlotLists<'a, D>>,
    /// A score for each head that takes part in the softmax without a value, as in
    /// [`DecodeCall::sinks`](crate::backend::DecodeCall::sinks): for steps of which every token is on
    /// the absorbed path.
    pub sinks: Option<ArrayRef<'a, D, f32>>,
    /// The rotation of queries and keys, which the cache write then does on its way: for steps of
    /// which every token is on the absorbed path. (The expanded path reads rotated tensors of its
    /// own.) [`MlaLayer::forward_unrotated`] takes any step.
    pub rotary: Option<Rotation<'a, D>>,
}

impl<'a, D: Device> LayerCall<'a, D> {
    /// A call without a log-sum-exp, slot lists, sinks and a rotation: the shapes are those of the
    /// fields.
    pub const fn new(
        weights: Weights<'a, D>,
        query: TensorRef<'a, D>,
        [latent, rope]: [TensorRef<'a, D>; 2],
        cache: CacheMut<'a, D>,
        out: TensorMut<'a, D>,
    ) -> Self {
        Self {
            weights,
            query,
            latent,
            rope,
            cache,
            out,
            lse: None,
            slot_lists: None,
            sinks: None,
            rotary: None,
        }
    }

    /// The same with the log-sum-exp written there.
    #[must_use]
    pub fn with_lse(mut self, lse: impl Into<Option<LseMut<'a, D>>>) -> Self {
        self.lse = lse.into();
        self
    }

    /// The same with the slots that each token attends to.
    #[must_use]
    pub fn with_slot_lists(mut self, lists: impl Into<Option<SlotLists<'a, D>>>) -> Self {
        self.slot_lists = lists.into();
        self
    }

    /// The same with a [sink](Self::sinks) for each head.
    #[must_use]
    pub fn with_sinks(mut self, sinks: impl Into<Option<ArrayRef<'a, D, f32>>>) -> Self {
        self.sinks = sinks.into();
        self
    }

    /// The same with the rotation that the cache write is to do.
    #[must_use]
    pub fn with_rotary(mut self, rotary: impl Into<Option<Rotation<'a, D>>>) -> Self {
        self.rotary = rotary.into();
        self
    }
}

impl<D: Device> LayerCall<'_, D> {
    /// What the cache write takes, to these slots and from these positions.
    fn rows<'a>(
        &'a mut self,
        slots: ArrayRef<'a, D, i64>,
        positions: ArrayRef<'a, D, i64>,
    ) -> CacheRows<'a, D> {
        CacheRows {
            latent: self.latent.shorten(),
            rope: self.rope.shorten(),
            slots,
            cache: self.cache.reborrow(),
            rotary: self.rotary.as_ref().map(|rotary| rotary.at(positions)),
        }
    }
}

impl<P: PrefillBackend, D: DecodeBackend<Device = P::Device>> MlaLayer<P, D> {
    /// With backends chosen by type.
    ///
    /// # Errors
    ///
    /// As [`Self::new`], or where a backend cannot be made.
    pub fn of(device: &P::Device, config: &LayerConfig) -> Result<Self> {
        check(&P::SPEC, &D::SPEC, device, config)?;
        Ok(Self {
            device: device.clone(),
            config: *config,
            prefill: P::new(device, config)?,
            decode: D::new(device, config)?,
        })
    }
}

impl<D: Device> MlaLayer<SelectedPrefill<D>, SelectedDecode<D>> {
    /// With backends that were selected and made for this configuration.
    ///
    /// # Errors
    ///
    /// Where a backend was made for another configuration, or does not fit the device or the
    /// problem, with every reason; where the problem contradicts itself or wants what the layer
    /// does not do.
    pub fn new(
        device: &D,
        config: &LayerConfig,
        prefill: SelectedPrefill<D>,
        decode: SelectedDecode<D>,
    ) -> Result<Self> {
        for (field, made_for) in [
            ("prefill backend", prefill.config()),
            ("decode backend", decode.config()),
        ] {
            if let Some((name, values)) = made_for.difference(config) {
                let [given, accepted] = values.map(|value| format!("one for {name} = {value}"));
                let accepted = accepted + ", as the layer has it";
                return Err(Error::argument(field, given, accepted));
            }
        }
        check(prefill.spec(), decode.spec(), device, config)?;
        Ok(Self {
            device: device.clone(),
            config: *config,
            prefill,
            decode,
        })
    }
}

/// What speaks against a layer of these backends, beside what they find themselves.
fn check<D: Device>(
    prefill: &BackendSpec,
    decode: &BackendSpec,
    device: &D,
    config: &LayerConfig,
) -> Result<()> {
    check_backend(prefill, device, config)?;
    check_backend(decode, device, config)?;
    let problem = &config.problem;
    for (field, given) in [
        ("heads", problem.heads),
        ("page size", problem.page_size),
        ("kv_lora_rank", problem.dims.latent),
        ("qk_nope_head_dim", problem.dims.head.nope),
        ("v_head_dim", problem.dims.head.v),
    ] {
        if given == 0 {
            return Err(Error::argument(field, 0, "1 and up"));
        }
    }
    for (field, given) in [
        ("heads", problem.heads),
        ("kv_lora_rank", problem.dims.latent),
        ("qk_nope_head_dim", problem.dims.head.nope),
        ("qk_rope_head_dim", problem.dims.head.rope),
        ("v_head_dim", problem.dims.head.v),
    ] {
        if given > MAX_DIM {
            return Err(Error::argument(field, given, format!("at most {MAX_DIM}")));
        }
    }
    if !problem.kv_format.holds(problem.dims) {
        return Err(Error::argument(
            "kv format",
            format!("{} with {}", problem.kv_format, problem.dims),
            "a format that holds the model's rows",
        ));
    }
    if problem.quant_output {
        return Err(Error::argument(
            "quantised output",
            "wanted",
            "not wanted: the layer's output has the problem's dtype",
        ));
    }
    if problem.context_parallel {
        return Err(Error::argument(
            "context parallelism",
            "wanted",
            "a cache on one device",
        ));
    }
    if !(config.softmax_scale.is_finite() && config.softmax_scale > 0.0) {
        return Err(Error::argument(
            "softmax scale",
            config.softmax_scale,
            "a finite number above 0",
        ));
    }
    Ok(())
}

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> MlaLayer<P, D> {
    /// The device.
    pub fn device(&self) -> &P::Device {
        &self.device
    }

    /// What the layer was made for.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// The prefill backend.
    pub fn prefill(&self) -> &P {
        &self.prefill
    }

    /// The decode backend.
    pub fn decode(&self) -> &D {
        &self.decode
    }

    /// The memory that `layers` such layers need for steps within `limits` on caches of `pages`
    /// pages each: what [`Self::workspace`] and the backends allocate, and the caches.
    ///
    /// # Errors
    ///
    /// Where a limit or size is out of range.
    pub fn memory_plan(&self, limits: &StepLimits, layers: u32, pages: u64) -> Result<MemoryPlan> {
        Ok(memory::plan(&self.memory_needs(limits, layers, pages)?)?)
    }

    /// What [`Self::memory_plan`] plans for, as [`memory::max_rows`] and [`memory::max_pages`] take
    /// it.
    ///
    /// # Errors
    ///
    /// Where a limit is out of range.
    pub fn memory_needs(
        &self,
        limits: &StepLimits,
        layers: u32,
        pages: u64,
    ) -> Result<MemoryNeeds> {
        let limits = &self.within_backend(limits);
        Ok(MemoryNeeds {
            pages,
            layers,
            packed_keys: self.packed_keys(),
            padded_values: self.prefill.spec().padded_values,
            decode_workspace: self.decode.workspace_bytes(&self.device, limits)?,
            prefill_workspace: self.prefill.workspace_bytes(&self.device, limits)?,
            ..MemoryNeeds::of_steps(&self.config.problem, limits)?
        })
    }

    /// The most new tokens of a request on the absorbed path, where a step does not say:
    /// [`crossover_threshold`] of the longest context, within `limits`, what the problem says of
    /// query lengths, and what the decode backend takes.
    pub fn threshold(&self, limits: &StepLimits) -> u32 {
        let problem = &self.config.problem;
        let most = match problem.query_len {
            QueryLen::Single => 1,
            _ => u32::try_from(self.within_backend(limits).decode_query_len).unwrap_or(u32::MAX),
        };
        let longest = limits
            .pages_per_request
            .saturating_mul(problem.page_size as usize);
        let longest = u32::try_from(longest).unwrap_or(u32::MAX);
        let machine = self.device.machine();
        crossover_threshold(&machine, problem, self.packed_keys(), Some(longest)).min(most)
    }

    /// The limits, with no more query tokens on the absorbed path than the decode backend takes.
    fn within_backend(&self, limits: &StepLimits) -> StepLimits {
        let most = self.decode.spec().max_query_len;
        let most = most.map_or(usize::MAX, |most| most as usize);
        StepLimits {
            decode_query_len: limits.decode_query_len.min(most),
            ..*limits
        }
    }

    /// Allocates everything that steps within `limits` need, to be shared by all layers of the same
    /// problem and backends. Requests of more new tokens than the decode backend
    /// [takes](BackendSpec::max_query_len) use the expanded path, whatever
    /// `limits.decode_query_len` is.
    ///
    /// # Errors
    ///
    /// Where a limit is out of range, or the device has not as much memory left.
    pub fn workspace(&self, limits: &StepLimits) -> Result<Workspace<P, D>> {
        Workspace::new(self, &self.within_backend(limits))
    }

    /// Runs the layer for the prepared step: writes the cache, then attends on both paths. Only
    /// enqueues.
    ///
    /// # Errors
    ///
    /// Where the call does not fit the prepared step, or the device or a backend fails.
    pub fn forward(
        &self,
        workspace: &mut Workspace<P, D>,
        mut call: LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check(workspace, &call)?;
        self.device
            .range(c"mla: write cache and attend absorbed", || {
                self.enqueue_absorbed(workspace, &mut call, true)
            })?;
        self.device.range(c"mla: attend expanded", || {
            self.enqueue_expanded(workspace, &mut call)
        })
    }

    /// The first part of [`Self::forward`]: writes the new tokens' rows to the cache. The other two
    /// parts come after it, in any order.
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    pub fn write_cache(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check(workspace, call)?;
        self.device.range(c"mla: write cache", || {
            self.enqueue_cache_write(workspace, call)
        })
    }

    /// The part of [`Self::forward`] for the tokens on the absorbed path.
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    pub fn attend_absorbed(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check(workspace, call)?;
        self.device.range(c"mla: attend absorbed", || {
            self.enqueue_absorbed(workspace, call, false)
        })
    }

    /// The part of [`Self::forward`] for the tokens on the expanded path.
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    pub fn attend_expanded(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check(workspace, call)?;
        self.device.range(c"mla: attend expanded", || {
            self.enqueue_expanded(workspace, call)
        })
    }

    fn enqueue_cache_write(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        let step = &workspace.step;
        let tokens = step.tokens();
        if tokens == 0 {
            return Ok(());
        }
        self.with_rows(workspace, call, |rows, query, _| {
            rows.write(&self.device, query)
        })
    }

    /// Calls `write` with the rows of the step's tokens, with the rotation of their queries if rows
    /// are rotated, and with their positions.
    pub(crate) fn with_rows(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
        write: impl FnOnce(
            CacheRows<'_, P::Device>,
            Option<RotaryQuery<'_, P::Device>>,
            ArrayRef<'_, P::Device, i64>,
        ) -> Result<()>,
    ) -> Result<()> {
        let step = &workspace.step;
        let tokens = step.tokens();
        let (query, weights) = (call.query.shorten(), call.weights.queries.shorten());
        let arrays = P::Device::bytes(&workspace.arrays);
        let positions = step.positions(arrays)?;
        let rows = call.rows(step.slots(arrays)?, positions);
        if rows.rotary.is_none() {
            return write(rows, None, positions);
        }
        let problem = &self.config.problem;
        let [heads, latent, rope] =
            [problem.heads, problem.dims.latent, problem.dims.head.rope].map(|n| n as usize);
        // Beside where the absorbed path will put what it makes of the rest.
        let mut arena = Arena::<P::Device>::new(P::Device::bytes_mut(&mut workspace.scratch));
        let to = arena.take(&workspace.regions.absorbed_queries);
        let to = self.tensor(to, [tokens, heads, latent + rope])?;
        let mut queries = AbsorbedQueries { query, weights, to };
        let rotation = queries.rotation(&rows)?;
        write(rows, rotation, positions)
    }

    /// Refuses a call that does not fit the prepared step.
    fn check(&self, workspace: &Workspace<P, D>, call: &LayerCall<'_, P::Device>) -> Result<()> {
        self.check_tensors(workspace, call)?;
        self.check_sinks(workspace, call.sinks.as_ref())?;
        self.check_lists(workspace, call.slot_lists.as_ref(), call.cache.layout())
    }

    pub(crate) fn check_sinks(
        &self,
        workspace: &Workspace<P, D>,
        sinks: Option<&ArrayRef<'_, P::Device, f32>>,
    ) -> Result<()> {
        check_sinks(
            sinks,
            self.config.problem.heads as usize,
            self.decode.spec(),
        )?;
        if sinks.is_none() {
            return Ok(());
        }
        self.check_absorbed_only(workspace, "sinks", "the expanded path has no sinks")
    }

    /// Refuses what `field` asks for in a step with tokens on the expanded path, which does not do it.
    fn check_absorbed_only(
        &self,
        workspace: &Workspace<P, D>,
        field: &'static str,
        why: &str,
    ) -> Result<()> {
        let expanded = workspace.step.expanded_tokens();
        if expanded == 0 {
            return Ok(());
        }
        let given = format!("present, with {expanded} tokens on the expanded path");
        let accepted = format!(
            "absent: {why}. A threshold of u32::MAX keeps all requests on the absorbed path"
        );
        Err(Error::argument(field, given, accepted))
    }

    pub(crate) fn check_lists(
        &self,
        workspace: &Workspace<P, D>,
        lists: Option<&SlotLists<'_, P::Device>>,
        cache: &CacheLayout,
    ) -> Result<()> {
        let step = &workspace.step;
        // Tokens on the expanded path see all that there is.
        let tokens = step.absorbed_tokens();
        check_lists("slot_lists", lists, tokens, &self.config.problem)?;
        let Some(lists) = lists else {
            return Ok(());
        };
        if ![0, step.dense_within()].contains(&lists.dense_within) {
            let accepted = format!("{}, as the step has it, or 0", step.dense_within());
            let given = lists.dense_within;
            return Err(Error::argument("slot_lists.dense_within", given, accepted));
        }
        let lists = lists.shorten().with_dense_within(step.dense_within());
        lists.check(self.decode.spec(), cache)?;
        if lists.second.is_none() {
            return Ok(());
        }
        let why = "the expanded path attends to one cache";
        self.check_absorbed_only(workspace, "slot_lists.second", why)
    }

    pub(crate) fn check_tensors(
        &self,
        workspace: &Workspace<P, D>,
        call: &LayerCall<'_, P::Device>,
    ) -> Result<()> {
        workspace.check(self)?;
        let step = &workspace.step;
        step.check_prepared()?;
        let problem = &self.config.problem;
        let dims = problem.dims;
        let [heads, latent, rope, qk, v] = [
            problem.heads,
            dims.latent,
            dims.head.rope,
            dims.head.qk(),
            dims.head.v,
        ]
        .map(|extent| extent as usize);
        let tokens = step.tokens();
        for (field, layout, shape) in [
            ("query", call.query.layout(), [tokens, heads, qk]),
            ("latent", call.latent.layout(), [tokens, 1, latent]),
            ("rope", call.rope.layout(), [tokens, 1, rope]),
            ("out", call.out.layout(), [tokens, heads, v]),
        ] {
            layout.require(field, problem.dtype, shape)?;
            self.device.check_tensor(field, layout)?;
        }
        // A view made for another configuration.
        let kv = call.weights.kv.layout();
        let columns = heads * dims.head.kv_b() as usize;
        kv.require("W_kv_b", problem.dtype, [1, latent, columns])?;
        if let Some(lse) = &call.lse {
            lse.layout().require("lse", heads, tokens)?;
        }
        let cache = call.cache.layout();
        check_cache(cache, problem)?;
        if step.pages_end() > cache.pages {
            return Err(Error::argument(
                "block_tables",
                format!("page {}", step.pages_end() - 1),
                format!("below the cache's {} pages", cache.pages),
            ));
        }
        if let Some(rotary) = &call.rotary {
            self.check_rotation(step, rotary)?;
            if step.expanded_tokens() > 0 {
                return Err(Error::argument(
                    "rotary",
                    format!(
                        "with {} tokens on the expanded path",
                        step.expanded_tokens()
                    ),
                    "none, and rotated queries and keys: only the absorbed path can leave it to the \
                     cache write. `forward_unrotated` takes any step",
                ));
            }
        }
        self.check_places(step, call)
    }

    /// Refuses tensors that a backend or a product of the step would not take as they lie.
    fn check_places(&self, step: &PreparedStep, call: &LayerCall<'_, P::Device>) -> Result<()> {
        let (prefill, decode) = (self.prefill.spec(), self.decode.spec());
        let head = self.config.problem.dims.head;
        let [nope, qk] = [head.nope, head.qk()].map(|extent| extent as usize);
        let first = step.absorbed_tokens();
        let (absorbed, expanded) = (0..first, first..step.tokens());
        let operand = |field, tensor: TensorRef<'_, P::Device>| {
            self.device.check_operand(field, tensor.layout())
        };
        let (query, out) = (call.query.shorten(), call.out.as_ref());
        check_rows(&call.cache.as_ref(), decode.alignment)?;
        if !absorbed.is_empty() {
            let query = query.narrow(0, absorbed.clone())?;
            operand("query", query.narrow(2, 0..nope)?.transpose(0, 1))?;
            operand("W_kv_b", call.weights.queries)?;
            operand("W_kv_b", call.weights.values)?;
            operand("out", out.narrow(0, absorbed)?.transpose(0, 1))?;
            // Of other queries the device makes rotary parts of its own.
            if decode.query_format == QueryFormat::Split && call.rotary.is_none() {
                let rope = query.narrow(2, nope..qk)?;
                rope.require_aligned("query", decode.alignment as usize)?;
            }
        }
        if !expanded.is_empty() {
            let alignment = prefill.alignment as usize;
            let query = query.narrow(0, expanded.clone())?;
            query.require_aligned("query", alignment)?;
            let latent = call.latent.narrow(0, expanded.clone())?;
            operand("latent", latent.transpose(0, 1))?;
            operand("W_kv_b", call.weights.kv)?;
            operand("W_kv_b", call.weights.keys)?;
            operand("W_kv_b", call.weights.values)?;
            if prefill.key_layout == KeyLayout::Split {
                // It has one head, from which no other is apart.
                let rope = call.rope.narrow(0, expanded.clone())?.broadcast(1, 1)?;
                rope.require_aligned("rope", alignment)?;
            }
            // A padded output is the layer's own.
            if !prefill.padded_values {
                let out = out.narrow(0, expanded)?;
                check_gaps(out.layout(), prefill)?;
                out.require_aligned("out", alignment)?;
            }
        }
        Ok(())
    }

    fn packed_keys(&self) -> bool {
        self.prefill.spec().key_layout == KeyLayout::Packed
    }

    /// A row-major tensor at the beginning of `bytes`, in the problem's dtype.
    fn tensor<'a>(
        &self,
        bytes: <P::Device as Memory>::BytesMut<'a>,
        shape: Shape,
    ) -> Result<TensorMut<'a, P::Device>> {
        TensorMut::new(bytes, Layout::contiguous(self.config.problem.dtype, shape))
    }
}

/// The most new tokens of a request for which the absorbed path is the faster one: by the
/// [crossover](crate::plan::crossover) on this machine, of so much context or, without, of a long
/// one.
pub fn crossover_threshold(
    machine: &Machine,
    problem: &Problem,
    packed_keys: bool,
    context_len: Option<u32>,
) -> u32 {
    let attention = Attention {
        dims: problem.dims,
        heads: problem.heads,
        context_len,
        traffic: ExpansionTraffic {
            element_bytes: problem.dtype.bytes() as u32,
            packed_keys,
        },
    };
    threshold(&attention, machine)
}

fn check_backend<D: Device>(spec: &BackendSpec, device: &D, config: &LayerConfig) -> Result<()> {
    let reasons = spec.validate(device.target(), &config.problem);
    if reasons.is_empty() {
        return Ok(());
    }
    let field = match spec.phase {
        Phase::Prefill => "prefill backend",
        Phase::Decode => "decode backend",
    };
    Err(Error::argument(
        field,
        spec.name,
        format!("one that fits the problem; this one does not: {reasons}"),
    ))
}

/// A planned size as an allocation's.
fn device_plan(bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| Error::argument("limits", format!("{bytes} bytes"), "what memory can hold"))
}
