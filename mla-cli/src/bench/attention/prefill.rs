//! Expanded attention to keys and values of each head.

use mla_conformance::reference::attend;
use mla_runtime::Result;
use mla_runtime::backend::{Keys, PrefillBatch, PrefillCall, PrefillStage, SelectedPrefill};
use mla_runtime::device::Device;
use mla_runtime::plan::context::ContextChunk;
use mla_runtime::select::Registry;
use mla_runtime::spec::KeyLayout;
use mla_runtime::tensor::{ArrayRef, Layout, TensorMut, TensorRef};
use rayon::prelude::*;

use super::outcome::{Outcome, chosen, request_of};
use crate::bench::work::Attention;
use crate::device::memory::upload;
use crate::device::random::Normal;
use crate::device::tensor::Tensor;
use crate::error::CliError;
use crate::run::deviation::Errors;

/// Expanded attention.
pub struct Prefill<'a, D: Device> {
    what: &'a Attention,
    causal: bool,
    backend: SelectedPrefill<D>,
    state: <SelectedPrefill<D> as PrefillStage>::State,
    metadata: <SelectedPrefill<D> as PrefillStage>::Metadata,
    query_lens: Vec<u32>,
    key_lens: Vec<u32>,
    query: Tensor<D>,
    /// Keys and values of each layer.
    layers: Vec<KeysAndValues<D>>,
    starts: [D::Buffer; 2],
    outcome: Outcome<D>,
}

/// Keys and values of one layer.
struct KeysAndValues<D: Device> {
    nope_numbers: Normal,
    rope_numbers: Normal,
    value_numbers: Normal,
    /// Keys `[Tk, H, P]` with `[Tk, 1, R]` in `rope`, or both together as `[Tk, H, P+R]`.
    keys: D::Buffer,
    rope: Option<D::Buffer>,
    values: D::Buffer,
}

impl<'a, D: Device> Prefill<'a, D> {
    pub fn new(
        what: &'a Attention,
        causal: bool,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<Self, CliError> {
        let problem = &what.config.problem;
        let head = problem.dims.head;
        let backend = registry.instantiate_prefill(what.backend, device, &what.config)?;
        let limits = what.limits();
        let mut state = backend.state(device, &limits)?;
        let mut metadata = backend.metadata(device, &limits)?;
        let (tokens, heads) = (what.tokens(), problem.heads as usize);
        let key_lens: Vec<u32> = what.requests.iter().map(|r| r.kv).collect();
        let query_lens: Vec<u32> = what.requests.iter().map(|r| r.q).collect();
        let chunks: Vec<ContextChunk> = if causal {
            Vec::new()
        } else {
            let starts = vec![0; key_lens.len()];
            vec![ContextChunk::new(
                0..key_lens.len(),
                starts,
                key_lens.clone(),
            )]
        };
        let batch = PrefillBatch::new(&query_lens, &query_lens).with_chunks(&chunks);
        backend.prepare(device, &batch, &mut state, &mut metadata)?;
        let shape = [tokens, heads, head.qk() as usize];
        let layout = backend.spec().key_layout;
        Ok(Self {
            query: Tensor::random(device, what.seed + 1, problem.dtype, shape, what.deviation)?,
            layers: (0..what.layers)
                .map(|layer| KeysAndValues::new(what, device, layout, layer))
                .collect::<Result<_>>()?,
            starts: [
                upload(device, &what.starts(|r| r.q))?,
                upload(device, &what.starts(|r| r.kv))?,
            ],
            outcome: Outcome::new(device, problem.dtype, [tokens, heads, head.v as usize])?,
            query_lens,
            key_lens,
            what,
            causal,
            backend,
            state,
            metadata,
        })
    }

    pub fn attend(&mut self, device: &D) -> Result<()> {
        let what = self.what;
        let problem = &what.config.problem;
        let head = problem.dims.head;
        let dtype = problem.dtype;
        let heads = problem.heads as usize;
        let keys = self.key_lens.iter().map(|len| *len as usize).sum();
        let [nope, rope, qk, v] = [head.nope, head.rope, head.qk(), head.v].map(|n| n as usize);
        let count = what.requests.len() + 1;
        for layer in &self.layers {
            let view = |buffer, shape| {
                TensorRef::<D>::new(D::bytes(buffer), Layout::contiguous(dtype, shape))
            };
            let (out, lse) = self.outcome.write()?;
            let call = PrefillCall::new(
                self.query.view()?,
                match &layer.rope {
                    Some(shared) => Keys::Split {
                        nope: view(&layer.keys, [keys, heads, nope])?,
                        rope: view(shared, [keys, 1, rope])?,
                    },
                    None => Keys::Packed(view(&layer.keys, [keys, heads, qk])?),
                },
                view(&layer.values, [keys, heads, v])?,
                out,
                (
                    ArrayRef::new(D::bytes(&self.starts[0]), count)?,
                    what.longest(|r| r.q),
                ),
                (
                    ArrayRef::new(D::bytes(&self.starts[1]), count)?,
                    what.longest(|r| r.kv),
                ),
            )
            .with_lse(lse);
            let (state, metadata) = (&mut self.state, &self.metadata);
            let lens: [&[u32]; 2] = [&self.query_lens, &self.key_lens];
            let chunk = (!self.causal).then_some((0, lens));
            // SAFETY: the starts are sums of the requests' lengths. Every tensor was made for
            // these, and the metadata was prepared for them. State and metadata are this backend's.
            unsafe {
                self.backend
                    .prefill(device, call.with_chunk(chunk), state, metadata)?;
            }
        }
        Ok(())
    }

    pub fn check(&self, device: &D, count: usize) -> std::result::Result<Errors, CliError> {
        let what = self.what;
        let problem = &what.config.problem;
        let head = problem.dims.head;
        let heads = problem.heads as usize;
        let [nope, rope, v] = [head.nope, head.rope, head.v].map(|n| n as usize);
        let (starts, key_starts) = (what.starts(|r| r.q), what.starts(|r| r.kv));
        let layer = &self.layers[self.layers.len() - 1];
        // Fields are borrowed one by one, since threads cannot share `self`.
        let (query, causal) = (&self.query, self.causal);
        let KeysAndValues {
            nope_numbers,
            rope_numbers,
            value_numbers,
            ..
        } = layer;
        let expected: Vec<_> = chosen(what, count)
            .into_par_iter()
            .map(|(token, head)| {
                let index = request_of(&starts, token);
                let request = what.requests[index];
                let own = token - starts[index] as usize;
                let seen = match causal {
                    true => (request.kv - request.q) as usize + own + 1,
                    false => request.kv as usize,
                };
                let first = key_starts[index] as usize;
                let row = |numbers: &Normal, at, width| numbers.row(at * width, width);
                let keys: Vec<Vec<f64>> = (first..first + seen)
                    .map(|at| {
                        let mut key = row(nope_numbers, at * heads + head, nope);
                        key.extend(row(rope_numbers, at, rope));
                        key
                    })
                    .collect();
                let values: Vec<Vec<f64>> = (first..first + seen)
                    .map(|at| row(value_numbers, at * heads + head, v))
                    .collect();
                let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
                let query = query.row(token, head);
                let scale = what.config.softmax_scale.into();
                ((token, head), attend(&query, &keys, &values, scale))
            })
            .collect();
        Ok(self.outcome.compare(device, expected)?)
    }
}

impl<D: Device> KeysAndValues<D> {
    fn new(what: &Attention, device: &D, layout: KeyLayout, layer: usize) -> Result<Self> {
        let problem = &what.config.problem;
        let (head, dtype) = (problem.dims.head, problem.dtype);
        let heads = problem.heads as usize;
        let [nope, rope, qk, v] = [head.nope, head.rope, head.qk(), head.v].map(|n| n as usize);
        let keys: usize = what.requests.iter().map(|r| r.kv as usize).sum();
        let seed = what.seed + 2 + 3 * layer as u64;
        let numbers = |number| Normal::new(seed + number, dtype, what.deviation);
        let (nope_numbers, rope_numbers, value_numbers) = (numbers(0), numbers(1), numbers(2));
        let head_part = nope_numbers.buffer(device, 0, keys * heads * nope)?;
        let shared = rope_numbers.buffer(device, 0, keys * rope)?;
        let (keys_buffer, rope_buffer) = match layout {
            KeyLayout::Split => (head_part, Some(shared)),
            KeyLayout::Packed => {
                let whole = Layout::contiguous(dtype, [keys, heads, qk]);
                let mut packed = device.allocate(whole.elements() * dtype.bytes())?;
                let to = TensorMut::<D>::new(D::bytes_mut(&mut packed), whole)?;
                let from = Layout::contiguous(dtype, [keys, heads, nope]);
                let from = TensorRef::new(D::bytes(&head_part), from)?;
                device.copy(from, to.narrow(2, 0..nope)?)?;
                let to = TensorMut::<D>::new(D::bytes_mut(&mut packed), whole)?;
                let from = Layout::contiguous(dtype, [keys, 1, rope]);
                let from = TensorRef::new(D::bytes(&shared), from)?.broadcast(1, heads)?;
                device.copy(from, to.narrow(2, nope..qk)?)?;
                device.synchronize()?;
                (packed, None)
            }
        };
        Ok(Self {
            keys: keys_buffer,
            rope: rope_buffer,
            values: value_numbers.buffer(device, 0, keys * heads * v)?,
            nope_numbers,
            rope_numbers,
            value_numbers,
        })
    }
}
