//! The absorbed path: every head attends to the cache's own rows.

use super::arena::Arena;
use super::{LayerCall, MlaLayer, Workspace};
use crate::backend::{DecodeCall, DecodeStage, Output, PrefillStage, Query, SlotLists};
use crate::device::{AbsorbedQueries, Device, Memory};
use crate::error::Result;
use crate::spec::QueryFormat;

impl<P: PrefillStage, D: DecodeStage<Device = P::Device>> MlaLayer<P, D> {
    /// With `writes`, the cache write of all tokens goes with it.
    pub(crate) fn enqueue_absorbed(
        &self,
        workspace: &mut Workspace<P, D>,
        call: &mut LayerCall<'_, P::Device>,
        writes: bool,
    ) -> Result<()> {
        let step = &workspace.step;
        let tokens = step.absorbed_tokens();
        if tokens == 0 {
            if writes {
                self.enqueue_cache_write(workspace, call)?;
            }
            return Ok(());
        }
        let problem = &self.config.problem;
        let dims = problem.dims;
        let [heads, latent, rope, nope] =
            [problem.heads, dims.latent, dims.head.rope, dims.head.nope].map(|n| n as usize);

        let regions = &workspace.regions;
        let mut arena = Arena::<P::Device>::new(P::Device::bytes_mut(&mut workspace.scratch));
        let queries = arena.take(&regions.absorbed_queries);
        let outputs = arena.take(&regions.absorbed_outputs);

        // q_lat = q_nope · W_UK, one product per head.
        let query = call.query.shorten().narrow(0, 0..tokens)?;
        let query_rope = query.narrow(2, nope..nope + rope)?;
        let format = self.decode.spec().query_format;
        let rotated = call.rotary.is_some();
        let width = match format {
            QueryFormat::Split if !rotated => latent,
            _ => latent + rope,
        };
        let mut absorbed = self.tensor(queries, [tokens, heads, width])?;
        {
            let mut queries = AbsorbedQueries {
                query: query.shorten(),
                weights: call.weights.queries.shorten(),
                to: absorbed.reborrow(),
            };
            if writes {
                let arrays = P::Device::bytes(&workspace.arrays);
                let rows = call.rows(step.slots(arrays)?, step.positions(arrays)?);
                self.device.write_cache_and_absorb(rows, queries)?;
            } else {
                let (from, weights, to) = queries.product()?;
                self.device.gemm_weights(from, weights, to)?;
            }
        }
        // The cache write has put rotated ones there.
        if format == QueryFormat::Concatenated && !rotated {
            let beside = absorbed.reborrow().narrow(2, latent..width)?;
            self.device.copy(query_rope, beside)?;
        }
        let query = match format {
            QueryFormat::Concatenated => Query::Concatenated(absorbed.as_ref()),
            QueryFormat::Split => Query::Split {
                latent: absorbed.as_ref().narrow(2, 0..latent)?,
                rope: match rotated {
                    true => absorbed.as_ref().narrow(2, latent..width)?,
                    false => query_rope,
                },
            },
        };

        let mut attended = self.tensor(outputs, [tokens, heads, latent])?;
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
        self.decode.decode(
            &self.device,
            DecodeCall {
                query,
                cache: call.cache.as_ref(),
                batch: step.decode_batch(P::Device::bytes(&workspace.arrays))?,
                out: Output::Plain(attended.reborrow()),
                lse,
                slots,
            },
            &mut workspace.decode_state,
            &workspace.decode_metadata,
        )?;

        // out = o_lat · W_UV, one product per head.
        self.device.gemm_weights(
            attended.as_ref().transpose(0, 1),
            call.weights.values,
            call.out.reborrow().narrow(0, 0..tokens)?.transpose(0, 1),
        )
    }
}
