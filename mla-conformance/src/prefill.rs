//! One prefill call against the reference.

use super::data::{
    Bits, OnDevice, Outputs, Random, Tensor, Written, array, config, most, out_gap, starts, upload,
};
use super::failure::{Failure, refused};
use crate::reference::{self, Array};
use mla_runtime::Result;
use mla_runtime::backend::{
    Chunk, Keys, Output, PrefillBackend, PrefillBatch, PrefillCall, PrefillStage, StepLimits,
};
use mla_runtime::device::Device;
use mla_runtime::plan::context::ContextChunk;
use mla_runtime::problem::Problem;
use mla_runtime::spec::{BackendSpec, KeyLayout};

/// A prefill call of random numbers.
#[derive(Clone, Debug)]
pub struct PrefillCase {
    /// What the backend is made for.
    pub problem: Problem,
    /// The query tokens of each request.
    pub query_lens: Vec<usize>,
    /// The keys of each request.
    pub key_lens: Vec<usize>,
    /// Whether the keys are the new tokens', rather than a context chunk's.
    pub causal: bool,
    /// Elements between one token's rows and the next, in every input, and in outputs if the spec
    /// has [`StridedOutputs`](mla_runtime::feature::Feature::StridedOutputs).
    pub gap: usize,
    /// Whether the log-sum-exp is asked for; of a context chunk it always is.
    pub lse: bool,
    /// Where queries are NaN: `[token, head, column]` of `[Tq, H, P+R]`.
    pub nan_queries: Vec<[usize; 3]>,
    /// Where keys are NaN: `[token, head, column]` of `[Tk, H, P+R]`. From column P on all heads
    /// share a token's key.
    pub nan_keys: Vec<[usize; 3]>,
    /// Where values are NaN: `[token, head, column]` of `[Tk, H, V]`.
    pub nan_values: Vec<[usize; 3]>,
    /// How the keys are given; `None`: as the backend asks for them.
    pub key_layout: Option<KeyLayout>,
    /// What the random numbers are made from.
    pub seed: u64,
}

impl PrefillCase {
    /// New tokens, as many queries as keys, without gaps, with a log-sum-exp.
    pub fn new(problem: Problem, lens: &[usize]) -> Self {
        Self {
            problem,
            query_lens: lens.to_vec(),
            key_lens: lens.to_vec(),
            causal: true,
            gap: 0,
            lse: true,
            nan_queries: Vec::new(),
            nan_keys: Vec::new(),
            nan_values: Vec::new(),
            key_layout: None,
            seed: 1,
        }
    }

    /// Runs the call and compares every number with the reference.
    ///
    /// # Errors
    ///
    /// What the backend did wrong. Two runs of one case that give equal [`Bits`] gave equal
    /// results.
    pub fn check<B: PrefillBackend>(
        &self,
        device: &B::Device,
    ) -> std::result::Result<Bits, Failure> {
        self.check_stage(&Self::backend::<B>(device, self.problem)?, device)
    }

    pub(super) fn backend<B: PrefillBackend>(
        device: &B::Device,
        problem: Problem,
    ) -> std::result::Result<B, Failure> {
        B::new(device, &config(problem))
            .map_err(|error| refused(problem, B::SPEC.name, "new", error))
    }

    /// The same through a backend that was made already, by type or by a registry.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn check_stage<S: PrefillStage>(
        &self,
        stage: &S,
        device: &S::Device,
    ) -> std::result::Result<Bits, Failure> {
        let numbers = Numbers::new(self);
        let written = numbers.run(self, stage, device)?;
        let spec = stage.spec();
        numbers.compare(self, spec, &written)?;
        written.check_gaps(spec.name)?;
        Ok(written.bits())
    }
}

// The tensors of a call.
struct Numbers {
    query: Tensor,
    nope: Tensor,
    rope: Tensor,
    values: Tensor,
    query_starts: Vec<i32>,
    key_starts: Vec<i32>,
}

impl Numbers {
    fn new(case: &PrefillCase) -> Self {
        let Problem {
            dims, heads, dtype, ..
        } = case.problem;
        let [p, r, v] = [dims.head.nope, dims.head.rope, dims.head.v].map(|n| n as usize);
        let heads = heads as usize;
        let mut random = Random::new(case.seed);
        let (queries, keys) = (
            case.query_lens.iter().sum(),
            case.key_lens.iter().sum::<usize>(),
        );
        let mut tensor = |shape| Tensor::random(&mut random, dtype, shape, case.gap);
        let mut numbers = Self {
            query: tensor([queries, heads, p + r]),
            nope: tensor([keys, heads, p]),
            rope: tensor([keys, 1, r]),
            values: tensor([keys, heads, v]),
            query_starts: starts(&case.query_lens),
            key_starts: starts(&case.key_lens),
        };
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

    // The keys as a backend wants them: in two tensors or one.
    fn keys(&self, case: &PrefillCase, layout: KeyLayout) -> Vec<Tensor> {
        let ([_, heads, qk], [keys, ..]) = (self.query.layout.shape, self.values.layout.shape);
        match layout {
            KeyLayout::Split => vec![self.nope.clone(), self.rope.clone()],
            KeyLayout::Packed => {
                let mut packed = Tensor::poison(case.problem.dtype, [keys, heads, qk], case.gap);
                packed.fill(|t, h, k| self.key(t, h, k));
                vec![packed]
            }
        }
    }

    // The values, with zeros up to so many columns.
    fn values(&self, case: &PrefillCase, columns: usize) -> Tensor {
        let [keys, heads, v] = self.values.layout.shape;
        let mut values = Tensor::poison(case.problem.dtype, [keys, heads, columns], case.gap);
        values.fill(|t, h, k| if k < v { self.values.at(t, h, k) } else { 0.0 });
        values
    }

    fn run<S: PrefillStage>(
        &self,
        case: &PrefillCase,
        stage: &S,
        device: &S::Device,
    ) -> std::result::Result<Written, Failure> {
        let spec = stage.spec();
        let refused = |operation| move |error| refused(case.problem, spec.name, operation, error);
        let [queries, heads, qk] = self.query.layout.shape;
        let [keys, _, v] = self.values.layout.shape;
        let limits = StepLimits::new(case.query_lens.len(), queries, 0)
            .with_decode_query_len(0)
            .with_context_rows(keys);
        let mut state = stage.state(device, &limits).map_err(refused("state"))?;
        let metadata = stage.metadata(device, &limits);
        let mut metadata = metadata.map_err(refused("metadata"))?;
        let lens = Lens::new(case);
        let chunk = lens.chunk(case.causal);
        stage
            .prepare(device, &lens.batch(&chunk), &mut state, &mut metadata)
            .map_err(refused("prepare"))?;

        let columns = if spec.padded_values { qk } else { v };
        let layout = case.key_layout.unwrap_or(spec.key_layout);
        let inputs = Inputs::upload(self, case, layout, columns, device)?;
        let mut outputs = Outputs::<S::Device>::new(
            device,
            case.problem,
            [queries, heads, columns],
            v,
            out_gap(spec, case.gap),
            case.lse || !case.causal,
        )?;
        {
            let (out, lse) = outputs.views()?;
            let call = inputs.call(case, out)?.with_lse(lse);
            let of_chunk = Chunk::new(0, &lens.query, &lens.key);
            let call = call.with_chunk((!case.causal).then_some(of_chunk));
            // SAFETY: the starts add up the case's lengths, of which the tensors have as many rows
            // and the call the maxima; state and metadata are this stage's, prepared for the batch.
            unsafe { stage.prefill(device, call, &mut state, &metadata) }
                .map_err(refused("prefill"))?;
        }
        Ok(outputs.finish(device)?)
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
        for (request, n) in case.query_lens.iter().enumerate() {
            let (q0, k0) = (
                self.query_starts[request] as usize,
                self.key_starts[request] as usize,
            );
            let m = case.key_lens[request];
            let want = reference::expanded(
                &Array::from_fn([*n, heads, qk], |t, h, k| self.query.at(q0 + t, h, k)),
                &Array::from_fn([m, heads, qk], |t, h, k| self.key(k0 + t, h, k)),
                &Array::from_fn([m, heads, v], |t, h, k| self.values.at(k0 + t, h, k)),
                scale,
                case.causal,
            );
            for t in 0..*n {
                for h in 0..heads {
                    written.check_row(spec, q0 + t, h, want.out.row(t, h), want.lse[t][h])?;
                }
            }
        }
        Ok(())
    }
}

// The lengths of a call's requests, as plans take them.
struct Lens {
    query: Vec<u32>,
    key: Vec<u32>,
    // Of the tokens whose keys are no context's.
    own: Vec<u32>,
}

impl Lens {
    fn new(case: &PrefillCase) -> Self {
        let [query, key] = [&case.query_lens, &case.key_lens]
            .map(|lens| lens.iter().map(|len| *len as u32).collect::<Vec<_>>());
        let own = if case.causal { &key } else { &query }.clone();
        Self { query, key, own }
    }

    // Of a context, the chunk from the first request that has keys in it to the last.
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
struct Inputs<D: Device> {
    query: OnDevice<D>,
    // Their two parts, or both in one tensor.
    keys: Vec<OnDevice<D>>,
    values: OnDevice<D>,
    query_starts: D::Buffer,
    key_starts: D::Buffer,
}

impl<D: Device> Inputs<D> {
    // The keys in a layout, and values of so many columns.
    fn upload(
        numbers: &Numbers,
        case: &PrefillCase,
        layout: KeyLayout,
        columns: usize,
        device: &D,
    ) -> Result<Self> {
        let keys = numbers.keys(case, layout);
        let keys = keys.iter().map(|keys| keys.upload(device));
        let ints = |ints: &[i32]| upload(device, bytemuck::cast_slice(ints));
        Ok(Self {
            query: numbers.query.upload(device)?,
            keys: keys.collect::<Result<_>>()?,
            values: numbers.values(case, columns).upload(device)?,
            query_starts: ints(&numbers.query_starts)?,
            key_starts: ints(&numbers.key_starts)?,
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
        Ok(PrefillCall::new(
            self.query.view()?,
            keys,
            self.values.view()?,
            out,
            (array(&self.query_starts, starts)?, most(&case.query_lens)),
            (array(&self.key_starts, starts)?, most(&case.key_lens)),
        ))
    }
}
