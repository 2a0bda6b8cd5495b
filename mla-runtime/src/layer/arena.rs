//! Regions of one buffer.

use crate::device::Device;
use crate::plan::memory::{MemoryPlan, RegionName};

/// The bytes of regions of a plan. The regions are in ascending order; empty ones can be anywhere.
/// A region out of order or outside the buffer panics, as slicing does.
pub(crate) fn regions<'a, D: Device, const N: usize>(
    buffer: &'a mut D::Buffer,
    plan: &MemoryPlan,
    names: [RegionName; N],
) -> [D::BytesMut<'a>; N] {
    let (mut rest, mut at) = (Some(D::bytes_mut(buffer)), 0);
    names.map(|name| {
        let region = plan.range(name);
        let start = if region.is_empty() { at } else { region.start };
        let left = rest.take().expect("put back after every region");
        let (_, left) = D::split_mut(left, start - at);
        let (taken, left) = D::split_mut(left, region.len());
        at = start + region.len();
        rest = Some(left);
        taken
    })
}
