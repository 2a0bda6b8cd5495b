//! The path that each request of a step takes.

use crate::backend::StepLimits;
use crate::batch::Request;
use crate::spec::{Problem, QueryLen};
use crate::{Error, Result};

/// The rules that decide which path a request takes.
pub(super) struct Paths<'a> {
    problem: &'a Problem,
    dense_within: u32,
    /// The maximum number of new tokens of a dense request on the absorbed path.
    threshold: u32,
    /// The maximum number of new tokens of any request on the absorbed path.
    limit: u32,
}

impl<'a> Paths<'a> {
    pub(super) fn new(
        problem: &'a Problem,
        limits: &StepLimits,
        threshold: u32,
        dense_within: u32,
    ) -> Result<Self> {
        if dense_within > 0 && !problem.sparse {
            let accepted = "0, as the problem is not sparse";
            return Err(Error::argument("dense_within", dense_within, accepted));
        }
        let limit = u32::try_from(limits.decode_query_len).unwrap_or(u32::MAX);
        Ok(Self {
            problem,
            dense_within,
            limit,
            threshold: match problem.query_len {
                _ if problem.sparse && limits.context_rows == 0 => u32::MAX,
                QueryLen::Single => threshold.min(limit).min(1),
                _ => threshold.min(limit),
            },
        })
    }

    /// Returns true if a request attends to all that it sees.
    fn is_dense(&self, request: &Request) -> bool {
        !self.problem.sparse || (self.dense_within > 0 && request.kv <= self.dense_within)
    }

    /// The maximum number of new tokens with which the request takes the absorbed path. The
    /// expanded path does not support lists of slots.
    pub(super) fn threshold(&self, request: &Request) -> u32 {
        match self.is_dense(request) {
            true => self.threshold,
            false => u32::MAX,
        }
    }

    /// The number of requests on the absorbed path, which come first. `number` maps a place to the
    /// request's number in the given order.
    pub(super) fn absorbed(
        &self,
        requests: &[Request],
        number: impl Fn(usize) -> usize,
    ) -> Result<usize> {
        let first_len = requests.first().map_or(0, |request| request.q);
        let is_absorbed = |request: &Request| {
            // The expanded path does not support padding, because its tokens attend to nothing.
            let limit = if request.is_padding() { self.limit } else { 0 };
            let is_short = request.q <= self.threshold(request).max(limit);
            match self.problem.query_len {
                QueryLen::Single => is_short && request.q == 1,
                QueryLen::Uniform => is_short && request.q == first_len && request.q > 0,
                QueryLen::Ragged => is_short,
            }
        };
        let count = requests.iter().position(|request| !is_absorbed(request));
        let count = count.unwrap_or(requests.len());
        let expanded = requests.iter().enumerate().skip(count);
        for (at, request) in expanded.filter(|(_, request)| request.q > 0) {
            let (new, number) = (request.q, number(at));
            let (field, given, accepted) = if request.is_padding() {
                (
                    "requests.total",
                    format!("0 of request {number}"),
                    format!(
                        "at least its {new} new tokens: padding stands first, and has the query \
                         length of the absorbed path"
                    ),
                )
            } else if is_absorbed(request) {
                (
                    "requests",
                    format!(
                        "one of {new} new tokens behind one of {}",
                        requests[count].q
                    ),
                    format!(
                        "the order that plan::split gives: those of the absorbed path first, here \
                         of at most {} new tokens",
                        self.threshold(request)
                    ),
                )
            } else if !self.is_dense(request) {
                (
                    "requests.new_tokens",
                    format!("{new} of request {number}"),
                    format!(
                        "{} query lengths: sparse attention has the absorbed form only",
                        self.problem.query_len
                    ),
                )
            } else {
                continue;
            };
            return Err(Error::argument(field, given, accepted));
        }
        Ok(count)
    }
}
