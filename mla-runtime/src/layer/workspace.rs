//! Memory that the layers of an engine share, with the prepared step.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

use super::packed::Packed;
use super::staged::StagedStep;
use super::step_plan::{Origin, StepPlan, StepRequest};
use super::{MlaLayer, device_plan};
use crate::backend::{
    DecodeBatch, DecodeStage, LayerConfig, PrefillStage, StepLimits, check_causal,
};
use crate::device::Device;
use crate::plan::context::ContextChunk;
use crate::plan::memory::MemoryPlan;
use crate::spec::Problem;
use crate::tensor::{ArrayRef, Memory};
use crate::{Error, Result};

/// The workspace of an engine's layers. It is made once, prepared once per step, and used by one
/// layer after another. All of its memory is allocated when it is made; its [plan](Self::plan)
/// lists the parts.
pub struct Workspace<P: PrefillStage, D: DecodeStage<Device = P::Device>> {
    pub(super) config: LayerConfig,
    /// The number of the device that has the memory.
    ordinal: usize,
    /// The names of the backends whose states the workspace has. The types do not always determine
    /// them.
    backends: [&'static str; 2],
    pub(super) scratch: Buffer<P>,
    pub(super) arrays: Buffer<P>,
    pub(super) prefill_state: P::State,
    pub(super) prefill_metadata: P::Metadata,
    pub(super) decode_state: D::State,
    pub(super) decode_metadata: D::Metadata,
    pub(super) step: StagedStep,
    /// Copies of a call's tensors in the order of the step, if the call's rows are in another
    /// order.
    pub(super) packed: Option<Packed<P::Device>>,
    id: u64,
    /// The number of steps that were prepared.
    step_number: u64,
    limits: StepLimits,
    threshold: u32,
    /// The location of each tensor in the buffers.
    pub(super) plan: MemoryPlan,
}

/// The prepared step of a workspace, as an indexer uses it.
pub(crate) struct PreparedStep<'a, D: Device> {
    pub(crate) tokens: usize,
    pub(crate) absorbed_tokens: usize,
    /// One more than the largest page number.
    pub(crate) pages_end: usize,
    pub(crate) id: [u64; 2],
    /// The requests on the absorbed path.
    pub(crate) batch: DecodeBatch<'a, D>,
    /// The slot of each new token.
    pub(crate) slots: ArrayRef<'a, D, i64>,
    /// The position of each new token.
    pub(crate) positions: ArrayRef<'a, D, i64>,
}

/// The number of the next workspace of the process.
static NEXT: AtomicU64 = AtomicU64::new(0);

type Buffer<P> = <<P as PrefillStage>::Device as Memory>::Buffer;

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> Workspace<P, D> {
    pub(super) fn new(layer: &MlaLayer<P, D>, limits: &StepLimits) -> Result<Self> {
        let device = layer.device();
        let config = layer.config();
        let step = StagedStep::new(limits, config)?;
        let plan = layer.memory_plan(limits, 1, 0)?;
        Ok(Self {
            config: *config,
            ordinal: device.ordinal(),
            backends: layer.backends(),
            scratch: device.allocate(device_plan(plan.workspace_bytes)?)?,
            arrays: device.allocate(device_plan(plan.step_bytes)?)?,
            prefill_state: layer.prefill().state(device, limits)?,
            prefill_metadata: layer.prefill().metadata(device, limits)?,
            decode_state: layer.decode().state(device, limits)?,
            decode_metadata: layer.decode().metadata(device, limits)?,
            step,
            packed: match limits.call_rows {
                0 => None,
                _ => Some(Packed::new(device, &plan)?),
            },
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            step_number: 0,
            limits: *limits,
            threshold: layer.threshold(limits),
            plan,
        })
    }

    /// Prepares a planned step: stages and uploads its arrays, and calls `prepare` of the backends.
    /// `layer` is any of the layers that will run the step.
    ///
    /// # Errors
    ///
    /// If the layer is on another device or for another problem; the step that was prepared last
    /// then stays valid. Also if the step was planned for other layers or exceeds the limits, or if
    /// the device or a backend fails. After these errors no layer runs until a step has been
    /// prepared without an error.
    pub fn prepare(&mut self, layer: &MlaLayer<P, D>, plan: &StepPlan) -> Result<()> {
        self.check(layer)?;
        self.step_number += 1;
        layer
            .device()
            .profile_range(c"mla: prepare", || self.prepare_unchecked(layer, plan))?;
        self.step.prepared = true;
        Ok(())
    }

    fn prepare_unchecked(&mut self, layer: &MlaLayer<P, D>, plan: &StepPlan) -> Result<()> {
        let device = layer.device();
        self.step.stage(&self.config.problem, plan)?;
        check_causal(self.step.absorbed_causal(), layer.decode().spec())?;
        check_causal(self.step.expanded_causal(), layer.prefill().spec())?;
        self.step
            .upload(device, P::Device::bytes_mut(&mut self.arrays))?;
        if self.step.absorbed_tokens > 0 {
            let batch = self.step.decode_batch(P::Device::bytes(&self.arrays))?;
            layer.decode().prepare(
                device,
                &batch,
                &mut self.decode_state,
                &mut self.decode_metadata,
            )?;
        }
        if self.step.expanded_tokens() > 0 {
            layer.prefill().prepare(
                device,
                &self.step.prefill_batch(),
                &mut self.prefill_state,
                &mut self.prefill_metadata,
            )?;
        }
        Ok(())
    }

    pub(super) fn check(&self, layer: &MlaLayer<P, D>) -> Result<()> {
        let ordinal = layer.device().ordinal();
        if self.ordinal != ordinal {
            let given = format!("one on device {}", self.ordinal);
            let accepted = format!("one on device {ordinal}, as the layer is");
            return Err(Error::argument("workspace", given, accepted));
        }
        self.check_memory(layer.device())?;
        self.check_problem(&layer.config().problem)?;
        let scalings = [self.config, *layer.config()].map(|config| config.query_scaling);
        if scalings[0] != scalings[1] {
            let [given, accepted] = scalings.map(|scaling| format!("one for {scaling:?}"));
            return Err(Error::argument(
                "query_scaling",
                given,
                accepted + ", as the layer has it",
            ));
        }
        let own = self.backends.iter().zip(layer.backends());
        for (phase, (given, accepted)) in ["prefill", "decode"].into_iter().zip(own) {
            if *given != accepted {
                let given = format!("one for {phase} backend {given}");
                let accepted = format!("one for {accepted}, as the layer has it");
                return Err(Error::argument("workspace", given, accepted));
            }
        }
        Ok(())
    }

    /// Refuses a device handle whose work is not ordered with that on the workspace's memory.
    fn check_memory(&self, device: &P::Device) -> Result<()> {
        device.check_bytes("workspace", P::Device::bytes(&self.scratch))
    }

    fn check_problem(&self, theirs: &Problem) -> Result<()> {
        self.config.problem.check_same("workspace", theirs)
    }

    /// The prepared step of `problem`, for work on `device`.
    pub(crate) fn prepared_for(
        &self,
        device: &P::Device,
        problem: &Problem,
    ) -> Result<PreparedStep<'_, P::Device>> {
        self.check_problem(problem)?;
        self.step.check_prepared()?;
        self.check_memory(device)?;
        let arrays = P::Device::bytes(&self.arrays);
        Ok(PreparedStep {
            tokens: self.step.tokens,
            absorbed_tokens: self.step.absorbed_tokens,
            pages_end: self.step.pages_end,
            id: self.step_id(),
            batch: self.step.decode_batch(arrays)?,
            slots: self.step.slots(arrays)?,
            positions: self.step.positions(arrays)?,
        })
    }

    /// Distinguishes the step that was prepared last from every other one of the process.
    pub(crate) fn step_id(&self) -> [u64; 2] {
        [self.id, self.step_number]
    }

    /// A number that distinguishes this workspace from every other one of the process. A captured
    /// graph belongs to the workspace with this number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The limits that the workspace was made for.
    pub fn limits(&self) -> &StepLimits {
        &self.limits
    }

    /// The maximum number of new tokens of a request on the absorbed path, unless a step sets
    /// another one.
    pub fn threshold(&self) -> u32 {
        self.threshold
    }

    /// The plan of the allocated memory, without a cache.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The sizes in bytes of the two buffers that the layer allocated: the plan's `workspace_bytes`
    /// and `step_bytes`.
    pub fn allocated_bytes(&self) -> [usize; 2] {
        [&self.scratch, &self.arrays].map(|buffer| P::Device::byte_len(P::Device::bytes(buffer)))
    }

    /// Returns true if the tensors of a call of the prepared step are used in place. If it is
    /// false, each call copies rows into the order of the step, and results back.
    pub fn rows_in_order(&self) -> bool {
        self.step.rows_in_order().is_some()
    }

    /// The number of rows in the tensors of a call of the prepared step. Padding counts as well.
    pub fn call_rows(&self) -> usize {
        self.step.call_rows()
    }

    /// The number of new tokens in the prepared step.
    pub fn tokens(&self) -> usize {
        self.step.tokens
    }

    /// The number of new tokens on the absorbed path. They come first.
    pub fn absorbed_tokens(&self) -> usize {
        self.step.absorbed_tokens
    }

    /// The number of requests of the prepared step on the absorbed path. They come first.
    pub fn absorbed_requests(&self) -> usize {
        self.step.absorbed_requests
    }

    /// The context chunks of the prepared step.
    pub fn context(&self) -> &[ContextChunk] {
        self.step.context()
    }
}

impl StepPlan {
    /// Checks the requests, orders them as the workspace's layers need them, and assigns a row to
    /// each token.
    ///
    /// # Errors
    ///
    /// If a request contradicts itself or has too few pages. If two requests write to one page, or
    /// if a request has a page at one index that another request writes at another index. If the
    /// workspace's limits have no room for the requests.
    pub fn new<P, D, T>(
        workspace: &Workspace<P, D>,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
        T: Copy + Display + TryInto<i64>,
    {
        Self::sparse(workspace, requests, 0)
    }

    /// Plans as [`Self::new`] does, for a sparse problem with dense requests. Requests of at most
    /// `dense_within` tokens attend to all that they see on the dense paths, and their slot lists
    /// are not read. Usually `dense_within` is the model's `topk`: in a request with no more
    /// tokens, every token would be chosen anyway. Dense requests with more new tokens than the
    /// threshold take the expanded path, if [`context_rows`](StepLimits::context_rows) is not 0.
    /// With a `dense_within` of 0 every request uses its lists.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::new`]. Also if the problem is not sparse and `dense_within` is not 0.
    pub fn sparse<P, D, T>(
        workspace: &Workspace<P, D>,
        requests: &[StepRequest<'_, T>],
        dense_within: u32,
    ) -> Result<Self>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
        T: Copy + Display + TryInto<i64>,
    {
        Self::planned(
            &workspace.config.problem,
            workspace.limits(),
            workspace.threshold(),
            dense_within,
            requests,
            Origin::Engine,
        )
    }
}
