//! Memory for a call's tensors in the order of the step.

use std::ops::Range;

use super::arena::Arena;
use super::device_plan;
use crate::Result;
use crate::device::Device;
use crate::plan::memory::MemoryPlan;
use crate::spec::Problem;
use crate::tensor::{Layout, LseLayout, LseMut, Shape, TensorMut};

/// Memory for a call's tensors in the order of the step.
pub(super) struct Packed<D: Device> {
    buffer: D::Buffer,
    query: Range<usize>,
    latent: Range<usize>,
    rope: Range<usize>,
    out: Range<usize>,
    lse: Range<usize>,
}

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
        // The whole plan fits the address space, as its allocation shows.
        let range = |name| {
            plan.region(name).map_or(0..0, |region| {
                region.offset as usize..(region.offset + region.bytes) as usize
            })
        };
        Ok(Self {
            buffer: device.allocate(device_plan(plan.packed_bytes)?)?,
            query: range("packed_query"),
            latent: range("packed_latent"),
            rope: range("packed_rope"),
            out: range("packed_outputs"),
            lse: range("packed_lse"),
        })
    }

    pub(super) fn tensors(
        &mut self,
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
        let mut arena = Arena::<D>::new(D::bytes_mut(&mut self.buffer));
        let mut tensor = |region: &Range<usize>, shape: Shape| {
            TensorMut::new(arena.take(region), Layout::contiguous(problem.dtype, shape))
        };
        Ok(PackedTensors {
            query: tensor(&self.query, [tokens, heads, qk])?,
            latent: tensor(&self.latent, [tokens, 1, latent])?,
            rope: tensor(&self.rope, [tokens, 1, rope])?,
            out: tensor(&self.out, [tokens, heads, v])?,
            lse: LseMut::new(arena.take(&self.lse), LseLayout::heads_first(heads, tokens))?,
        })
    }
}
