//! The arithmetic and the memory traffic of a step's parts.

use mla_runtime::batch::Request;
use mla_runtime::spec::Problem;
use serde::{Deserialize, Serialize};

/// Arithmetic and memory traffic.
#[derive(Clone, Copy, Default, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations, two per multiply-add.
    pub flop: f64,
    /// The minimum of bytes that have to move between memory and processor.
    pub bytes: f64,
}

impl Cost {
    /// Returns the cost of absorbed attention of some requests to the cache.
    ///
    /// There are 2·H·(2L + R) FLOP for each pair of a query token and a row that it sees. Queries,
    /// outputs and log-sum-exp are moved once, and so are each request's rows, for all its tokens
    /// and heads together.
    pub fn decode(problem: &Problem, requests: &[Request]) -> Self {
        let rows: f64 = requests.iter().map(|r| f64::from(r.kv)).sum();
        Self::sparse(problem, requests, pairs(requests, true), rows, 0)
    }

    /// Returns the cost of sparse absorbed attention.
    ///
    /// It is like [`decode`](Self::decode), with `pairs` pairs of a query token and a row of its
    /// list. Each row in a list is read once, and so are the lists.
    pub fn sparse(
        problem: &Problem,
        requests: &[Request],
        pairs: f64,
        rows: f64,
        width: u32,
    ) -> Self {
        let dims = problem.dims;
        let [heads, latent, rope, width] =
            [problem.heads, dims.latent, dims.head.rope, width].map(f64::from);
        let element = problem.dtype.bytes() as f64;
        let token = heads * ((2.0 * latent + rope) * element + 4.0) + 4.0 * width;
        Self {
            flop: 2.0 * heads * pairs * (2.0 * latent + rope),
            bytes: rows * problem.kv_format.row_bytes(dims) as f64 + query_tokens(requests) * token,
        }
    }

    /// Returns the cost of expanded attention.
    ///
    /// There are 2·H·(P + R + V) FLOP for each pair. Queries, keys, values, outputs and log-sum-exp
    /// are moved once, and the rotary key once for all heads.
    pub fn prefill(problem: &Problem, requests: &[Request], causal: bool) -> Self {
        let head = problem.dims.head;
        let heads = f64::from(problem.heads);
        let [nope, rope, v] = [head.nope, head.rope, head.v].map(f64::from);
        let element = problem.dtype.bytes() as f64;
        let keys: f64 = requests.iter().map(|r| f64::from(r.kv)).sum();
        let token = heads * ((nope + rope + v) * element + 4.0);
        Self {
            flop: 2.0 * heads * pairs(requests, causal) * (nope + rope + v),
            bytes: query_tokens(requests) * token + keys * (heads * (nope + v) + rope) * element,
        }
    }
}

/// Returns the number of new tokens of some requests.
pub(crate) fn query_tokens(requests: &[Request]) -> f64 {
    requests.iter().map(|r| f64::from(r.q)).sum()
}

/// Returns the number of pairs of a query token and a token that it sees. If causal, it sees the
/// whole context, and the new tokens up to itself.
pub(crate) fn pairs(requests: &[Request], causal: bool) -> f64 {
    let of = |r: &Request| {
        let (q, kv) = (f64::from(r.q), f64::from(r.kv));
        q * kv - if causal { q * (q - 1.0) / 2.0 } else { 0.0 }
    };
    requests.iter().map(of).sum()
}
