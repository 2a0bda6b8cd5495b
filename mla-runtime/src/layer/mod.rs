//! The MLA layer, from queries and new latent rows to attention outputs. It runs on any device with
//! any backends.
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
//!             out          = out / (1 + e^(sink − lse))           if there are sinks
//!
//! both        out          = out · sigmoid(gate)                  if there is a gate
//! ```
//!
//! In some steps the expanded path gathers both context and new tokens from the cache. One causal
//! attention then replaces two attentions and a merge. This has two conditions: the workspace has
//! room for all of these rows at the same time, and the cache holds rows in the format of the
//! queries. For a problem with [`BatchInvariant`](crate::spec::Feature::BatchInvariant) it never
//! happens, because the room depends on all requests. In such a problem each request's context is
//! cut as if the request were alone.
//!
//! The expanded path reads a new token's own rows from the tensors of the call. The absorbed path
//! reads them from the cache, and so quantised if the cache is quantised.
//!
//! Four objects have different lifetimes:
//!
//! | object | made | holds |
//! |---|---|---|
//! | [`MlaLayer`] | once per layer | the backends' implementations |
//! | [`Workspace`] | once per engine, [prepared](Workspace::prepare) once per step | all memory: scratch, step arrays, the backends' states and metadata |
//! | [`StepPlan`] | per step | an engine's requests: ordered, split between the paths, checked |
//! | [`LayerCall`] | per layer and step | views of the engine's own tensors: weights, queries, new rows, cache, outputs |
//!
//! [`MlaLayer::forward`] only enqueues: it allocates nothing, waits for nothing and reads nothing
//! back. Its launches depend on the prepared step's counts (tokens and requests of the absorbed
//! path, chunks) and on the maximum length. The device reads lengths, pages and slots from arrays
//! that never move. A step of decodes can therefore be captured into a graph. For this, set
//! [`max_len`](StepPlan::with_max_len) to the maximum number of tokens that a request will have.
//! The graph is replayed after another [`prepare`](Workspace::prepare) with the same number of
//! requests, the same number of tokens, the same `max_len` and no longer request. A smaller batch
//! is filled up with padding.
//!
//! The layer is one implementation for backends chosen by type ([`MlaLayer::of`]) and for backends
//! chosen at run time ([`SelectedPrefill`] and [`SelectedDecode`] in [`MlaLayer::new`]).
//!
//! # Example
//!
//! One request decodes its sixth token, and another is a prompt of three tokens:
//!
//! ```
//! use mla_runtime::backend::{LayerConfig, StepLimits};
//! use mla_runtime::model::{DType, HeadDims, MlaDims};
//! use mla_runtime::spec::Problem;
//! use mla_runtime::tensor::{CacheLayout, CacheMut, Memory, TensorMut, TensorRef};
//! use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
//! use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights};
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
//! let requests = [StepRequest::new(1, 6, &[1]), StepRequest::new(3, 3, &[0])];
//! let step = StepPlan::new(&workspace, &requests)?;
//! workspace.prepare(&layer, &step)?;
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
//!         Weights::from_transposed(TensorRef::from_slice::<f32>(&kv_b, [1, 64, 128])?, &config)?,
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
mod call;
mod check;
mod expanded;
mod own_rows;
mod owned_weights;
mod packed;
mod rotation;
mod selected;
mod staged;
mod step_plan;
mod weights;
mod workspace;

pub use call::LayerCall;
pub use owned_weights::OwnedWeights;
pub use selected::{SelectedLayer, SelectedWorkspace};
pub use step_plan::{StepPlan, StepRequest};
pub use weights::{Weights, check_adapter};
pub(crate) use workspace::PreparedStep;
pub use workspace::Workspace;

pub(crate) use self::absorbed::Absorbing;
pub(crate) use self::arena::regions;
use crate::backend::{
    DecodeBackend, DecodeStage, LayerConfig, PrefillBackend, PrefillStage, SelectedDecode,
    SelectedPrefill, StepLimits,
};
use crate::device::{CacheRows, Device, for_problem};
use crate::plan::crossover;
use crate::plan::memory::{self, MemoryNeeds, MemoryPlan, RegionName};
use crate::spec::{BackendSpec, Feature, Field, KeyLayout, Phase, QueryLen};
use crate::tensor::{ArrayRef, Layout, Memory, TensorMut, TensorRef};
use crate::{Error, Result, named};

/// The attention of one layer, with its backends.
pub struct MlaLayer<P: PrefillStage, D: DecodeStage<Device = P::Device>> {
    device: P::Device,
    config: LayerConfig,
    prefill: P,
    decode: D,
}

impl<P: PrefillBackend, D: DecodeBackend<Device = P::Device>> MlaLayer<P, D> {
    /// Makes a layer with backends chosen by type.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::new`]. Also if a backend cannot be made.
    pub fn of(device: &P::Device, config: &LayerConfig) -> Result<Self> {
        Ok(Self {
            device: check(&P::SPEC, &D::SPEC, device, config)?,
            config: *config,
            prefill: P::new(device, config)?,
            decode: D::new(device, config)?,
        })
    }
}

impl<D: Device> MlaLayer<SelectedPrefill<D>, SelectedDecode<D>> {
    /// Makes a layer with backends that were selected and made for this configuration.
    ///
    /// # Errors
    ///
    /// If a backend was made for another configuration or another device. If a backend does not fit
    /// the device or the problem; the error has every reason. If the problem contradicts itself or
    /// asks for something that the layer does not support.
    pub fn new(
        device: &D,
        config: &LayerConfig,
        prefill: SelectedPrefill<D>,
        decode: SelectedDecode<D>,
    ) -> Result<Self> {
        let accepted = device.ordinal();
        for (field, made_for, ordinal) in [
            ("prefill backend", prefill.config(), prefill.ordinal()),
            ("decode backend", decode.config(), decode.ordinal()),
        ] {
            if ordinal != accepted {
                let given = format!("one for device {ordinal}");
                let accepted = format!("one for device {accepted}, as the layer is");
                return Err(Error::argument(field, given, accepted));
            }
            if let Some((name, values)) = made_for.difference(config) {
                let [given, accepted] = values.map(|value| format!("one for {name} = {value}"));
                let accepted = accepted + ", as the layer has it";
                return Err(Error::argument(field, given, accepted));
            }
        }
        Ok(Self {
            device: check(prefill.spec(), decode.spec(), device, config)?,
            config: *config,
            prefill,
            decode,
        })
    }
}

/// Checks the problem and the backends of a layer, and returns the layer's device. The backends
/// make further checks of their own.
fn check<D: Device>(
    prefill: &BackendSpec,
    decode: &BackendSpec,
    device: &D,
    config: &LayerConfig,
) -> Result<D> {
    let problem = &config.problem;
    let fault = problem.fault();
    // The backend's own error about page sizes lists those that it supports.
    if let Some(fault) = fault.filter(|fault| fault.field != Field::PageSize) {
        return Err(fault.into());
    }
    check_backend(prefill, device, config)?;
    check_backend(decode, device, config)?;
    if let Some(fault) = fault {
        return Err(fault.into());
    }
    let scale = config.softmax_scale;
    if !(scale.is_finite() && scale > 0.0) {
        let accepted = "a finite number above 0";
        return Err(Error::argument("softmax_scale", scale, accepted));
    }
    let scaling = config.query_scaling;
    let is_finite = scaling.is_none_or(|scaling| scaling.beta.is_finite() && scaling.beta >= 0.0);
    if scaling.is_some() != problem.features.contains(Feature::QueryScales) || !is_finite {
        let accepted = match problem.features.contains(Feature::QueryScales) {
            true => "one with a finite beta of at least 0, as the problem has query_scales",
            false => "none, as the problem has no query_scales",
        };
        return Err(Error::argument(
            "query_scaling",
            format!("{scaling:?}"),
            accepted,
        ));
    }
    for (field, given, accepted) in [
        (
            "quant_output",
            problem.quant_output,
            "false: the layer's output has the problem's dtype",
        ),
        (
            "context_parallel",
            problem.context_parallel,
            "false: the layer's cache is on one device",
        ),
    ] {
        if given {
            return Err(Error::argument(field, given, accepted));
        }
    }
    let is_uniform = problem.query_len == QueryLen::Uniform;
    if is_uniform && problem.features.contains(Feature::BatchInvariant) {
        let accepted = "single or ragged, as the batch_invariant layer has no path for the \
                        batch's most frequent length";
        return Err(Error::argument("query_len", "uniform", accepted));
    }
    for_problem(device, problem)
}

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> MlaLayer<P, D> {
    /// The device. For a batch-invariant problem, it is the handle whose operations are
    /// batch-invariant ([`Device::batch_invariant`]).
    pub fn device(&self) -> &P::Device {
        &self.device
    }

    /// The configuration that the layer was made for.
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

    /// Plans the memory of `layers` such layers for steps within `limits`: the allocations of
    /// [`Self::workspace`] and of the backends, and caches of `pages` pages each.
    ///
    /// # Errors
    ///
    /// If a limit or size is out of range.
    pub fn memory_plan(&self, limits: &StepLimits, layers: u32, pages: u64) -> Result<MemoryPlan> {
        memory::plan(&self.memory_needs(limits, layers, pages)?)
    }

    /// Returns the needs from which [`Self::memory_plan`] makes its plan. [`memory::max_rows`] and
    /// [`memory::max_pages`] take such needs.
    ///
    /// # Errors
    ///
    /// If a limit is out of range.
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
            decode_workspace: self.decode.workspace_bytes(&self.device, limits)?,
            prefill_workspace: self.prefill.workspace_bytes(&self.device, limits)?,
            ..MemoryNeeds::of_steps(&self.config.problem, limits)?
        })
    }

    /// The maximum number of new tokens of a request on the absorbed path, unless a step sets
    /// another one. It is [`crossover::threshold`] for the longest context, limited by `limits`,
    /// the problem's query length, and the decode backend's maximum.
    pub fn threshold(&self, limits: &StepLimits) -> u32 {
        let problem = &self.config.problem;
        let max = match problem.query_len {
            QueryLen::Single => 1,
            _ => u32::try_from(self.within_backend(limits).decode_query_len).unwrap_or(u32::MAX),
        };
        let longest = limits
            .pages_per_request
            .saturating_mul(problem.page_size as usize);
        let longest = u32::try_from(longest).unwrap_or(u32::MAX);
        let machine = self.device.machine();
        crossover::threshold(&machine, problem, self.packed_keys(), Some(longest)).min(max)
    }

    /// The limits, with at most the number of query tokens on the absorbed path that the decode
    /// backend supports.
    fn within_backend(&self, limits: &StepLimits) -> StepLimits {
        let max = self.decode.spec().max_query_len;
        let max = max.map_or(usize::MAX, |max| max as usize);
        StepLimits {
            decode_query_len: limits.decode_query_len.min(max),
            ..*limits
        }
    }

    /// Allocates everything that steps within `limits` need. All layers with the same problem and
    /// backends share it. Requests with more new tokens than the decode backend
    /// [supports](BackendSpec::max_query_len) use the expanded path, whatever
    /// `limits.decode_query_len` is.
    ///
    /// # Errors
    ///
    /// If a limit is out of range, or if the device has too little free memory.
    pub fn workspace(&self, limits: &StepLimits) -> Result<Workspace<P, D>> {
        Workspace::new(self, &self.within_backend(limits))
    }

    /// Runs the layer for the prepared step: writes the cache, then attends on both paths. The call
    /// only enqueues.
    ///
    /// # Errors
    ///
    /// If the call does not fit the prepared step, or if the device or a backend fails.
    pub fn forward(
        &self,
        workspace: &mut Workspace<P, D>,
        mut call: LayerCall<'_, P::Device>,
    ) -> Result<()> {
        if !workspace.step.is_packed() {
            return self.forward_rows(workspace, call);
        }
        self.check(workspace, &call)?;
        self.enqueue(workspace, &mut call)
    }

    /// Enqueues a call that has been checked.
    fn enqueue(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.device
            .profile_range(c"mla: write cache and attend absorbed", || {
                self.enqueue_absorbed(workspace, call, Absorbing::Writing)
            })?;
        self.device.profile_range(c"mla: attend expanded", || {
            self.enqueue_expanded(workspace, call)
        })
    }

    /// The first part of [`Self::forward`]: writes the new tokens' rows to the cache. The other two
    /// parts follow in any order.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::forward`]. Also if the step's [rows](StepPlan::rows) are not exactly
    /// those of its tokens in order. The same holds for the other parts.
    pub fn write_cache(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check_packed(workspace, call)?;
        self.device.profile_range(c"mla: write cache", || {
            self.enqueue_cache_write(workspace, call)
        })
    }

    /// The part of [`Self::forward`] for the tokens on the absorbed path.
    ///
    /// # Errors
    ///
    /// Same as [`Self::forward`].
    pub fn attend_absorbed(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check_packed(workspace, call)?;
        self.device.profile_range(c"mla: attend absorbed", || {
            self.enqueue_absorbed(workspace, call, Absorbing::Alone)
        })
    }

    /// The part of [`Self::forward`] for the tokens on the expanded path.
    ///
    /// # Errors
    ///
    /// Same as [`Self::forward`].
    pub fn attend_expanded(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        self.check_packed(workspace, call)?;
        self.device.profile_range(c"mla: attend expanded", || {
            self.enqueue_expanded(workspace, call)
        })
    }

    fn enqueue_cache_write(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        let step = &workspace.step;
        let tokens = step.tokens;
        if tokens == 0 {
            return Ok(());
        }
        self.with_rows(workspace, call, |rows, query, _| {
            rows.write(&self.device, query)
        })
    }

    /// Calls `write` with the rows of the step's tokens and their positions. If rows are rotated,
    /// also passes the rotation of the queries.
    pub(crate) fn with_rows(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
        write: impl FnOnce(
            CacheRows<'_, P::Device>,
            Option<(TensorRef<'_, P::Device>, TensorMut<'_, P::Device>)>,
            ArrayRef<'_, P::Device, i64>,
        ) -> Result<()>,
    ) -> Result<()> {
        let step = &workspace.step;
        let tokens = step.tokens;
        let (query, weights) = (call.query.shorten(), call.weights.queries.shorten());
        let arrays = P::Device::bytes(&workspace.arrays);
        let positions = step.positions(arrays)?;
        let rows = call.rows(step.slots(arrays)?, positions);
        if rows.rotary.is_none() {
            return write(rows, None, positions);
        }
        let [heads, latent, _, rope, ..] = self.config.problem.extents();
        let names = [RegionName::AbsorbedQueries];
        let [to] = regions::<P::Device, _>(&mut workspace.scratch, &workspace.plan, names);
        let mut to = self.tensor(to, [tokens, heads, latent + rope])?;
        let rotation = rows.query_rotation(&query, &weights, &mut to)?;
        write(rows, rotation, positions)
    }

    /// The names of the prefill and the decode backend.
    fn backends(&self) -> [&'static str; 2] {
        [self.prefill.spec().name, self.decode.spec().name]
    }

    fn packed_keys(&self) -> bool {
        self.prefill.spec().key_layout == KeyLayout::Packed
    }

    /// A row-major tensor at the beginning of `bytes`, in the problem's dtype.
    fn tensor<'a>(
        &self,
        bytes: <P::Device as Memory>::BytesMut<'a>,
        shape: [usize; 3],
    ) -> Result<TensorMut<'a, P::Device>> {
        let layout = Layout::contiguous(self.config.problem.dtype, shape);
        named("workspace", TensorMut::new(bytes, layout))
    }
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

/// Converts a planned size to the size of an allocation.
pub(crate) fn device_plan(bytes: u64) -> Result<usize> {
    usize::try_from(bytes)
        .map_err(|_| Error::argument("limits", format!("{bytes} bytes"), "what memory can hold"))
}
