//! A decode backend for the CPU, as simple as possible.

use mla_cpu::{Cpu, ReadRow as _};
use mla_runtime::backend::{DecodeBackend, DecodeCall, LayerConfig, Output, Query, StepLimits};
use mla_runtime::{Error, Result, mla_backend};

/// A backend that processes one row of the cache after the other.
pub struct Simple(LayerConfig);

#[mla_backend(sm = "any", dtypes = "f32,bf16", query_len = "ragged", priority = -1)]
impl DecodeBackend for Simple {
    type Device = Cpu;
    type State = ();
    type Metadata = ();

    fn new(_: &Cpu, config: &LayerConfig) -> Result<Self> {
        Ok(Self(*config))
    }

    fn state(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    fn metadata(&self, _: &Cpu, _: &StepLimits) -> Result<()> {
        Ok(())
    }

    unsafe fn decode(&self, _: &Cpu, call: DecodeCall<'_, Cpu>, _: &mut (), _: &()) -> Result<()> {
        let (Query::Split { latent, rope }, Output::Plain(mut out)) = (call.query, call.out) else {
            return Err(Error::argument("call", "another form", "split and plain"));
        };
        let (problem, tokens) = (&self.0.problem, latent.shape()[0]);
        let [l, r, heads] =
            [problem.dims.latent, problem.dims.head.rope, problem.heads].map(|n| n as usize);
        let shape = |width| [tokens, heads, width];
        latent.layout().require("latent", problem.dtype, shape(l))?;
        rope.layout().require("rope", problem.dtype, shape(r))?;
        out.layout().require("out", problem.dtype, shape(l))?;
        let (batch, mut lse, mut row) = (call.batch, call.lse, vec![0.0; l + r]);
        let page_size = problem.page_size as usize;
        for request in 0..batch.block_table.requests() {
            let table = request * batch.block_table.max_pages();
            let [first, end] = [0, 1].map(|i| batch.query_starts.at(request + i) as usize);
            for (t, h) in (first..end).flat_map(|t| (0..heads).map(move |h| (t, h))) {
                // The last query token sees every row, and each earlier token sees one row less.
                let seen = (batch.seq_lens.at(request) as usize + t + 1).saturating_sub(end);
                let (mut max, mut sum, mut acc) = (f32::NEG_INFINITY, 0.0, vec![0.0; l]);
                for position in 0..seen {
                    let page = batch.block_table.entries().at(table + position / page_size);
                    let slot = page as usize * page_size + position % page_size;
                    call.cache.read_row(slot, &mut row)?;
                    let dot = (0..l).map(|k| latent.at([t, h, k]) * row[k]).sum::<f32>()
                        + (0..r).map(|k| rope.at([t, h, k]) * row[l + k]).sum::<f32>();
                    let score = dot * self.0.softmax_scale;
                    // A new maximum scales down the sums so far.
                    let greater = score.max(max);
                    let (old, weight) = ((max - greater).exp(), (score - greater).exp());
                    (max, sum) = (greater, sum * old + weight);
                    for k in 0..l {
                        acc[k] = acc[k] * old + weight * row[k];
                    }
                }
                for (k, acc) in acc.iter().enumerate() {
                    out.set([t, h, k], if seen == 0 { 0.0 } else { acc / sum });
                }
                if let Some(lse) = &mut lse {
                    lse.set(h, t, max + sum.ln());
                }
            }
        }
        Ok(())
    }
}
