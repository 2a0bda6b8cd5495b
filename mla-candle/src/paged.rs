//! The MLA layer with a cache of its own, on any device.

use mla_runtime::backend::{
    DecodeBackend, DecodeStage, LayerConfig, PrefillBackend, PrefillStage, StepLimits,
};
use mla_runtime::batch::Request;
use mla_runtime::cache::{CacheLayout, CacheMut};
use mla_runtime::device::Memory;
use mla_runtime::dtype::DType;
use mla_runtime::layer::{LayerCall, MlaLayer, StepBatch, Weights, Workspace};
use mla_runtime::plan::slots::BlockTables;
use mla_runtime::problem::Problem;
use mla_runtime::spec::QueryLen;
use mla_runtime::tensor::{Layout, Shape, TensorMut, TensorRef};
use mla_runtime::{Named as _, Result};

use crate::config::{Config, Room};

const PAGE: usize = 16;

/// A layer, its workspace and its cache, all made once.
pub(crate) struct Paged<P: PrefillStage, D: DecodeStage<Device = P::Device>> {
    layer: MlaLayer<P, D>,
    workspace: Workspace<P, D>,
    cache: <P::Device as Memory>::Buffer,
    cache_layout: CacheLayout,
    /// Sequence after sequence.
    block_tables: Vec<i32>,
}

/// B sequences of `len` new tokens behind `offset` earlier ones.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub(crate) batch: usize,
    pub(crate) len: usize,
    pub(crate) offset: usize,
}

/// What a call reads, without gaps and in the layer's dtype.
pub(crate) struct Inputs<B> {
    /// `[B, T, H, P+R]`, rotated.
    pub(crate) query: B,
    /// `[B, T, L]`, normed.
    pub(crate) latent: B,
    /// `[B, T, R]`, rotated.
    pub(crate) rope: B,
    /// `[H·(P+V), L]`, as checkpoints hold it.
    pub(crate) kv_b: B,
}

impl<P: PrefillBackend, D: DecodeBackend<Device = P::Device>> Paged<P, D> {
    pub(crate) fn new(
        device: &P::Device,
        config: &Config,
        room: Room,
        dtype: DType,
    ) -> Result<Self> {
        let model = &config.attention;
        let problem = Problem::new(model.dims, model.heads, dtype)
            .with_page_size(PAGE as u32)
            .with_query_len(QueryLen::Ragged);
        let layer = MlaLayer::of(
            device,
            &LayerConfig::new(problem, model.softmax_scale() as f32),
        )?;
        let pages = room.max_len.div_ceil(PAGE);
        let workspace = layer.workspace(
            &StepLimits::new(room.batch, room.batch * room.max_len, pages)
                .with_context_rows(room.max_len.next_multiple_of(PAGE)),
        )?;
        let pages = room.batch * pages;
        let cache_layout = CacheLayout::contiguous(model.dims, problem.kv_format, pages, PAGE);
        Ok(Self {
            layer,
            workspace,
            cache: device.allocate(cache_layout.pages * cache_layout.page_stride)?,
            cache_layout,
            block_tables: (0..pages as i32).collect(),
        })
    }
}

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> Paged<P, D> {
    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> &P::Device {
        self.layer.device()
    }

    /// Writes the attention of the new tokens, `[B, T, H, V]`.
    pub(crate) fn attend(
        &mut self,
        span: Span,
        inputs: Inputs<<P::Device as Memory>::Bytes<'_>>,
        mut out: <P::Device as Memory>::BytesMut<'_>,
    ) -> Result<()> {
        let config = *self.layer.config();
        let Problem {
            dims, heads, dtype, ..
        } = config.problem;
        let [heads, latent, rope, qk, v, kv_b] = [
            heads,
            dims.latent,
            dims.head.rope,
            dims.head.qk(),
            dims.head.v,
            dims.head.kv_b(),
        ]
        .map(|extent| extent as usize);
        let requests =
            vec![Request::new(span.len as u32, (span.offset + span.len) as u32); span.batch];
        let pages = self.workspace.limits().pages_per_request;
        let used = &self.block_tables[..span.batch * pages];
        let block_tables = BlockTables::new(used, pages, PAGE as u32)?;
        let batch = StepBatch::new(&requests, block_tables);
        self.workspace.prepare(&self.layer, &batch)?;
        let tokens = span.batch * span.len;
        let layout = |shape: Shape| Layout::contiguous(dtype, shape);
        let view = |name, bytes, shape| {
            TensorRef::<P::Device>::new(P::Device::shorten(bytes), layout(shape)).named(name)
        };
        let kv_b = view("kv_b_proj", inputs.kv_b, [1, heads * kv_b, latent])?;
        self.layer.forward(
            &mut self.workspace,
            LayerCall::new(
                Weights::from_checkpoint(kv_b, &config)?,
                view("query", inputs.query, [tokens, heads, qk])?,
                [
                    view("latent", inputs.latent, [tokens, 1, latent])?,
                    view("rope", inputs.rope, [tokens, 1, rope])?,
                ],
                CacheMut::new(P::Device::bytes_mut(&mut self.cache), self.cache_layout)?,
                TensorMut::new(P::Device::reborrow(&mut out), layout([tokens, heads, v]))
                    .named("out")?,
            ),
        )
    }
}
