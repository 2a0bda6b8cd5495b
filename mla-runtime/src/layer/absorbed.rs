//! The absorbed path: every head attends to the rows of the cache itself.

use super::arena::regions;
use super::{LayerCall, MlaLayer, Workspace};
use crate::Result;
use crate::backend::{DecodeCall, DecodeStage, Output, PrefillStage, Query, SlotLists};
use crate::device::{Device, absorption};
use crate::plan::memory::RegionName;
use crate::spec::QueryFormat;
use crate::tensor::{ArrayRef, Memory, TensorRef};

/// The work that is combined with the absorption of queries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Absorbing {
    /// The cache write of all tokens.
    Writing,
    /// No other work.
    Alone,
    /// No other work. The product is enqueued directly after the selection of a sparse layer. That
    /// selection waits for the work that made the call's queries. It also waits for the attention
    /// of the previous layer, which reads the absorbed queries. The selection itself accesses
    /// neither of these tensors ([`Device::gemm_ready`]).
    Ready,
}

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> MlaLayer<P, D> {
    pub(crate) fn enqueue_absorbed(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
        absorbing: Absorbing,
    ) -> Result<()> {
        self.enqueue_absorbed_queries(workspace, call, absorbing)?;
        self.enqueue_absorbed_attention(workspace, call)
    }

    /// Enqueues `q_lat = q_nope · W_UK`, one product per head. Attention needs it first.
    pub(crate) fn enqueue_absorbed_queries(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
        absorbing: Absorbing,
    ) -> Result<()> {
        let step = &workspace.step;
        let tokens = step.absorbed_tokens;
        if tokens == 0 {
            return match absorbing {
                Absorbing::Writing => self.enqueue_cache_write(workspace, call),
                Absorbing::Alone | Absorbing::Ready => Ok(()),
            };
        }
        let names = [RegionName::AbsorbedQueries];
        let [to] = regions::<P::Device, _>(&mut workspace.scratch, &workspace.plan, names);
        let mut to = self.tensor(to, self.query_shape(tokens, call))?;
        let arrays = P::Device::bytes(&workspace.arrays);
        let query = call.query.shorten().narrow(0, 0..tokens)?;
        let rotated = call.rotary.is_some();
        let concatenated = self.decode.spec().query_format == QueryFormat::Concatenated;
        let weights = call.weights.queries.shorten();
        match absorbing {
            Absorbing::Writing => {
                let rows = call.rows(step.slots(arrays)?, step.positions(arrays)?);
                let (query, to) = (query.shorten(), to.reborrow());
                self.device
                    .write_cache_and_absorb(rows, query, weights, to)?;
            }
            Absorbing::Alone => {
                let (from, weights, to) = absorption(&query, &weights, &mut to)?;
                self.device.gemm(from, weights, to)?;
            }
            Absorbing::Ready => {
                let (from, weights, to) = absorption(&query, &weights, &mut to)?;
                // SAFETY: the selection of the layer's lists was enqueued last, and begins when
                // all before it is done. It reads logits and the step's arrays, and writes
                // lists. None of these is the call's query or the absorbed queries, which have
                // their own regions of the workspace.
                unsafe { self.device.gemm_ready(from, weights, to)? };
            }
        }
        // A cache write with rotation has already put the rotary parts there.
        if concatenated && !rotated {
            let [_, latent, nope, ..] = self.config.problem.extents();
            let (own, width) = (query.shape()[2], to.shape()[2]);
            let beside = to.narrow(2, latent..width)?;
            self.device.copy(query.narrow(2, nope..own)?, beside)?;
        }
        Ok(())
    }

    /// Enqueues attention of the absorbed queries to the cache, and then the product with W_UV. The
    /// queries have already been absorbed, and the call was [checked](MlaLayer::check) against the
    /// prepared step.
    pub(crate) fn enqueue_absorbed_attention(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
    ) -> Result<()> {
        let step = &workspace.step;
        let tokens = step.absorbed_tokens;
        if tokens == 0 {
            return Ok(());
        }
        let [heads, latent, ..] = self.config.problem.extents();
        let names = [RegionName::AbsorbedQueries, RegionName::AbsorbedOutputs];
        let [queries, outputs] =
            regions::<P::Device, _>(&mut workspace.scratch, &workspace.plan, names);
        let queries = self.tensor(queries, self.query_shape(tokens, call))?;
        let mut attended = self.tensor(outputs, [tokens, heads, latent])?;

        let arrays = P::Device::bytes(&workspace.arrays);
        let own = call.query.shorten().narrow(0, 0..tokens)?;
        let rotated = call.rotary.is_some();
        let lse = match &mut call.lse {
            Some(lse) => Some(lse.reborrow().tokens(0..tokens)?),
            None => None,
        };
        let slots = match &call.slot_lists {
            Some(lists) => Some(SlotLists {
                dense_within: step.dense_within(),
                ..lists.shorten().of_first(tokens)?
            }),
            None => None,
        };
        let attention = DecodeCall {
            query: self.query(own, queries.as_ref(), rotated)?,
            cache: call.cache.as_ref(),
            batch: step.decode_batch(arrays)?,
            out: Output::Plain(attended.reborrow()),
            lse,
            slots,
            sinks: call.sinks.as_ref().map(ArrayRef::shorten),
            query_scales: step.query_scales::<P::Device>(arrays, 0..tokens)?,
        };
        // SAFETY: the contract of a call. The checks of the call, those of the plan, and
        // `StagedStep::check_limits` establish it. Starts: `StagedStep::write_arrays` adds up the
        // absorbed requests' tokens from 0. Their sum is `tokens`, and their largest is
        // `max_query_len`, at most the limit of the state. Lengths and pages: the plan limits
        // lengths to each request's pages, and entries in use to 0 and above. `check_limits` limits
        // lengths to the capacity of the table, `StagedStep::stage_lens` makes `max_seq_len` their
        // maximum, and `check` compared the cache with `pages_end`. The host's numbers are those
        // that were staged. State and metadata belong to this workspace. `check` compared it with
        // the layer's device and problem, and `check_prepared` made sure that the step's `prepare`
        // succeeded. Arrays and scratch are the workspace's own memory, on the layer's device.
        unsafe {
            self.decode.decode(
                &self.device,
                attention,
                &mut workspace.decode_state,
                &workspace.decode_metadata,
            )?;
        }

        // out = o_lat · W_UV, one product per head.
        self.device.gemm(
            attended.as_ref().transpose(0, 1),
            call.weights.values,
            call.out.reborrow().narrow(0, 0..tokens)?.transpose(0, 1),
        )?;
        let Some(gate) = &call.gate else {
            return Ok(());
        };
        let out = call.out.reborrow().narrow(0, 0..tokens)?;
        self.device
            .scale_outputs(out, None, Some(gate.narrow(0, 0..tokens)?))
    }

    /// Returns the shape of the absorbed queries. A cache write with rotation puts the rotary part
    /// after the latent part, whatever format the backend needs.
    fn query_shape(&self, tokens: usize, call: &LayerCall<'_, P::Device>) -> [usize; 3] {
        let [heads, latent, _, rope, ..] = self.config.problem.extents();
        let width = match self.decode.spec().query_format {
            QueryFormat::Split if call.rotary.is_none() => latent,
            _ => latent + rope,
        };
        [tokens, heads, width]
    }

    /// The queries in the backend's format, from the call's `own` `[T, H, P+R]` and the `absorbed`
    /// `[T, H, width]`. The latter also hold the rotary part if a cache write has rotated it.
    fn query<'a>(
        &self,
        own: TensorRef<'a, P::Device>,
        absorbed: TensorRef<'a, P::Device>,
        rotated: bool,
    ) -> Result<Query<'a, P::Device>> {
        if self.decode.spec().query_format == QueryFormat::Concatenated {
            return Ok(Query::Concatenated(absorbed));
        }
        let [_, latent, nope, ..] = self.config.problem.extents();
        let (row, width) = (own.shape()[2], absorbed.shape()[2]);
        Ok(Query::Split {
            rope: match rotated {
                true => absorbed.narrow(2, latent..width)?,
                false => own.narrow(2, nope..row)?,
            },
            latent: absorbed.narrow(2, 0..latent)?,
        })
    }
}
