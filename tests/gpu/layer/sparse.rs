//! Tests of layers of DeepSeek-V3.2 and GLM-5 with their indexers, compared with the CPU device,
//! and as one graph.

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_kernels::Cuda;
use mla_kernels::backends::sm90::{WgmmaAttn, WgmmaMlaSparse};
use mla_kernels::decode_graph::{DecodeGraph, DecodeShape};
use mla_runtime::Result;
use mla_runtime::backend::{DecodeStage, PrefillStage, StepLimits};
use mla_runtime::device::Device;
use mla_runtime::indexer::{
    IndexCacheLayout, IndexCacheMut, IndexCall, IndexDevice, IndexKeys, Indexer, IndexerWorkspace,
};
use mla_runtime::layer::{MlaLayer, Workspace};
use mla_runtime::model::{DType, HeadDims, IndexerConfig, KvFormat, MlaDims, RotaryStyle};
use mla_runtime::tensor::{ArrayRef, Memory, Rotary, TensorRef};
use rand::RngExt as _;

use super::batch::{Batch, Case, Engine, Outcome, relative};
use super::replays::padded;
use crate::common::{download, gpu, rng, upload, upload_all};
use crate::tensors::{normals, rotary_tables, view};

const RANK: usize = 192;
const WIDTH: usize = 128;
const PAIRS: usize = 32;
const TOPK: u32 = 128;
/// Positions of the rotary tables, more than any request needs.
const POSITIONS: usize = 1024;

/// Returns a layer of each model, with fewer heads and shorter lists.
fn models() -> [(Case, IndexerConfig); 2] {
    let case = |heads, head| Case {
        dims: MlaDims::new(512, head),
        kv_format: KvFormat::Fp8DsMla,
        threshold: u32::MAX,
        context_rows: 0,
        sparse: true,
        ..Case::new(heads, &[])
    };
    let shorter = |config: IndexerConfig| config.with_topk(TOPK);
    [
        (
            case(16, HeadDims::R1),
            shorter(IndexerConfig::DEEPSEEK_V3_2),
        ),
        (
            case(8, HeadDims::new(192, 64, 256)),
            shorter(IndexerConfig::GLM_5),
        ),
    ]
}

fn numbers(seed: u64, elements: usize, max: f32) -> Vec<u8> {
    normals(&mut rng(seed), DType::BF16, elements, max)
}

/// Inputs of a layer's indexer, in host memory.
#[derive(Clone)]
struct IndexBatch {
    config: IndexerConfig,
    latent: Vec<u8>,
    weights: Vec<u8>,
    keys: Vec<u8>,
    norm: [Vec<u8>; 2],
    head_weights: Vec<u8>,
    tables: [Vec<f32>; 2],
    layout: IndexCacheLayout,
    cache: Vec<u8>,
}

impl IndexBatch {
    /// Makes the inputs for the tokens of `batch`. Every token of its context has an index key, and
    /// the rest is 0xff.
    fn new(batch: &Batch, config: IndexerConfig) -> Result<Self> {
        let (case, tokens, seed) = (&batch.case, batch.tokens(), batch.case.seed + 100);
        let heads = config.heads as usize;
        let page = case.page_size as usize;
        let layout = IndexCacheLayout::contiguous(&config, batch.cache_layout.pages, page);
        let mut own = Self {
            config,
            latent: numbers(seed, tokens * RANK, 1.0),
            weights: numbers(seed + 1, RANK * heads * WIDTH, (RANK as f32).powf(-0.5)),
            keys: numbers(seed + 2, tokens * WIDTH, 1.0),
            norm: [numbers(seed + 3, WIDTH, 1.0), numbers(seed + 4, WIDTH, 0.1)],
            head_weights: numbers(seed + 5, tokens * heads, 1.0),
            tables: rotary_tables(POSITIONS, PAIRS),
            layout,
            cache: vec![0xff; layout.pages * layout.page_stride],
        };
        own.write_context(batch)?;
        Ok(own)
    }

    fn write_context(&mut self, batch: &Batch) -> Result<()> {
        let page = batch.case.page_size;
        let (mut slots, mut positions) = (Vec::new(), Vec::new());
        for (request, row) in batch
            .requests
            .iter()
            .zip(batch.tables.chunks(batch.max_pages))
        {
            for position in 0..request.kv.saturating_sub(request.q) {
                let first = i64::from(row[(position / page) as usize]) * i64::from(page);
                slots.push(first + i64::from(position % page));
                positions.push(i64::from(position));
            }
        }
        let count = slots.len();
        if count == 0 {
            return Ok(());
        }
        let cpu = Cpu::new();
        let keys = numbers(batch.case.seed + 7, count * WIDTH, 1.0);
        let keys = upload(&cpu, &keys)?;
        let mut engine = IndexEngine::new(&cpu, self)?;
        {
            let positions = ArrayRef::from_slice(&positions);
            let rotary =
                rotary::<Cpu>(&engine.tables, self.config.rotary)?.with_positions(positions);
            cpu.write_index_keys(
                &self.config,
                IndexKeys::new(
                    view::<Cpu>(&keys, DType::BF16, [count, 1, WIDTH])?,
                    norm::<Cpu>(&engine.norm)?,
                    ArrayRef::from_slice(&slots),
                    IndexCacheMut::new(Cpu::bytes_mut(&mut engine.cache), self.layout)?,
                )
                .with_rotary(rotary),
            )?;
        }
        self.cache = download(&cpu, &engine.cache)?;
        Ok(())
    }
}

fn norm<D: Device>([weight, bias]: &[D::Buffer; 2]) -> Result<[TensorRef<'_, D>; 2]> {
    let of = |buffer| view::<D>(buffer, DType::BF16, [1, 1, WIDTH]);
    Ok([of(weight)?, of(bias)?])
}

fn rotary<D: Device>([cos, sin]: &[D::Buffer; 2], style: RotaryStyle) -> Result<Rotary<'_, D>> {
    let table = |buffer| view::<D>(buffer, DType::F32, [1, POSITIONS, PAIRS]);
    Ok(Rotary::new(None, [table(cos)?, table(sin)?], style))
}

/// The tensors of an [`IndexBatch`] on a device.
struct IndexEngine<D: Device> {
    heads: usize,
    layout: IndexCacheLayout,
    latent: D::Buffer,
    weights: D::Buffer,
    keys: D::Buffer,
    norm: [D::Buffer; 2],
    head_weights: D::Buffer,
    tables: [D::Buffer; 2],
    cache: D::Buffer,
}

impl<D: IndexDevice> IndexEngine<D> {
    fn new(device: &D, batch: &IndexBatch) -> Result<Self> {
        let up = |bytes: &Vec<u8>| upload(device, bytes);
        Ok(Self {
            heads: batch.config.heads as usize,
            layout: batch.layout,
            latent: up(&batch.latent)?,
            weights: up(&batch.weights)?,
            keys: up(&batch.keys)?,
            norm: [up(&batch.norm[0])?, up(&batch.norm[1])?],
            head_weights: up(&batch.head_weights)?,
            tables: batch
                .tables
                .each_ref()
                .map(|table| upload_all(device, table)),
            cache: up(&batch.cache)?,
        })
    }

    /// Uploads another step's inputs to the beginning of the tensors, and its cache. The weights
    /// stay.
    fn load(&mut self, device: &D, batch: &IndexBatch) -> Result<()> {
        for (bytes, buffer) in [
            (&batch.latent, &mut self.latent),
            (&batch.keys, &mut self.keys),
            (&batch.head_weights, &mut self.head_weights),
            (&batch.cache, &mut self.cache),
        ] {
            let (to, _) = D::split_mut(D::bytes_mut(buffer), bytes.len());
            device.upload(bytes, to)?;
        }
        Ok(())
    }

    fn call(&mut self, tokens: usize) -> Result<IndexCall<'_, D>> {
        let of = |buffer, shape| view::<D>(buffer, DType::BF16, shape);
        let rotary = rotary::<D>(&self.tables, RotaryStyle::Interleaved)?;
        Ok(IndexCall::new(
            [
                of(&self.latent, [tokens, 1, RANK])?,
                of(&self.weights, [1, RANK, self.heads * WIDTH])?,
            ],
            of(&self.keys, [tokens, 1, WIDTH])?,
            norm::<D>(&self.norm)?,
            of(&self.head_weights, [tokens, 1, self.heads])?,
            IndexCacheMut::new(D::bytes_mut(&mut self.cache), self.layout)?,
        )
        .with_rotary(rotary))
    }
}

/// A layer with an indexer, and a following one that shares its lists, on a device.
struct Layers<D: IndexDevice> {
    indexer: Indexer<D>,
    own: Engine<D>,
    shared: Engine<D>,
    index: IndexEngine<D>,
}

impl<D: IndexDevice> Layers<D> {
    fn new(device: &D, batches: [&Batch; 2], index: &IndexBatch) -> Result<Self> {
        let problem = batches[0].case.config().problem;
        Ok(Self {
            indexer: Indexer::new(device, &index.config, &problem)?,
            own: Engine::new(device, batches[0])?,
            shared: Engine::new(device, batches[1])?,
            index: IndexEngine::new(device, index)?,
        })
    }

    fn forward<P, B>(
        &mut self,
        layer: &MlaLayer<P, B>,
        workspace: &mut Workspace<P, B>,
        lists: &mut IndexerWorkspace<D>,
        tokens: usize,
    ) -> Result<()>
    where
        P: PrefillStage<Device = D>,
        B: DecodeStage<Device = D>,
    {
        layer.forward_selecting(
            workspace,
            lists,
            &self.indexer,
            self.index.call(tokens)?,
            self.own.call(tokens)?,
        )?;
        // The lists are borrowed from the workspace whose step they are for.
        let made = lists.lists(workspace)?;
        let call = self.shared.call(tokens)?.with_slot_lists(made);
        layer.forward(workspace, call)
    }

    fn outcome<P, B>(
        &self,
        device: &D,
        workspace: &Workspace<P, B>,
        lists: &IndexerWorkspace<D>,
    ) -> Result<Outcomes>
    where
        P: PrefillStage<Device = D>,
        B: DecodeStage<Device = D>,
    {
        let made = lists.lists(workspace)?;
        let mut bytes = vec![0; made.slots.len() * 4];
        device.download(made.slots.bytes(), &mut bytes)?;
        Ok(Outcomes {
            own: self.own.outcome(device)?,
            shared: self.shared.outcome(device)?,
            index_cache: download(device, &self.index.cache)?,
            lists: bytemuck::pod_collect_to_vec(&bytes),
        })
    }
}

#[derive(Clone, PartialEq)]
struct Outcomes {
    own: Outcome,
    shared: Outcome,
    index_cache: Vec<u8>,
    lists: Vec<i32>,
}

/// Makes the batches of both layers, with the same requests, pages and slots, and other numbers.
fn batches(case: &Case) -> [Batch; 2] {
    let own = Batch::new(case);
    let mut shared = own.clone();
    let row = |bytes: usize| bytes / 2;
    shared.query = numbers(case.seed + 50, row(own.query.len()), 2.0);
    shared.latent = numbers(case.seed + 51, row(own.latent.len()), 1.0);
    shared.rope = numbers(case.seed + 52, row(own.rope.len()), 1.0);
    [own, shared]
}

fn run<P, B>(
    layer: &MlaLayer<P, B>,
    batches: [&Batch; 2],
    index: &IndexBatch,
    logits_bytes: u64,
) -> Result<Outcomes>
where
    P: PrefillStage,
    P::Device: IndexDevice,
    B: DecodeStage<Device = P::Device>,
{
    let device = layer.device();
    let limits = batches[0].case.limits();
    let steps = limits.with_decode_query_len(batches[0].tokens().max(1));
    let mut layers = Layers::new(device, batches, index)?;
    let mut workspace = layer.workspace(&steps)?;
    let limits = steps.with_logits_bytes(logits_bytes);
    let mut lists = layers.indexer.workspace(&limits)?;
    batches[0].prepare(layer, &mut workspace)?;
    layers.forward(layer, &mut workspace, &mut lists, batches[0].tokens())?;
    layers.outcome(device, &workspace, &lists)
}

type GpuLayer = MlaLayer<WgmmaAttn, WgmmaMlaSparse>;

fn gpu_layer(gpu: &Cuda, case: &Case) -> GpuLayer {
    MlaLayer::of(gpu, &case.config()).unwrap()
}

/// Prompts with and without context, decodes, speculative decodes, and padding.
const MIXED: &[(u32, u32)] = &[
    (1, 700),
    (1, 1),
    (3, 200),
    (1, 0),
    (1, TOPK),
    (1, TOPK + 1),
    (70, 500),
    (12, 13),
    (300, 300),
];

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn layers_of_sparse_models_agree_with_the_cpu() -> Result<()> {
    let gpu = &*gpu();
    for (model, config) in models() {
        for (kv_format, split_cache) in [
            (KvFormat::BF16, false),
            (KvFormat::BF16, true),
            (KvFormat::Fp8, true),
            (KvFormat::Fp8DsMla, false),
        ] {
            let case = Case {
                kv_format,
                split_cache,
                requests: MIXED.to_vec(),
                ..model.clone()
            };
            let [own, shared] = batches(&case);
            let index = IndexBatch::new(&own, config)?;
            let cpu: MlaLayer<CpuPrefill, CpuDecode> = MlaLayer::of(&Cpu::new(), &case.config())?;
            let expected = run(&cpu, [&own, &shared], &index, 1 << 28)?;
            let layer = gpu_layer(gpu, &case);
            let given = run(&layer, [&own, &shared], &index, 1 << 28)?;
            // Computing the logits of a few rows at a time must not change anything.
            let by_parts = run(&layer, [&own, &shared], &index, 100 << 10)?;
            assert!(given == by_parts, "logits by parts, {case:?}");
            assert!(given.own.cache == expected.own.cache, "caches, {case:?}");
            assert!(
                given.shared.cache == expected.shared.cache,
                "caches, {case:?}"
            );
            let apart = given.index_cache.iter().zip(&expected.index_cache);
            let apart = apart.filter(|(a, b)| a != b).count();
            assert!(
                apart * 100_000 <= given.index_cache.len(),
                "{apart} bytes of the index cache"
            );

            // Tensor cores add products of e4m3 with fewer bits than f32 has, so another token may
            // be selected at the threshold. This affects only a few tokens, and none if all are
            // selected anyway.
            let width = TOPK as usize;
            let values = (case.heads * case.dims.head.v) as usize;
            let (mut changed, mut compared) = (0, 0);
            for (token, (list, reference)) in given
                .lists
                .chunks(width)
                .zip(expected.lists.chunks(width))
                .enumerate()
            {
                let missing = list.iter().filter(|slot| !reference.contains(slot)).count();
                assert!(missing <= 3, "{missing} of token {token}'s list, {case:?}");
                if reference.contains(&-1) {
                    assert_eq!(list, reference, "token {token}");
                }
                changed += usize::from(missing > 0);
                compared += 1;
                if missing > 0 {
                    continue;
                }
                for (a, b) in [
                    (&given.own, &expected.own),
                    (&given.shared, &expected.shared),
                ] {
                    let row = token * values..(token + 1) * values;
                    let apart = relative(case.dtype, [&a.out, &b.out], row);
                    assert!(apart <= 0.03, "token {token}: {apart}, {case:?}");
                }
            }
            println!("{changed} of {compared} lists differ");
            assert!(changed * 20 <= compared, "{changed} of {compared} lists");
        }
    }
    Ok(())
}

const MAX_LEN: u32 = 900;

/// Makes a step of decodes in a cache of a fixed size.
fn decodes(case: &Case, requests: usize, query_len: u32, seed: u64) -> [Batch; 2] {
    let mut rng = rng(seed);
    let lens = (0..requests).map(|_| (query_len, rng.random_range(query_len..=MAX_LEN)));
    let mut pair = batches(&Case {
        requests: lens.collect(),
        seed,
        ..case.clone()
    });
    for batch in &mut pair {
        batch.enlarge_cache(12, MAX_LEN);
    }
    pair
}

/// Captures two layers of a decode step in one graph: one layer with an indexer, and one that
/// shares its lists. Checks that replays with other lengths, other pages and fewer requests give
/// the same results as these steps without a graph.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_decode_step_of_a_sparse_model_is_one_graph() -> Result<()> {
    let gpu = &*gpu();
    for ((case, config), query_len) in models().into_iter().zip([1, 2]) {
        let shape = DecodeShape::new(12, query_len, MAX_LEN);
        let pages = MAX_LEN.div_ceil(case.page_size) as usize;
        let steps =
            StepLimits::new(12, shape.tokens(), pages).with_decode_query_len(query_len as usize);
        let case = Case {
            threshold: query_len,
            ..case
        };
        let layer = gpu_layer(gpu, &case);
        let mut workspace = layer.workspace(&steps)?;
        let mut eager_workspace = layer.workspace(&steps)?;
        let largest = decodes(&case, 12, query_len, 99);
        let index = IndexBatch::new(&largest[0], config)?;
        let mut layers = Layers::new(gpu, [&largest[0], &largest[1]], &index)?;
        let mut lists = layers.indexer.workspace(&steps)?;
        let mut eager_lists = layers.indexer.workspace(&steps)?;
        let mut graph = DecodeGraph::capture(&layer, &mut workspace, shape, |workspace| {
            layers.forward(&layer, workspace, &mut lists, shape.tokens())
        })?;
        for (step, requests) in [12, 1, 5, 12, 3].into_iter().enumerate() {
            let [mut own, mut shared] = decodes(&case, requests, query_len, step as u64);
            own.weights.clone_from(&largest[0].weights);
            shared.weights.clone_from(&largest[1].weights);
            let batch = own.clone();
            for of in [&mut own, &mut shared] {
                *of = padded(of, 12, query_len);
            }
            let mut inputs = IndexBatch::new(&own, config)?;
            inputs.weights.clone_from(&index.weights);
            inputs.norm.clone_from(&index.norm);
            let mut eager = Layers::new(gpu, [&own, &shared], &inputs)?;
            let step_at_once = own.step(&eager_workspace)?.with_max_len(Some(MAX_LEN));
            eager_workspace.prepare(&layer, &step_at_once)?;
            eager.forward(
                &layer,
                &mut eager_workspace,
                &mut eager_lists,
                shape.tokens(),
            )?;
            let expected = eager.outcome(gpu, &eager_workspace, &eager_lists)?;

            layers.own.load(gpu, &own)?;
            layers.shared.load(gpu, &shared)?;
            layers.index.load(gpu, &inputs)?;
            let plan = batch.step(&workspace)?;
            // SAFETY: the layer, workspaces and tensors live, and the caches have the pages that
            // the batches name.
            unsafe { graph.replay(&layer, &mut workspace, &plan) }?;
            let given = [layers.own.outcome(gpu)?, layers.shared.outcome(gpu)?];
            let index_cache = download(gpu, &layers.index.cache)?;
            assert!(given == [expected.own, expected.shared], "step {step}");
            assert!(index_cache == expected.index_cache, "step {step}");
        }
    }
    Ok(())
}

/// Captures a step of two layers that share lists in one graph, for fixed lengths. The step has
/// decodes, and prompts with and without context. Checks the replays, with logits in one chunk or
/// in several.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_mixed_step_of_a_sparse_model_is_one_graph() -> Result<()> {
    let gpu = &*gpu();
    for (model, config) in models() {
        let case = Case {
            requests: MIXED.to_vec(),
            ..model
        };
        let pair = batches(&case);
        let batches = [&pair[0], &pair[1]];
        let index = IndexBatch::new(batches[0], config)?;
        let layer = gpu_layer(gpu, &case);
        let tokens = batches[0].tokens();
        for logits_bytes in [1 << 28, 100 << 10] {
            let expected = run(&layer, batches, &index, logits_bytes)?;
            let steps = case.limits().with_decode_query_len(tokens);
            let mut layers = Layers::new(gpu, batches, &index)?;
            let mut workspace = layer.workspace(&steps)?;
            let limits = steps.with_logits_bytes(logits_bytes);
            let mut lists = layers.indexer.workspace(&limits)?;
            batches[0].prepare(&layer, &mut workspace)?;
            let graph =
                gpu.capture(|_| layers.forward(&layer, &mut workspace, &mut lists, tokens))?;
            // Capturing has not run anything yet.
            let before = layers.own.outcome(gpu)?;
            assert!(before.out != expected.own.out, "{case:?}");
            for _ in 0..2 {
                // SAFETY: layer, workspaces and tensors live, and only this stream uses them.
                unsafe { graph.replay() }?;
                let given = layers.outcome(gpu, &workspace, &lists)?;
                assert!(
                    given == expected,
                    "{logits_bytes} bytes of logits, {case:?}"
                );
            }
        }
    }
    Ok(())
}
