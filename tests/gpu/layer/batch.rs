//! A batch in host memory, and an engine's tensors for it on any device.

use std::fmt::Debug;
use std::ops::Range;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::backend::{DecodeStage, LayerConfig, PrefillStage};
use mla_runtime::batch::Request;
use mla_runtime::device::Device;
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights, Workspace};
use mla_runtime::model::DType;
use mla_runtime::plan::split;
use mla_runtime::tensor::{
    ArrayRef, CacheLayout, Layout, LseLayout, LseMut, Memory, TensorMut, TensorRef,
};
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use crate::common::{cache_bytes, cache_mut, download, get, put, rng, upload};
use crate::tensors::{unit, view};

#[path = "../../../mla-runtime/tests/layer/case.rs"]
#[allow(dead_code, reason = "the tests on the CPU device use the rest")]
mod case;

pub(crate) use case::Case;
use case::Places;

/// Returns numbers that are evenly distributed from −`max` to `max`, rounded.
fn random(rng: &mut StdRng, dtype: DType, elements: usize, max: f32) -> Vec<u8> {
    let mut bytes = vec![0; elements * dtype.bytes()];
    for element in 0..elements {
        put(
            dtype,
            &mut bytes,
            element,
            (2.0 * rng.random::<f32>() - 1.0) * max,
        );
    }
    bytes
}

/// The numbers of a case, in host memory.
#[derive(Clone)]
pub(crate) struct Batch {
    pub(crate) case: Case,
    pub(crate) requests: Vec<Request>,
    pub(crate) tables: Vec<i32>,
    pub(crate) max_pages: usize,
    pub(crate) slots: Vec<i64>,
    pub(crate) query: Vec<u8>,
    pub(crate) latent: Vec<u8>,
    pub(crate) rope: Vec<u8>,
    pub(crate) weights: Vec<u8>,
    pub(crate) cache: Vec<u8>,
    pub(crate) cache_layout: CacheLayout,
}

impl Batch {
    /// Makes a batch for a case.
    ///
    /// Requests are in the planner's order, with padding after those on the absorbed path. Pages
    /// are shuffled over a cache with spare pages. Slots without context hold NaN, and unneeded
    /// entries of the block tables hold garbage.
    pub(crate) fn new(case: &Case) -> Self {
        let mut rng = rng(case.seed);
        let dims = case.dims;
        let all = case.requests.iter().map(|&(q, kv)| Request::new(q, kv));
        let (real, padding): (Vec<_>, Vec<_>) = all.partition(|request| request.kv >= request.q);
        let order = split::order(&real, |_| case.threshold, false).unwrap();
        let mut requests: Vec<Request> = order.iter().map(|&at| real[at]).collect();
        let is_absorbed = |request: &&Request| (1..=case.threshold).contains(&request.q);
        let at = real.iter().filter(is_absorbed).count();
        requests.splice(at..at, padding);

        let page = case.page_size;
        let Places {
            tables,
            max_pages,
            pages,
            slots,
            context: context_slots,
        } = Places::new(&requests, page, |pages| pages.shuffle(&mut rng));
        let (tokens, context) = (slots.len(), context_slots.len());
        let [heads, latent, rope, qk, kv_b] = [
            case.heads,
            dims.latent,
            dims.head.rope,
            dims.head.qk(),
            dims.head.kv_b(),
        ]
        .map(|extent| extent as usize);
        let dtype = case.dtype;
        let unit = 3f32.sqrt();
        let mut random = |elements, max| random(&mut rng, dtype, elements, max);
        let of_pages = match case.split_cache {
            true => CacheLayout::split,
            false => CacheLayout::contiguous,
        };
        let cache_layout = of_pages(dims, case.kv_format, pages, page as usize).with_scale(
            match case.kv_format.has_tensor_scale() {
                true => unit / 448.0,
                false => 1.0,
            },
        );
        let cpu = Cpu::new();
        // A row of bytes 0xff is NaN in every format.
        let bytes = cache_bytes(&cache_layout);
        let mut cache = upload(&cpu, &vec![0xff; bytes]).unwrap();
        if context > 0 {
            let [rows, ropes] = [latent, rope].map(|width| {
                let layout = Layout::contiguous(dtype, [context, 1, width]);
                (random(layout.elements(), unit), layout)
            });
            let [rows, ropes] = [&rows, &ropes]
                .map(|(bytes, layout)| TensorRef::<Cpu>::new(bytes.as_slice(), *layout).unwrap());
            let cache = cache_mut(Cpu::bytes_mut(&mut cache), cache_layout).unwrap();
            let slots = ArrayRef::from_slice(&context_slots);
            cpu.write_cache(rows, ropes, slots, cache).unwrap();
        }
        Self {
            case: case.clone(),
            requests,
            tables,
            max_pages,
            slots,
            // Scores have a standard deviation of about 2, so every key counts, and no key
            // dominates.
            query: random(tokens * heads * qk, 2.0 * unit),
            latent: random(tokens * latent, unit),
            rope: random(tokens * rope, unit),
            weights: random(heads * kv_b * latent, unit / (latent as f32).sqrt()),
            cache: download(&cpu, &cache).unwrap(),
            cache_layout,
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.slots.len()
    }

    /// Adds pages until the cache has room for any requests of up to `max_len` tokens.
    pub(crate) fn enlarge_cache(&mut self, requests: usize, max_len: u32) {
        let pages = requests * max_len.div_ceil(self.case.page_size) as usize + 3;
        assert!(self.cache_layout.pages <= pages);
        self.cache_layout.pages = pages;
        self.cache
            .resize(pages * self.cache_layout.page_stride, 0xff);
    }

    /// Plans the step for a workspace of the case's layers.
    pub(crate) fn step<P, D>(&self, workspace: &Workspace<P, D>) -> Result<StepPlan>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
    {
        let tables = self.tables.chunks(self.max_pages);
        let requests: Vec<StepRequest<'_>> = self
            .requests
            .iter()
            .zip(tables)
            .map(|(lens, pages)| StepRequest::new(lens.q, lens.kv, pages))
            .collect();
        let (problem, limits) = (self.case.config().problem, workspace.limits());
        let step = StepPlan::in_order(&problem, limits, self.case.threshold, 0, &requests)?;
        step.with_causal(self.case.causal).with_slots(&self.slots)
    }

    pub(crate) fn prepare<P, D>(
        &self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
    ) -> Result<()>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
    {
        workspace.prepare(layer, &self.step(workspace)?)
    }

    /// Runs the batch on the CPU device.
    pub(crate) fn on_cpu(&self) -> Outcome {
        let layer: MlaLayer<CpuPrefill, CpuDecode> =
            MlaLayer::of(&Cpu::new(), &self.case.config()).unwrap();
        self.run(&layer).unwrap()
    }

    pub(crate) fn run<P, D>(&self, layer: &MlaLayer<P, D>) -> Result<Outcome>
    where
        P: PrefillStage,
        D: DecodeStage<Device = P::Device>,
    {
        let mut workspace = layer.workspace(&self.case.limits())?;
        self.prepare(layer, &mut workspace)?;
        let mut engine = Engine::new(layer.device(), self)?;
        engine.forward(layer, &mut workspace, self.tokens())?;
        let mut outcome = engine.outcome(layer.device())?;
        outcome.absorbed_tokens = workspace.absorbed_tokens();
        outcome.chunks = workspace.context().len();
        Ok(outcome)
    }
}

/// Results of a run.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Outcome {
    pub(crate) out: Vec<u8>,
    pub(crate) lse: Vec<u8>,
    pub(crate) cache: Vec<u8>,
    pub(crate) absorbed_tokens: usize,
    pub(crate) chunks: usize,
}

/// An engine's own tensors on a device, with room for some number of tokens.
pub(crate) struct Engine<D: Device> {
    config: LayerConfig,
    cache_layout: CacheLayout,
    pub(crate) query: D::Buffer,
    pub(crate) latent: D::Buffer,
    pub(crate) rope: D::Buffer,
    pub(crate) weights: D::Buffer,
    pub(crate) cache: D::Buffer,
    pub(crate) out: D::Buffer,
    pub(crate) lse: D::Buffer,
}

impl<D: Device> Engine<D> {
    /// Uploads the batch, and fills the memory for results with ones.
    pub(crate) fn new(device: &D, batch: &Batch) -> Result<Self> {
        let case = &batch.case;
        let rows = batch.tokens() * case.heads as usize;
        let out = rows * case.dims.head.v as usize * case.dtype.bytes();
        Ok(Self {
            config: case.config(),
            cache_layout: batch.cache_layout,
            query: upload(device, &batch.query)?,
            latent: upload(device, &batch.latent)?,
            rope: upload(device, &batch.rope)?,
            weights: upload(device, &batch.weights)?,
            cache: upload(device, &batch.cache)?,
            out: upload(device, &vec![0xff; out])?,
            lse: upload(device, &vec![0xff; 4 * rows])?,
        })
    }

    /// An engine's own tensors on a device, with room for a certain number of tokens.
    pub(crate) fn call(&mut self, tokens: usize) -> Result<LayerCall<'_, D>> {
        let problem = &self.config.problem;
        let dims = problem.dims;
        let [heads, latent, rope, qk, v, kv_b] = [
            problem.heads,
            dims.latent,
            dims.head.rope,
            dims.head.qk(),
            dims.head.v,
            dims.head.kv_b(),
        ]
        .map(|extent| extent as usize);
        let of = |buffer, shape| view::<D>(buffer, problem.dtype, shape);
        let weights = of(&self.weights, [1, heads * kv_b, latent])?;
        // SAFETY: the weights were uploaded with the batch, and nothing writes them again.
        let weights = unsafe { weights.assume_constant() };
        Ok(LayerCall::new(
            Weights::from_checkpoint(weights, &self.config)?,
            of(&self.query, [tokens, heads, qk])?,
            [
                of(&self.latent, [tokens, 1, latent])?,
                of(&self.rope, [tokens, 1, rope])?,
            ],
            cache_mut(D::bytes_mut(&mut self.cache), self.cache_layout)?,
            TensorMut::new(
                D::bytes_mut(&mut self.out),
                Layout::contiguous(problem.dtype, [tokens, heads, v]),
            )?,
        )
        .with_lse(LseMut::new(
            D::bytes_mut(&mut self.lse),
            LseLayout::heads_first(heads, tokens),
        )?))
    }

    pub(crate) fn forward<P, B>(
        &mut self,
        layer: &MlaLayer<P, B>,
        workspace: &mut Workspace<P, B>,
        tokens: usize,
    ) -> Result<()>
    where
        P: PrefillStage<Device = D>,
        B: DecodeStage<Device = D>,
    {
        layer.forward(workspace, self.call(tokens)?)
    }

    /// Uploads another step's queries and new rows to the beginning of the tensors, and its cache.
    pub(crate) fn load(&mut self, device: &D, batch: &Batch) -> Result<()> {
        for (bytes, buffer) in [
            (&batch.query, &mut self.query),
            (&batch.latent, &mut self.latent),
            (&batch.rope, &mut self.rope),
            (&batch.cache, &mut self.cache),
        ] {
            let (to, _) = D::split_mut(D::bytes_mut(buffer), bytes.len());
            device.upload(bytes, to)?;
        }
        Ok(())
    }

    pub(crate) fn outcome(&self, device: &D) -> Result<Outcome> {
        Ok(Outcome {
            out: download(device, &self.out)?,
            lse: download(device, &self.lse)?,
            cache: download(device, &self.cache)?,
            absorbed_tokens: 0,
            chunks: 0,
        })
    }
}

/// Distance between two results.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Distance {
    /// The largest |difference| / |expected| of a row, as vectors.
    pub(crate) worst: f64,
    /// The mean over all rows.
    pub(crate) mean: f64,
    /// The largest difference of two log-sum-exps.
    pub(crate) lse: f64,
}

impl Distance {
    /// Returns the maximum distance between two right results.
    pub(crate) fn accepted(case: &Case, chunks: usize) -> Self {
        // Both sides round queries, weights, values and outputs to u. A row then differs by about
        // u, and the worst of thousands by two to three times that. Each chunk's merge adds a
        // rounding.
        let u = f64::from(unit(case.dtype, 0.0)) / 4.0;
        let merges = (chunks as f64).sqrt();
        Self {
            worst: (5.0 + merges) * u,
            mean: (2.0 + merges / 2.0) * u,
            lse: 4.0 * u,
        }
    }

    pub(crate) fn is_within(&self, accepted: &Self) -> bool {
        self.worst <= accepted.worst && self.mean <= accepted.mean && self.lse <= accepted.lse
    }
}

/// Returns |difference| / |expected| of given and expected elements, as vectors. It is infinite if
/// something is NaN, or if only what is expected is zero.
pub(crate) fn relative(dtype: DType, vectors: [&[u8]; 2], elements: Range<usize>) -> f64 {
    let (mut difference, mut norm) = (0f64, 0f64);
    for element in elements {
        let [given, expected] = vectors.map(|bytes| f64::from(get(dtype, bytes, element)));
        difference += (given - expected) * (given - expected);
        norm += expected * expected;
    }
    match (difference / norm).sqrt() {
        _ if difference == 0.0 => 0.0,
        relative if relative.is_nan() => f64::INFINITY,
        relative => relative,
    }
}

impl Outcome {
    /// Checks that the bits of both outcomes are the same, whatever steps they come from.
    pub(crate) fn is_that_of(&self, expected: &Self, what: impl Debug) {
        assert!(self.cache == expected.cache, "the caches differ: {what:?}");
        assert!(self.out == expected.out, "the outputs differ: {what:?}");
        assert!(self.lse == expected.lse, "log-sum-exps differ: {what:?}");
    }

    /// Computes the distance from `expected`. Rows that are NaN, or zero in only one of the
    /// results, are infinitely far away.
    pub(crate) fn distance(&self, expected: &Self, case: &Case) -> Distance {
        let width = case.dims.head.v as usize;
        let rows = expected.lse.len() / 4;
        let mut distance = Distance::default();
        for row in 0..rows {
            let elements = row * width..(row + 1) * width;
            let relative = relative(case.dtype, [&self.out, &expected.out], elements);
            distance.worst = distance.worst.max(relative);
            distance.mean += relative / rows as f64;
            let [given, expected] =
                [&self.lse, &expected.lse].map(|bytes| get(DType::F32, bytes, row));
            if given != expected {
                let apart = f64::from((given - expected).abs());
                distance.lse = distance
                    .lse
                    .max(if apart.is_nan() { f64::INFINITY } else { apart });
            }
        }
        distance
    }
}
