//! The expanded path: keys and values per head, of the new tokens and of chunks of their context.

use std::ops::Range;

use super::arena::regions;
use super::staged::StagedStep;
use super::{LayerCall, MlaLayer, Weights, Workspace};
use crate::Result;
use crate::backend::{DecodeStage, Keys, Output, PrefillCall, PrefillStage};
use crate::device::{Device, GatherRows};
use crate::plan::memory::RegionName;
use crate::spec::KeyLayout;
use crate::tensor::{ArrayRef, CacheRef, Layout, LseLayout, LseMut, Memory, TensorMut, TensorRef};

/// The destination of expanded keys and values.
///
/// A backend with split keys gets two views of one product with the whole of `W_kv_b`. For a
/// backend with packed keys, the product has two parts. Each part writes its columns where the
/// backend reads them. Afterwards only the rotary part is copied, into every head's packed key.
enum ExpansionBuffers<'a, D: Device> {
    Together(D::BytesMut<'a>),
    Apart {
        keys: D::BytesMut<'a>,
        values: D::BytesMut<'a>,
    },
}

/// Keys and values.
type Expansion<'a, D> = (Keys<'a, D>, TensorRef<'a, D>);

/// The expanded path's memory, in the scratch of a workspace.
struct Buffers<'a, D: Device> {
    /// Gathered rows of the cache.
    latent: D::BytesMut<'a>,
    rope: D::BytesMut<'a>,
    expansion: ExpansionBuffers<'a, D>,
    /// The outputs of a chunk.
    partial: D::BytesMut<'a>,
    partial_lse: D::BytesMut<'a>,
}

/// The tokens of a call that take the expanded path: their inputs, and the destinations of the
/// results.
struct Tokens<'a, 'w, D: Device> {
    weights: &'a Weights<'w, D>,
    cache: CacheRef<'a, D>,
    query: TensorRef<'a, D>,
    /// The tokens' own latents and rotary keys.
    latent: TensorRef<'a, D>,
    rope: TensorRef<'a, D>,
    out: TensorMut<'a, D>,
    /// Absent if the caller does not need it, nothing must be merged, and there are no sinks.
    lse: Option<LseMut<'a, D>>,
}

/// A prepared step, with the backend's state and metadata.
struct Prepared<'a, P: PrefillStage> {
    step: &'a StagedStep,
    arrays: &'a <P::Device as Memory>::Buffer,
    state: &'a mut P::State,
    metadata: &'a P::Metadata,
}

impl<'a, P: PrefillStage> Prepared<'a, P> {
    /// The scale factors of these tokens of the expanded path, if the problem has any.
    fn query_scales(&self, tokens: Range<usize>) -> Result<Option<ArrayRef<'a, P::Device, f32>>> {
        let first = self.step.absorbed_tokens;
        let tokens = first + tokens.start..first + tokens.end;
        self.step
            .query_scales(P::Device::bytes(self.arrays), tokens)
    }
}

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> MlaLayer<P, D> {
    pub(crate) fn enqueue_expanded(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        let step = &workspace.step;
        let tokens = step.expanded_tokens();
        if tokens == 0 {
            return Ok(());
        }
        let [heads, ..] = self.config.problem.extents();
        let names = [
            RegionName::ContextLatent,
            RegionName::ContextRope,
            RegionName::ExpandedKv,
            RegionName::ExpandedKeys,
            RegionName::ExpandedValues,
            RegionName::PartialOutputs,
            RegionName::PartialLse,
            RegionName::ExpandedLse,
        ];
        let [
            latent,
            rope,
            together,
            keys,
            values,
            partial,
            partial_lse,
            own_lse,
        ] = regions::<P::Device, _>(&mut workspace.scratch, &workspace.plan, names);
        let mut buffers = Buffers {
            latent,
            rope,
            expansion: match self.packed_keys() {
                true => ExpansionBuffers::Apart { keys, values },
                false => ExpansionBuffers::Together(together),
            },
            partial,
            partial_lse,
        };
        let mut prepared = Prepared::<P> {
            step,
            arrays: &workspace.arrays,
            state: &mut workspace.prefill_state,
            metadata: &workspace.prefill_metadata,
        };
        let first = step.absorbed_tokens;
        let all = first..first + tokens;
        let lse = match &mut call.lse {
            Some(lse) => Some(lse.reborrow().tokens(all.clone())?),
            // Without context there is only one partial result, so nothing is merged.
            None if step.context().is_empty() && call.sinks.is_none() => None,
            None => Some(LseMut::new(own_lse, LseLayout::heads_first(heads, tokens))?),
        };
        let mut tokens = Tokens {
            weights: &call.weights,
            cache: call.cache.as_ref(),
            query: call.query.shorten().narrow(0, all.clone())?,
            latent: call.latent.shorten().narrow(0, all.clone())?,
            rope: call.rope.shorten().narrow(0, all.clone())?,
            out: call.out.reborrow().narrow(0, all.clone())?,
            lse,
        };
        self.attend_to_new(&mut prepared, &mut buffers, &mut tokens)?;
        (0..step.context().len()).try_for_each(|index| {
            self.attend_to_chunk(index, &mut prepared, &mut buffers, &mut tokens)
        })?;
        let sinks = match (&call.sinks, &tokens.lse) {
            (Some(sinks), Some(lse)) => Some((sinks.shorten(), lse.as_ref())),
            _ => None,
        };
        let gate = call.gate.as_ref().map(|gate| gate.narrow(0, all));
        match (&sinks, gate.transpose()?) {
            (None, None) => Ok(()),
            (_, gate) => self.device.scale_outputs(tokens.out, sinks, gate),
        }
    }

    /// Attends new tokens to each other, or also to their context. In the latter case all keys come
    /// from the cache.
    fn attend_to_new(
        &self,
        prepared: &mut Prepared<'_, P>,
        buffers: &mut Buffers<'_, P::Device>,
        tokens: &mut Tokens<'_, '_, P::Device>,
    ) -> Result<()> {
        let step = prepared.step;
        let longest = step.max_expanded_query_len();
        let starts = || step.expanded_starts::<P::Device>(P::Device::bytes(prepared.arrays));
        let Buffers {
            latent,
            rope,
            expansion,
            ..
        } = buffers;
        let (cached, key_starts, max_key_len) =
            match step.one_call::<P::Device>(P::Device::bytes(prepared.arrays))? {
                Some(one) => {
                    let latent = P::Device::reborrow(latent);
                    let rope = P::Device::reborrow(rope);
                    let rope = self.expand_cached(tokens, one.gather, latent, rope, expansion)?;
                    (Some(rope), one.key_starts, one.max_key_len)
                }
                None => (None, starts()?, longest),
            };
        let (keys, values) = match &cached {
            Some(rope) => self.read_expansion(rope.as_ref(), expansion)?,
            None => {
                let (latent, rope) = (tokens.latent.shorten(), tokens.rope.shorten());
                self.write_expansion(tokens.weights, latent, rope.shorten(), expansion)?;
                self.read_expansion(rope, expansion)?
            }
        };
        let attention = PrefillCall {
            chunk: None,
            causal: step.expanded_causal(),
            query: tokens.query.shorten(),
            keys,
            values,
            out: Output::Plain(tokens.out.reborrow()),
            lse: tokens.lse.as_mut().map(LseMut::reborrow),
            query_starts: starts()?,
            key_starts,
            max_query_len: longest,
            max_key_len,
            query_scales: prepared.query_scales(0..step.expanded_tokens())?,
        };
        self.enqueue_prefill(attention, prepared)
    }

    /// Enqueues one attention of the prepared step, with the starts and lengths that the step
    /// staged.
    fn enqueue_prefill(
        &self,
        attention: PrefillCall<'_, P::Device>,
        prepared: &mut Prepared<'_, P>,
    ) -> Result<()> {
        // SAFETY: the contract of a call. Starts: `StagedStep::write_arrays` adds up the query and
        // key lengths of the call's requests from 0. Their sums are the numbers of rows of the
        // tensors that the two callers pass, and their maxima are `max_query_len` and
        // `max_key_len`. The host's numbers are those that were staged. State and metadata belong
        // to the call's workspace. The layer's `check` compared it with the layer's device and
        // problem, and made sure that the step's `prepare` succeeded. Arrays and scratch are the
        // workspace's own memory, on the layer's device.
        unsafe {
            self.prefill
                .prefill(&self.device, attention, prepared.state, prepared.metadata)
        }
    }

    /// Attends to a chunk of the tokens' context, and merges the result into the earlier one.
    fn attend_to_chunk(
        &self,
        index: usize,
        prepared: &mut Prepared<'_, P>,
        buffers: &mut Buffers<'_, P::Device>,
        tokens: &mut Tokens<'_, '_, P::Device>,
    ) -> Result<()> {
        let chunk = prepared
            .step
            .chunk::<P::Device>(index, P::Device::bytes(prepared.arrays))?;
        let latent = P::Device::reborrow(&mut buffers.latent);
        let rope = P::Device::reborrow(&mut buffers.rope);
        let rope =
            self.expand_cached(tokens, chunk.gather, latent, rope, &mut buffers.expansion)?;
        let (keys, values) = self.read_expansion(rope.as_ref(), &buffers.expansion)?;
        // Every call with context has a log-sum-exp.
        let Some(lse) = &mut tokens.lse else {
            return Ok(());
        };
        let [_, heads, v] = tokens.out.layout().shape;
        let count = chunk.tokens.len();
        let bytes = P::Device::reborrow(&mut buffers.partial);
        let mut out = self.tensor(bytes, [count, heads, v])?;
        let bytes = P::Device::reborrow(&mut buffers.partial_lse);
        let mut out_lse = LseMut::new(bytes, LseLayout::heads_first(heads, count))?;
        let attention = PrefillCall {
            chunk: chunk.chunk,
            causal: false,
            query: tokens.query.shorten().narrow(0, chunk.tokens.clone())?,
            keys,
            values,
            out: Output::Plain(out.reborrow()),
            lse: Some(out_lse.reborrow()),
            query_starts: chunk.query_starts,
            key_starts: chunk.key_starts,
            max_query_len: chunk.max_query_len,
            max_key_len: chunk.max_key_len,
            query_scales: prepared.query_scales(chunk.tokens.clone())?,
        };
        self.enqueue_prefill(attention, prepared)?;
        self.device.merge(
            tokens.out.reborrow().narrow(0, chunk.tokens.clone())?,
            lse.reborrow().tokens(chunk.tokens)?,
            out.as_ref(),
            out_lse.as_ref(),
        )
    }

    /// Writes keys and values of cached rows to `expansion`, and returns their rotary parts.
    fn expand_cached<'a>(
        &self,
        tokens: &Tokens<'_, '_, P::Device>,
        rows: GatherRows<'_, P::Device>,
        latent: <P::Device as Memory>::BytesMut<'_>,
        rope: <P::Device as Memory>::BytesMut<'a>,
        expansion: &mut ExpansionBuffers<'_, P::Device>,
    ) -> Result<TensorMut<'a, P::Device>> {
        let [_, latent_width, _, rope_width, _] = self.config.problem.extents();
        let mut latent = self.tensor(latent, [rows.rows, 1, latent_width])?;
        let mut rope = self.tensor(rope, [rows.rows, 1, rope_width])?;
        if let ExpansionBuffers::Together(bytes) = expansion {
            let to = self.product(P::Device::reborrow(bytes), rows.rows)?;
            let (weights, gathered) = (tokens.weights.kv, (latent, rope.reborrow()));
            self.device
                .gather_cache_and_expand(tokens.cache, rows, gathered, weights, to)?;
        } else {
            self.device
                .gather_cache(tokens.cache, rows, latent.reborrow(), rope.reborrow())?;
            self.write_expansion(tokens.weights, latent.as_ref(), rope.as_ref(), expansion)?;
        }
        Ok(rope)
    }

    /// Returns the tensor of keys and values that are written together: `[1, rows, H·(P+V)]`.
    fn product<'a>(
        &self,
        bytes: <P::Device as Memory>::BytesMut<'a>,
        rows: usize,
    ) -> Result<TensorMut<'a, P::Device>> {
        let [heads, _, nope, _, v] = self.config.problem.extents();
        self.tensor(bytes, [1, rows, heads * (nope + v)])
    }

    /// Writes `[k_nope | v] = c · W_kv_b` from `latent` `[N, 1, L]` and `rope` `[N, 1, R]`, in the
    /// layout that the backend needs.
    fn write_expansion(
        &self,
        weights: &Weights<'_, P::Device>,
        latent: TensorRef<'_, P::Device>,
        rope: TensorRef<'_, P::Device>,
        expansion: &mut ExpansionBuffers<'_, P::Device>,
    ) -> Result<()> {
        let problem = &self.config.problem;
        let [heads, _, nope, _, v] = problem.extents();
        // From here on, latents are [1, N, L].
        let latent = latent.transpose(0, 1);
        let rows = latent.shape()[1];
        match expansion {
            ExpansionBuffers::Together(bytes) => {
                let product = self.product(P::Device::reborrow(bytes), rows)?;
                self.device.gemm(latent, weights.kv, product)
            }
            ExpansionBuffers::Apart { keys, values } => {
                let latent = latent.broadcast(0, heads)?;
                let width = self.keys_width();
                let mut keys = self.tensor(P::Device::reborrow(keys), [rows, heads, width])?;
                let own = keys.reborrow().narrow(2, 0..nope)?;
                self.device
                    .gemm(latent, weights.keys, own.transpose(0, 1))?;
                if width > nope {
                    let shared = keys.narrow(2, nope..width)?;
                    self.device.copy(rope.broadcast(1, heads)?, shared)?;
                }
                let values = self.tensor(P::Device::reborrow(values), [rows, heads, v])?;
                self.device
                    .gemm(latent, weights.values, values.transpose(0, 1))
            }
        }
    }

    /// Returns the written keys and values, with the number of rows that `rope` has.
    fn read_expansion<'a>(
        &self,
        rope: TensorRef<'a, P::Device>,
        expansion: &'a ExpansionBuffers<'_, P::Device>,
    ) -> Result<Expansion<'a, P::Device>> {
        let rows = rope.shape()[0];
        let problem = &self.config.problem;
        let [heads, _, nope, _, v] = problem.extents();
        let tensor = |bytes, width| {
            let layout = Layout::contiguous(problem.dtype, [rows, heads, width]);
            TensorRef::<P::Device>::new(P::Device::freeze(bytes), layout)
        };
        let (keys, values) = match expansion {
            ExpansionBuffers::Together(bytes) => {
                let both = tensor(bytes, nope + v)?;
                (both.narrow(2, 0..nope)?, both.narrow(2, nope..nope + v)?)
            }
            ExpansionBuffers::Apart { keys, values } => {
                (tensor(keys, self.keys_width())?, tensor(values, v)?)
            }
        };
        let keys = match self.prefill.spec().key_layout {
            KeyLayout::Packed => Keys::Packed(keys),
            KeyLayout::Split => Keys::Split { nope: keys, rope },
        };
        Ok((keys, values))
    }

    /// The width of a head's key in the backend's layout.
    fn keys_width(&self) -> usize {
        let [_, _, nope, rope, ..] = self.config.problem.extents();
        match self.prefill.spec().key_layout {
            KeyLayout::Packed => nope + rope,
            KeyLayout::Split => nope,
        }
    }
}
