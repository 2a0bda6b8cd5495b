//! The tensors of a run, random and reproducible.

use fastrand::Rng;
use half::{bf16, f16};
use mla_runtime::Result;
use mla_runtime::backend::{LayerConfig, SlotLists};
use mla_runtime::device::Device;
use mla_runtime::layer::{LayerCall, Weights};
use mla_runtime::model::DType;
use mla_runtime::tensor::{ArrayRef, CacheLayout, CacheMut, Layout, TensorMut, TensorRef};
use rayon::prelude::*;

use super::workload::Workload;
use crate::device::memory::upload;
use crate::error::CliError;
use crate::progress::Progress;

/// Evenly distributed numbers from −√3 to √3 have a variance of 1, as normalised latents do.
pub(crate) const UNIT: f32 = 1.732_050_8;

/// Queries of this size make scores with a standard deviation of 2. The softmax is then neither
/// nearly uniform nor nearly a choice of one key, so a wrong key or weight shows.
const QUERY: f32 = 2.0 * UNIT;

/// Context rows that are made at a time.
pub(crate) const BLOCK: usize = 4096;

/// The data that an engine would own.
pub struct Data<D: Device> {
    pub query: Tensor<D>,
    pub latent: Tensor<D>,
    pub rope: Tensor<D>,
    /// `W_kv_b` as checkpoints hold it: `[1, H·(P+V), L]`.
    pub weights: Tensor<D>,
    pub out: Tensor<D>,
    pub cache: D::Buffer,
    pub cache_layout: CacheLayout,
    /// The lists of slots that each token attends to. Set after the selection of a sparse layer.
    pub lists: Option<HostLists>,
}

/// Lists of slots, read back.
pub struct HostLists {
    slots: Vec<i32>,
    width: usize,
}

impl HostLists {
    pub fn read<D: Device>(device: &D, lists: &SlotLists<'_, D>) -> Result<Self> {
        let mut bytes = vec![0; lists.slots.len() * 4];
        let from = D::byte_range(lists.slots.bytes(), 0..bytes.len());
        device.download(from, &mut bytes)?;
        Ok(Self {
            slots: bytes
                .chunks_exact(4)
                .map(|b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            width: lists.width,
        })
    }

    /// A token's.
    pub fn of(&self, token: usize) -> &[i32] {
        &self.slots[token * self.width..(token + 1) * self.width]
    }
}

/// A tensor on the device, and what was written to it.
pub struct Tensor<D: Device> {
    buffer: D::Buffer,
    layout: Layout,
    host: Vec<u8>,
}

impl<D: Device> Tensor<D> {
    pub fn random(
        device: &D,
        rng: &mut Rng,
        dtype: DType,
        shape: [usize; 3],
        max: f32,
    ) -> Result<Self> {
        let layout = Layout::contiguous(dtype, shape);
        let host = random_bytes(rng, dtype, layout.elements(), max);
        let buffer = upload(device, &host)?;
        device.synchronize()?;
        Ok(Self {
            buffer,
            layout,
            host,
        })
    }

    fn zeros(device: &D, dtype: DType, shape: [usize; 3]) -> Result<Self> {
        let layout = Layout::contiguous(dtype, shape);
        Ok(Self {
            buffer: device.allocate(layout.elements() * dtype.bytes())?,
            layout,
            host: Vec::new(),
        })
    }

    pub fn view(&self) -> Result<TensorRef<'_, D>> {
        TensorRef::new(D::bytes(&self.buffer), self.layout)
    }

    /// The same view of weights.
    pub fn constant_view(&self) -> Result<TensorRef<'_, D>> {
        // SAFETY: `random` waits for its upload, and nothing else writes a tensor's buffer but
        // through `out`, which is none of the weights.
        Ok(unsafe { self.view()?.assume_constant() })
    }

    pub fn dtype(&self) -> DType {
        self.layout.dtype
    }

    /// The extent of the last axis.
    pub fn width(&self) -> usize {
        self.layout.shape[2]
    }

    /// `[i, j, 0..]` as it was written.
    pub fn row(&self, i: usize, j: usize) -> Vec<f64> {
        let [_, rows, width] = self.layout.shape;
        let bytes = width * self.layout.dtype.bytes();
        let start = (i * rows + j) * bytes;
        numbers(self.layout.dtype, &self.host[start..start + bytes])
    }

    /// `[i, j, 0..]` as it is on the device now.
    pub fn read(&self, device: &D, i: usize, j: usize) -> Result<Vec<f64>> {
        let [_, rows, width] = self.layout.shape;
        let mut row = vec![0; width * self.layout.dtype.bytes()];
        let start = (i * rows + j) * row.len();
        let bytes = D::byte_range(D::bytes(&self.buffer), start..start + row.len());
        device.download(bytes, &mut row)?;
        Ok(numbers(self.layout.dtype, &row))
    }
}

/// Numbers that a thread makes one after the other, from a seed of their own.
const OF_ONE_SEED: usize = 1 << 16;

/// Evenly distributed numbers up to `max`, made by all threads: the same ones however many there
/// are.
fn random_bytes(rng: &mut Rng, dtype: DType, count: usize, max: f32) -> Vec<u8> {
    let width = dtype.bytes();
    let seed = rng.u64(..);
    let mut bytes = vec![0; count * width];
    let chunks = bytes.par_chunks_mut(OF_ONE_SEED * width).enumerate();
    chunks.for_each(|(number, chunk)| {
        let mut rng = Rng::with_seed(seed.wrapping_add(number as u64));
        for element in chunk.chunks_exact_mut(width) {
            let value = (2.0 * rng.f32() - 1.0) * max;
            match dtype {
                DType::F32 => element.copy_from_slice(&value.to_ne_bytes()),
                DType::F16 => element.copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
                DType::BF16 => element.copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
            }
        }
    });
    bytes
}

fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]).into())
            .collect(),
        DType::F16 => bytes
            .chunks_exact(2)
            .map(|b| f16::from_ne_bytes([b[0], b[1]]).into())
            .collect(),
        DType::BF16 => bytes
            .chunks_exact(2)
            .map(|b| bf16::from_ne_bytes([b[0], b[1]]).into())
            .collect(),
    }
}

/// Fills the cache with the context of requests.
struct Fill<'a, D: Device> {
    device: &'a D,
    rng: &'a mut Rng,
    dtype: DType,
    /// The widths of a latent and of a rotary part.
    rows: [usize; 2],
    cache: &'a mut D::Buffer,
    layout: CacheLayout,
}

impl<D: Device> Fill<'_, D> {
    fn request(&mut self, workload: &Workload, index: usize) -> std::result::Result<(), CliError> {
        let (device, dtype, [latent, rope]) = (self.device, self.dtype, self.rows);
        let tables = workload.tables()?;
        let context: Vec<u32> = (0..workload.requests[index].context_len()).collect();
        for block in context.chunks(BLOCK) {
            let slots: std::result::Result<Vec<i64>, _> = block
                .iter()
                .map(|position| tables.slot(index, (*position).into()))
                .collect();
            let slots = upload(device, &slots?)?;
            let rows = block.len();
            let latent = Tensor::random(device, self.rng, dtype, [rows, 1, latent], UNIT)?;
            let rope = Tensor::random(device, self.rng, dtype, [rows, 1, rope], UNIT)?;
            device.write_cache(
                latent.view()?,
                rope.view()?,
                ArrayRef::new(D::bytes(&slots), rows)?,
                CacheMut::new(D::bytes_mut(self.cache), self.layout)?,
            )?;
            // The block's memory is given back here.
            device.synchronize()?;
        }
        Ok(())
    }
}

/// A cache with the context of a batch.
fn cache<D: Device>(
    device: &D,
    config: &LayerConfig,
    workload: &Workload,
    rng: &mut Rng,
    progress: &Progress,
) -> std::result::Result<(D::Buffer, CacheLayout), CliError> {
    let problem = &config.problem;
    let dims = problem.dims;
    let pages = usize::try_from(workload.pages).map_err(|_| CliError::Argument {
        argument: "--batch",
        given: format!("{} pages", workload.pages),
        accepted: "as many as memory can address".to_owned(),
    })?;
    let cache_layout =
        CacheLayout::contiguous(dims, problem.kv_format, pages, problem.page_size as usize)
            // The largest value that is stored becomes the largest of e4m3.
            .with_scale(match problem.kv_format.has_tensor_scale() {
                true => UNIT / 448.0,
                false => 1.0,
            });
    let mut cache = device.allocate(pages * cache_layout.page_stride)?;
    let mut fill = Fill {
        device,
        rng,
        dtype: problem.dtype,
        rows: [dims.latent, dims.head.rope].map(|n| n as usize),
        cache: &mut cache,
        layout: cache_layout,
    };
    for index in 0..workload.requests.len() {
        progress.step(format!(
            "filling the cache: request {} of {}",
            index + 1,
            workload.requests.len()
        ));
        fill.request(workload, index)?;
    }
    Ok((cache, cache_layout))
}

impl<D: Device> Data<D> {
    pub fn new(
        device: &D,
        config: &LayerConfig,
        workload: &Workload,
        seed: u32,
        progress: &Progress,
    ) -> std::result::Result<Self, CliError> {
        let problem = &config.problem;
        let (dims, dtype) = (problem.dims, problem.dtype);
        let [heads, latent, rope] =
            [problem.heads, dims.latent, dims.head.rope].map(|n| n as usize);
        let columns = heads * dims.head.kv_b() as usize;
        let tokens = workload.tokens();
        let mut rng = Rng::with_seed(seed.into());
        let mut random = |shape, max| Tensor::random(device, &mut rng, dtype, shape, max);

        progress.step("making weights and queries");
        // Keys and values then have a variance of 1 as well.
        let weights = random([1, columns, latent], UNIT / (latent as f32).sqrt())?;
        let query = random([tokens, heads, dims.head.qk() as usize], QUERY)?;
        let new_latent = random([tokens, 1, latent], UNIT)?;
        let new_rope = random([tokens, 1, rope], UNIT)?;
        let out = Tensor::zeros(device, dtype, [tokens, heads, dims.head.v as usize])?;

        let (cache, cache_layout) = cache(device, config, workload, &mut rng, progress)?;
        Ok(Self {
            query,
            latent: new_latent,
            rope: new_rope,
            weights,
            out,
            cache,
            cache_layout,
            lists: None,
        })
    }

    /// The layer's call on these tensors.
    pub fn call(&mut self, config: &LayerConfig) -> Result<LayerCall<'_, D>> {
        Ok(LayerCall::new(
            Weights::from_checkpoint(self.weights.constant_view()?, config)?,
            self.query.view()?,
            [self.latent.view()?, self.rope.view()?],
            CacheMut::new(D::bytes_mut(&mut self.cache), self.cache_layout)?,
            TensorMut::new(D::bytes_mut(&mut self.out.buffer), self.out.layout)?,
        ))
    }
}
