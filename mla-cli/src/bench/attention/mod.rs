//! One backend's attention on random data: absorbed or expanded, one or several layers at a time.

mod decode;
mod outcome;
mod prefill;

use std::time::Instant;

use mla_runtime::Result;
use mla_runtime::backend::{DecodeStage, LayerConfig, SelectedDecode, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::device::Device;
use mla_runtime::select::Registry;

use self::decode::Decode;
use self::prefill::Prefill;
use super::check::Errors;
use super::lists::{Lists, distinct_rows};
use crate::cost::{Cost, query_tokens};
use crate::error::CliError;

/// An attention to time: its backend and its input.
#[derive(Clone, Debug)]
pub struct Attention {
    pub backend: &'static str,
    pub kind: Kind,
    pub config: LayerConfig,
    /// The requests. For expanded attention that is not causal, `kv` is the number of keys alone.
    pub requests: Vec<Request>,
    /// The standard deviation of queries, keys and values.
    pub deviation: f32,
    /// The number of layers that run one after another, each with a cache, or keys and values, of
    /// its own.
    pub layers: usize,
    /// Parts into which a decode backend is told to divide rows.
    pub num_splits: Option<u32>,
    pub seed: u64,
    /// The lists of a sparse attention: the tokens that each query token attends to.
    pub lists: Option<Lists>,
}

/// The form of an attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Absorbed, to the cache.
    Decode,
    /// Expanded; causal for new tokens, not for a chunk of context.
    Prefill { causal: bool },
}

impl Attention {
    pub fn tokens(&self) -> usize {
        self.requests.iter().map(|r| r.q as usize).sum()
    }

    /// The cost of one layer.
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

    /// The positions in its request that each query token's list names; none where attention is
    /// dense.
    fn positions(&self) -> Vec<Vec<u32>> {
        let page_size = self.config.problem.page_size;
        let lists = self.lists;
        lists.map_or_else(Vec::new, |lists| {
            lists.positions(&self.requests, page_size, self.seed)
        })
    }

    fn longest(&self, of: fn(&Request) -> u32) -> usize {
        self.requests.iter().map(of).max().unwrap_or(0) as usize
    }

    /// Offsets of the requests' first tokens, and the end of the last.
    fn starts(&self, of: fn(&Request) -> u32) -> Vec<i32> {
        let mut starts = vec![0];
        for request in &self.requests {
            starts.push(starts[starts.len() - 1] + of(request) as i32);
        }
        starts
    }

    fn pages_of(&self, request: &Request) -> usize {
        request.kv.div_ceil(self.config.problem.page_size) as usize
    }

    fn max_pages(&self) -> usize {
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

    /// The bytes that the inputs and outputs take on the device. In floating point, which nothing
    /// overflows.
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

    /// The decode backend, told how to divide rows.
    pub fn decode_backend<D: Device>(
        &self,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<SelectedDecode<D>, CliError> {
        let mut backend = registry.instantiate_decode(self.backend, device, &self.config)?;
        if let Some(parts) = self.num_splits {
            backend.set_num_splits(parts)?;
        }
        Ok(backend)
    }

    /// The attention with everything that it needs on `device`.
    pub fn set_up<D: Device>(
        &self,
        registry: &Registry,
        device: &D,
    ) -> std::result::Result<Work<'_, D>, CliError> {
        Ok(match self.kind {
            Kind::Decode => Work::Decode(Decode::new(self, registry, device)?),
            Kind::Prefill { causal } => {
                Work::Prefill(Prefill::new(self, causal, registry, device)?)
            }
        })
    }
}

/// An attention that is ready to run.
pub enum Work<'a, D: Device> {
    Decode(Decode<'a, D>),
    Prefill(Prefill<'a, D>),
}

impl<D: Device> Work<'_, D> {
    /// Enqueues all layers, with what has to be prepared from lengths on the device unless that is
    /// `planned` already.
    pub fn enqueue(&mut self, device: &D, planned: bool) -> Result<()> {
        match self {
            Self::Decode(work) => {
                if !planned {
                    work.prepare(device)?;
                }
                work.attend(device)
            }
            Self::Prefill(work) => work.attend(device),
        }
    }

    /// Seconds that a plan takes which is made on the host, so that no graph can hold it: the
    /// fastest of some, until it has arrived on the device. None where the device plans.
    pub fn planning(&mut self, device: &D) -> Result<Option<f64>> {
        let Self::Decode(work) = self else {
            return Ok(None);
        };
        if !work.backend.spec().plans_on_host {
            return Ok(None);
        }
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            device.synchronize()?;
            let begin = Instant::now();
            work.prepare(device)?;
            device.synchronize()?;
            fastest = fastest.min(begin.elapsed().as_secs_f64());
        }
        Ok(Some(fastest))
    }

    /// True if a plan can be made ahead of the run.
    pub const fn has_plan(&self) -> bool {
        matches!(self, Self::Decode(_))
    }

    /// Compares `count` rows of the last layer's output with attention in f64.
    pub fn check(&self, device: &D, count: usize) -> std::result::Result<Errors, CliError> {
        match self {
            Self::Decode(work) => work.check(device, count),
            Self::Prefill(work) => work.check(device, count),
        }
    }
}
