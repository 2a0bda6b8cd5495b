//! The engine's attention after the port. mla-candle's layer takes the padded rows, the two tensors
//! of the cache and the block tables as they are.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Error, Result, Tensor};
use mla_candle::{Attention as Backends, Cache, Layer, Workspace, attend};
use mla_runtime::backend::StepLimits;
use mla_runtime::layer::StepRequest;
use mla_runtime::spec::{Feature, FeatureSet, Problem, QueryLen};

use crate::engine::{Batch, Config, PAGE, PagedCache, Weights};

/// The part that all layers share: the backends and the memory of a step.
pub struct Steps {
    backends: Backends,
    // The engine calls its layers through `&self`.
    workspace: Mutex<Workspace>,
}

impl Steps {
    /// Makes the shared part for steps within these limits: requests, padded rows in total, and
    /// drafts.
    pub fn new(
        config: &Config,
        dtype: DType,
        device: &Device,
        [requests, rows, drafts]: [usize; 3],
    ) -> Result<Self> {
        let dtype = match dtype {
            DType::F32 => mla_runtime::model::DType::F32,
            DType::BF16 => mla_runtime::model::DType::BF16,
            other => candle_core::bail!("dtype: given {other:?}, accepted F32, BF16"),
        };
        let problem = Problem::new(config.dims, config.heads as u32, dtype)
            .with_page_size(PAGE as u32)
            .with_query_len(QueryLen::Ragged)
            .with_features(FeatureSet::of(&[Feature::SplitCache]));
        let backends = Backends::new(device, &problem, config.scale())?;
        let pages = config.max_len.div_ceil(PAGE);
        let limits = StepLimits::new(requests, rows, pages)
            .with_decode_query_len(1 + drafts)
            .with_context_rows(config.max_len.next_multiple_of(PAGE))
            .with_call_rows(rows);
        let workspace = Mutex::new(backends.workspace(&limits)?);
        Ok(Self {
            backends,
            workspace,
        })
    }

    /// Prepares a step, once for all layers.
    pub fn prepare(&self, batch: &Batch) -> Result<()> {
        let requests: Vec<_> = (0..batch.new.len())
            .map(|index| {
                let (new, cached) = (batch.new[index], batch.cached[index]);
                let pages = &batch.block_tables[index];
                StepRequest::new(new as u32, (cached + new) as u32, pages)
            })
            .collect();
        let mut workspace = self.lock();
        let step = workspace.plan(&requests)?;
        let step = step.padded_to(batch.rows).map_err(Error::wrap)?;
        let step = step.with_padded_rows(batch.max_len).map_err(Error::wrap)?;
        workspace.prepare(&self.backends, &step)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Workspace> {
        // After an error, preparing starts again.
        self.workspace
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The attention of a layer.
pub struct Attention {
    weights: Weights,
    layer: Layer,
}

impl Attention {
    /// Makes the attention with these weights.
    pub fn new(weights: Weights, steps: &Steps) -> Self {
        let layer = Layer::new(steps.backends.clone(), weights.kv_b_proj.clone());
        Self { weights, layer }
    }

    /// Computes `[rows, max_len, hidden]` from a tensor of the same shape, for the prepared step.
    pub fn forward(
        &self,
        hidden: &Tensor,
        batch: &Batch,
        cache: &PagedCache,
        steps: &Steps,
    ) -> Result<Tensor> {
        let projected = self.weights.project(hidden, batch)?;
        let [.., v] = self.weights.config.widths();
        let shape = (batch.rows, batch.max_len, self.weights.config.heads, v);
        let out = Tensor::zeros(shape, hidden.dtype(), hidden.device())?;
        attend(
            &mut steps.lock(),
            &self.layer,
            &projected.query,
            &projected.latent,
            &projected.rope,
            Cache::split(&cache.latent, &cache.rope),
            &out,
        )?;
        self.weights.project_out(&out)
    }
}
