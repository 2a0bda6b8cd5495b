//! A prefill call and its comparison with the reference.

use super::Failure;
use super::data::{
    Bits, Buffers, OnDevice, Random, Sequences, Tensor, Tolerances, Written, array, config, factor,
    floats, longest, owners, query_scales, starts, upload,
};
use super::failure::refused;
use super::trial::{Placement, Trial};
use super::trials::{Call, Case, On, checks, own_seeds, stage_items};
use crate::reference::{self, Array};
use mla_runtime::Result;
use mla_runtime::backend::{
    Keys, Output, PrefillBackend, PrefillBatch, PrefillCall, PrefillStage, StepLimits,
};
use mla_runtime::device::Device;
use mla_runtime::plan::context::ContextChunk;
use mla_runtime::spec::{BackendSpec, KeyLayout, Problem};

/// A prefill call of random numbers.
#[derive(Clone, Debug)]
pub struct PrefillCase {
    /// The problem for which the backend is made.
    pub problem: Problem,
    /// The query tokens of each request.
    pub query_lens: Vec<usize>,
    /// The keys of each request.
    pub key_lens: Vec<usize>,
    /// True if the keys are those of the new tokens, and false if they are those of a context
    /// chunk.
    pub causal: bool,
    /// True if the new tokens see all keys of their request.
    pub see_each_other: bool,
    /// Elements between one token's rows and the next, in every input, and in outputs if the spec
    /// has [`StridedOutputs`](mla_runtime::spec::Feature::StridedOutputs).
    pub gap: usize,
    /// Amplitude of queries and keys.
    pub amplitude: f64,
    /// Maximum number of query tokens and of keys of a request that the call states, or `None` for
    /// the exact numbers. With maxima, a replay has other lengths than the capture.
    pub bounds: Option<[usize; 2]>,
    /// True if the log-sum-exp is asked for. For a context chunk it always is.
    pub lse: bool,
    /// Elements of the queries that are NaN: `[token, head, column]` of `[Tq, H, P+R]`.
    pub nan_queries: Vec<[usize; 3]>,
    /// Elements of the keys that are NaN: `[token, head, column]` of `[Tk, H, P+R]`. All heads of a
    /// token share the columns from P on.
    pub nan_keys: Vec<[usize; 3]>,
    /// Elements of the values that are NaN: `[token, head, column]` of `[Tk, H, V]`.
    pub nan_values: Vec<[usize; 3]>,
    /// Layout of the keys, or `None` for the one that the backend asks for.
    pub key_layout: Option<KeyLayout>,
    /// The way in which the case is run.
    pub trial: Trial,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Seeds for each request's own numbers. If empty, all numbers follow `seed`.
    pub own_seeds: Vec<u64>,
}

impl PrefillCase {
    /// Makes a case of new tokens with equal numbers of queries and keys, without gaps, with a
    /// log-sum-exp.
    pub fn new(problem: Problem, lens: &[usize]) -> Self {
        Self {
            problem,
            query_lens: lens.to_vec(),
            key_lens: lens.to_vec(),
            causal: true,
            see_each_other: false,
            gap: 0,
            amplitude: 1.0,
            bounds: None,
            lse: true,
            nan_queries: Vec::new(),
            nan_keys: Vec::new(),
            nan_values: Vec::new(),
            key_layout: None,
            trial: Trial::Once,
            seed: 1,
            own_seeds: Vec::new(),
        }
    }

    checks!(PrefillBackend, PrefillStage);
}

impl<S: PrefillStage> Case<S> for PrefillCase {
    type Numbers = Numbers;
    type Inputs = Inputs<S::Device>;

    const CALL: &'static str = "prefill";
    const SMALLEST: StepLimits = StepLimits::new(1, 1, 0)
        .with_decode_query_len(0)
        .with_context_rows(1);
    const REPLAYS_LENGTHS: bool = false;

    stage_items!();

    fn limits(&self) -> StepLimits {
        let [tokens, keys] = [&self.query_lens, &self.key_lens].map(|lens| lens.iter().sum());
        StepLimits::new(self.query_lens.len(), tokens, 0)
            .with_decode_query_len(0)
            .with_context_rows(keys)
    }

    fn changed(&self) -> Self {
        let mut changed = Self {
            seed: self.seed + 1,
            ..self.clone()
        };
        if self.bounds.is_some() && self.own_seeds.is_empty() {
            // Another request takes the lengths of the first one.
            for lens in [&mut changed.query_lens, &mut changed.key_lens] {
                lens.rotate_right(1);
                if let [first, second, ..] = &mut lens[..] {
                    *second += std::mem::take(first);
                }
            }
        }
        changed
    }

    fn of_requests(&self, requests: &[Option<usize>], random: &mut Random, wide: bool) -> Self {
        let lens = |of: &[usize]| {
            let requests = requests.iter();
            requests
                .map(|request| request.map_or(0, |at| of[at]))
                .collect()
        };
        let bounds = [longest(&self.query_lens), longest(&self.key_lens)];
        Self {
            query_lens: lens(&self.query_lens),
            key_lens: lens(&self.key_lens),
            own_seeds: own_seeds(requests),
            bounds: (wide || random.below(2) == 0).then_some(bounds),
            ..self.clone()
        }
    }

    fn query_lens(&self) -> &[usize] {
        &self.query_lens
    }

    fn own_seeds(&self) -> &[u64] {
        &self.own_seeds
    }

    fn numbers(&self, placement: Placement) -> Numbers {
        Numbers::new(self, placement)
    }

    fn upload(
        &self,
        numbers: &Numbers,
        spec: &BackendSpec,
        device: &S::Device,
    ) -> Result<Inputs<S::Device>> {
        Inputs::upload(numbers, self, spec, device)
    }

    fn output(&self, numbers: &Numbers) -> ([usize; 3], bool) {
        let [queries, heads, _] = numbers.query.layout.shape;
        let [.., v] = numbers.values.layout.shape;
        ([queries, heads, v], self.lse || !self.causal)
    }

    fn compare(
        &self,
        numbers: &Numbers,
        spec: &BackendSpec,
        written: &Written,
    ) -> std::result::Result<(), Failure> {
        numbers.compare(self, spec, written)
    }

    fn buffers(inputs: &mut Inputs<S::Device>) -> Buffers<'_, S::Device> {
        let tensors = [&mut inputs.query, &mut inputs.values].into_iter();
        tensors
            .chain(&mut inputs.keys)
            .map(|tensor| &mut tensor.buffer)
            .chain([&mut inputs.query_starts, &mut inputs.key_starts])
            .chain(&mut inputs.query_scales)
            .collect()
    }

    fn late<'a>(&self, inputs: &'a mut Inputs<S::Device>) -> Buffers<'a, S::Device> {
        vec![match self.trial {
            Trial::LateRows => &mut inputs.values.buffer,
            _ => &mut inputs.query.buffer,
        }]
    }

    fn prepare(call: &mut Call<'_, Self, S>) -> Result<()> {
        let lens = Lens::new(&call.case);
        let chunk = lens.chunk(call.case.causal);
        let batch = lens.batch(&chunk);
        let batch = batch.with_causal(!call.case.see_each_other);
        call.stage
            .prepare(call.device, &batch, &mut call.state, &mut call.metadata)
    }

    fn enqueue(call: &mut Call<'_, Self, S>) -> Result<()> {
        let (case, lens) = (&call.case, Lens::new(&call.case));
        let (out, lse) = call.outputs.views()?;
        let of_chunk: (_, [&[u32]; 2]) = (0, [&lens.query, &lens.key]);
        let of_case = call
            .inputs
            .call(case, out)?
            .with_lse(lse)
            .with_chunk((!case.causal).then_some(of_chunk))
            .with_causal(!case.see_each_other);
        // SAFETY: the starts are sums of the case's lengths and end at the tensors' rows. The
        // call's maxima are those of the lengths. State and metadata belong to this stage and are
        // prepared for the batch.
        unsafe {
            call.stage
                .prefill(call.device, of_case, &mut call.state, &call.metadata)
        }
    }
}

// The tensors of a call.
pub(super) struct Numbers {
    query: Tensor,
    nope: Tensor,
    rope: Tensor,
    values: Tensor,
    query_starts: Vec<i32>,
    key_starts: Vec<i32>,
    query_scales: Option<Vec<f32>>,
    placement: Placement,
}

impl Numbers {
    fn new(case: &PrefillCase, placement: Placement) -> Self {
        let Problem {
            dims, heads, dtype, ..
        } = case.problem;
        let [p, r, v] = [dims.head.nope, dims.head.rope, dims.head.v].map(|n| n as usize);
        let heads = heads as usize;
        let mut random = Sequences::new(case.seed, &case.own_seeds);
        let [queries, keys] = [&case.query_lens, &case.key_lens].map(|lens| owners(lens));
        let mut tensor = |owners: &[usize], [heads, width]: [usize; 2], amplitude| {
            let shape = [owners.len(), heads, width];
            Tensor::random((&mut random, owners), amplitude, dtype, shape, placement)
        };
        let mut numbers = Self {
            query: tensor(&queries, [heads, p + r], case.amplitude),
            nope: tensor(&keys, [heads, p], case.amplitude),
            rope: tensor(&keys, [1, r], case.amplitude),
            values: tensor(&keys, [heads, v], 1.0),
            query_starts: starts(&case.query_lens),
            key_starts: starts(&case.key_lens),
            query_scales: None,
            placement,
        };
        numbers.query_scales = query_scales(&mut random, &queries, &case.problem);
        for nan in &case.nan_queries {
            numbers.query.set(*nan, f64::NAN);
        }
        for [token, head, column] in case.nan_keys.iter().copied() {
            match column.checked_sub(p) {
                None => numbers.nope.set([token, head, column], f64::NAN),
                Some(column) => numbers.rope.set([token, 0, column], f64::NAN),
            }
        }
        for nan in &case.nan_values {
            numbers.values.set(*nan, f64::NAN);
        }
        numbers
    }

    fn key(&self, t: usize, h: usize, k: usize) -> f64 {
        let p = self.nope.layout.shape[2];
        if k < p {
            self.nope.at(t, h, k)
        } else {
            self.rope.at(t, 0, k - p)
        }
    }

    // Returns the keys in the layout of a backend, in two tensors or one.
    fn keys(&self, layout: KeyLayout) -> Vec<Tensor> {
        let ([_, heads, qk], [keys, ..]) = (self.query.layout.shape, self.values.layout.shape);
        let dtype = self.query.layout.dtype;
        match layout {
            KeyLayout::Split => vec![self.nope.clone(), self.rope.clone()],
            KeyLayout::Packed => {
                let mut packed = Tensor::poison(dtype, [keys, heads, qk], self.placement);
                packed.fill(|t, h, k| self.key(t, h, k));
                vec![packed]
            }
        }
    }

    fn compare(
        &self,
        case: &PrefillCase,
        spec: &BackendSpec,
        written: &Written,
    ) -> std::result::Result<(), Failure> {
        let [_, heads, qk] = self.query.layout.shape;
        let v = self.values.layout.shape[2];
        let scale = f64::from(config(case.problem).softmax_scale);
        let tolerances = match case.amplitude > 1.0 {
            true => Tolerances::Amplitude(case.amplitude),
            false => Tolerances::Plain,
        };
        for (request, n) in case.query_lens.iter().enumerate() {
            let (q0, k0) = (
                self.query_starts[request] as usize,
                self.key_starts[request] as usize,
            );
            let m = case.key_lens[request];
            let want = reference::expanded(
                &Array::from_fn([*n, heads, qk], |t, h, k| {
                    factor(&self.query_scales, q0 + t) * self.query.at(q0 + t, h, k)
                }),
                &Array::from_fn([m, heads, qk], |t, h, k| self.key(k0 + t, h, k)),
                &Array::from_fn([m, heads, v], |t, h, k| self.values.at(k0 + t, h, k)),
                scale,
                case.causal && !case.see_each_other,
            );
            for t in 0..*n {
                for h in 0..heads {
                    let (row, lse) = (want.out.row(t, h), want.lse[t][h]);
                    written.check_row(spec, [q0 + t, h], row, lse, tolerances)?;
                }
            }
        }
        Ok(())
    }
}

// The lengths of a call's requests, in the form that plans use.
struct Lens {
    query: Vec<u32>,
    key: Vec<u32>,
    // Lengths in tokens whose keys do not belong to a context.
    own: Vec<u32>,
}

impl Lens {
    fn new(case: &PrefillCase) -> Self {
        let [query, key] = [&case.query_lens, &case.key_lens]
            .map(|lens| lens.iter().map(|len| *len as u32).collect::<Vec<_>>());
        let own = if case.causal { &key } else { &query }.clone();
        Self { query, key, own }
    }

    // Returns the chunk of a context from the first request with keys to the last one.
    fn chunk(&self, causal: bool) -> Option<ContextChunk> {
        let has_keys = |len: &u32| *len > 0 && !causal;
        let start = self.key.iter().position(has_keys)?;
        let end = self.key.iter().rposition(has_keys)? + 1;
        let (starts, lens) = (vec![0; end - start], self.key[start..end].to_vec());
        Some(ContextChunk::new(start..end, starts, lens))
    }

    fn batch<'a>(&'a self, chunk: &'a Option<ContextChunk>) -> PrefillBatch<'a> {
        PrefillBatch::new(&self.query, &self.own).with_chunks(chunk.as_slice())
    }
}

// A case's inputs in a device's memory.
pub(super) struct Inputs<D: Device> {
    query: OnDevice<D>,
    // The two parts of the keys in two tensors, or both in one.
    keys: Vec<OnDevice<D>>,
    values: OnDevice<D>,
    query_starts: D::Buffer,
    key_starts: D::Buffer,
    query_scales: Option<D::Buffer>,
}

impl<D: Device> Inputs<D> {
    // Uploads the inputs in the form that a spec asks for.
    fn upload(
        numbers: &Numbers,
        case: &PrefillCase,
        spec: &BackendSpec,
        device: &D,
    ) -> Result<Self> {
        let keys = numbers.keys(case.key_layout.unwrap_or(spec.key_layout));
        let keys = keys.iter().map(|keys| keys.upload(device));
        let ints = |ints: &[i32]| upload(device, bytemuck::cast_slice(ints));
        let query_scales = numbers.query_scales.as_deref();
        let query_scales = query_scales.map(|scales| upload(device, bytemuck::cast_slice(scales)));
        Ok(Self {
            query: numbers.query.upload(device)?,
            keys: keys.collect::<Result<_>>()?,
            values: numbers.values.upload(device)?,
            query_starts: ints(&numbers.query_starts)?,
            key_starts: ints(&numbers.key_starts)?,
            query_scales: query_scales.transpose()?,
        })
    }

    fn call<'a>(&'a self, case: &PrefillCase, out: Output<'a, D>) -> Result<PrefillCall<'a, D>> {
        let keys = match &self.keys[..] {
            [nope, rope] => Keys::Split {
                nope: nope.view()?,
                rope: rope.view()?,
            },
            keys => Keys::Packed(keys[0].view()?),
        };
        let starts = case.query_lens.len() + 1;
        let exact = [&case.query_lens, &case.key_lens].map(|lens| longest(lens));
        let [queries, longest] = case.bounds.unwrap_or(exact);
        Ok(PrefillCall::new(
            self.query.view()?,
            keys,
            self.values.view()?,
            out,
            (array(&self.query_starts, starts)?, queries),
            (array(&self.key_starts, starts)?, longest),
        )
        .with_query_scales(floats::<D>(
            &self.query_scales,
            self.query.view()?.shape()[0],
        )?))
    }
}
