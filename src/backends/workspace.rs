//! The size of a kernel's workspace.

use mla_runtime::Result;

use crate::device::Cuda;
use crate::raw;

/// Returns the workspace's bytes, which `query`, a function of the C interface, writes.
pub(super) fn size(
    device: &Cuda,
    query: impl FnOnce(&mut usize) -> raw::MlaStatus,
) -> Result<usize> {
    let mut bytes = 0;
    device.bind()?;
    // SAFETY: the status is that of a function of `raw`.
    unsafe { raw::check("workspace", query(&mut bytes)) }?;
    Ok(bytes)
}
