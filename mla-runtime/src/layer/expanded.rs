//! The expanded path: keys and values per head, of the new tokens and of chunks of their context.

use super::arena::Arena;
use super::{LayerCall, MlaLayer, Weights, Workspace};
use crate::backend::{DecodeStage, Keys, Output, PrefillCall, PrefillStage};
use crate::cache::CacheRef;
use crate::device::{Device, GatherRows, Memory};
use crate::error::Result;
use crate::lse::{LseLayout, LseMut};
use crate::spec::KeyLayout;
use crate::tensor::{Layout, TensorMut, TensorRef};

/// Where expanded keys and values are put.
///
/// A backend that takes a head's own key and its values as they come gets two views of one product
/// with the whole of `W_kv_b`. For one that wants keys packed or values padded, the product is done
/// in two parts, each of which writes its columns where the backend will read them: so nothing is
/// copied afterwards but the rotary part, which every head's packed key repeats.
enum Room<'a, D: Device> {
    Together(D::BytesMut<'a>),
    Apart {
        keys: D::BytesMut<'a>,
        values: D::BytesMut<'a>,
    },
}

/// Latents and rotary keys.
type Rows<'a, D> = (TensorMut<'a, D>, TensorMut<'a, D>);

/// Keys and values.
type Expansion<'a, D> = (Keys<'a, D>, TensorRef<'a, D>);

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
        let problem = &self.config.problem;
        let dims = problem.dims;
        let [heads, v] = [problem.heads, dims.head.v].map(|n| n as usize);
        let values_width = self.values_width();
        let padded = values_width > v;

        let regions = &workspace.regions;
        let mut arena = Arena::<P::Device>::new(P::Device::bytes_mut(&mut workspace.scratch));
        let mut context_latent = arena.take(&regions.context_latent);
        let mut context_rope = arena.take(&regions.context_rope);
        let together = arena.take(&regions.expanded_kv);
        let keys = arena.take(&regions.expanded_keys);
        let values = arena.take(&regions.expanded_values);
        let mut partial = arena.take(&regions.partial_outputs);
        let mut partial_lse = arena.take(&regions.partial_lse);
        let own_lse = arena.take(&regions.expanded_lse);
        let mut room = if padded || self.packed_keys() {
            Room::Apart { keys, values }
        } else {
            Room::Together(together)
        };

        let first = step.absorbed_tokens();
        let all = first..first + tokens;
        let query = call.query.shorten().narrow(0, all.clone())?;
        let mut out = call.out.reborrow().narrow(0, all.clone())?;
        let mut lse = match &mut call.lse {
            Some(lse) => Some(lse.reborrow().tokens(all.clone())?),
            // Without context there is one partial result, and nothing to merge it with.
            None if step.context().chunks.is_empty() => None,
            None => Some(LseMut::new(own_lse, LseLayout::heads_first(heads, tokens))?),
        };

        // The new tokens among themselves, or with their context, all from the cache.
        {
            let (gathered, key_starts) =
                match step.one_call::<P::Device>(P::Device::bytes(&workspace.arrays))? {
                    Some(one) => {
                        let latent = P::Device::reborrow(&mut context_latent);
                        let rope = P::Device::reborrow(&mut context_rope);
                        let rows = self.gather(call.cache.as_ref(), one.gather, latent, rope)?;
                        (Some(rows), Some((one.key_starts, one.max_key_len)))
                    }
                    None => (None, None),
                };
            let (rows_latent, rows_rope) = match &gathered {
                Some((latent, rope)) => (latent.as_ref(), rope.as_ref()),
                None => (
                    call.latent.shorten().narrow(0, all.clone())?,
                    call.rope.shorten().narrow(0, all)?,
                ),
            };
            let (keys, values) = self.expand(&call.weights, rows_latent, rows_rope, &mut room)?;
            let bytes = P::Device::reborrow(&mut partial);
            let mut wide = match padded {
                true => Some(self.tensor(bytes, [tokens, heads, values_width])?),
                false => None,
            };
            let starts = || step.expanded_starts(P::Device::bytes(&workspace.arrays));
            let longest = step.max_expanded_query_len();
            let (key_starts, max_key_len) = match key_starts {
                Some(of_all) => of_all,
                None => (starts()?, longest),
            };
            self.prefill.prefill(
                &self.device,
                PrefillCall {
                    chunk: None,
                    query: query.shorten(),
                    keys,
                    values,
                    out: Output::Plain(match &mut wide {
                        Some(wide) => wide.reborrow(),
                        None => out.reborrow(),
                    }),
                    lse: lse.as_mut().map(LseMut::reborrow),
                    query_starts: starts()?,
                    key_starts,
                    max_query_len: longest,
                    max_key_len,
                },
                &mut workspace.prefill_state,
                &workspace.prefill_metadata,
            )?;
            if let Some(wide) = &wide {
                self.device
                    .copy(wide.as_ref().narrow(2, 0..v)?, out.reborrow())?;
            }
        }

        // Their context, chunk by chunk.
        let Some(lse) = &mut lse else { return Ok(()) };
        for index in 0..step.context().chunks.len() {
            let chunk = step.chunk::<P::Device>(index, P::Device::bytes(&workspace.arrays))?;
            let (rows_latent, rows_rope) = self.gather(
                call.cache.as_ref(),
                chunk.gather,
                P::Device::reborrow(&mut context_latent),
                P::Device::reborrow(&mut context_rope),
            )?;
            let (keys, values) = self.expand(
                &call.weights,
                rows_latent.as_ref(),
                rows_rope.as_ref(),
                &mut room,
            )?;
            let count = chunk.tokens.len();
            let bytes = P::Device::reborrow(&mut partial);
            let mut chunk_out = self.tensor(bytes, [count, heads, values_width])?;
            let bytes = P::Device::reborrow(&mut partial_lse);
            let mut chunk_lse = LseMut::new(bytes, LseLayout::heads_first(heads, count))?;
            self.prefill.prefill(
                &self.device,
                PrefillCall {
                    chunk: chunk.chunk,
                    query: query.shorten().narrow(0, chunk.tokens.clone())?,
                    keys,
                    values,
                    out: Output::Plain(chunk_out.reborrow()),
                    lse: Some(chunk_lse.reborrow()),
                    query_starts: chunk.query_starts,
                    key_starts: chunk.key_starts,
                    max_query_len: chunk.max_query_len,
                    max_key_len: chunk.max_key_len,
                },
                &mut workspace.prefill_state,
                &workspace.prefill_metadata,
            )?;
            self.device.merge(
                out.reborrow().narrow(0, chunk.tokens.clone())?,
                lse.reborrow().tokens(chunk.tokens.clone())?,
                chunk_out.as_ref().narrow(2, 0..v)?,
                chunk_lse.as_ref(),
            )?;
        }
        Ok(())
    }

    /// The rows of a call, gathered from the cache: `[rows, 1, L]` and `[rows, 1, R]`.
    fn gather<'a>(
        &self,
        cache: CacheRef<'_, P::Device>,
        rows: GatherRows<'_, P::Device>,
        latent: <P::Device as Memory>::BytesMut<'a>,
        rope: <P::Device as Memory>::BytesMut<'a>,
    ) -> Result<Rows<'a, P::Device>> {
        let dims = self.config.problem.dims;
        let mut latent = self.tensor(latent, [rows.rows, 1, dims.latent as usize])?;
        let mut rope = self.tensor(rope, [rows.rows, 1, dims.head.rope as usize])?;
        self.device
            .gather_cache(cache, rows, latent.reborrow(), rope.reborrow())?;
        Ok((latent, rope))
    }

    /// `[k_nope | v] = c · W_kv_b` of `latent` `[N, 1, L]` and `rope` `[N, 1, R]`, as the backend
    /// wants them.
    fn expand<'a>(
        &self,
        weights: &Weights<'_, P::Device>,
        latent: TensorRef<'_, P::Device>,
        rope: TensorRef<'a, P::Device>,
        room: &'a mut Room<'_, P::Device>,
    ) -> Result<Expansion<'a, P::Device>> {
        let rows = latent.shape()[0];
        self.write_expansion(weights, latent, rope, room)?;
        self.read_expansion(rows, rope, room)
    }

    fn write_expansion(
        &self,
        weights: &Weights<'_, P::Device>,
        latent: TensorRef<'_, P::Device>,
        rope: TensorRef<'_, P::Device>,
        room: &mut Room<'_, P::Device>,
    ) -> Result<()> {
        let problem = &self.config.problem;
        let head = problem.dims.head;
        let [heads, nope, v] = [problem.heads, head.nope, head.v].map(|n| n as usize);
        // As [1, N, L].
        let latent = latent.transpose(0, 1);
        let rows = latent.shape()[1];
        match room {
            Room::Together(bytes) => {
                let shape = [1, rows, heads * (nope + v)];
                let product = self.tensor(P::Device::reborrow(bytes), shape)?;
                self.device.gemm_weights(latent, weights.kv, product)
            }
            Room::Apart { keys, values } => {
                let latent = latent.broadcast(0, heads)?;
                let width = self.keys_width();
                let mut keys = self.tensor(P::Device::reborrow(keys), [rows, heads, width])?;
                let own = keys.reborrow().narrow(2, 0..nope)?;
                self.device
                    .gemm_weights(latent, weights.keys, own.transpose(0, 1))?;
                if width > nope {
                    let shared = keys.narrow(2, nope..width)?;
                    self.device.copy(rope.broadcast(1, heads)?, shared)?;
                }
                let width = self.values_width();
                let values = self.tensor(P::Device::reborrow(values), [rows, heads, width])?;
                // What pads them is zero since it was allocated: these columns lie at the same
                // places whatever the number of rows, and nothing else is ever written there.
                let own = values.narrow(2, 0..v)?;
                self.device
                    .gemm_weights(latent, weights.values, own.transpose(0, 1))?;
                Ok(())
            }
        }
    }

    fn read_expansion<'a>(
        &self,
        rows: usize,
        rope: TensorRef<'a, P::Device>,
        room: &'a Room<'_, P::Device>,
    ) -> Result<Expansion<'a, P::Device>> {
        let problem = &self.config.problem;
        let head = problem.dims.head;
        let [heads, nope, v] = [problem.heads, head.nope, head.v].map(|n| n as usize);
        let tensor = |bytes, width| {
            let layout = Layout::contiguous(problem.dtype, [rows, heads, width]);
            TensorRef::<P::Device>::new(P::Device::freeze(bytes), layout)
        };
        let (keys, values) = match room {
            Room::Together(bytes) => {
                let both = tensor(bytes, nope + v)?;
                (both.narrow(2, 0..nope)?, both.narrow(2, nope..nope + v)?)
            }
            Room::Apart { keys, values } => (
                tensor(keys, self.keys_width())?,
                tensor(values, self.values_width())?,
            ),
        };
        let keys = match self.prefill.spec().key_layout {
            KeyLayout::Packed => Keys::Packed(keys),
            KeyLayout::Split => Keys::Split { nope: keys, rope },
        };
        Ok((keys, values))
    }

    /// The width of a head's key as the backend takes it.
    fn keys_width(&self) -> usize {
        let head = self.config.problem.dims.head;
        let width = match self.prefill.spec().key_layout {
            KeyLayout::Packed => head.qk(),
            KeyLayout::Split => head.nope,
        };
        width as usize
    }

    /// The width of values and outputs as the backend takes them.
    fn values_width(&self) -> usize {
        let head = self.config.problem.dims.head;
        let width = match self.prefill.spec().padded_values {
            true => head.qk().max(head.v),
            false => head.v,
        };
        width as usize
    }
}
