//! Memory for a call's tensors in the order of the step.

use super::arena::Arena;
use super::device_plan;
use crate::Result;
use crate::device::Device;
use crate::plan::memory::{MemoryPlan, RegionName};
use crate::spec::Problem;
use crate::tensor::{Layout, LseLayout, LseMut, TensorMut};

/// Memory for a call's tensors in the order of the step.
pub(super) struct Packed<D: Device>(D::Buffer);

/// A call's tensors in the order of the step.
pub(super) struct PackedTensors<'a, D: Device> {
    pub(super) query: TensorMut<'a, D>,
    pub(super) latent: TensorMut<'a, D>,
    pub(super) rope: TensorMut<'a, D>,
    pub(super) out: TensorMut<'a, D>,
    pub(super) lse: LseMut<'a, D>,
}

impl<D: Device> Packed<D> {
    pub(super) fn new(device: &D, plan: &MemoryPlan) -> Result<Self> {
        let bytes = device_plan(plan.packed_bytes)?;
        device.allocate(bytes).map(Self)
    }

    pub(super) fn tensors(
        &mut self,
        plan: &MemoryPlan,
        problem: &Problem,
        tokens: usize,
    ) -> Result<PackedTensors<'_, D>> {
        let head = problem.dims.head;
        let [heads, latent, rope, qk, v] = [
            problem.heads,
            problem.dims.latent,
            head.rope,
            head.qk(),
            head.v,
        ]
        .map(|extent| extent as usize);
        let mut arena = Arena::<D>::new(D::bytes_mut(&mut self.0));
        let mut tensor = |name, shape: [usize; 3]| {
            let bytes = arena.take(&plan.range(name));
            TensorMut::new(bytes, Layout::contiguous(problem.dtype, shape))
        };
        Ok(PackedTensors {
            query: tensor(RegionName::PackedQuery, [tokens, heads, qk])?,
            latent: tensor(RegionName::PackedLatent, [tokens, 1, latent])?,
            rope: tensor(RegionName::PackedRope, [tokens, 1, rope])?,
            out: tensor(RegionName::PackedOutputs, [tokens, heads, v])?,
            lse: LseMut::new(
                arena.take(&plan.range(RegionName::PackedLse)),
                LseLayout::heads_first(heads, tokens),
            )?,
        })
    }
}
