//! The attention of a layer on an engine's own candle tensors.

mod cache;
mod device;
mod parts;

use std::sync::Arc;

use candle_core::{Device, Error, Result, Tensor};
use mla_cpu::Cpu;
use mla_runtime::backend::StepLimits;
use mla_runtime::layer::{StepPlan, StepRequest};
use mla_runtime::model::IndexerConfig;
use mla_runtime::select::{Registry, Selection, SelectionRequest};
use mla_runtime::spec::{Problem, Target};

pub use self::cache::Cache;
use self::parts::{Parts, Work};

/// The attention of a model on a device, with the backends that all its layers share.
///
/// A clone shares them, too.
#[derive(Clone)]
pub struct Attention(Arc<On>);

enum On {
    Cpu(Parts<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(Parts<mla_kernels::Cuda>),
}

/// The memory of steps and the prepared step, shared by all layers of an engine.
pub struct Workspace(Of);

enum Of {
    Cpu(Work<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(Work<mla_kernels::Cuda>),
}

/// The weights of one layer, with the model's attention.
pub struct Layer {
    attention: Attention,
    /// The weight of `kv_b_proj`, `[H·(P+V), L]`.
    kv_b: Tensor,
    sinks: Option<Tensor>,
    index: Option<IndexWeights>,
}

/// The weights of a layer's indexer, as a checkpoint holds them.
#[derive(Clone)]
pub struct IndexWeights {
    /// The weight of `indexer.wq_b.weight`, `[heads · D, Q]`.
    pub query: Tensor,
    /// The weight and bias of `indexer.k_norm`, `[D]` each.
    pub norm: [Tensor; 2],
    /// Cosines and sines, `[positions, R/2]` each, in f32; `None` if keys are not rotated.
    pub angles: Option<[Tensor; 2]>,
    /// The table `indexer.index_kpool_compress_ape`, `[K, D]`, if keys are pooled.
    pub pool: Option<Tensor>,
}

/// The inputs of a selection that come from the new tokens' hidden states.
#[derive(Clone, Copy)]
pub struct IndexInputs<'a> {
    /// The normalised latent of the queries, `[…, Q]`.
    pub query_latent: &'a Tensor,
    /// The index keys, before normalisation and rotation, `[…, D]`.
    pub keys: &'a Tensor,
    /// The weights of the indexer's heads, `[…, heads]`.
    pub head_weights: &'a Tensor,
    /// The gates of the keys, `[…, D]`, if these are pooled.
    pub gates: Option<&'a Tensor>,
}

impl Attention {
    /// Selects the best backends of this program for tensors of `device`.
    ///
    /// # Errors
    ///
    /// If no backend fits. The error gives the reason for each backend.
    pub fn new(device: &Device, problem: &Problem, softmax_scale: f64) -> Result<Self> {
        let request = SelectionRequest::new(target(device)?, *problem);
        let registry = Registry::linked().map_err(Error::wrap)?;
        let selection = registry.select(&request).map_err(Error::wrap)?;
        Self::of(device, &selection, softmax_scale)
    }

    /// Makes the backends of a selection for [`target`] of `device`.
    ///
    /// # Errors
    ///
    /// If they cannot be made on the device.
    pub fn of(device: &Device, selection: &Selection, softmax_scale: f64) -> Result<Self> {
        let scale = softmax_scale as f32;
        let on = match device {
            Device::Cpu => On::Cpu(Parts::new(Cpu::new(), selection, scale)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                // The device uses candle's own stream, so neither has to wait for the other.
                let device = mla_kernels::Cuda::on_stream(device.cuda_stream());
                let device = device.map_err(Error::wrap)?;
                On::Cuda(Parts::new(device, selection, scale)?)
            }
            other => return Err(device_refused(other)),
        };
        Ok(Self(Arc::new(on)))
    }

    /// Returns the same attention with the model's indexer, for a sparse problem. Call this before
    /// making layers and workspaces.
    ///
    /// # Errors
    ///
    /// If the problem is not sparse, if the device has no indexer, or if the attention is already
    /// shared.
    pub fn with_indexer(mut self, config: &IndexerConfig) -> Result<Self> {
        let on = Arc::get_mut(&mut self.0)
            .ok_or_else(|| Error::msg("attention: given one that is shared, accepted a new one"))?;
        match on {
            On::Cpu(parts) => parts.add_indexer(config)?,
            #[cfg(feature = "cuda")]
            On::Cuda(parts) => parts.add_indexer(config)?,
        }
        Ok(self)
    }

    /// Returns the attention's problem, with the selected cache format and page size.
    pub fn problem(&self) -> &Problem {
        match &*self.0 {
            On::Cpu(parts) => &parts.layer.config().problem,
            #[cfg(feature = "cuda")]
            On::Cuda(parts) => &parts.layer.config().problem,
        }
    }

    /// Allocates the memory for steps within these limits.
    ///
    /// # Errors
    ///
    /// If the device does not have enough memory.
    pub fn workspace(&self, limits: &StepLimits) -> Result<Workspace> {
        let of = match &*self.0 {
            On::Cpu(parts) => Of::Cpu(parts.work(limits)?),
            #[cfg(feature = "cuda")]
            On::Cuda(parts) => Of::Cuda(parts.work(limits)?),
        };
        Ok(Workspace(of))
    }
}

/// Returns the hardware of a candle device, as the target of a selection.
///
/// # Errors
///
/// If it is neither the CPU nor, in a build with `cuda`, an NVIDIA GPU.
pub fn target(device: &Device) -> Result<Target> {
    match device {
        Device::Cpu => Ok(Target::CPU),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let device = mla_kernels::Cuda::on_stream(device.cuda_stream());
            let device = device.map_err(Error::wrap)?;
            Ok(mla_runtime::device::Device::target(&device))
        }
        other => Err(device_refused(other)),
    }
}

fn device_refused(given: &Device) -> Error {
    let location = given.location();
    Error::msg(format!(
        "device: given {location:?}, accepted the CPU or, built with cuda, a GPU of NVIDIA"
    ))
}

impl Layer {
    /// Makes a layer with `kv_b_proj.weight` in the layout of checkpoints, `[H·(P+V), L]`.
    pub const fn new(attention: Attention, kv_b: Tensor) -> Self {
        Self {
            attention,
            kv_b,
            sinks: None,
            index: None,
        }
    }

    /// Returns the model's attention.
    pub const fn attention(&self) -> &Attention {
        &self.attention
    }

    /// Returns the same layer with a sink for each head, `[H]` in f32. A sink is a score that takes
    /// part in the softmax without a value.
    #[must_use]
    pub fn with_sinks(self, sinks: Tensor) -> Self {
        Self {
            sinks: Some(sinks),
            ..self
        }
    }

    /// Returns the same layer with the weights of its own indexer. A sparse layer without one uses
    /// the lists of the last preceding layer that has an indexer.
    #[must_use]
    pub fn with_indexer(self, index: IndexWeights) -> Self {
        Self {
            index: Some(index),
            ..self
        }
    }
}

impl Workspace {
    /// Plans a step of these requests. Their page numbers may be of any integer type.
    ///
    /// [`StepPlan`] says which rows hold each request's tokens. [`StepPlan::with_padded_rows`] and
    /// similar methods allow tensors in the engine's own order.
    ///
    /// # Errors
    ///
    /// If the requests contradict themselves or each other, or exceed the limits.
    pub fn plan<T: Copy + std::fmt::Display + TryInto<i64>>(
        &self,
        requests: &[StepRequest<'_, T>],
    ) -> Result<StepPlan> {
        match &self.0 {
            Of::Cpu(work) => work.plan(requests),
            #[cfg(feature = "cuda")]
            Of::Cuda(work) => work.plan(requests),
        }
        .map_err(Error::wrap)
    }

    /// Prepares a planned step, once for all layers.
    ///
    /// # Errors
    ///
    /// If the attention belongs to another device, or the device fails.
    pub fn prepare(&mut self, attention: &Attention, step: &StepPlan) -> Result<()> {
        match (&mut self.0, &*attention.0) {
            (Of::Cpu(work), On::Cpu(parts)) => work.prepare(parts, step),
            #[cfg(feature = "cuda")]
            (Of::Cuda(work), On::Cuda(parts)) => work.prepare(parts, step),
            #[cfg(feature = "cuda")]
            _ => return Err(workspace_refused()),
        }
        .map_err(Error::wrap)
    }
}

#[cfg(feature = "cuda")]
fn workspace_refused() -> Error {
    Error::msg("step: given a workspace of another device, accepted one of the layer's attention")
}

/// Runs a layer for the prepared step, on the engine's own tensors. It writes the new tokens' rows
/// to the cache, and the result of their attention to `out`.
///
/// | tensor | shape | |
/// |---|---|---|
/// | `query` | `[…, H, P+R]` | rotated |
/// | `latent` | `[…, L]` | normalised |
/// | `rope` | `[…, R]` | rotated |
/// | `cache` | as [`Cache`] says | |
/// | `out` | `[…, H, V]` | written |
///
/// The leading axes (`…`) together are the rows of the step, in its order. Rows may have any
/// stride. On a GPU everything is enqueued on candle's stream, and this does not wait.
///
/// # Errors
///
/// If a tensor does not fit the step, if `out` or a cache shares its storage with another tensor of
/// the call, or if the device fails. An error about a tensor names it, and nothing is written.
pub fn attend<'t>(
    step: &mut Workspace,
    layer: &Layer,
    query: &Tensor,
    latent: &Tensor,
    rope: &Tensor,
    cache: impl Into<Cache<'t>>,
    out: &Tensor,
) -> Result<()> {
    let (cache, inputs) = (cache.into(), [query, latent, rope]);
    match (&mut step.0, &*layer.attention.0) {
        (Of::Cpu(work), On::Cpu(parts)) => work.attend(parts, layer, inputs, &cache, out),
        #[cfg(feature = "cuda")]
        (Of::Cuda(work), On::Cuda(parts)) => work.attend(parts, layer, inputs, &cache, out),
        #[cfg(feature = "cuda")]
        _ => Err(workspace_refused()),
    }
}

/// Makes the lists of slots that a sparse layer with an indexer attends to. Call this before
/// [`attend`].
///
/// It writes the new tokens' index keys to `cache`, `[pages, page size · (D + 4)]` of u8, and
/// computes scores of all index keys. If keys are pooled, a page has [`IndexerConfig::page_bytes`].
/// The following layers without an indexer use the same lists.
///
/// # Errors
///
/// If the layer has no indexer, and in the cases of [`attend`].
///
/// [`IndexerConfig::page_bytes`]: mla_runtime::model::IndexerConfig::page_bytes
pub fn select(
    step: &mut Workspace,
    layer: &Layer,
    inputs: &IndexInputs<'_>,
    cache: &Tensor,
) -> Result<()> {
    match (&mut step.0, &*layer.attention.0) {
        (Of::Cpu(work), On::Cpu(parts)) => work.select(parts, layer, inputs, cache),
        #[cfg(feature = "cuda")]
        (Of::Cuda(work), On::Cuda(parts)) => work.select(parts, layer, inputs, cache),
        #[cfg(feature = "cuda")]
        _ => Err(workspace_refused()),
    }
}
