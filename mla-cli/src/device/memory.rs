//! Numbers in a device's memory, the rows of a cache that are read back, and memory figures of the
//! system.

use bytemuck::NoUninit;
use mla_conformance::reference::decode_row;
use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::spec::Problem;
use mla_runtime::tensor::{CacheLayout, CacheMut, CacheRef, CacheStrides};
use rayon::prelude::*;

/// Copies numbers to new memory of a device, in the same order.
pub fn upload<D: Device, T: NoUninit>(device: &D, numbers: &[T]) -> Result<D::Buffer> {
    let bytes = bytemuck::cast_slice(numbers);
    let mut buffer = device.allocate(bytes.len())?;
    device.upload(bytes, D::bytes_mut(&mut buffer))?;
    Ok(buffer)
}

/// A cache in one buffer. It holds rows or, if the problem has a cache of two tensors, all latents
/// followed by all rotary keys.
pub struct CacheBuffer<D: Device> {
    bytes: D::Buffer,
    pub layout: CacheLayout,
}

/// Alignment of the second tensor.
const ALIGNMENT: usize = 256;

impl<D: Device> CacheBuffer<D> {
    /// Makes a cache without gaps. The largest value that it stores is `max`.
    pub fn new(device: &D, problem: &Problem, pages: usize, max: f32) -> Result<Self> {
        let of_pages = match problem.has_split_cache() {
            true => CacheLayout::split,
            false => CacheLayout::contiguous,
        };
        let page_size = problem.page_size as usize;
        let layout = of_pages(problem.dims, problem.kv_format, pages, page_size)
            // The scale maps the largest stored value to the largest of e4m3.
            .with_scale(match problem.kv_format.has_tensor_scale() {
                true => max / 448.0,
                false => 1.0,
            });
        let bytes = match layout.split_rope {
            Some(rope) => rope_start(&layout) + pages * rope.page_stride,
            None => pages * layout.page_stride,
        };
        let bytes = device.allocate(bytes)?;
        Ok(Self { bytes, layout })
    }

    pub fn view(&self) -> Result<CacheRef<'_, D>> {
        let (bytes, layout) = (D::bytes(&self.bytes), self.layout);
        if !layout.is_split() {
            return CacheRef::new(bytes, layout);
        }
        let start = rope_start(&layout);
        let rope = D::byte_range(bytes, start..D::byte_len(bytes));
        CacheRef::split(D::byte_range(bytes, 0..start), rope, layout)
    }

    pub fn view_mut(&mut self) -> Result<CacheMut<'_, D>> {
        let (bytes, layout) = (D::bytes_mut(&mut self.bytes), self.layout);
        if !layout.is_split() {
            return CacheMut::new(bytes, layout);
        }
        let (latent, rope) = D::split_mut(bytes, rope_start(&layout));
        CacheMut::split(latent, rope, layout)
    }

    /// Returns the first `count` rows of `pages`, in this order, dequantised. A row is a latent
    /// followed by its rotary part.
    pub fn rows(&self, device: &D, pages: &[usize], count: usize) -> Result<Vec<Vec<f64>>> {
        let layout = &self.layout;
        let (latent, rope) = (layout.dims.latent as usize, layout.dims.head.rope as usize);
        let read = |first: usize, strides: CacheStrides| {
            let mut bytes = vec![0; pages.len() * strides.page_stride];
            for (page, to) in pages.iter().zip(bytes.chunks_mut(strides.page_stride)) {
                let start = first + page * strides.page_stride;
                let from = D::byte_range(D::bytes(&self.bytes), start..start + to.len());
                device.download(from, to)?;
            }
            Result::<_>::Ok(bytes)
        };
        // Rows have no gaps, so a row's index is its position.
        let rows = read(0, layout.strides())?;
        let ropes = match layout.split_rope {
            Some(rope) => Some((read(rope_start(layout), rope)?, rope.row_stride)),
            None => None,
        };
        let row = |position: usize| {
            let mut row = rows[position * layout.row_stride..][..layout.row_stride].to_vec();
            if let Some((ropes, stride)) = &ropes {
                row.extend_from_slice(&ropes[position * stride..][..*stride]);
            }
            decode_row(layout.format, latent, rope, &row, layout.scale.into())
        };
        Ok((0..count).into_par_iter().map(row).collect())
    }
}

/// Returns the first byte of rotary keys in a separate tensor.
fn rope_start(layout: &CacheLayout) -> usize {
    (layout.pages * layout.page_stride).next_multiple_of(ALIGNMENT)
}

/// Returns the first value of a field in a file of `name: value` lines.
pub(crate) fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(field, _)| field.trim() == name)?;
    Some(value.trim().to_owned())
}

/// Returns the bytes of such a field, whose value is in KiB.
pub(crate) fn field_bytes(path: &str, name: &str) -> Option<u64> {
    let text = field(path, name)?;
    let kib: u64 = text.strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
