//! The paths that requests of a batch take, and how.

use mla_runtime::batch::{BatchSpec, Request};
use mla_runtime::spec::QueryLen;

use crate::bench::settings::Route;

/// The settings with which a layer runs a batch.
#[derive(Clone, Copy)]
pub(super) struct LayerSettings {
    pub route: Option<Route>,
    pub threshold: u32,
    pub query_chunk: Option<u32>,
    pub rows: Option<u32>,
    pub num_splits: Option<u32>,
}

/// Each value, or none where the key is not given.
pub(super) fn optional(list: &Option<Vec<u32>>) -> Vec<Option<u32>> {
    list.as_ref()
        .map_or(vec![None], |list| list.iter().copied().map(Some).collect())
}

pub(super) fn splits(number: Option<u32>) -> impl Iterator<Item = (&'static str, String)> {
    number
        .into_iter()
        .map(|number| ("num_splits", number.to_string()))
}

impl LayerSettings {
    /// The parameters that a row shows.
    pub(super) fn parameters(self) -> Vec<(&'static str, String)> {
        let mut parameters = match self.route {
            Some(route) => vec![("path", route.name().to_owned())],
            None => vec![("threshold", self.threshold.to_string())],
        };
        parameters.extend(
            self.query_chunk
                .map(|chunk| ("query_chunk", chunk.to_string())),
        );
        parameters.extend(self.rows.map(|rows| ("rows", rows.to_string())));
        parameters.extend(splits(self.num_splits));
        parameters
    }
}

/// The requests of a batch on either path of the layer.
pub(super) struct Paths<'b> {
    pub absorbed: Vec<&'b Request>,
    pub expanded: Vec<&'b Request>,
}

impl<'b> Paths<'b> {
    pub(super) fn of(spec: &'b BatchSpec, threshold: u32) -> Self {
        let requests = spec.requests().iter();
        let (absorbed, expanded) = requests.partition(|request| request.q <= threshold);
        Self { absorbed, expanded }
    }

    /// The query lengths of the requests for decode backends: single, uniform or ragged. With
    /// `chunk` they are given in chunks.
    pub(super) fn query_len(&self, chunk: Option<u32>) -> QueryLen {
        let longest = self.absorbed.iter().map(|r| r.q).max().unwrap_or(0);
        match (longest, chunk) {
            (0 | 1, _) | (_, Some(1)) => QueryLen::Single,
            _ if self.absorbed.iter().all(|r| r.q == longest)
                && chunk.is_none_or(|chunk| longest.is_multiple_of(chunk.min(longest))) =>
            {
                QueryLen::Uniform
            }
            _ => QueryLen::Ragged,
        }
    }

    /// The backends that run, of two.
    pub(super) fn backends(&self, prefill: &str, decode: &str) -> String {
        match (self.absorbed.is_empty(), self.expanded.is_empty()) {
            (true, _) => prefill.to_owned(),
            (_, true) => decode.to_owned(),
            _ if prefill == decode => prefill.to_owned(),
            _ => format!("{decode} + {prefill}"),
        }
    }
}
