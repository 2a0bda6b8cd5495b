//! A row before it is measured: an attention or a layer, and its names.

use std::collections::BTreeMap;

use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;

use super::lists::{Lists, distinct_rows};
use crate::batch::BatchSpec;
use crate::run::cost::{Cost, query_tokens};
use crate::run::workload::Workload;

/// A row to be measured.
#[derive(Clone, Debug)]
pub struct RowPlan {
    /// The description of the case. Rows of the same case compete with each other.
    pub case: String,
    /// The name of the contender: its backends, and the path if the settings choose it.
    pub contender: String,
    /// The batch in words.
    pub label: String,
    /// The value of each axis.
    pub parameters: BTreeMap<&'static str, String>,
    pub work: Work,
}

/// The attention or the layer to time.
#[derive(Clone, Debug)]
pub enum Work {
    Attention(Attention),
    Layer(Layer),
}

impl Work {
    pub const fn config(&self) -> &LayerConfig {
        match self {
            Self::Attention(attention) => &attention.config,
            Self::Layer(layer) => &layer.config,
        }
    }

    pub const fn layers(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.layers,
            Self::Layer(layer) => layer.layers,
        }
    }

    pub fn requests(&self) -> &[Request] {
        match self {
            Self::Attention(attention) => &attention.requests,
            Self::Layer(layer) => layer.spec.requests(),
        }
    }

    /// Returns the cost of one layer.
    pub fn cost(&self) -> mla_runtime::Result<Cost> {
        match self {
            Self::Attention(attention) => Ok(attention.cost()),
            Self::Layer(layer) => layer.cost(),
        }
    }

    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Attention(attention) => match attention.kind {
                Kind::Decode if attention.lists.is_some() => "sparse",
                Kind::Decode => "decode",
                Kind::Prefill { .. } => "prefill",
            },
            Self::Layer(_) => "layer",
        }
    }
}

/// An attention to time: its backend and its input.
#[derive(Clone, Debug)]
pub struct Attention {
    pub backend: &'static str,
    pub kind: Kind,
    pub config: LayerConfig,
    /// The requests. For expanded attention that is not causal, `kv` counts only the keys.
    pub requests: Vec<Request>,
    /// The standard deviation of queries, keys and values.
    pub deviation: f32,
    /// The number of layers that run one after another. Each has its own cache, or its own keys and
    /// values.
    pub layers: usize,
    pub seed: u64,
    /// The lists of a sparse attention: the tokens that each query token attends to.
    pub lists: Option<Lists>,
}

/// The form of an attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Absorbed attention to the cache.
    Decode,
    /// Expanded attention. It is causal for new tokens, but not for a chunk of context.
    Prefill { causal: bool },
}

impl Attention {
    pub fn tokens(&self) -> usize {
        self.requests.iter().map(|r| r.q as usize).sum()
    }

    /// Returns the cost of one layer.
    pub fn cost(&self) -> Cost {
        let problem = &self.config.problem;
        if let Some(lists) = self.lists {
            let positions = self.positions();
            let pairs = positions.iter().map(Vec::len).sum::<usize>() as f64;
            let rows = distinct_rows(&self.requests, &positions) as f64;
            return Cost::sparse(problem, &self.requests, pairs, rows, lists.topk);
        }
        match self.kind {
            Kind::Decode => Cost::decode(problem, &self.requests),
            Kind::Prefill { causal } => Cost::prefill(problem, &self.requests, causal),
        }
    }

    /// Returns the positions in its request that each query token's list names. Without lists,
    /// there are none.
    pub fn positions(&self) -> Vec<Vec<u32>> {
        let page_size = self.config.problem.page_size;
        let lists = self.lists;
        lists.map_or_else(Vec::new, |lists| {
            lists.positions(&self.requests, page_size, self.seed)
        })
    }

    pub fn longest(&self, of: fn(&Request) -> u32) -> usize {
        self.requests.iter().map(of).max().unwrap_or(0) as usize
    }

    /// Returns the offsets of the requests' first tokens, and the end of the last request.
    pub fn starts(&self, of: fn(&Request) -> u32) -> Vec<i32> {
        let mut starts = vec![0];
        for request in &self.requests {
            starts.push(starts[starts.len() - 1] + of(request) as i32);
        }
        starts
    }

    pub fn pages_of(&self, request: &Request) -> usize {
        request.kv.div_ceil(self.config.problem.page_size) as usize
    }

    pub fn max_pages(&self) -> usize {
        let pages = self.requests.iter().map(|r| self.pages_of(r));
        pages.max().unwrap_or(0).max(1)
    }

    pub fn limits(&self) -> StepLimits {
        StepLimits::new(self.requests.len(), self.tokens(), self.max_pages())
            .with_decode_query_len(match self.kind {
                Kind::Decode => self.longest(|r| r.q),
                Kind::Prefill { .. } => 1,
            })
            .with_context_rows(match self.kind {
                Kind::Decode => 0,
                Kind::Prefill { .. } => self.requests.iter().map(|r| r.kv as usize).sum(),
            })
    }

    /// Returns the bytes of the inputs and outputs on the device, as floating point, which does not
    /// overflow.
    pub fn bytes(&self) -> f64 {
        let problem = &self.config.problem;
        let dims = problem.dims;
        let [heads, latent, rope, nope, v] = [
            problem.heads,
            dims.latent,
            dims.head.rope,
            dims.head.nope,
            dims.head.v,
        ]
        .map(f64::from);
        let element = problem.dtype.bytes() as f64;
        let tokens = query_tokens(&self.requests);
        let layers = self.layers as f64;
        match self.kind {
            Kind::Decode => {
                let pages: f64 = self.requests.iter().map(|r| self.pages_of(r) as f64).sum();
                let slots = pages * f64::from(problem.page_size);
                let row = problem.kv_format.row_bytes(dims) as f64;
                let width = self.lists.map_or(0, |lists| lists.topk);
                let table = self.requests.len() as f64 * self.max_pages() as f64 * 4.0
                    + tokens * f64::from(width) * 4.0;
                layers * slots * row + table + tokens * heads * (2.0 * latent + rope) * element
            }
            Kind::Prefill { .. } => {
                let keys: f64 = self.requests.iter().map(|r| f64::from(r.kv)).sum();
                // Packed keys repeat the rotary part for every head.
                let packed = keys * heads * (nope + rope + v) * element;
                layers * packed + tokens * heads * (nope + rope + v) * element
            }
        }
    }
}

/// A step of a layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub prefill: &'static str,
    pub decode: &'static str,
    pub config: LayerConfig,
    pub spec: BatchSpec,
    pub threshold: u32,
    pub query_chunk: Option<u32>,
    pub rows: Option<u32>,
    /// True if tensors are not in the order of the step.
    pub own_rows: bool,
    pub layers: usize,
    pub seed: u32,
}

impl Layer {
    pub fn workload(&self) -> mla_runtime::Result<Workload> {
        let page = self.config.problem.page_size;
        let workload = Workload::new(&self.spec, self.threshold, page, self.seed)?;
        let workload = match self.query_chunk {
            Some(len) => workload.cut(len)?,
            None => workload,
        };
        Ok(match self.own_rows {
            true => workload.reversed(),
            false => workload,
        })
    }

    /// Returns the cost of one layer, without regard to chunks.
    pub fn cost(&self) -> mla_runtime::Result<Cost> {
        let page = self.config.problem.page_size;
        let workload = Workload::new(&self.spec, self.threshold, page, self.seed)?;
        let problem = &self.config.problem;
        let parts = [
            workload.absorbed_cost(problem),
            workload.expanded_cost(problem),
        ];
        Ok(Cost {
            flop: parts.iter().map(|part| part.flop).sum(),
            bytes: parts.iter().map(|part| part.bytes).sum(),
        })
    }
}
