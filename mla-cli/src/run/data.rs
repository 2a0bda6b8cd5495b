//! The tensors of a run, random and reproducible.

use mla_runtime::Result;
use mla_runtime::backend::{LayerConfig, SlotLists};
use mla_runtime::device::Device;
use mla_runtime::layer::{LayerCall, SelectedLayer, Weights};

use super::workload::Workload;
use crate::device::memory::CacheBuffer;
use crate::device::progress::Progress;
use crate::device::tensor::{Tensor, filled_cache};

/// The standard deviation of queries. It gives scores a standard deviation of 2. The softmax is
/// then neither nearly uniform nor nearly a choice of one key, so a wrong key or weight shows.
const QUERY: f32 = 2.0;

/// The data that an engine would own.
pub struct Data<D: Device> {
    pub query: Tensor<D>,
    pub latent: Tensor<D>,
    pub rope: Tensor<D>,
    /// `W_kv_b` as checkpoints hold it: `[1, H·(P+V), L]`.
    pub weights: Tensor<D>,
    pub out: Tensor<D>,
    pub cache: CacheBuffer<D>,
    /// The lists of slots that each token attends to, set after the selection of a sparse layer.
    pub lists: Option<HostLists>,
}

/// Lists of slots, read back to the host.
pub struct HostLists {
    slots: Vec<i32>,
    width: usize,
}

impl HostLists {
    pub fn read<D: Device>(device: &D, lists: &SlotLists<'_, D>) -> Result<Self> {
        let mut slots = vec![0i32; lists.slots.len()];
        let bytes = bytemuck::cast_slice_mut(&mut slots);
        let from = D::byte_range(lists.slots.bytes(), 0..bytes.len());
        device.download(from, bytes)?;
        let width = lists.width;
        Ok(Self { slots, width })
    }

    /// Returns a token's list.
    pub fn of(&self, token: usize) -> &[i32] {
        &self.slots[token * self.width..(token + 1) * self.width]
    }
}

/// Returns the seed of the run's tensor with this number, which is below 256.
pub(super) fn seed_of(seed: u32, number: u64) -> u64 {
    u64::from(seed) << 8 | number
}

impl<D: Device> Data<D> {
    pub fn new(
        layer: &SelectedLayer<D>,
        workload: &Workload,
        seed: u32,
        progress: &Progress,
    ) -> Result<Self> {
        let (device, problem) = (layer.device(), &layer.config().problem);
        let (dims, dtype) = (problem.dims, problem.dtype);
        let [heads, latent, rope] =
            [problem.heads, dims.latent, dims.head.rope].map(|n| n as usize);
        let columns = heads * dims.head.kv_b() as usize;
        let tokens = workload.tokens();
        let random = |number, shape, deviation| {
            Tensor::random(device, seed_of(seed, number), dtype, shape, deviation)
        };
        progress.step("making weights and queries");
        // Latents are normalised, so keys and values then have a variance of 1 as well.
        let weights = random(0, [1, columns, latent], 1.0 / (latent as f32).sqrt())?;
        let query = random(1, [tokens, heads, dims.head.qk() as usize], QUERY)?;
        let new_latent = random(2, [tokens, 1, latent], 1.0)?;
        let new_rope = random(3, [tokens, 1, rope], 1.0)?;
        let out = Tensor::unwritten(device, dtype, [tokens, heads, dims.head.v as usize])?;
        progress.step("filling the cache");
        let (pages, seed) = (workload.pages as usize, seed_of(seed, 4));
        Ok(Self {
            query,
            latent: new_latent,
            rope: new_rope,
            weights,
            out,
            cache: filled_cache(device, problem, pages, seed, 1.0)?,
            lists: None,
        })
    }

    /// Returns the layer's call on these tensors.
    pub fn call(&mut self, config: &LayerConfig) -> Result<LayerCall<'_, D>> {
        Ok(LayerCall::new(
            Weights::from_checkpoint(self.weights.constant_view()?, config)?,
            self.query.view()?,
            [self.latent.view()?, self.rope.view()?],
            self.cache.view_mut()?,
            self.out.view_mut()?,
        ))
    }
}
