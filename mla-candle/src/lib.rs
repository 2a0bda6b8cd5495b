//! Multi-head Latent Attention over candle tensors, on the CPU and on NVIDIA GPUs.
//!
//! [`attend`] runs a layer on an engine's own tensors: queries, paged cache, block tables and
//! output. Nothing is copied: candle's storage is lent to the layer for the time of a call
//! ([`Lending`]). On a GPU, the call uses candle's own stream.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use mla_candle::{Attention, Layer, attend};
//! use mla_runtime::backend::StepLimits;
//! use mla_runtime::model::{HeadDims, MlaDims};
//! use mla_runtime::spec::Problem;
//! use mla_runtime::layer::StepRequest;
//!
//! // L = 64, (P, R, V) = (32, 16, 32), two heads, pages of 16.
//! let dims = MlaDims::new(64, HeadDims::new(32, 16, 32));
//! let problem = Problem::new(dims, 2, mla_runtime::model::DType::F32).with_page_size(16);
//! let device = Device::Cpu; // Device::new_cuda_with_stream(0)?
//!
//! // Once for the model: backends, and memory for every step within the limits. Then each layer.
//! let attention = Attention::new(&device, &problem, 1.0 / 48f64.sqrt())?;
//! let limits = StepLimits::new(8, 32, 4).with_context_rows(64);
//! let mut step = attention.workspace(&limits)?;
//! let kv_b = Tensor::rand(-1f32, 1., (2 * (32 + 32), 64), &device)?;
//! let layer = Layer::new(attention.clone(), kv_b);
//! let cache = Tensor::zeros((2, 16, 64 + 16), DType::F32, &device)?;
//!
//! // Once per step: a prompt of three tokens in page 0, and a decode of a sixth token in page 1.
//! let requests = [StepRequest::new(3, 3, &[0]), StepRequest::new(1, 6, &[1])];
//! let planned = step.plan(&requests)?;
//! step.prepare(&attention, &planned)?;
//!
//! // Once per layer and step, on the rows of four tokens in the step's order.
//! let query = Tensor::rand(-1f32, 1., (4, 2, 48), &device)?;
//! let latent = Tensor::rand(-1f32, 1., (4, 64), &device)?;
//! let rope = Tensor::rand(-1f32, 1., (4, 16), &device)?;
//! let out = Tensor::zeros((4, 2, 32), DType::F32, &device)?;
//! attend(&mut step, &layer, &query, &latent, &rope, &cache, &out)?;
//! let prompt = out.narrow(0, planned.rows(0).start, 3)?;
//! # assert!(prompt.abs()?.sum_all()?.to_scalar::<f32>()? > 0.0);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! [`select`] makes the lists of a sparse layer. [`MlaAttention`] is a whole module with its own
//! projections, norms, rotation and cache.
//!
//! The CPU needs no feature. `sm80`, `sm90` and `sm100` turn on the kernels of a family of GPUs. No
//! feature chooses a version of CUDA's interface, since candle takes the one of nvcc.

mod attend;
mod config;
mod lend;
mod module;

pub use crate::attend::{
    Attention, Cache, IndexInputs, IndexWeights, Layer, Workspace, attend, select, target,
};
pub use crate::config::{Config, Limits};
pub use crate::lend::{Lending, Lent, LentMut};
pub use crate::module::MlaAttention;
/// The crate whose problems, requests and limits these functions take.
pub use mla_runtime as runtime;
