//! Graphs on a GPU. There is one for each of some sizes, and it is launched by one call.

use mla_kernels::Cuda;
use mla_kernels::decode_graph::{DecodeGraph, DecodeShape};
use mla_runtime::Result;
use mla_runtime::prelude::*;

use super::Graphs;
use crate::memory::{Memory, Shared};
use crate::model::Model;

/// The numbers of requests for which there are graphs.
const SIZES: [usize; 6] = [1, 2, 4, 8, 16, 32];

impl Graphs for Cuda {
    /// The graphs by the number of new tokens of a request.
    type Captured = Vec<(u32, Vec<DecodeGraph>)>;

    fn capture(
        model: &Model<Self>,
        shared: &mut Shared<Self>,
        memory: &mut Memory<Self>,
        query_lens: &[u32],
    ) -> Result<Self::Captured> {
        let limits = *shared.limits();
        let page = model.layer().config().problem.page_size;
        let max_len = limits.pages_per_request as u32 * page;
        let fits = |size: &usize, len: u32| {
            *size <= limits.requests && size * len as usize <= limits.tokens
        };
        let mut graphs = Vec::new();
        for &len in query_lens {
            let sizes: Vec<usize> = SIZES.into_iter().filter(|size| fits(size, len)).collect();
            let record = |shared: &mut Shared<Self>, shape: DecodeShape| {
                model.enqueue(shared, memory, shape.tokens())
            };
            let of_len =
                DecodeGraph::capture_sizes(model.layer(), shared, &sizes, len, max_len, record)?;
            graphs.push((len, of_len));
        }
        Ok(graphs)
    }

    fn replay(
        graphs: &mut Self::Captured,
        model: &Model<Self>,
        shared: &mut Shared<Self>,
        step: &StepPlan,
    ) -> Result<bool> {
        let len = step.requests().first().map_or(0, |request| request.q);
        if step.requests().iter().any(|request| request.q != len) {
            return Ok(false);
        }
        // The library, for a step that is replayed:
        let of_len = graphs.iter_mut().find(|(of, _)| *of == len);
        let Some(graph) =
            of_len.and_then(|(_, all)| DecodeGraph::for_requests(all, step.requests().len()))
        else {
            return Ok(false);
        };
        // SAFETY: the runner owns all captured memory and frees none of it before the graph. It
        // uses one stream, and its allocator hands out only pages of the cache.
        unsafe { graph.replay(model.layer(), shared, step) }?;
        // End of the library.
        Ok(true)
    }
}
