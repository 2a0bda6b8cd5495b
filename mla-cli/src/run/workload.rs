//! A batch as the layer runs it: in order, with pages and slots, and its cost.

use std::ops::Range;

use fastrand::Rng;
use mla_runtime::backend::StepLimits;
use mla_runtime::batch::Request;
use mla_runtime::layer::{StepPlan, StepRequest};
use mla_runtime::plan::memory::MAX_PAGES;
use mla_runtime::plan::slots::BlockTables;
use mla_runtime::plan::split;
use mla_runtime::plan::workspace::row_budget;
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::{Error, Result};

use super::cost::{Cost, pairs, query_tokens};
use crate::batch::BatchSpec;

/// The maximum number of rows of a context workspace. With the last page rounded up, there are
/// still fewer than 2³¹.
const MAX_ROWS: u32 = 1 << 30;

/// A batch in the order of the step.
pub struct Workload {
    pub label: String,
    pub requests: Vec<Request>,
    /// The requests on the absorbed path. The others follow them.
    pub absorbed: Range<usize>,
    /// Offsets of the requests' first new tokens, and the end of the last request.
    pub token_starts: Vec<usize>,
    /// The row of each request's first new token, if tensors are not in the order of the step.
    own_rows: Option<Vec<usize>>,
    pub query_len: QueryLen,
    threshold: u32,
    page_size: u32,
    /// The number of pages that the batch needs in the cache.
    pub pages: u64,
    max_pages: usize,
    tables: Vec<i32>,
    slots: Vec<i64>,
}

impl Workload {
    pub fn new(spec: &BatchSpec, threshold: u32, page_size: u32, seed: u32) -> Result<Self> {
        let order = split::order(spec.requests(), |_| threshold, false)?;
        let requests: Vec<Request> = order.iter().map(|&at| spec.requests()[at]).collect();
        let absorbed = requests.iter().filter(|r| r.q <= threshold).count();
        let query_len = query_len(&requests[..absorbed]);

        let needed = |request: &Request| u64::from(request.kv.div_ceil(page_size));
        let pages: u64 = requests.iter().map(needed).sum();
        if pages > MAX_PAGES {
            return Err(Error::argument(
                "--batch",
                format!("{pages} pages of {page_size} tokens"),
                format!("at most {MAX_PAGES} pages"),
            ));
        }
        let (tables, max_pages) = block_tables(&requests, page_size, seed.into());
        let slots = BlockTables::new(&tables, max_pages, page_size)?.new_token_slots(&requests)?;
        Ok(Self {
            label: spec.label(),
            absorbed: 0..absorbed,
            token_starts: token_starts(&requests),
            own_rows: None,
            requests,
            query_len,
            threshold,
            page_size,
            pages,
            max_pages,
            tables,
            slots,
        })
    }

    /// Divides the requests on the absorbed path into chunks of at most `len` new tokens. Each
    /// chunk attends to the pages of its whole request. This is for backends that accept no longer
    /// requests.
    pub fn cut(self, len: u32) -> Result<Self> {
        let (mut requests, mut tables) = (Vec::new(), Vec::new());
        let mut absorbed = 0;
        for (index, request) in self.requests.iter().enumerate() {
            let pages = &self.tables[index * self.max_pages..][..self.max_pages];
            let is_absorbed = self.absorbed.contains(&index);
            for chunk in chunks(request, if is_absorbed { len } else { u32::MAX }) {
                requests.push(chunk);
                tables.extend_from_slice(pages);
                absorbed += usize::from(is_absorbed);
            }
        }
        let slots = BlockTables::new(&tables, self.max_pages, self.page_size)?
            .new_token_slots(&requests)?;
        Ok(Self {
            query_len: query_len(&requests[..absorbed]),
            token_starts: token_starts(&requests),
            absorbed: 0..absorbed,
            threshold: self.threshold.min(len),
            requests,
            tables,
            slots,
            ..self
        })
    }

    /// Returns the same batch with tensors in which the last request comes first.
    pub fn reversed(self) -> Self {
        let ends = self.token_starts[1..].iter();
        let starts = ends.map(|end| self.tokens() - end).collect();
        Self {
            own_rows: Some(starts),
            ..self
        }
    }

    /// Returns the row of a token of request `index`.
    pub fn row_of(&self, index: usize, token: usize) -> usize {
        match &self.own_rows {
            Some(rows) => rows[index] + token - self.token_starts[index],
            None => token,
        }
    }

    /// Returns the block tables' entries, their number for each request, and each new token's slot.
    pub fn entries(&self) -> (&[i32], usize, &[i64]) {
        (&self.tables, self.max_pages, &self.slots)
    }

    pub fn tables(&self) -> Result<BlockTables<'_>> {
        BlockTables::new(&self.tables, self.max_pages, self.page_size)
    }

    /// Returns the step, for layers of `problem` and a workspace of these limits.
    pub fn step(&self, problem: &Problem, limits: &StepLimits) -> Result<StepPlan> {
        let tables = self.tables.chunks(self.max_pages);
        let requests: Vec<StepRequest<'_>> = self
            .requests
            .iter()
            .zip(tables)
            .map(|(lens, pages)| StepRequest::new(lens.q, lens.kv, pages))
            .collect();
        let step = StepPlan::in_order(problem, limits, self.threshold, 0, &requests)?;
        match &self.own_rows {
            Some(rows) => step.with_row_starts(rows, self.tokens()),
            None => Ok(step),
        }
    }

    pub fn tokens(&self) -> usize {
        self.slots.len()
    }

    /// Returns the requests on the expanded path.
    pub fn expanded(&self) -> Range<usize> {
        self.absorbed.end..self.requests.len()
    }

    /// Returns the new tokens of some requests.
    pub fn tokens_of(&self, requests: &Range<usize>) -> Range<usize> {
        self.token_starts[requests.start]..self.token_starts[requests.end]
    }

    /// Returns the smallest limits for this batch, with the given row budget or the customary one.
    pub fn limits(&self, rows: Option<u32>) -> Result<StepLimits> {
        // One call needs room for context and new tokens, if there is context.
        let expanded = &self.requests[self.expanded()];
        let context = match expanded.iter().any(|request| request.context_len() > 0) {
            true => expanded.iter().map(|request| u64::from(request.kv)).sum(),
            false => 0u64,
        };
        let longest = self.requests.iter().map(|r| r.kv).max().unwrap_or(0);
        let page = u64::from(self.page_size);
        let rows = match rows {
            Some(rows) if rows > MAX_ROWS => {
                return Err(Error::argument(
                    "--rows",
                    rows.to_string(),
                    format!("1 to {MAX_ROWS}"),
                ));
            }
            Some(rows) => u64::from(rows).next_multiple_of(page),
            None => {
                let count = self.requests.len() as u32;
                let budget = row_budget(longest, count, self.page_size)?;
                u64::from(budget).min(context.next_multiple_of(page))
            }
        };
        let absorbed = self.requests[self.absorbed.clone()].iter();
        Ok(
            StepLimits::new(self.requests.len(), self.tokens(), self.max_pages)
                .with_decode_query_len(absorbed.map(|r| r.q).max().unwrap_or(0) as usize)
                .with_context_rows(rows as usize)
                .with_call_rows(self.own_rows.as_ref().map_or(0, |_| self.tokens())),
        )
    }

    /// Returns the minimum of arithmetic and traffic of the absorbed path.
    ///
    /// It computes the queries' projection to the latent and back, and the pairs of query tokens
    /// and cache rows. It moves weights, queries and outputs once, and each request's cache rows
    /// once for all its tokens and heads.
    pub fn absorbed_cost(&self, problem: &Problem) -> Cost {
        let n = Sizes::of(problem);
        let requests = &self.requests[self.absorbed.clone()];
        let (tokens, pairs) = (query_tokens(requests), pairs(requests, true));
        let rows: f64 = requests.iter().map(|r| f64::from(r.kv)).sum();
        if tokens == 0.0 {
            return Cost::default();
        }
        Cost {
            flop: 2.0 * n.heads * (tokens * n.latent * n.kv_b + pairs * (2.0 * n.latent + n.rope)),
            bytes: n.weight_bytes + tokens * n.token_bytes + rows * n.row_bytes,
        }
    }

    /// Returns the minimum of arithmetic and traffic of the expanded path.
    ///
    /// It computes the expansion of new rows and of context rows, and the pairs of query tokens and
    /// keys. It moves weights, queries, outputs, new rows and cache rows once, and writes and reads
    /// the expanded keys and values once.
    pub fn expanded_cost(&self, problem: &Problem) -> Cost {
        let n = Sizes::of(problem);
        let requests = &self.requests[self.expanded()];
        let (tokens, pairs) = (query_tokens(requests), pairs(requests, true));
        let context: f64 = requests.iter().map(|r| f64::from(r.context_len())).sum();
        if tokens == 0.0 {
            return Cost::default();
        }
        let rows = tokens + context;
        let expanded_bytes = 2.0 * rows * n.heads * n.kv_b * n.element_bytes;
        let new_bytes = tokens * (n.latent + n.rope) * n.element_bytes;
        Cost {
            flop: 2.0 * n.heads * (rows * n.latent * n.kv_b + pairs * (n.kv_b + n.rope)),
            bytes: n.weight_bytes
                + tokens * n.token_bytes
                + new_bytes
                + context * n.row_bytes
                + expanded_bytes,
        }
    }
}

/// Returns the block tables of requests, and the number of entries of each. Pages are in random
/// order, as in a cache that has been used for a while.
pub(crate) fn block_tables(requests: &[Request], page_size: u32, seed: u64) -> (Vec<i32>, usize) {
    let needed = |request: &Request| request.kv.div_ceil(page_size) as usize;
    let pages: usize = requests.iter().map(needed).sum();
    let width = requests.iter().map(needed).max().unwrap_or(0).max(1);
    let mut free: Vec<i32> = (0..pages as i32).collect();
    Rng::with_seed(seed).shuffle(&mut free);
    let mut free = free.into_iter();
    let mut tables = Vec::with_capacity(requests.len() * width);
    for request in requests {
        tables.extend(free.by_ref().take(needed(request)));
        tables.resize(tables.len().next_multiple_of(width), -1);
    }
    (tables, width)
}

/// Divides a request into chunks of at most `len` new tokens.
pub(crate) fn chunks(request: &Request, len: u32) -> impl Iterator<Item = Request> {
    let (context, all) = (request.context_len(), request.q);
    let len = len.min(all);
    (0..all).step_by(len as usize).map(move |start| {
        let q = len.min(all - start);
        Request::new(q, context + start + q)
    })
}

/// Returns the query lengths of requests on the absorbed path: single, uniform or ragged.
pub(crate) fn query_len(absorbed: &[Request]) -> QueryLen {
    match absorbed {
        // Without requests on the absorbed path, any decode backend will do.
        [] => QueryLen::Single,
        [first, others @ ..] if others.iter().any(|other| other.q != first.q) => QueryLen::Ragged,
        [Request { q: 1, .. }, ..] => QueryLen::Single,
        _ => QueryLen::Uniform,
    }
}

/// Returns the offsets of the requests' first new tokens, and the end of the last request.
fn token_starts(requests: &[Request]) -> Vec<usize> {
    let mut starts = vec![0];
    for request in requests {
        starts.push(starts[starts.len() - 1] + request.q as usize);
    }
    starts
}

/// Returns the minimum of bytes for a batch's cache, tensors and block table, on the host and on
/// the device.
pub(crate) fn bytes(spec: &BatchSpec, problem: &Problem) -> f64 {
    let n = Sizes::of(problem);
    let requests = spec.requests();
    let page = f64::from(problem.page_size);
    let pages = |r: &Request| f64::from(r.kv.div_ceil(problem.page_size));
    let rows: f64 = requests.iter().map(|r| pages(r) * page).sum();
    let longest = requests.iter().map(pages).fold(0.0, f64::max);
    let expanded = n.heads * n.kv_b * n.element_bytes;
    rows * n.row_bytes
        + query_tokens(requests) * (n.token_bytes + expanded)
        + n.weight_bytes
        + requests.len() as f64 * longest * 8.0
}

/// The widths of a problem, as factors of costs.
struct Sizes {
    heads: f64,
    latent: f64,
    rope: f64,
    /// P + V.
    kv_b: f64,
    element_bytes: f64,
    weight_bytes: f64,
    row_bytes: f64,
    /// Bytes of one token's queries and outputs.
    token_bytes: f64,
}

impl Sizes {
    fn of(problem: &Problem) -> Self {
        let dims = problem.dims;
        let [heads, latent, rope, kv_b, qk, v] = [
            problem.heads,
            dims.latent,
            dims.head.rope,
            dims.head.kv_b(),
            dims.head.qk(),
            dims.head.v,
        ]
        .map(f64::from);
        let element_bytes = problem.dtype.bytes() as f64;
        Self {
            heads,
            latent,
            rope,
            kv_b,
            element_bytes,
            weight_bytes: latent * heads * kv_b * element_bytes,
            row_bytes: problem.kv_format.row_bytes(dims) as f64,
            token_bytes: heads * (qk + v) * element_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use mla_runtime::model::{DType, HeadDims, MlaDims};

    use super::*;

    #[test]
    fn costs_of_a_batch_small_enough_to_count() {
        let spec: BatchSpec = "q1s3_q4".parse().unwrap();
        let workload = Workload::new(&spec, 1, 2, 7).unwrap();
        assert_eq!(workload.pages, 4);
        assert_eq!(workload.limits(None).unwrap().context_rows, 0);
        // L, P, R, V, H in f32.
        let dims = MlaDims::new(5, HeadDims::new(2, 1, 3));
        let problem = Problem::new(dims, 2, DType::F32);
        let cost = workload.absorbed_cost(&problem);
        assert_eq!(cost.flop, 2.0 * 2.0 * (5.0 * 5.0 + 3.0 * 11.0));
        // Weights have 5·2·5 values, a token 2·(3 + 3), and three rows 6 each. A value has 4 bytes.
        assert_eq!(cost.bytes, 4.0 * (50.0 + 12.0 + 18.0));
        let cost = workload.expanded_cost(&problem);
        assert_eq!(cost.flop, 2.0 * 2.0 * (4.0 * 25.0 + 10.0 * 6.0));
        let expanded = 2.0 * 4.0 * 2.0 * 5.0;
        assert_eq!(cost.bytes, 4.0 * (50.0 + 48.0 + 24.0 + expanded));
    }

    #[test]
    fn chunks_share_the_pages_and_have_the_slots_of_the_whole() {
        let spec: BatchSpec = "q20s100_q3s40_q200".parse().unwrap();
        let whole = Workload::new(&spec, 64, 16, 3).unwrap();
        let slots = whole.slots.clone();
        let cut = whole.cut(8).unwrap();
        let lens: Vec<_> = cut.requests.iter().map(|r| (r.q, r.kv)).collect();
        assert_eq!(lens, [(8, 88), (8, 96), (4, 100), (3, 40), (200, 200)]);
        assert_eq!(
            (cut.absorbed.clone(), cut.query_len),
            (0..4, QueryLen::Ragged)
        );
        assert_eq!(cut.token_starts, [0, 8, 16, 20, 23, 223]);
        assert_eq!((cut.slots.clone(), cut.threshold), (slots, 8));
        assert_eq!(
            cut.tables[..cut.max_pages],
            cut.tables[cut.max_pages..2 * cut.max_pages]
        );
    }

    #[test]
    fn the_absorbed_path_comes_first_and_tables_hold_every_page_once() {
        let spec: BatchSpec = "q300s400_3q1s100_q200_q5s80".parse().unwrap();
        let workload = Workload::new(&spec, 171, 16, 3).unwrap();
        assert_eq!(workload.absorbed, 0..4);
        assert_eq!(workload.tokens_of(&workload.absorbed), 0..8);
        assert_eq!(workload.query_len, QueryLen::Ragged);
        let mut pages: Vec<_> = workload.tables.iter().filter(|page| **page >= 0).collect();
        pages.sort_unstable();
        let all: Vec<i32> = (0..workload.pages as i32).collect();
        assert!(pages.into_iter().eq(all.iter()));
    }

    #[test]
    fn pairs_are_those_of_a_loop() {
        for (q, kv) in [(1, 1), (1, 9), (4, 4), (5, 13)] {
            let counted: u32 = (0..q).map(|own| kv - q + own + 1).sum();
            let requests = [Request::new(q, kv)];
            assert_eq!(pairs(&requests, true), f64::from(counted));
            assert_eq!(pairs(&requests, false), f64::from(q * kv));
        }
    }

    #[test]
    fn costs_of_requests_small_enough_to_count() {
        // L, P, R, V, H in f32.
        let problem = Problem::new(MlaDims::new(5, HeadDims::new(2, 1, 3)), 2, DType::F32);
        let requests = [Request::new(1, 3), Request::new(2, 2)];
        let decode = Cost::decode(&problem, &requests);
        // There are 3 + 1 + 2 pairs of 2·5 + 1 multiply-adds, 5 rows of 6 values, and 3 tokens of
        // 2·(11 + 1) values.
        assert_eq!(decode.flop, 2.0 * 2.0 * 6.0 * 11.0);
        assert_eq!(decode.bytes, 4.0 * (5.0 * 6.0 + 3.0 * 2.0 * 12.0));
        // There are 6 pairs with 4 rows, and 3 lists of 7 entries.
        let sparse = Cost::sparse(&problem, &requests, 6.0, 4.0, 7);
        assert_eq!(sparse.flop, decode.flop);
        assert_eq!(
            sparse.bytes,
            4.0 * (4.0 * 6.0 + 3.0 * 2.0 * 12.0 + 3.0 * 7.0)
        );
        let prefill = Cost::prefill(&problem, &requests, false);
        assert_eq!(prefill.flop, 2.0 * 2.0 * 7.0 * 6.0);
        assert_eq!(
            prefill.bytes,
            4.0 * (3.0 * 2.0 * 7.0 + 5.0 * (2.0 * 5.0 + 1.0))
        );
    }
}
