//! Memory that the layers of an engine share, and the prepared step.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::packed::Packed;
use super::step::{Step, StepBatch};
use super::{MlaLayer, device_plan};
use crate::backend::{
    DecodeBatch, DecodeStage, LayerConfig, MadeFor, PrefillStage, StepLimits, check_causal,
};
use crate::device::Device;
use crate::plan::context::ContextPlan;
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
    pub(super) regions: Regions,
    pub(super) scratch: Buffer<P>,
    pub(super) arrays: Buffer<P>,
    pub(super) prefill_state: P::State,
    pub(super) prefill_metadata: P::Metadata,
    pub(super) decode_state: D::State,
    pub(super) decode_metadata: D::Metadata,
    pub(super) step: Step,
    /// Tensors in the order of the step, made of those of a call whose rows are in another.
    pub(super) packed: Option<Packed<P::Device>>,
    id: WorkspaceId,
    /// Counts the steps that were prepared.
    step_number: u64,
    limits: StepLimits,
    threshold: u32,
    plan: MemoryPlan,
}

/// Tells a workspace from every other one of the process: what a captured graph belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WorkspaceId(u64);

impl WorkspaceId {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

type Buffer<P> = <<P as PrefillStage>::Device as Memory>::Buffer;

/// The place of each tensor in the scratch buffer, in bytes; empty where the plan has none. In the
/// order of the plan.
pub(super) struct Regions {
    pub(super) absorbed_queries: Range<usize>,
    pub(super) absorbed_outputs: Range<usize>,
    pub(super) context_latent: Range<usize>,
    pub(super) context_rope: Range<usize>,
    pub(super) expanded_kv: Range<usize>,
    pub(super) expanded_keys: Range<usize>,
    pub(super) expanded_values: Range<usize>,
    pub(super) partial_outputs: Range<usize>,
    pub(super) partial_lse: Range<usize>,
    pub(super) expanded_lse: Range<usize>,
}

impl Regions {
    fn new(plan: &MemoryPlan) -> Self {
        // The whole plan fits the address space, as its allocation shows.
        let range = |name| {
            plan.region(name).map_or(0..0, |region| {
                region.offset as usize..(region.offset + region.bytes) as usize
            })
        };
        Self {
            absorbed_queries: range("absorbed_queries"),
            absorbed_outputs: range("absorbed_outputs"),
            context_latent: range("context_latent"),
            context_rope: range("context_rope"),
            expanded_kv: range("expanded_kv"),
            expanded_keys: range("expanded_keys"),
            expanded_values: range("expanded_values"),
            partial_outputs: range("partial_outputs"),
            partial_lse: range("partial_lse"),
            expanded_lse: range("expanded_lse"),
        }
    }
}

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> Workspace<P, D> {
    pub(super) fn new(layer: &MlaLayer<P, D>, limits: &StepLimits) -> Result<Self> {
        let device = layer.device();
        let config = layer.config();
        let step = Step::new(limits, config.problem.page_size)?;
        let plan = layer.memory_plan(limits, 1, 0)?;
        Ok(Self {
            config: *config,
            ordinal: device.ordinal(),
            backends: backends(layer),
            regions: Regions::new(&plan),
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
            id: WorkspaceId::new(),
            step_number: 0,
            limits: *limits,
            threshold: layer.threshold(limits),
            plan,
        })
    }

    /// Prepares a step: checks the batch, plans it, uploads its arrays, and lets the backends
    /// prepare. `layer` is any of the layers that will run it.
    ///
    /// # Errors
    ///
    /// If the layer is on another device or for another problem: then the step that was prepared
    /// last stays. If the batch contradicts itself or exceeds the limits, or the device or a
    /// backend fails: then no layer runs until a step has been prepared without error.
    pub fn prepare<T: HostIndex, S: HostIndex>(
        &mut self,
        layer: &MlaLayer<P, D>,
        batch: &StepBatch<'_, T, S>,
    ) -> Result<()> {
        self.check(layer)?;
        self.step_number += 1;
        layer
            .device()
            .profile_range(c"mla: prepare", || self.prepare_unchecked(layer, batch))?;
        self.step.set_prepared();
        Ok(())
    }

    fn prepare_unchecked<T: HostIndex, S: HostIndex>(
        &mut self,
        layer: &MlaLayer<P, D>,
        batch: &StepBatch<'_, T, S>,
    ) -> Result<()> {
        let device = layer.device();
        self.step
            .plan(&self.config.problem, self.threshold, batch)?;
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
        MadeFor::new(&self.config).check_problem("workspace", theirs)
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

    /// The number that tells this workspace from others.
    pub fn id(&self) -> WorkspaceId {
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

    /// Returns true if the tensors of a call of the prepared step are taken as they lie: if not,
    /// each call copies rows into the order of the step, and results back.
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
    pub fn context(&self) -> &ContextPlan {
        self.step.context()
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
