//! A step on the device: from requests with new tokens to the likeliest token after each of them.

use std::ops::Range;

use mla_runtime::backend::{DecodeStage as _, PrefillStage as _};
use mla_runtime::prelude::*;
use mla_runtime::select::SelectionRequest;
use mla_runtime::spec::{Feature, FeatureSet, QueryLen};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::graphs::Graphs;
use crate::memory::{Layer, Memory, Scratch, Shared};
use crate::model::Model;
use crate::tensor::Ids;

/// The part of one request in a step.
pub struct Brought<'a> {
    /// The request's new tokens.
    pub tokens: &'a [u32],
    /// The number of the request's tokens, including the new ones.
    pub total: usize,
    /// The pages of all these tokens.
    pub pages: &'a [i32],
}

/// The size of a runner.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// The number of pages of the cache.
    pub pages: usize,
    /// The number of tokens in a page.
    pub page_size: usize,
    /// The maximum number of requests of a step.
    pub requests: usize,
    /// The maximum number of new tokens of a step.
    pub tokens: usize,
    /// The maximum number of tokens of a request.
    pub max_len: usize,
    /// The maximum number of drafts of a request.
    pub drafts: usize,
    /// True if a request's bits must not depend on the other requests of its steps.
    pub batch_invariant: bool,
}

impl Size {
    /// The maximum of every size, since pages, positions and token counts are 32-bit numbers on a
    /// device.
    pub const MAX: usize = i32::MAX as usize - 1;

    /// Checks the sizes.
    ///
    /// # Errors
    ///
    /// If a size is 0 or exceeds the device's numbers, or a step has no room for a token of each
    /// request.
    pub fn check(&self) -> Result<()> {
        for (field, given, min, max) in [
            ("pages", self.pages, 1, Self::MAX),
            ("page_size", self.page_size, 1, Self::MAX),
            ("requests", self.requests, 1, Self::MAX),
            ("tokens", self.tokens, self.requests, Self::MAX),
            ("max_len", self.max_len, 1, Self::MAX),
            // A step holds the drafts and the token before them.
            ("drafts", self.drafts, 0, self.tokens.saturating_sub(1)),
        ] {
            if !(min..=max).contains(&given) {
                let why = match field {
                    "tokens" => ": a token for each request",
                    "drafts" => ": what a step has room for beside a token",
                    _ => "",
                };
                return Err(Error::refused(field, given, format!("{min} to {max}{why}")));
            }
        }
        Ok(())
    }
}

/// A model with its caches and its workspace.
pub struct Runner<D: Graphs> {
    model: Model<D>,
    shared: Shared<D>,
    memory: Memory<D>,
    graphs: D::Captured,
    /// The rows of each request in the last step.
    rows: Vec<Range<usize>>,
}

impl<D: Graphs> Runner<D> {
    /// Selects backends, makes the model and allocates everything.
    ///
    /// # Errors
    ///
    /// If no backend fits, or the device has no memory left.
    pub fn new(device: &D, config: &Config, size: &Size, seed: u64) -> Result<Self> {
        let attention = &config.attention;
        let features: &[Feature] = match size.batch_invariant {
            true => &[Feature::BatchInvariant],
            false => &[],
        };
        let problem = Problem::new(attention.dims, attention.heads, D::DTYPE)
            .with_page_size(size.page_size as u32)
            .with_query_len(QueryLen::Ragged)
            .with_features(FeatureSet::of(features));
        let registry = Registry::linked()?;
        let selection = registry.select(&SelectionRequest::new(device.target(), problem))?;
        let layer_config = selection.config(attention.softmax_scale() as f32);
        let layer = Layer::new(
            device,
            &layer_config,
            registry.instantiate_prefill(selection.prefill.name, device, &layer_config)?,
            registry.instantiate_decode(selection.decode.name, device, &layer_config)?,
        )?;
        let mut shared = layer.workspace(
            &StepLimits::new(
                size.requests,
                size.tokens,
                size.max_len.div_ceil(size.page_size),
            )
            .with_decode_query_len(1 + size.drafts)
            .with_context_rows(size.max_len.next_multiple_of(size.page_size)),
        )?;
        let problem = selection.problem;
        let cache_layout =
            CacheLayout::contiguous(problem.dims, problem.kv_format, size.pages, size.page_size);
        let cache = |_| device.allocate(size.pages.saturating_mul(cache_layout.page_stride));
        let mut memory = Memory {
            ids: Ids::zeros(device, size.tokens)?,
            best: Ids::zeros(device, size.tokens)?,
            scratch: Scratch::new(device, config, size.tokens)?,
            caches: (0..config.layers())
                .map(cache)
                .collect::<mla_runtime::Result<_>>()?,
            cache_layout,
        };
        let positions = size.max_len.next_multiple_of(size.page_size);
        let model = Model::random(layer, config, positions, seed)?;
        let mut lens = vec![1, 1 + size.drafts as u32];
        lens.dedup();
        let graphs = D::capture(&model, &mut shared, &mut memory, &lens)?;
        Ok(Self {
            model,
            shared,
            memory,
            graphs,
            rows: Vec::new(),
        })
    }

    /// Returns the names of the backends.
    pub fn backends(&self) -> [&'static str; 2] {
        let layer = self.model.layer();
        [layer.prefill().spec().name, layer.decode().spec().name]
    }

    /// Runs a step, and returns the likeliest tokens after each request's new ones, in the order of
    /// the requests.
    ///
    /// # Errors
    ///
    /// If the step does not fit, or the device fails.
    pub fn run(&mut self, brought: &[Brought<'_>]) -> Result<Vec<Vec<u32>>> {
        let device = self.model.layer().device().clone();
        // The library, for every step:
        let requests: Vec<StepRequest<'_>> = brought
            .iter()
            .map(|b| StepRequest::new(b.tokens.len() as u32, b.total as u32, b.pages))
            .collect();
        let step = StepPlan::new(&self.shared, &requests)?;
        // End of the library.
        let mut ids = vec![0; step.tokens()];
        for (index, request) in brought.iter().enumerate() {
            for (id, token) in ids[step.rows(index)].iter_mut().zip(request.tokens) {
                *id = *token as i32;
            }
        }
        self.memory.ids.upload(&device, &ids)?;
        if !D::replay(&mut self.graphs, &self.model, &mut self.shared, &step)? {
            // The library, for a step that is not replayed:
            self.shared.prepare(self.model.layer(), &step)?;
            // End of the library.
            self.model
                .enqueue(&mut self.shared, &mut self.memory, step.tokens())?;
        }
        let best = self.memory.best.download(&device, step.tokens())?;
        self.rows = (0..brought.len()).map(|index| step.rows(index)).collect();
        let of = |rows: &Range<usize>| best[rows.clone()].iter().map(|id| *id as u32).collect();
        Ok(self.rows.iter().map(of).collect())
    }

    /// Returns the bytes of the logits after each of a request's tokens in the last step.
    ///
    /// # Errors
    ///
    /// If the device fails.
    ///
    /// # Panics
    ///
    /// If the last step had no such request.
    pub fn logits(&self, request: usize) -> Result<Vec<u8>> {
        let rows = self.rows[request].clone();
        let vocab = self.model.config().widths.vocab_size;
        let logits = self.memory.scratch.logits.view([rows.end, 1, vocab])?;
        let row = vocab * D::DTYPE.bytes();
        let from = D::byte_range(logits.bytes(), rows.start * row..rows.end * row);
        let mut bytes = vec![0; rows.len() * row];
        self.model.layer().device().download(from, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies a page of every layer's cache to another.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn copy_page(&mut self, from: i32, to: i32) -> Result<()> {
        let device = self.model.layer().device();
        let layout = self.memory.cache_layout;
        for cache in &mut self.memory.caches {
            let cache = CacheMut::new(D::bytes_mut(cache), layout)?;
            device.copy_page(cache, from as usize, to as usize)?;
        }
        Ok(())
    }
}
