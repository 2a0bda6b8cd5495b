//! Decode steps as CUDA graphs: captured once for a number of requests, then replayed while
//! lengths, pages and slots change.
//!
//! The launches of a decode step depend on its counts and on its maximum length. A graph captured
//! for `n` requests of `q` tokens and for `max_len` serves every step of up to `n` such requests of
//! at most `max_len` tokens. The other requests are padding: they attend to nothing, write no cache
//! row, and give zeros.
//!
//! ```text
//! once       capture_sizes   for each size: prepare padding, run it, capture it
//! per step   replay          fill up with padding, prepare (uploads the arrays), launch
//! ```
//!
//! The engine decides what is captured: one layer, or a whole model with everything between the
//! layers. The engine's own tensors are captured by their addresses. Before a replay the engine
//! copies a step's inputs to these addresses. Afterwards it finds the outputs there.

use mla_runtime::backend::{DecodeStage, PrefillStage, StepLimits};
use mla_runtime::layer::{MlaLayer, StepPlan, StepRequest, Workspace};
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::{Error, Result};

use crate::device::{Cuda, Graph};

/// Shape of the steps for which a graph is captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DecodeShape {
    /// The number of requests of a step, padding included.
    pub requests: usize,
    /// The number of new tokens of each request.
    pub query_len: u32,
    /// The maximum number of tokens that a request has in any replay.
    pub max_len: u32,
    /// True if the graph's steps are [causal](StepPlan::with_causal).
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

    /// Returns the number of tokens of a step, padding included, or `usize::MAX` if it is larger.
    pub const fn tokens(&self) -> usize {
        self.requests.saturating_mul(self.query_len as usize)
    }

    /// Refuses a shape that decode steps of `problem` within `limits` cannot have.
    fn check(&self, limits: &StepLimits, problem: &Problem) -> Result<()> {
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
        if problem.query_len == QueryLen::Single && self.query_len > 1 {
            let accepted = format!("a length that the problem has ({})", problem.query_len);
            return Err(Error::argument("shape.query_len", self.query_len, accepted));
        }
        let max_pages = limits.pages_per_request;
        if max_pages == 0 {
            return Err(Error::argument("limits.pages_per_request", 0, "1 and up"));
        }
        // The workspace's limits keep this product within 31 bits.
        let longest = max_pages * problem.page_size as usize;
        if self.max_len as usize > longest {
            let accepted =
                format!("at most {longest} tokens, which the workspace's block table has room for");
            return Err(Error::argument("shape.max_len", self.max_len, accepted));
        }
        Ok(())
    }

    /// Makes a step of this shape in which every request is padding.
    fn padding(&self, limits: &StepLimits, problem: &Problem) -> Result<StepPlan> {
        let padding = vec![StepRequest::<i32>::new(self.query_len, 0, &[]); self.requests];
        let step = StepPlan::in_order(problem, limits, self.query_len, 0, &padding)?;
        let step = step.with_causal(self.causal);
        Ok(step.with_max_len(Some(self.max_len)))
    }
}

/// A captured step of decodes.
pub struct DecodeGraph {
    graph: Graph,
    shape: DecodeShape,
    /// The number of the workspace with which the graph was captured.
    workspace: u64,
}

impl DecodeGraph {
    /// Captures what `record` enqueues for a step of `shape`.
    ///
    /// `record` is called twice, both times with a step of padding alone. The first call is not
    /// captured, so that everything is loaded before the graph is captured.
    ///
    /// # Errors
    ///
    /// If the shape exceeds the workspace's limits or has requests that the layer does not put on
    /// the absorbed path, if `record` fails, or if something in it cannot be captured.
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
        let problem = &layer.config().problem;
        shape.check(workspace.limits(), problem)?;
        let padding = shape.padding(workspace.limits(), problem)?;
        workspace.prepare(layer, &padding)?;
        record(workspace)?;
        let device = layer.device();
        let graph = device.capture(|_| record(workspace))?;
        graph.upload()?;
        Ok(Self {
            graph,
            shape,
            workspace: workspace.id(),
        })
    }

    /// Captures a graph for each number of requests in `sizes`, which ascend. `record` is called
    /// with the shape.
    ///
    /// # Errors
    ///
    /// Fails as [`DecodeGraph::capture`] does.
    pub fn capture_sizes<P, D>(
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        sizes: &[usize],
        query_len: u32,
        max_len: u32,
        mut record: impl FnMut(&mut Workspace<P, D>, DecodeShape) -> Result<()>,
    ) -> Result<Vec<Self>>
    where
        P: PrefillStage<Device = Cuda>,
        D: DecodeStage<Device = Cuda>,
    {
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let graphs = sizes.into_iter().map(|requests| {
            let shape = DecodeShape::new(requests, query_len, max_len);
            Self::capture(layer, workspace, shape, |workspace| {
                record(workspace, shape)
            })
        });
        graphs.collect()
    }

    /// Returns the first of these graphs that holds a step of `requests` requests, if one does.
    pub fn for_requests(graphs: &mut [Self], requests: usize) -> Option<&mut Self> {
        let mut graphs = graphs.iter_mut();
        graphs.find(|graph| graph.shape.requests >= requests)
    }

    /// Returns the shape for which the graph was captured.
    pub fn shape(&self) -> DecodeShape {
        self.shape
    }

    /// Prepares the step, filled up with padding behind its own requests, and enqueues the graph.
    ///
    /// The graph's `max_len` replaces the step's. Its `dense_within` counts as 0: every request
    /// uses its slot lists. Nothing is allocated if the step is [padded](StepPlan::padded_to) to
    /// the graph's requests and has its [`max_len`](StepPlan::with_max_len).
    ///
    /// # Safety
    ///
    /// The conditions of [`Graph::replay`] hold: all captured memory is still allocated and stays
    /// so until the stream has passed this replay. No other stream accesses it in conflict
    /// meanwhile. Besides, the cache has every page that the step names. Only the captured step's
    /// pages were checked.
    ///
    /// # Errors
    ///
    /// If the step does not fit the graph, if the graph was captured with another workspace, or if
    /// the device fails.
    pub unsafe fn replay<P, D>(
        &mut self,
        layer: &MlaLayer<P, D>,
        workspace: &mut Workspace<P, D>,
        step: &StepPlan,
    ) -> Result<()>
    where
        P: PrefillStage<Device = Cuda>,
        D: DecodeStage<Device = Cuda>,
    {
        if workspace.id() != self.workspace {
            let given = format!("number {}", workspace.id());
            let accepted = format!(
                "number {}, with which the graph was captured",
                self.workspace
            );
            return Err(Error::argument("workspace", given, accepted));
        }
        self.check(step)?;
        let DecodeShape {
            requests, max_len, ..
        } = self.shape;
        let own = step.requests().len();
        if own == requests && step.max_len() == Some(max_len) {
            workspace.prepare(layer, step)?;
        } else {
            let padded = match own {
                0 => {
                    let problem = &layer.config().problem;
                    self.shape.padding(workspace.limits(), problem)?
                }
                _ => step.clone().padded_to(requests)?,
            };
            workspace.prepare(layer, &padded.with_max_len(Some(max_len)))?;
        }
        let expanded = workspace.tokens() - workspace.absorbed_tokens();
        if expanded > 0 {
            let given = format!("{expanded} new tokens on the expanded path");
            let accepted = "none: a graph is of the absorbed path";
            return Err(Error::argument("requests", given, accepted));
        }
        // SAFETY: the contract of `Graph::replay`, which is this function's own.
        unsafe { self.graph.replay() }
    }

    /// Refuses a step for which the graph was not captured.
    fn check(&self, step: &StepPlan) -> Result<()> {
        let DecodeShape {
            requests,
            query_len,
            max_len,
            causal,
        } = self.shape;
        if step.is_causal() != causal && query_len > 1 {
            let accepted = format!("{causal}, for which the graph was captured");
            return Err(Error::argument("causal", step.is_causal(), accepted));
        }
        let own = step.requests();
        if own.len() > requests {
            let accepted = format!("at most {requests}, for which the graph was captured");
            return Err(Error::argument("requests", own.len(), accepted));
        }
        if !step.rows_in_order() || step.tensor_rows() != step.tokens() {
            let given = "those of an order of the engine's own, or padded";
            let accepted = "rows in the order of the step: the graph was captured for them";
            return Err(Error::argument("rows", given, accepted));
        }
        for (place, request) in own.iter().enumerate() {
            let (field, given, accepted) = if request.q != query_len {
                ("requests.new_tokens", request.q, query_len.to_string())
            } else if request.kv > max_len {
                ("requests.total", request.kv, format!("at most {max_len}"))
            } else {
                continue;
            };
            let given = format!("{given} of the step's request {place}");
            let accepted = accepted + ", for which the graph was captured";
            return Err(Error::argument(field, given, accepted));
        }
        Ok(())
    }
}
