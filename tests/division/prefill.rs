//! Tests of the prefill kernel's order of query tiles, and of its division of keys among CTAs for
//! few tiles. Both are computed on the host by the kernel's own code.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use mla_kernels::raw::{self, MlaPrefillParams, MlaPrefillWorkItem};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::calls::PREFILL_DIMS as DIMS;
use super::{checked, listed};

const QUERIES: usize = 128;
/// Cost of an item besides its KV tiles, and the minimum cost of combining, in KV tiles, as
/// `split_plan.cuh` predicts them.
const ITEM: f64 = 2.0;
const COMBINE: f64 = 3.0;
const COMBINE_ROWS: f64 = 1.5;
/// The predicted relative time that a division must not exceed, and the cost per item of asking for
/// the lengths.
const WORTHWHILE: f64 = 0.95;
const ASK_ITEM: f64 = 0.034;

#[derive(Clone, Debug)]
struct Batch {
    heads: usize,
    causal: bool,
    /// The head's part of a query, its rotary part, and a value.
    dims: [i32; 3],
    /// Query and key tokens of each request.
    lens: Vec<(usize, usize)>,
    ctas: usize,
}

impl Batch {
    fn context(heads: usize, requests: usize, queries: usize, keys: usize) -> Self {
        Self {
            heads,
            causal: false,
            dims: [128, 64, 128],
            lens: vec![(queries, keys); requests],
            ctas: 132,
        }
    }

    fn prompt(heads: usize, queries: usize) -> Self {
        Self {
            causal: true,
            ..Self::context(heads, 1, queries, queries)
        }
    }

    fn items(&self) -> Vec<MlaPrefillWorkItem> {
        self.items_if_said(false, self.longest_request().1)
    }

    /// Returns the items that the device makes if it divides by the lengths. With this bound every
    /// launch does so, and the items do not depend on the bound.
    fn answer(&self) -> Vec<MlaPrefillWorkItem> {
        self.items_if_said(false, 1 << 20)
    }

    /// Returns the maximum number of query tokens and of keys of any request.
    fn longest_request(&self) -> (usize, usize) {
        let longest = |len: fn(&(usize, usize)) -> usize| self.lens.iter().map(len).max().unwrap();
        (longest(|len| len.0), longest(|len| len.1))
    }

    /// Returns the items for given numbers of the host. `equal` tells it that all requests are as
    /// long as the longest.
    fn items_if_said(&self, equal: bool, max_key_len: usize) -> Vec<MlaPrefillWorkItem> {
        let [queries, keys] = &self.starts();
        let (max_query_len, requests) = (self.longest_request().0, self.lens.len());
        let max = requests * max_key_len;
        let [query_tokens, key_tokens] = match equal {
            true => [requests * max_query_len, max],
            // A total that would equal that of equal requests is reduced by one token.
            false => [queries[requests], keys[requests]].map(|tokens| tokens as usize),
        };
        let key_tokens = key_tokens - usize::from(!equal && key_tokens == max && max > 0);
        let params = MlaPrefillParams {
            max_key_len: max_key_len as i32,
            query_tokens: query_tokens as i32,
            key_tokens: key_tokens as i32,
            ..self.params(queries, keys)
        };
        self.items_of(&params)
    }

    fn items_of(&self, params: &MlaPrefillParams) -> Vec<MlaPrefillWorkItem> {
        listed("mla_prefill_sm90_work_items", |items, room, count| {
            // SAFETY: the pointers are to arrays with the numbers of elements that the header asks
            // for.
            unsafe {
                raw::mla_prefill_sm90_work_items(params, self.ctas as i32, items, room, count)
            }
        })
    }

    /// Returns the items if each request is divided as if it were alone. `loose` is added to the
    /// bounds of lengths.
    fn items_alone(&self, loose: usize) -> Vec<MlaPrefillWorkItem> {
        let [queries, keys] = &self.starts();
        let params = self.params(queries, keys);
        let params = MlaPrefillParams {
            batch_invariant: 1,
            max_query_len: params.max_query_len + loose as i32,
            max_key_len: params.max_key_len + loose as i32,
            ..params
        };
        self.items_of(&params)
    }

    /// Returns the order of query tiles without splits, for these blocks of the L2 swizzle.
    fn unsplit_items(&self, requests: usize, heads: usize) -> Vec<MlaPrefillWorkItem> {
        let [queries, keys] = &self.starts();
        let params = self.params(queries, keys);
        listed(
            "mla_prefill_sm90_unsplit_work_items",
            |items, room, count| {
                // SAFETY: the pointers are to arrays with the numbers of elements that the header
                // asks for.
                unsafe {
                    raw::mla_prefill_sm90_unsplit_work_items(
                        &params,
                        self.ctas as i32,
                        requests as i32,
                        heads as i32,
                        items,
                        room,
                        count,
                    )
                }
            },
        )
    }

    /// Returns the first query token and the first key of each request, and the ends of the last.
    fn starts(&self) -> [Vec<i32>; 2] {
        let mut starts = [vec![0], vec![0]];
        for &(queries, keys) in &self.lens {
            for (starts, len) in starts.iter_mut().zip([queries, keys]) {
                starts.push(starts[starts.len() - 1] + len as i32);
            }
        }
        starts
    }

    /// Returns the parameters with the host's numbers of the batch.
    fn params(&self, queries: &[i32], keys: &[i32]) -> MlaPrefillParams {
        let (max_query_len, max_key_len) = self.longest_request();
        MlaPrefillParams {
            cu_query_lens: queries.as_ptr(),
            cu_key_lens: keys.as_ptr(),
            requests: self.lens.len() as i32,
            heads: self.heads as i32,
            max_query_len: max_query_len as i32,
            max_key_len: max_key_len as i32,
            query_tokens: queries[self.lens.len()],
            key_tokens: keys[self.lens.len()],
            nope_dim: self.dims[0],
            rope_dim: self.dims[1],
            value_dim: self.dims[2],
            causal: i32::from(self.causal),
            ..MlaPrefillParams::default()
        }
    }

    /// Checks the work items if the host says that all requests are as long as the longest. If this
    /// is true, the items are those of equal requests. If not, the items follow from the lengths on
    /// the device. Returns true if query tiles are divided into splits.
    fn items_told_equal(&self) -> bool {
        let longest = self.longest_request();
        let told = self.items_if_said(true, longest.1);
        if self.lens.iter().all(|lens| *lens == longest) {
            return self.check_items(&told).is_some();
        }
        let believed = Self {
            lens: vec![longest; self.lens.len()],
            ..self.clone()
        };
        let is_divided = !believed.items_if_said(true, longest.1).is_empty();
        match is_divided {
            true => assert_eq!(numbers(told), numbers(self.answer()), "{self:?}"),
            false => assert!(told.is_empty(), "{self:?}"),
        }
        is_divided
    }

    /// Returns the number of KV tiles that the rows of a query tile see together.
    fn kv_tiles(&self, request: usize, query: usize) -> usize {
        let (queries, keys) = self.lens[request];
        let visible = if self.causal {
            (query + QUERIES + keys).saturating_sub(queries).min(keys)
        } else {
            keys
        };
        visible.div_ceil(self.kv_tile())
    }

    /// Returns the number of keys of a KV tile.
    fn kv_tile(&self) -> usize {
        match self.dims {
            [_, _, 256] => 64,
            [192, _, _] => 96,
            _ => 128,
        }
    }

    fn query_tiles(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.lens.iter().enumerate().flat_map(|(request, len)| {
            (0..self.heads).flat_map(move |head| {
                (0..len.0)
                    .step_by(QUERIES)
                    .map(move |query| (request, head, query))
            })
        })
    }

    /// Returns the query tile of an item that is not a split.
    fn whole_tile(&self, item: &MlaPrefillWorkItem) -> (usize, usize, usize) {
        assert_eq!((item.begin, item.split, item.splits), (0, 0, 1), "{item:?}");
        let (request, query) = (item.request as usize, item.query as usize);
        assert_eq!(item.end as usize, self.kv_tiles(request, query), "{item:?}");
        (request, item.head as usize, query)
    }

    /// Returns the time at which the last CTA ends, if each takes the next of `costs` as soon as it
    /// is free.
    fn end(&self, costs: impl Iterator<Item = usize>) -> f64 {
        // The heap returns the largest value. Values are in thousandths, since f64 has no total
        // order.
        let mut free: BinaryHeap<i64> = std::iter::repeat_n(0, self.ctas).collect();
        let mut end = 0;
        for cost in costs {
            let time = -free.pop().unwrap() + (1000.0 * (cost as f64 + ITEM)) as i64;
            free.push(-time);
            end = end.max(time);
        }
        end as f64 / 1000.0
    }

    /// Returns the end if no query tile is divided and the longest ones come first.
    fn end_of_whole(&self) -> f64 {
        let mut costs: Vec<usize> = self
            .query_tiles()
            .map(|(request, _, query)| self.kv_tiles(request, query))
            .collect();
        costs.sort_unstable_by(|a, b| b.cmp(a));
        self.end(costs.into_iter())
    }

    /// Checks everything that the kernel relies on if the batch is divided, and returns the time at
    /// which the last item ends.
    fn check(&self) -> Option<f64> {
        self.check_items(&self.items())
    }

    /// Returns true if the batch is divided. Asserts that the division is right, and that it ends
    /// earlier than the undivided batch.
    fn divides_and_pays(&self) -> bool {
        let Some(end) = self.check() else {
            return false;
        };
        let whole = self.end_of_whole();
        assert!(end + COMBINE <= whole, "{self:?}: {end} for {whole}");
        true
    }

    fn check_items(&self, items: &[MlaPrefillWorkItem]) -> Option<f64> {
        if items.is_empty() {
            return None;
        }
        let mut tiles: BTreeMap<(usize, usize, usize), Vec<MlaPrefillWorkItem>> = BTreeMap::new();
        let mut slots = BTreeSet::new();
        for item in items.iter().filter(|item| !is_empty(item)) {
            let key = (
                item.request as usize,
                item.head as usize,
                item.query as usize,
            );
            tiles.entry(key).or_default().push(*item);
            // An item that is its tile's only split stores no partial result.
            if item.splits > 1 {
                assert!((0..3 * self.ctas as i32).contains(&item.slot), "{item:?}");
                assert!(slots.insert(item.slot), "{item:?}");
            }
        }
        let mut expected = 0;
        for (request, head, query) in self.query_tiles() {
            expected += 1;
            let of_tile = self.kv_tiles(request, query);
            // Splits of a request have the length of those of the longest tile. Only the last split
            // of a tile may be shorter.
            let last = (self.lens[request].0 - 1) / QUERIES * QUERIES;
            let longest = self.kv_tiles(request, last);
            let length = longest.div_ceil(tiles[&(request, head, last)].len());
            let splits = tiles.get_mut(&(request, head, query)).unwrap();
            splits.sort_unstable_by_key(|item| item.split);
            let mut done = 0;
            for (at, item) in splits.iter().enumerate() {
                assert_eq!(item.split as usize, at, "{item:?}");
                assert_eq!(item.slot, splits[0].slot + item.split, "{item:?}");
                assert_eq!(item.splits as usize, splits.len(), "{item:?}");
                assert_eq!(item.begin as usize, done, "{item:?}");
                assert_eq!(item.begin == item.end, of_tile == 0, "{item:?}");
                let rest = of_tile - item.begin as usize;
                assert_eq!(
                    (item.end - item.begin) as usize,
                    length.min(rest),
                    "{item:?}"
                );
                done = item.end as usize;
            }
            assert_eq!(done, of_tile, "{self:?}");
        }
        assert_eq!(tiles.len(), expected);
        let costs = items.iter().map(|item| (item.end - item.begin) as usize);
        Some(self.end(costs.filter(|cost| *cost > 0)))
    }

    fn longest(&self) -> usize {
        let items = self.items();
        let costs = items.iter().map(|item| (item.end - item.begin) as usize);
        costs.max().unwrap_or(0)
    }
}

/// Returns true if an item only fills its place in the list. The first split of a query tile
/// without visible keys is not such an item, since it stores the empty result.
fn is_empty(item: &MlaPrefillWorkItem) -> bool {
    item.begin == item.end && item.split > 0
}

/// Returns the fields of each item in an order that tests can compare.
fn numbers(items: Vec<MlaPrefillWorkItem>) -> Vec<([i32; 4], [i32; 4])> {
    let of = |i: &MlaPrefillWorkItem| {
        let place = [i.request, i.head, i.query, i.slot];
        (place, [i.begin, i.end, i.split, i.splits])
    };
    items.iter().map(of).collect()
}

/// Draws requests. The bounds of their keys are 2^keys and up, below `more` further doublings.
fn drawn(
    below: &mut dyn FnMut(u32) -> usize,
    max_requests: u32,
    keys: usize,
    more: u32,
) -> Vec<(usize, usize)> {
    (0..=below(max_requests))
        .map(|_| {
            let max = [1 << (1 + below(11)), 1 << (keys + below(more))];
            (below(max[0]), below(max[1]))
        })
        .collect()
}

/// Checks that the order of undivided query tiles contains each once, and ends little later than an
/// order by all lengths. The kernel rounds lengths to powers of two, and puts short ones into any
/// order. Some batches have more requests than it looks at together.
#[test]
fn whole_query_tiles_are_handed_out_once_and_the_longest_early() {
    for (seed, runs, max_requests, max_heads, max_mean) in
        [(40, 300, 60, 32, 1.015), (41, 40, 3000, 4, 1.03)]
    {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut worst, mut logs, mut batches): (f64, f64, u32) = (0.0, 0.0, 0);
        for run in 0..runs {
            let mut below = |max: u32| rng.random_range(0..max) as usize;
            let max_queries = [16, 200, 2000][below(3)];
            let (queries, keys) = (1 + below(max_queries), 1 + below(4000));
            let max_long = 1 << (10 + below(7));
            let batch = Batch {
                lens: (0..1 + below(max_requests))
                    .map(|_| {
                        let max = if below(8) == 0 { max_long } else { keys };
                        (below(queries as u32 + 1), below(max as u32))
                    })
                    .collect(),
                causal: run % 2 == 0,
                dims: DIMS[below(6)],
                heads: 1 + below(max_heads),
                ctas: 132,
            };
            let (all_requests, all_heads) = (max_requests as usize, max_heads as usize);
            for (requests, heads) in [
                (all_requests, all_heads),
                (1 + below(8), all_heads),
                (all_requests, 1 + below(8)),
            ] {
                let items = batch.unsplit_items(requests, heads);
                let mut tiles: Vec<_> = items.iter().map(|item| batch.whole_tile(item)).collect();
                tiles.sort_unstable();
                assert!(tiles.into_iter().eq(batch.query_tiles()), "{batch:?}");
                let end = batch.end(items.iter().map(|item| item.end as usize));
                // Both ends are 0 if there is no tile.
                let later = end.max(1.0) / batch.end_of_whole().max(1.0);
                worst = worst.max(later);
                logs += later.ln();
                batches += 1;
            }
        }
        let mean = (logs / f64::from(batches)).exp();
        assert!(worst < 1.4 && mean < max_mean, "{worst} {mean}");
    }
}

#[test]
fn few_query_tiles_fill_the_gpu() {
    for (heads, requests, queries, keys, longest) in [
        // Eight query tiles of 256 KV tiles have 16 splits each.
        (8, 1, 16, 32_768, 16),
        (8, 4, 16, 32_768, 64),
        (8, 1, 1024, 32_768, 128),
        (16, 1, 512, 32_768, 128),
        (16, 1, 256, 2048, 4),
        (8, 2, 64, 8192, 8),
        // There is a single query tile with 128 splits.
        (1, 1, 128, 131_072, 8),
    ] {
        let batch = Batch::context(heads, requests, queries, keys);
        let end = batch.check().unwrap();
        assert_eq!(batch.longest(), longest, "{batch:?}");
        let even = heads * requests * queries.div_ceil(QUERIES) * keys.div_ceil(128);
        let even = even as f64 / batch.ctas as f64;
        assert!(end <= 1.04 * even + ITEM, "{batch:?}: {end} of {even}");
    }
}

#[test]
fn query_tiles_of_a_head_share_their_splits_keys() {
    let batch = Batch {
        causal: true,
        ..Batch::context(16, 1, 512, 33_280)
    };
    batch.check().unwrap();
    let mut begins: BTreeMap<i32, BTreeSet<i32>> = BTreeMap::new();
    for item in batch.items() {
        begins.entry(item.split).or_default().insert(item.begin);
    }
    assert!(
        begins.values().all(|begins| begins.len() == 1),
        "{begins:?}"
    );
}

#[test]
fn what_fills_the_gpu_is_not_divided() {
    for batch in [
        Batch::prompt(128, 2048),
        Batch::prompt(16, 2048),
        Batch::prompt(8, 512),
        Batch::context(128, 1, 128, 32_768),
        Batch::context(8, 16, 16, 2048),
        Batch::context(16, 4, 512, 8192),
        Batch::context(8, 1, 128, 128),
        Batch::context(8, 1, 0, 4096),
        Batch::context(8, 1, 128, 0),
    ] {
        assert_eq!(batch.check(), None, "{batch:?}");
    }
}

/// Draws batches, and returns the numbers of those that are divided and of those that are not.
/// Asserts that each division is right and pays.
fn divisions(
    seed: u64,
    runs: usize,
    draw: impl Fn(usize, &mut dyn FnMut(u32) -> usize) -> Batch,
) -> [usize; 2] {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut counts = [0; 2];
    for run in 0..runs {
        let batch = draw(run, &mut |max| rng.random_range(0..max) as usize);
        counts[usize::from(!batch.divides_and_pays())] += 1;
    }
    counts
}

#[test]
fn dividing_random_batches_is_exact_and_pays() {
    let [divided, _] = divisions(1, 3000, |_, below| {
        let max_requests = [4, 60][below(2)];
        let max_heads = [16, 128][below(2)];
        Batch {
            heads: 1 + below(max_heads),
            causal: below(2) == 1,
            dims: DIMS[below(6)],
            lens: drawn(below, max_requests, 4, 13),
            ctas: 1 + below(256),
        }
    });
    assert!(divided > 300, "{divided}");
}

#[test]
fn dividing_thousands_of_requests_and_empty_ones_is_exact() {
    let [divided, undivided] = divisions(20, 1500, |run, below| {
        let requests = 1 + below([4, 40, 4096][run % 3]);
        // These are the percentages of requests without query tokens and without keys.
        let [silent, empty] = [below(101), below(101)];
        // The number of requests with query tokens is at most the number of places in a division.
        let mut speaking = 3 * 160 / (1 + below(8));
        let [max_heads, max_queries] = [[2, 16, 128][below(3)], [16, 700, 16][below(3)]];
        let heads = 1 + below(max_heads);
        let queries = 1 + below(max_queries);
        let keys = 1 << (1 + below(16));
        let lens = (0..requests).map(|_| {
            let mut len = (1 + below(queries as u32), below(keys));
            if below(100) < silent || speaking == 0 {
                len.0 = 0;
            }
            if below(100) < empty {
                len.1 = 0;
            }
            speaking -= usize::from(len.0 > 0);
            len
        });
        Batch {
            lens: lens.collect(),
            causal: run % 2 == 0,
            dims: DIMS[run / 2 % 6],
            heads,
            ctas: 1 + below(160),
        }
    });
    assert!(divided > 100 && undivided > 100, "{divided} {undivided}");
}

#[test]
fn one_long_request_among_many_short_ones_is_divided() {
    for (heads, requests, queries, keys, longest) in [
        (8, 200, 8, 500, 30_000),
        (4, 64, 8, 300, 12_000),
        (2, 1000, 4, 100, 60_000),
        (32, 100, 16, 300, 60_000),
        (1, 1000, 1, 100, 100_000),
    ] {
        let mut batch = Batch::context(heads, requests, queries, keys);
        batch.lens[requests / 3].1 = longest;
        let whole = batch.end_of_whole();
        let end = batch.check().unwrap();
        let work: usize = batch
            .query_tiles()
            .map(|(request, _, query)| batch.kv_tiles(request, query) + ITEM as usize)
            .sum();
        let even = work as f64 / batch.ctas as f64;
        assert!(
            end <= 1.3 * even,
            "{batch:?}: {end} of {even}, whole {whole}"
        );
    }
}

#[test]
fn a_long_prompt_beside_short_ones_is_divided() {
    for (heads, short, queries, prompt, keys) in [
        (8, 20, 100, 1000, 21_000),
        (4, 30, 60, 2000, 18_000),
        (16, 10, 128, 500, 30_000),
        (8, 24, 16, 900, 12_000),
    ] {
        let mut batch = Batch::context(heads, short, queries, queries);
        batch.causal = true;
        batch.lens[short / 2] = (prompt, keys);
        let whole = batch.end_of_whole();
        let end = batch.check().unwrap();
        assert!(end <= 0.8 * whole, "{batch:?}: {end} of {whole}");
    }
}

#[test]
fn dividing_the_long_ones_of_many_random_requests_is_exact_and_pays() {
    let [divided, undivided] = divisions(30, 600, |run, below| {
        let requests = 1 + below([100, 700, 3000][run % 3]);
        let max_queries = [16, 300][below(2)];
        let (queries, keys) = (1 + below(max_queries), 1 + below(3000));
        let max_long = 1 << (10 + below(8));
        let long = 1 + below(max_long);
        let one_in = 1 + below(2 * requests as u32);
        let max_heads = [4, 32, 128][below(3)];
        let lens = (0..requests).map(|_| {
            let is_long = below(one_in as u32) == 0;
            let max = if is_long { long } else { keys };
            (below(queries as u32 + 1), below(max as u32))
        });
        Batch {
            lens: lens.collect(),
            causal: below(2) == 1,
            dims: DIMS[below(6)],
            heads: 1 + below(max_heads),
            ctas: 1 + below(160),
        }
    });
    assert!(divided > 50 && undivided > 100, "{divided} {undivided}");
}

#[test]
fn a_question_that_is_spared_would_not_have_paid() {
    let mut rng = StdRng::seed_from_u64(3);
    let (mut divided, mut undivided, mut spared) = (0, 0, 0);
    for _ in 0..3000 {
        let mut below = |max: u32| rng.random_range(0..max) as usize;
        let max_queries = [1, 16, 64, 128, 130, 300, 700, 900][below(8)];
        let max_keys = [700, 768, 800, 900, 1100, 1500][below(6)];
        let causal = below(2) == 1;
        let lens = (0..=below(6)).map(|_| {
            let queries = 1 + below(max_queries);
            let keys = 1 + below(max_keys);
            (queries, if causal { keys.max(queries) } else { keys })
        });
        let batch = Batch {
            lens: lens.collect(),
            causal,
            dims: DIMS[below(6)],
            heads: 1 + below(8),
            ctas: 132,
        };
        let longest = batch.longest_request().1;
        if longest <= 640 {
            continue;
        }
        let (asked, items) = (batch.answer(), batch.items());
        if asked.is_empty() {
            undivided += 1;
        } else if items.is_empty() {
            spared += 1;
            let costs = asked.iter().map(|item| (item.end - item.begin) as usize);
            let count = costs.clone().filter(|cost| *cost > 0).count();
            let rows = batch.longest_request().0.min(QUERIES) as f64 / QUERIES as f64;
            let end = batch.end(costs.filter(|cost| *cost > 0)) + COMBINE + COMBINE_ROWS * rows;
            let whole = batch.end_of_whole();
            let paid = WORTHWHILE * whole - end - ASK_ITEM * count as f64;
            // The host knows the mean length and the maximum length.
            assert!(paid < 0.1 * whole, "{batch:?}: {paid} of {whole}");
            continue;
        } else {
            divided += 1;
        }
        assert_eq!(numbers(items), numbers(asked), "{batch:?}");
    }
    let counts = [divided, undivided, spared];
    assert!(counts.iter().all(|count| *count > 200), "{counts:?}");
}

/// Tries upper query tiles, which do not see the last splits. If the host says that there is one
/// request, these splits have no items.
#[test]
fn few_items_of_equal_requests_are_empty() {
    let mut rng = StdRng::seed_from_u64(7);
    let (mut empty, mut all) = (0, 0);
    for _ in 0..300 {
        let mut below = |max: u32| rng.random_range(0..max) as usize;
        let batch = Batch {
            dims: DIMS[below(6)],
            ..Batch::prompt(1 + below(6), 1 + below(5000))
        };
        let items = batch.items_if_said(true, batch.longest_request().1);
        empty += items.iter().filter(|item| is_empty(item)).count();
        all += items.len();
    }
    assert!(all > 5000 && 50 * empty <= all, "{empty} of {all}");
}

#[test]
fn equal_requests_are_divided_exactly_and_others_by_their_lengths() {
    let mut rng = StdRng::seed_from_u64(11);
    let (mut divided, mut undivided) = (0, 0);
    for _ in 0..300 {
        let mut below = |max: u32| rng.random_range(0..max) as usize;
        let queries = 1 + below(700);
        let keys = queries + below(40_000);
        let batch = Batch {
            causal: below(2) == 1,
            dims: DIMS[below(6)],
            ..Batch::context(1 + below(20), 1 + below(9), queries, keys)
        };
        match batch.items_told_equal() {
            true => divided += 1,
            false => undivided += 1,
        }
        // The division checks the host's numbers against the lengths.
        let mut lens = batch.lens.clone();
        lens[0].1 /= 2;
        Batch { lens, ..batch }.items_told_equal();
    }
    assert!(divided > 50 && undivided > 5, "{divided} {undivided}");
}

/// Returns the divided query tiles of a request: for each split its head, first query row, index,
/// KV tiles, and the number of splits.
fn splits_of(items: &[MlaPrefillWorkItem], request: usize) -> BTreeSet<[i32; 6]> {
    let of_request = items.iter().filter(|item| item.request as usize == request);
    let divided = of_request.filter(|item| !is_empty(item) && item.splits > 1);
    divided
        .map(|i| [i.head, i.query, i.split, i.begin, i.end, i.splits])
        .collect()
}

#[test]
fn batch_invariant_requests_are_divided_as_if_alone() {
    let mut rng = StdRng::seed_from_u64(17);
    let (mut divided, mut whole, mut launches, mut freely) = (0, 0, 0, 0);
    for _ in 0..1000 {
        let mut below = |max: u32| rng.random_range(0..max) as usize;
        let (max_requests, max_heads) = ([6, 60][below(2)], [4, 16, 128][below(3)]);
        let batch = Batch {
            heads: 1 + below(max_heads),
            causal: below(2) == 1,
            dims: DIMS[below(6)],
            lens: drawn(&mut below, max_requests, 9, 9),
            ctas: [78, 114, 132][below(3)],
        };
        let loose = below(2) * below(30_000);
        let items = batch.items_alone(loose);
        let free = batch.items();
        // A launch has so many requests that their splits have slots, by the bounds.
        let (queries, keys) = batch.longest_request();
        let tile = batch.kv_tile();
        let splits = (keys + loose).div_ceil(tile).div_ceil(2048 / tile);
        let of_head = (queries + loose).div_ceil(QUERIES) * splits;
        let of_request = batch.heads * of_head.min(batch.ctas / batch.heads);
        let at_once = (3 * batch.ctas / of_request.max(1)).max(1);
        let mut end = 0;
        for (request, lens) in batch.lens.iter().enumerate() {
            let splits = splits_of(&items, request);
            let alone = Batch {
                lens: vec![*lens],
                ..batch.clone()
            };
            let own = alone.items_alone(0);
            assert_eq!(splits, splits_of(&own, 0), "{batch:?}, request {request}");
            alone.check_items(&own);
            freely += usize::from(splits != splits_of(&free, request));
            if request % at_once == 0 {
                launches += usize::from(end > 0);
                end = 0;
            }
            if splits.is_empty() {
                whole += 1;
                continue;
            }
            divided += 1;
            let of_request = items.iter().filter(|item| {
                item.request as usize == request && !is_empty(item) && item.splits > 1
            });
            let slots: BTreeSet<i32> = of_request.map(|item| item.slot).collect();
            assert_eq!(slots.len(), splits.len(), "{batch:?}, request {request}");
            let (first, last) = (slots.first().unwrap(), slots.last().unwrap());
            assert!(*first >= end, "{batch:?}, request {request}");
            end = last + 1;
            assert!(end <= 3 * batch.ctas as i32, "{batch:?}, request {request}");
        }
    }
    let counts = [divided, whole, launches, freely];
    assert!(counts.iter().all(|count| *count > 300), "{counts:?}");
}

#[test]
fn arguments_that_cannot_be_divided_are_refused() {
    let mut params = MlaPrefillParams::default();
    let refusal = |params: &MlaPrefillParams, ctas| {
        let mut count = 0;
        // SAFETY: there is no room for items, and the values behind the other pointers live.
        let status = unsafe {
            raw::mla_prefill_sm90_work_items(params, ctas, std::ptr::null_mut(), 0, &mut count)
        };
        checked("mla_prefill_sm90_work_items", status)
    };
    assert!(refusal(&params, 1).unwrap_err().contains("heads"));
    params.heads = 1;
    assert!(refusal(&params, 1).unwrap_err().contains("requests"));
    params.requests = 1;
    assert!(refusal(&params, 1).unwrap_err().contains("cu_query_lens"));
    let starts = [0, 5];
    params.cu_query_lens = starts.as_ptr();
    assert!(refusal(&params, 1).unwrap_err().contains("cu_key_lens"));
    params.cu_key_lens = starts.as_ptr();
    assert!(refusal(&params, 1).unwrap_err().contains("nope_dim"));
    [params.nope_dim, params.rope_dim, params.value_dim] = DIMS[0];
    refusal(&params, 1).unwrap();
    assert!(refusal(&params, 0).unwrap_err().contains("ctas"));
    assert!(refusal(&params, 257).unwrap_err().contains("ctas"));
}
