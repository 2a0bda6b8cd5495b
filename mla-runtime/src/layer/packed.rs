//! Memory for a call's tensors in the order of the step.

use super::arena::regions;
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
        let [heads, latent, nope, rope, v] = problem.extents();
        let names = [
            RegionName::PackedQuery,
            RegionName::PackedLatent,
            RegionName::PackedRope,
            RegionName::PackedOutputs,
            RegionName::PackedLse,
        ];
        let [query, latents, keys, out, lse] = regions::<D, _>(&mut self.0, plan, names);
        let tensor = |bytes, shape: [usize; 3]| {
            TensorMut::<D>::new(bytes, Layout::contiguous(problem.dtype, shape))
        };
        Ok(PackedTensors {
            query: tensor(query, [tokens, heads, nope + rope])?,
            latent: tensor(latents, [tokens, 1, latent])?,
            rope: tensor(keys, [tokens, 1, rope])?,
            out: tensor(out, [tokens, heads, v])?,
            lse: LseMut::new(lse, LseLayout::heads_first(heads, tokens))?,
        })
    }
}
