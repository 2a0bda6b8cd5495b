//! Numbers that go to a device, and the rows of a cache that come back; and the memory that the
//! system tells of.

use bytemuck::NoUninit;
use mla_conformance::reference::decode_row;
use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::tensor::CacheLayout;
use rayon::prelude::*;

/// Numbers in new memory of a device, as they lie in the host's.
pub fn upload<D: Device, T: NoUninit>(device: &D, numbers: &[T]) -> Result<D::Buffer> {
    let bytes = bytemuck::cast_slice(numbers);
    let mut buffer = device.allocate(bytes.len())?;
    device.upload(bytes, D::bytes_mut(&mut buffer))?;
    Ok(buffer)
}

/// The first `count` rows of `pages`, which follow each other in this order: latents, then rotary
/// parts, dequantised.
pub(crate) fn stored_rows<D: Device>(
    device: &D,
    cache: &D::Buffer,
    layout: &CacheLayout,
    pages: &[usize],
    count: usize,
) -> Result<Vec<Vec<f64>>> {
    let (latent, rope) = (layout.dims.latent as usize, layout.dims.head.rope as usize);
    let mut bytes = vec![0; pages.len() * layout.page_stride];
    for (page, to) in pages.iter().zip(bytes.chunks_mut(layout.page_stride)) {
        let start = page * layout.page_stride;
        let from = D::byte_range(D::bytes(cache), start..start + to.len());
        device.download(from, to)?;
    }
    let row = |position: usize| {
        let (page, place) = (position / layout.page_size, position % layout.page_size);
        let page = &bytes[page * layout.page_stride..][..layout.page_stride];
        let row = page.chunks(layout.row_stride).nth(place).unwrap_or(&[]);
        decode_row(layout.format, latent, rope, row, layout.scale.into())
    };
    Ok((0..count).into_par_iter().map(row).collect())
}

/// The first value of a field in a file of `name: value` lines.
pub(crate) fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(field, _)| field.trim() == name)?;
    Some(value.trim().to_owned())
}

/// The bytes of such a field, whose value is in KiB.
pub(crate) fn field_bytes(path: &str, name: &str) -> Option<u64> {
    let text = field(path, name)?;
    let kib: u64 = text.strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
