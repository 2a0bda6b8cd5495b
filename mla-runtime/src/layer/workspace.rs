//! Memory that the layers of an engine share, and the prepared step.

use std::sync::atomic::{AtomicU64, Ordering};

use super::packed::Packed;
use super::staged::StagedStep;
use super::step_plan::{StepPlan, StepRequest};
use super::{MlaLayer, device_plan};
use crate::backend::{
    DecodeBatch, DecodeStage, LayerConfig, PrefillStage, StepLimits, check_causal,
};
use crate::device::Device;
use crate::plan::context::ContextChunk;
use crate::plan::memory::MemoryPlan;
use crate::plan::slots::HostIndex;
use crate::spec::Problem;
use crate::tensor::{ArrayRef, Memory};
use crate::{Error, Result};

/// The workspace of an engine's layers: made once, prepared once per step, used by one layer after
/// the other. Everything in it is allocated when it is made, as its [plan](Self::plan) lists.
pub struct Workspace<P: PrefillStage, D: DecodeStage<Device = P::Device>> {
    pub(super) config: LayerConfig,
    /// The number of the device that has its memory.
    ordinal: usize,
    /// The names of the backends whose states it has, which the types need not say.
    backends: [&'static str; 2],
    pub(super) scratch: Buffer<P>,
    pub(super) arrays: Buffer<P>,
    pub(super) prefill_state: P::State,
    pub(super) prefill_metadata: P::Metadata,
    pub(super) decode_state: D::State,
    pub(super) decode_metadata: D::Metadata,
    pub(super) step: StagedStep,
    /// Tensors in the order of the step, made of those of a call whose rows are in another.
    pub(super) packed: Option<Packed<P::Device>>,
    id: u64,
    /// Counts the steps that were prepared.
    step_number: u64,
    limits: StepLimits,
    threshold: u32,
    /// The place of each tensor in the buffers.
    pub(super) plan: MemoryPlan,
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
            backends: backends(layer),
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

    /// Prepares a planned step: stages and uploads its arrays, and lets the backends prepare.
    /// `layer` is any of the layers that will run it.
    ///
    /// # Errors
    ///
    /// If the layer is on another device or for another problem: then the step that was prepared
    /// last stays. If the step was planned for other layers or exceeds the limits, or the device
    /// or a backend fails: then no layer runs until a step has been prepared without error.
    pub fn prepare(&mut self, layer: &MlaLayer<P, D>, plan: &StepPlan) -> Result<()> {
        self.check(layer)?;
        self.step_number += 1;
        layer
            .device()
            .profile_range(c"mla: prepare", || self.prepare_unchecked(layer, plan))?;
        self.step.set_prepared();
        Ok(())
    }

    fn prepare_unchecked(&mut self, layer: &MlaLayer<P, D>, plan: &StepPlan) -> Result<()> {
        let device = layer.device();
        self.step.stage(&self.config.problem, plan)?;
        check_causal(self.step.absorbed_causal(), layer.decode().spec())?;
        check_causal(self.step.expanded_causal(), layer.prefill().spec())?;
        self.step
            .upload(device, P::Device::bytes_mut(&mut self.arrays))?;
        if self.step.absorbed_tokens() > 0 {
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
        let own = self.backends.iter().zip(backends(layer));
        for (phase, (given, accepted)) in ["prefill", "decode"].into_iter().zip(own) {
            if *given != accepted {
                let given = format!("one for {phase} backend {given}");
                let accepted = format!("one for {accepted}, as the layer has it");
                return Err(Error::argument("workspace", given, accepted));
            }
        }
        Ok(())
    }

    /// Refuses a handle that does not order the workspace's memory.
    pub(crate) fn check_memory(&self, device: &P::Device) -> Result<()> {
        device.check_bytes("workspace", P::Device::bytes(&self.scratch))
    }

    fn check_problem(&self, theirs: &Problem) -> Result<()> {
        self.config.problem.check_same("workspace", theirs)
    }

    /// Refuses to go on without a prepared step of `problem`.
    pub(crate) fn check_prepared_for(&self, problem: &Problem) -> Result<()> {
        self.check_problem(problem)?;
        self.step.check_prepared()
    }

    /// The requests of the prepared step on the absorbed path.
    pub(crate) fn decode_batch(&self) -> Result<DecodeBatch<'_, P::Device>> {
        self.step.decode_batch(P::Device::bytes(&self.arrays))
    }

    /// The slot of each new token of the prepared step.
    pub(crate) fn slots(&self) -> Result<ArrayRef<'_, P::Device, i64>> {
        self.step.slots(P::Device::bytes(&self.arrays))
    }

    /// The position of each new token of the prepared step.
    pub(crate) fn positions(&self) -> Result<ArrayRef<'_, P::Device, i64>> {
        self.step.positions(P::Device::bytes(&self.arrays))
    }

    /// One past the largest page that the prepared step names.
    pub(crate) fn pages_end(&self) -> usize {
        self.step.pages_end()
    }

    /// The number of the step that was prepared last.
    pub(crate) fn step_number(&self) -> u64 {
        self.step_number
    }

    /// The number that tells this workspace from every other one of the process: what a captured
    /// graph belongs to.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The limits that it was made for.
    pub fn limits(&self) -> &StepLimits {
        &self.limits
    }

    /// The max number of new tokens of a request on the absorbed path, if a step does not say.
    pub fn threshold(&self) -> u32 {
        self.threshold
    }

    /// The plan of what was allocated, without a cache.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The bytes of the two buffers that the layer itself allocated: the plan's `workspace_bytes`
    /// and `step_bytes`.
    pub fn allocated_bytes(&self) -> [usize; 2] {
        [&self.scratch, &self.arrays].map(|buffer| P::Device::byte_len(P::Device::bytes(buffer)))
    }

    /// Returns true if the tensors of a call of the prepared step are used in place. If not, each
    /// call copies rows into the order of the step, and results back.
    pub fn rows_in_order(&self) -> bool {
        self.step.rows_in_order().is_some()
    }

    /// The rows of the tensors of a call of the prepared step: its new tokens, and padding.
    pub fn call_rows(&self) -> usize {
        self.step.call_rows()
    }

    /// The new tokens of the prepared step.
    pub fn tokens(&self) -> usize {
        self.step.tokens()
    }

    /// The number of these, from the first on, that are on the absorbed path.
    pub fn absorbed_tokens(&self) -> usize {
        self.step.absorbed_tokens()
    }

    /// The requests of the prepared step on the absorbed path; they come first.
    pub fn absorbed_requests(&self) -> usize {
        self.step.absorbed_requests()
    }

    /// The context chunks of the prepared step.
    pub fn context(&self) -> &[ContextChunk] {
        self.step.context()
    }
}

impl StepPlan {
    /// Orders the requests as the workspace's layers take them, checks them, and finds where each
    /// token stands.
    ///
    /// # Errors
    ///
    /// If a request contradicts itself or has too few pages, if two write to one page or one reads
    /// it as another of its own, or if there are more than the workspace was made for.
    pub fn new<P, D, T>(
        workspace: &Workspace<P, D>,
        requests: &[StepRequest<'_, T>],
    ) -> Result<Self>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
        T: HostIndex,
    {
        Self::sparse(workspace, requests, 0)
    }

    /// [`Self::new`] for a sparse problem whose requests of at most `dense_within` tokens attend to
    /// all that they see, by the dense paths: their slot lists are not read. It is what a model
    /// chooses of each context (its `topk`), since a request with no more is told to attend to
    /// everything. Dense requests of more new tokens than the threshold take the expanded path, if
    /// [`context_rows`](StepLimits::context_rows) is not 0. 0: every request goes by its lists.
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`], and if the problem is not sparse and `dense_within` not 0.
    pub fn sparse<P, D, T>(
        workspace: &Workspace<P, D>,
        requests: &[StepRequest<'_, T>],
        dense_within: u32,
    ) -> Result<Self>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
        T: HostIndex,
    {
        let (problem, limits) = (&workspace.config.problem, workspace.limits());
        Self::ordered(
            problem,
            limits,
            workspace.threshold(),
            dense_within,
            requests,
        )
    }
}

/// The names of a layer's prefill and decode backend.
fn backends<P, D>(layer: &MlaLayer<P, D>) -> [&'static str; 2]
where
    P: PrefillStage,
    D: DecodeStage<Device = P::Device>,
{
    [layer.prefill().spec().name, layer.decode().spec().name]
}
