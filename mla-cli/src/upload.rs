//! Numbers that go to a device.

use bytemuck::NoUninit;
use mla_runtime::Result;
use mla_runtime::device::Device;

/// Numbers in new memory of a device, as they lie in the host's.
pub fn upload<D: Device, T: NoUninit>(device: &D, numbers: &[T]) -> Result<D::Buffer> {
    let bytes = bytemuck::cast_slice(numbers);
    let mut buffer = device.allocate(bytes.len())?;
    device.upload(bytes, D::bytes_mut(&mut buffer))?;
    Ok(buffer)
}
