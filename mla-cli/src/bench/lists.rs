//! Lists for sparse attention. They say which tokens of its request each query token attends to.

use clap::ValueEnum;
use fastrand::Rng;
use mla_runtime::batch::Request;
use serde::{Deserialize, Serialize};

/// The order and the distribution of the entries of lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ListKind {
    /// Random positions in the context, in random order.
    #[default]
    Random,
    /// Random positions in ascending order.
    Sorted,
    /// Runs of 32 neighbouring tokens.
    Clustered,
    /// Whole pages of the cache.
    Pages,
    /// Random order, but 15 of 16 entries are those of the preceding query token's list.
    Shared,
}

/// Length of a run in a clustered list.
const CLUSTER: u32 = 32;

/// In shared lists, one of `CHANGED` entries changes from a query token to the next.
const CHANGED: usize = 16;

/// The lists of a batch. Entries behind the valid ones are -1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lists {
    pub kind: ListKind,
    /// Entries of a list.
    pub topk: u32,
    /// The number of entries that name a token, if the query token sees at least this number.
    pub valid: u32,
}

impl Lists {
    /// Returns the positions in its request that each query token attends to.
    pub fn positions(&self, requests: &[Request], page_size: u32, seed: u64) -> Vec<Vec<u32>> {
        let mut rng = Rng::with_seed(seed ^ 0x0001_1575);
        let of_request = |request: &Request| self.of_request(*request, page_size, &mut rng);
        requests.iter().flat_map(of_request).collect()
    }

    /// Returns the lists of one request, one for each of its query tokens.
    fn of_request(&self, request: Request, page_size: u32, rng: &mut Rng) -> Vec<Vec<u32>> {
        let context = request.kv - request.q;
        // All tokens that a query token sees. The order begins with its list.
        let mut order: Vec<u32> = (0..context).collect();
        let mut lists = Vec::with_capacity(request.q as usize);
        for own in context..request.kv {
            order.push(own);
            let count = order.len().min(self.valid as usize);
            let list = match self.kind {
                ListKind::Clustered => runs(own + 1, count, CLUSTER, rng),
                ListKind::Pages => runs(own + 1, count, page_size, rng),
                ListKind::Shared if own > context => {
                    for _ in 0..count.div_ceil(CHANGED) {
                        let with = rng.usize(..order.len());
                        order.swap(rng.usize(..count), with);
                    }
                    order[..count].to_vec()
                }
                ListKind::Random | ListKind::Sorted | ListKind::Shared => {
                    for at in 0..count {
                        let with = rng.usize(at..order.len());
                        order.swap(at, with);
                    }
                    let mut list = order[..count].to_vec();
                    if self.kind == ListKind::Sorted {
                        list.sort_unstable();
                    }
                    list
                }
            };
            lists.push(list);
        }
        lists
    }
}

/// Returns `count` of `seen` tokens, as aligned runs of `length` in random order. The last run may
/// be cut off.
fn runs(seen: u32, count: usize, length: u32, rng: &mut Rng) -> Vec<u32> {
    let mut starts: Vec<u32> = (0..seen).step_by(length as usize).collect();
    let mut list = Vec::with_capacity(count + length as usize);
    for at in 0..starts.len() {
        if list.len() >= count {
            break;
        }
        let with = rng.usize(at..starts.len());
        starts.swap(at, with);
        list.extend(starts[at]..seen.min(starts[at] + length));
    }
    list.truncate(count);
    list
}

/// Returns the number of different cache rows in the lists of a batch.
pub(super) fn distinct_rows(requests: &[Request], positions: &[Vec<u32>]) -> usize {
    let mut rest = positions;
    let rows_of = |request: &Request| {
        let (own, others) = rest.split_at(request.q as usize);
        rest = others;
        match own {
            [list] => list.len(),
            lists => {
                let mut named = vec![false; request.kv as usize];
                for position in lists.iter().flatten() {
                    named[*position as usize] = true;
                }
                named.into_iter().filter(|named| *named).count()
            }
        }
    };
    requests.iter().map(rows_of).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const REQUESTS: [Request; 3] = [
        Request::new(1, 900),
        Request::new(3, 40),
        Request::new(20, 1000),
    ];

    /// Makes the lists of a kind, and checks the properties that all kinds share.
    fn lists(kind: ListKind, valid: u32) -> Vec<Vec<u32>> {
        let lists = Lists {
            kind,
            topk: 256,
            valid,
        };
        let positions = lists.positions(&REQUESTS, 16, 7);
        assert_eq!(positions, lists.positions(&REQUESTS, 16, 7));
        assert_ne!(positions, lists.positions(&REQUESTS, 16, 8));
        let seen: Vec<u32> = REQUESTS
            .iter()
            .flat_map(|r| r.kv - r.q + 1..=r.kv)
            .collect();
        assert_eq!(positions.len(), seen.len());
        for (list, seen) in positions.iter().zip(seen) {
            assert_eq!(list.len(), seen.min(valid) as usize, "{kind:?}");
            assert!(list.iter().all(|position| *position < seen), "{kind:?}");
            let distinct: BTreeSet<_> = list.iter().collect();
            assert_eq!(distinct.len(), list.len(), "{kind:?}");
        }
        positions
    }

    #[test]
    fn lists_name_distinct_tokens_that_are_seen() {
        for kind in ListKind::value_variants() {
            for valid in [256, 100, 1] {
                lists(*kind, valid);
            }
        }
    }

    #[test]
    fn kinds_lie_as_they_say() {
        let ascends = |list: &[u32]| list.is_sorted();
        assert!(lists(ListKind::Sorted, 256).iter().all(|l| ascends(l)));
        assert!(!lists(ListKind::Random, 256).iter().any(|l| ascends(l)));
        for (kind, length) in [(ListKind::Clustered, 32), (ListKind::Pages, 16)] {
            for list in lists(kind, 256).iter().filter(|list| list.len() == 256) {
                let in_run = |pair: &&[u32]| pair[1] == pair[0] + 1;
                let neighbours = list.windows(2).filter(in_run).count();
                // The run with the newest tokens may be short.
                assert!(
                    neighbours >= 256 - 256 / length - 2,
                    "{kind:?} {neighbours}"
                );
            }
        }
    }

    #[test]
    fn neighbours_share_most_of_a_shared_list() {
        let common = |kind| {
            let lists = lists(kind, 160);
            let last = &lists[lists.len() - 20..];
            let pairs = last.windows(2).map(|pair| {
                let first: BTreeSet<_> = pair[0].iter().collect();
                pair[1].iter().filter(|entry| first.contains(entry)).count()
            });
            pairs.min().unwrap()
        };
        assert!(
            common(ListKind::Shared) >= 150,
            "{}",
            common(ListKind::Shared)
        );
        assert!(common(ListKind::Random) < 80);
    }

    #[test]
    fn rows_are_counted_once_for_each_request() {
        let requests = [Request::new(1, 9), Request::new(2, 9)];
        let positions = [vec![1, 2], vec![1, 5], vec![5, 6, 7]];
        assert_eq!(distinct_rows(&requests, &positions), 2 + 4);
    }
}
