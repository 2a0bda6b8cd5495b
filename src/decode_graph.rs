//! Decode steps as CUDA graphs: captured once for a number of requests, replayed while lengths,
//! pages and slots change.
//!
//! The launches of a step of decodes depend on its counts and on the longest length that it allows
//! for. So a graph that was captured for `n` requests of `q` tokens and for `max_len` serves every
//! step of up to `n` such requests of at most `max_len` tokens: the others are padding, which
//! attends to nothing, writes no cache row, and gives zeros.
//!
//! ```text
//! once       DecodeGraphs::capture   for each size: prepare padding, run it, capture it
//! per step   replay                  fill up with padding, prepare (uploads the arrays), launch
//! ```
//!
//! The engine decides what is captured: one layer, or all of a model with everything between the
//! layers. The engine's own tensors are captured by their addresses. Before a replay it copies a
//! step's inputs to those places, and afterwards it finds the outputs there.

use mla_runtime::backend::{DecodeStage, PrefillStage, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::layer::{MlaLayer, StepBatch, Workspace, WorkspaceId};
use mla_runtime::plan::slots::{BlockTables, HostIndex, SKIPPED};
use mla_runtime::{Error, Result};

use crate::device::{Cuda, Graph};

/// Shape of the steps for which a graph is captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DecodeShape {
    /// The requests of a step, padding included.
    pub requests: usize,
    /// The new tokens of each.
    pub query_len: u32,
    /// The maximum number of tokens that a request has in any replay.
    pub max_len: u32,
    /// True if its steps are [causal](StepBatch::causal).
    pub causal: bool,
}

impl DecodeShape {
    /// Makes a shape of `requests` requests with `query_len` new tokens each and at most `max_len`
    /// tokens in all.
    pub const fn new(requests: usize, query_len: u32, max_len: u32) -> Self {
        Self {
            requests,
            query_len,
            max_len,
            causal: true,
        }
    }

    /// Returns the same shape for steps that are causal or not.
    #[must_use]
    pub const fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Returns the tokens of a step, padding included; `usize::MAX` if there are more.
    pub const fn tokens(&self) -> usize {
        self.requests.saturating_mul(self.query_len as usize)
    }

    /// Refuses a shape that steps within `limits` on pages of `page_size` tokens cannot have.
    fn check(&self, limits: &StepLimits, page_size: u32) -> Result<()> {
        let query_len = self.query_len as usize;
        for (field, given, limit, max) in [
            (
                "shape.query_len",
                query_len,
                "limits.decode_query_len",
                limits.decode_query_len,
            ),
            (
                "shape.requests",
                self.requests,
                "limits.requests",
                limits.requests,
            ),
        ] {
            if given == 0 || given > max {
                let accepted = format!("1 to {limit} = {max}");
                return Err(Error::argument(field, given, accepted));
            }
        }
        let max_pages = limits.pages_per_request;
        if max_pages == 0 {
            return Err(Error::argument("limits.pages_per_request", 0, "1 and up"));
        }
        // The workspace's limits keep it within 31 bits.
        let longest = max_pages * page_size as usize;
        if self.max_len as usize > longest {
            let accepted =
                format!("at most {longest} tokens, which the workspace's block table has room for");
            return Err(Error::argument("shape.max_len", self.max_len, accepted));
        }
        Ok(())
    }
}

/// A captured step of decodes.
pub struct DecodeGraph {
    graph: Graph,
    shape: DecodeShape,
    workspace: WorkspaceId,
    padded: Padded,
}

impl DecodeGraph {
    /// Captures what `record` enqueues for a step of `shape`. It is called twice, the first time
    /// without capturing, so that nothing is loaded for the first time while the graph is captured;
    /// both times every request is padding.
    ///
    /// # Errors
    ///
    /// If the shape exceeds the workspace's limits or has requests that the layer does not put on
    /// the absorbed path, `record` fails, or something in it cannot be captured.
    pub fn capture<P, D>(
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        shape: DecodeShape,
        mut record: impl FnMut(&mut Workspace<P, D>) -> Result<()>,
    ) -> Result<Self>
    where
        P: PrefillStage<Device = Cuda>,
        D: DecodeStage<Device = Cuda>,
    {
        let page_size = layer.config().problem.page_size;
        shape.check(workspace.limits(), page_size)?;
        let max_pages = workspace.limits().pages_per_request;
        let mut padded = Padded::new(shape, max_pages, page_size)?;
        padded.fill(&StepBatch::new(
            &[],
            BlockTables::<i32>::new(&[], 1, page_size)?,
        ))?;
        padded.prepare(layer, workspace)?;
        record(workspace)?;
        let device = layer.device();
        let graph = device.capture(|_| record(workspace))?;
        graph.upload()?;
        Ok(Self {
            graph,
            shape,
            workspace: workspace.id(),
            padded,
        })
    }

    /// Returns the shape for which the graph was captured.
    pub fn shape(&self) -> DecodeShape {
        self.shape
    }

    /// Prepares the step, filled up with padding behind its own requests, and enqueues the graph.
    /// The batch's `threshold` and `max_len` are the graph's, and its `dense_within` is taken as 0:
    /// every request goes by its slot lists.
    ///
    /// # Safety
    ///
    /// As [`Graph::replay`]: all memory that was captured is still allocated and stays so until the
    /// stream has passed this, and no other stream accesses it in conflict meanwhile. The cache has
    /// every page and slot that the batch names; that was checked of the captured step alone.
    ///
    /// # Errors
    ///
    /// If the batch does not fit the graph, the workspace is not the one that it was captured with,
    /// or the device fails.
    pub unsafe fn replay<P, D, T, S>(
        &mut self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        batch: &StepBatch<'_, T, S>,
    ) -> Result<()>
    where
        P: PrefillStage<Device = Cuda>,
        D: DecodeStage<Device = Cuda>,
        T: HostIndex,
        S: HostIndex,
    {
        if workspace.id() != self.workspace {
            return Err(Error::argument(
                "workspace",
                format!("{:?}", workspace.id()),
                format!("{:?}, with which the graph was captured", self.workspace),
            ));
        }
        self.check(batch)?;
        self.padded.fill(batch)?;
        self.padded.prepare(layer, workspace)?;
        // SAFETY: the contract of `Graph::replay`, which is this function's own.
        unsafe { self.graph.replay() }
    }

    fn check<T: HostIndex, S: HostIndex>(&self, batch: &StepBatch<'_, T, S>) -> Result<()> {
        let DecodeShape {
            requests,
            query_len,
            max_len,
            causal,
        } = self.shape;
        if batch.causal != causal && query_len > 1 {
            let accepted = format!("{causal}, for which the graph was captured");
            return Err(Error::argument("causal", batch.causal, accepted));
        }
        if batch.requests.len() > requests {
            return Err(Error::argument(
                "requests",
                batch.requests.len(),
                format!("at most {requests}, for which the graph was captured"),
            ));
        }
        if batch.block_tables.requests() < batch.requests.len() {
            return Err(Error::argument(
                "block_tables",
                format!("{} rows", batch.block_tables.requests()),
                format!("a row for each of {} requests", batch.requests.len()),
            ));
        }
        if let Some(rows) = batch.rows {
            let starts = rows.starts.iter().enumerate();
            if let Some((index, start)) = starts
                .clone()
                .find(|(index, start)| **start != index.saturating_mul(query_len as usize))
            {
                return Err(Error::argument(
                    "rows.starts",
                    format!("{start} of request {index}"),
                    "rows in the order of the requests: the graph was captured for them",
                ));
            }
        }
        let tables = batch.block_tables;
        if tables.page_size() != self.padded.page_size {
            return Err(Error::argument(
                "block_tables.page_size",
                tables.page_size(),
                format!("the problem's, {}", self.padded.page_size),
            ));
        }
        let room = tables.max_pages() as u64 * u64::from(tables.page_size());
        let longest = room.min(max_len.into());
        for (index, request) in batch.requests.iter().enumerate() {
            if request.q != query_len {
                return Err(Error::argument(
                    "requests.q",
                    format!("{} of request {index}", request.q),
                    format!("{query_len}, for which the graph was captured"),
                ));
            }
            if u64::from(request.kv) > longest {
                return Err(Error::argument(
                    "requests.kv",
                    format!("{} of request {index}", request.kv),
                    format!(
                        "at most {longest}: the graph was captured for {max_len}, and the block \
                         table has room for {room}"
                    ),
                ));
            }
        }
        let tokens = batch.requests.len() * query_len as usize;
        match batch.slots {
            Some(slots) if slots.len() != tokens => Err(Error::argument(
                "slots",
                format!("{} entries", slots.len()),
                format!("one for each of {tokens} new tokens"),
            )),
            _ => Ok(()),
        }
    }
}

/// A batch that was filled up with padding to the number of requests of a graph. It allocates when
/// it is made and never again.
struct Padded {
    shape: DecodeShape,
    page_size: u32,
    max_pages: usize,
    requests: Vec<Request>,
    tables: Vec<i32>,
    slots: Vec<i64>,
    /// True if the step has `slots`; false if the block tables say where every token's row is
    /// written.
    has_slots: bool,
}

impl Padded {
    fn new(shape: DecodeShape, max_pages: usize, page_size: u32) -> Result<Self> {
        let entries = shape.requests.saturating_mul(max_pages);
        let tables = bytemuck::try_zeroed_vec(entries).map_err(|()| too_long::<i32>(entries))?;
        Ok(Self {
            shape,
            page_size,
            max_pages,
            requests: with_room(shape.requests)?,
            tables,
            slots: with_room(shape.tokens())?,
            has_slots: false,
        })
    }

    /// Copies a batch that was checked to fit.
    fn fill<T: HostIndex, S: HostIndex>(&mut self, batch: &StepBatch<'_, T, S>) -> Result<()> {
        let padding = Request::new(self.shape.query_len, 0);
        self.requests.clear();
        self.requests.extend_from_slice(batch.requests);
        self.requests.resize(self.shape.requests, padding);
        self.slots.clear();
        self.has_slots = batch.slots.is_some();
        for (token, slot) in batch.slots.unwrap_or_default().iter().enumerate() {
            let number = slot.to_i64().ok_or_else(|| {
                let accepted = "where the block table has it, or −1";
                Error::argument("slots", format!("{slot} of token {token}"), accepted)
            })?;
            self.slots.push(number);
        }
        self.slots.resize(self.shape.tokens(), SKIPPED);
        let tables = batch.block_tables;
        let from = tables.entries().chunks(tables.max_pages());
        let rows = self.tables.chunks_exact_mut(self.max_pages).zip(from);
        for (index, ((to, from), request)) in rows.zip(batch.requests).enumerate() {
            let pages = request.kv.div_ceil(self.page_size) as usize;
            for (place, (to, from)) in to.iter_mut().zip(&from[..pages]).enumerate() {
                *to = from.to_page().map_err(|accepted| {
                    let given = format!("{from} at [{index}][{place}]");
                    Error::argument("block_tables", given, accepted)
                })?;
            }
        }
        Ok(())
    }

    fn prepare<P, D>(&self, layer: &MlaLayer<P, D>, workspace: &mut Workspace<P, D>) -> Result<()>
    where
        P: PrefillStage<Device = Cuda>,
        D: DecodeStage<Device = Cuda>,
    {
        workspace.prepare(
            layer,
            &StepBatch::new(
                &self.requests,
                BlockTables::new(&self.tables, self.max_pages, self.page_size)?,
            )
            .with_slots(self.has_slots.then_some(&self.slots[..]))
            .with_threshold(Some(self.shape.query_len))
            .with_causal(self.shape.causal)
            .with_max_len(Some(self.shape.max_len)),
        )?;
        let (given, accepted) = (workspace.absorbed_tokens(), self.shape.tokens());
        if given == accepted {
            return Ok(());
        }
        Err(Error::argument(
            "shape.query_len",
            self.shape.query_len,
            format!(
                "a length that the problem has ({})",
                layer.config().problem.query_len
            ),
        ))
    }
}

/// Makes an empty list with room for `len` elements.
fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    let reserved = list.try_reserve_exact(len);
    reserved.map(|()| list).map_err(|_| too_long::<T>(len))
}

fn too_long<T>(len: usize) -> Error {
    Error::OutOfMemory {
        device: "host",
        bytes: (len as u64).saturating_mul(size_of::<T>() as u64),
        free: None,
    }
}

/// Graphs for several numbers of requests. A step runs in the smallest that holds it.
pub struct DecodeGraphs {
    // The graphs, ascending by requests.
    graphs: Vec<DecodeGraph>,
}

impl DecodeGraphs {
    /// Captures a graph for each of `sizes` requests; `record` is told the shape.
    ///
    /// # Errors
    ///
    /// As [`DecodeGraph::capture`].
    pub fn capture<P, D>(
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        sizes: &[usize],
        query_len: u32,
        max_len: u32,
        mut record: impl FnMut(&mut Workspace<P, D>, DecodeShape) -> Result<()>,
    ) -> Result<Self>
    where
        P: PrefillStage<Device = Cuda>,
        D: DecodeStage<Device = Cuda>,
    {
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let graphs = sizes.into_iter().map(|requests| {
            let shape = DecodeShape::new(requests, query_len, max_len);
            DecodeGraph::capture(layer, workspace, shape, |workspace| {
                record(workspace, shape)
            })
        });
        Ok(Self {
            graphs: graphs.collect::<Result<_>>()?,
        })
    }

    /// Returns the smallest graph for a step of `requests` requests, if there is one.
    pub fn for_requests(&mut self, requests: usize) -> Option<&mut DecodeGraph> {
        self.graphs
            .iter_mut()
            .find(|graph| graph.shape.requests >= requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_no_memory_holds_is_an_error() {
        let huge = DecodeShape::new(usize::MAX / 8, 1, 1);
        let refused = Padded::new(huge, 4, 64).map(drop).unwrap_err();
        assert!(
            matches!(refused, Error::OutOfMemory { device: "host", .. }),
            "{refused}"
        );
    }
}
