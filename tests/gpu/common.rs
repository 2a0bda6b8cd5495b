//! Fixtures of all GPU tests: the GPU, random numbers, elements and buffers.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;
use cudarc::driver::CudaContext;
use half::{bf16, f16};
use mla_kernels::Cuda;
use mla_runtime::Result;
use mla_runtime::device::Device;
use mla_runtime::model::DType;
use mla_runtime::tensor::{CacheLayout, CacheMut, Memory};
use rand::SeedableRng as _;
use rand::rngs::StdRng;

/// A GPU with its own stream, which only one test holds at a time. Some tests measure time, and
/// some need much memory.
pub(crate) struct Gpu {
    device: Cuda,
    // The lock comes after the device, so the device is dropped before the next test begins.
    _turn: MutexGuard<'static, Option<Arc<CudaContext>>>,
}

impl Deref for Gpu {
    type Target = Cuda;

    fn deref(&self) -> &Cuda {
        &self.device
    }
}

/// Returns the first GPU once no other test holds it. Tests that call this are ignored without a
/// GPU. A test must call it only once, since a second call would wait for the end of the first.
pub(crate) fn gpu() -> Gpu {
    // The context is kept, since it would otherwise be destroyed and made again between tests.
    static TURN: Mutex<Option<Arc<CudaContext>>> = Mutex::new(None);
    // A test that fails while it holds the GPU must not make the next one fail.
    let mut turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Cuda::new(0).expect("a GPU that the kernels were built for");
    turn.get_or_insert_with(|| device.stream().context().clone());
    Gpu {
        device,
        _turn: turn,
    }
}

/// Makes another handle of the GPU with its own stream.
pub(crate) fn on_new_stream(gpu: &Cuda) -> Cuda {
    Cuda::on_stream(gpu.stream().context().new_stream().unwrap()).unwrap()
}

/// Returns the message of an error.
pub(crate) fn message<T>(result: Result<T>) -> String {
    result.map(drop).unwrap_err().to_string()
}

/// Makes a generator that repeats its numbers for a seed.
pub(crate) fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// Writes one element, rounded.
pub(crate) fn put(dtype: DType, bytes: &mut [u8], element: usize, value: f32) {
    let at = element * dtype.bytes();
    match dtype {
        DType::F32 => bytes[at..at + 4].copy_from_slice(&value.to_le_bytes()),
        DType::F16 => bytes[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        DType::BF16 => bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
    }
}

/// Reads one element.
pub(crate) fn get(dtype: DType, bytes: &[u8], element: usize) -> f32 {
    let at = element * dtype.bytes();
    match dtype {
        DType::F32 => f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()),
        DType::F16 => f16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).to_f32(),
        DType::BF16 => bf16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).to_f32(),
    }
}

pub(crate) fn upload<D: Memory>(device: &D, bytes: &[u8]) -> Result<D::Buffer> {
    let mut buffer = device.allocate(bytes.len())?;
    device.upload(bytes, D::bytes_mut(&mut buffer))?;
    Ok(buffer)
}

pub(crate) fn download<D: Memory>(device: &D, buffer: &D::Buffer) -> Result<Vec<u8>> {
    let from = D::bytes(buffer);
    let mut bytes = vec![0; D::byte_len(from)];
    device.download(from, &mut bytes)?;
    Ok(bytes)
}

/// Uploads numbers.
pub(crate) fn upload_all<D: Memory, T: Pod>(device: &D, numbers: &[T]) -> D::Buffer {
    upload(device, bytemuck::cast_slice(numbers)).unwrap()
}

/// Downloads numbers.
pub(crate) fn download_all<D: Memory, T: Pod>(device: &D, buffer: &D::Buffer) -> Vec<T> {
    bytemuck::pod_collect_to_vec(&download(device, buffer).unwrap())
}

/// Returns the size of a cache in bytes. In a split cache, rotary keys follow all latents.
pub(crate) fn cache_bytes(layout: &CacheLayout) -> usize {
    let rope = layout
        .split_rope
        .map(|rope| layout.pages * rope.page_stride);
    rope.map_or(layout.pages * layout.page_stride, |rope| {
        rope_start(layout) + rope
    })
}

/// Returns the first byte of a split cache's rotary keys in a buffer of [`cache_bytes`].
pub(crate) fn rope_start(layout: &CacheLayout) -> usize {
    (layout.pages * layout.page_stride).next_multiple_of(16)
}

/// Returns a view of a cache in a buffer of [`cache_bytes`].
pub(crate) fn cache_mut<D: Device>(
    bytes: D::BytesMut<'_>,
    layout: CacheLayout,
) -> Result<CacheMut<'_, D>> {
    if !layout.is_split() {
        return CacheMut::new(bytes, layout);
    }
    let (latents, rope) = D::split_mut(bytes, rope_start(&layout));
    CacheMut::split(latents, rope, layout)
}
