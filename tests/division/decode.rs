//! Tests of the decode kernel's division of a batch among CTAs, computed on the host by the
//! kernel's own code.

use std::collections::BTreeMap;

use mla_kernels::raw::{self, MlaDecodeParams, MlaDecodeWorkItem};
use mla_runtime::model::{DType, KvFormat, MlaDims};
use rand::{RngExt as _, SeedableRng as _};

use super::calls::decode;
use super::{checked, listed};

const TILE_TOKENS: usize = 64;

struct Batch {
    heads: usize,
    query_len: usize,
    /// Query tokens of each request. `None` means `query_len` for each.
    queries: Option<Vec<usize>>,
    lens: Vec<usize>,
    groups: usize,
}

impl Batch {
    fn equal(heads: usize, query_len: usize, requests: usize, len: usize, groups: usize) -> Self {
        Self {
            heads,
            query_len,
            queries: None,
            lens: vec![len; requests],
            groups,
        }
    }

    fn query_rows(&self, request: usize) -> usize {
        let tokens = self
            .queries
            .as_ref()
            .map_or(self.query_len, |queries| queries[request]);
        tokens * self.heads
    }

    fn kv_tiles(&self, request: usize) -> usize {
        self.lens[request].div_ceil(TILE_TOKENS)
    }

    fn items(&self) -> Vec<Vec<MlaDecodeWorkItem>> {
        let lens: Vec<i32> = self.lens.iter().map(|&len| len as i32).collect();
        let starts: Option<Vec<i32>> = self.queries.as_ref().map(|queries| {
            std::iter::once(0)
                .chain(queries.iter().scan(0, |sum, &tokens| {
                    *sum += tokens as i32;
                    Some(*sum)
                }))
                .collect()
        });
        let longest = self
            .lens
            .iter()
            .max()
            .map_or(0, |len| len.div_ceil(TILE_TOKENS));
        let rows = [self.heads, self.query_len].map(|count| count as i32);
        let batch = [lens.len(), longest.max(1)].map(|count| count as i32);
        let params = MlaDecodeParams {
            kv_lens: lens.as_ptr(),
            cu_q_lens: starts.as_ref().map_or(std::ptr::null(), |s| s.as_ptr()),
            ..decode(MlaDims::R1, DType::BF16, KvFormat::BF16, rows, batch)
        };
        let groups = self.groups as i32;
        let items_of = |group| {
            listed("mla_decode_sm90_work_items", |items, room, count| {
                // SAFETY: the pointers are to arrays with the numbers of elements that the header
                // asks for.
                unsafe {
                    raw::mla_decode_sm90_work_items(&params, groups, group, items, room, count)
                }
            })
        };
        (0..groups).map(items_of).collect()
    }

    /// Checks everything that the kernel relies on. Returns the largest number of KV tiles of a
    /// group.
    fn check(&self) -> usize {
        let groups = self.items();
        // The splits of each query tile, by request and first row, each with its group.
        let mut tiles: BTreeMap<(i32, i32), Vec<(usize, MlaDecodeWorkItem)>> = BTreeMap::new();
        for (group, items) in groups.iter().enumerate() {
            for (i, item) in items.iter().enumerate() {
                assert!(item.last == 0 || i + 1 == items.len(), "{item:?}");
                tiles
                    .entry((item.request, item.first_row))
                    .or_default()
                    .push((group, *item));
            }
            // A group has two places in the workspace: for a split of a tile that begins with it,
            // and for another split.
            let split = |first| {
                items
                    .iter()
                    .filter(|item| item.splits > 1 && (item.split == 0) == first)
                    .count()
            };
            assert!(split(true) <= 1 && split(false) <= 1, "group {group}");
        }
        let rows = groups.iter().flatten().next().map_or(1, |item| item.rows) as usize;
        let mut expected = 0;
        for request in 0..self.lens.len() {
            for first_row in (0..self.query_rows(request)).step_by(rows) {
                expected += 1;
                let splits = &tiles[&(request as i32, first_row as i32)];
                let mut done = 0;
                for (i, (group, item)) in splits.iter().enumerate() {
                    assert_eq!(item.kv_tile_begin as usize, done, "{item:?}");
                    done = item.kv_tile_end as usize;
                    assert!(done > item.kv_tile_begin as usize || self.kv_tiles(request) == 0);
                    assert_eq!(item.split as usize, i);
                    assert_eq!(item.splits as usize, splits.len());
                    assert_eq!(item.first_group as usize + i, *group);
                    assert!(item.splits == 1 || item.combiners > 0);
                    assert!(item.combiners <= item.splits, "{item:?}");
                    // Combiners have no further work items.
                    assert!(
                        item.splits == 1 || i >= item.combiners as usize || item.last != 0,
                        "{item:?}"
                    );
                }
                assert_eq!(done, self.kv_tiles(request));
            }
        }
        assert_eq!(tiles.len(), expected);
        let max = groups
            .iter()
            .map(|items| {
                items
                    .iter()
                    .map(|item| (item.kv_tile_end - item.kv_tile_begin) as usize)
                    .sum()
            })
            .max()
            .unwrap();
        self.check_balance(rows, max);
        max
    }

    /// Checks that no group has more KV tiles beyond an even share than `worth` of scheduler.cuh
    /// allows. Both numbers count one further KV tile for each query tile.
    fn check_balance(&self, rows: usize, max: usize) {
        let cost: usize = (0..self.lens.len())
            .map(|request| {
                self.query_rows(request).div_ceil(rows) * (self.kv_tiles(request).max(1) + 1)
            })
            .sum();
        let share = cost as f64 / self.groups as f64;
        // For divided and for whole tiles, `worth` allows a multiple of an even share, and a number
        // of KV tiles besides.
        let granted: &[(f64, f64)] = match rows {
            65.. => &[(17.0 / 16.0, 3.0)],
            33.. => &[(17.0 / 16.0, 7.0), (4.0 / 3.0, 4.0)],
            _ => &[(5.0 / 3.0, 16.0 / 3.0), (23.0 / 16.0, 4.0)],
        };
        let limits = granted
            .iter()
            .map(|(of_share, beside)| of_share * share + beside - 1.0);
        // The ranges of an in-line division are at most a rounded-up share. Splits of a very long
        // tile may exceed it by the rounding error of a float.
        let limit = limits.fold(share + 1.0, f64::max) + share / f64::from(1 << 20);
        assert!(max as f64 <= limit, "{max} of {limit}: {share} each");
    }
}

#[test]
fn every_kv_tile_is_done_once_at_equal_lengths() {
    for (heads, query_len, groups) in [
        (16, 1, 132),
        (64, 1, 132),
        (128, 1, 66),
        (128, 2, 66),
        (128, 8, 7),
        (48, 4, 44),
        (40, 8, 26),
        (64, 7, 18),
        (16, 9, 44),
        (128, 16, 66),
    ] {
        for requests in [
            1, 2, 3, 4, 7, 8, 22, 31, 32, 33, 34, 65, 66, 67, 128, 131, 132, 133, 500, 1024,
        ] {
            for len in [0, 1, 63, 64, 65, 128, 1000, 4096, 8192, 131_072] {
                let mut batch = Batch::equal(heads, query_len, requests, len, groups);
                let max = batch.check();
                // This is the same batch with the query length of each request.
                batch.queries = Some(vec![query_len; requests]);
                assert_eq!(batch.check(), max);
            }
        }
    }
}

#[test]
fn every_kv_tile_is_done_once_at_great_lengths() {
    for (heads, groups) in [(16, 132), (128, 66)] {
        for requests in [1, 2, 5, 33] {
            for len in [(1 << 24) - 63, 1 << 24, (1 << 27) + 5] {
                Batch::equal(heads, 1, requests, len, groups).check();
            }
        }
    }
}

#[test]
fn every_kv_tile_is_done_once_at_any_lengths() {
    let mut rng = rand::rngs::StdRng::seed_from_u64(4);
    for _ in 0..4000 {
        let groups = rng.random_range(1..=160);
        let requests = 1 << rng.random_range(0..=8);
        let requests = rng.random_range(1..=requests);
        let longest = 1 << rng.random_range(0..=15);
        let query_len = rng.random_range(1..=16);
        let ragged = rng.random_range(0..2) == 0;
        Batch {
            heads: rng.random_range(1..=128),
            query_len,
            queries: ragged.then(|| {
                (0..requests)
                    .map(|_| rng.random_range(0..=query_len))
                    .collect()
            }),
            lens: (0..requests)
                .map(|_| rng.random_range(0..=longest))
                .collect(),
            groups,
        }
        .check();
    }
}

#[test]
fn every_kv_tile_is_done_once_in_batches_with_many_empty_requests() {
    let mut rng = rand::rngs::StdRng::seed_from_u64(20);
    for run in 0..1500 {
        let requests = match run % 3 {
            0 => rng.random_range(1..=4),
            1 => rng.random_range(1..=64),
            _ => rng.random_range(900..=1024),
        };
        let query_len = rng.random_range(1..=16);
        // These are the percentages of requests without tokens, without query tokens, and with a
        // long context.
        let [empty, silent, long] = [(); 3].map(|()| rng.random_range(0..=100));
        let longest = 1 << rng.random_range(6..=17);
        let mut one_of = |percent: i32| rng.random_range(0..100) < percent;
        let kinds: Vec<_> = (0..requests)
            .map(|_| (one_of(empty), one_of(silent), one_of(long)))
            .collect();
        let lens = kinds.iter().map(|&(empty, _, long)| match (empty, long) {
            (true, _) => 0,
            (false, true) => longest + rng.random_range(0..=longest),
            (false, false) => rng.random_range(1..=300),
        });
        let lens = lens.collect();
        let queries = kinds.iter().map(|&(_, silent, _)| match silent {
            true => 0,
            false => rng.random_range(1..=query_len),
        });
        let queries = queries.collect();
        Batch {
            heads: rng.random_range(1..=128),
            query_len,
            queries: (run % 4 != 0).then_some(queries),
            lens,
            groups: rng.random_range(1..=160),
        }
        .check();
    }
}

#[test]
fn a_query_tile_has_the_rows_that_leave_the_fewest_ctas_idle() {
    // The number of CTAs of 64 rows in a group is one or two, or three for 129 to 192 rows. It is
    // five, seven, 11 or 13 if two or three would leave one idle, unless requests have room for at
    // most 256 tokens.
    for (heads, query_len, long, short) in [
        (8, 1, 8, 8),
        (64, 1, 64, 64),
        (65, 1, 128, 128),
        (128, 2, 128, 128),
        (48, 4, 192, 192),
        (43, 3, 192, 192),
        (48, 6, 320, 128),
        (100, 16, 320, 128),
        (27, 16, 448, 128),
        (64, 8, 128, 128),
        (64, 9, 192, 192),
        (44, 16, 704, 128),
        (64, 13, 832, 128),
        (64, 15, 192, 192),
    ] {
        for (len, rows) in [(500, long), (256, short)] {
            let batch = Batch::equal(heads, query_len, 3, len, 10);
            for item in batch.items().into_iter().flatten() {
                assert_eq!(item.rows, rows, "{heads} heads, {query_len} query tokens");
            }
        }
    }
}

#[test]
fn equal_tiles_are_divided_alike() {
    // The 66 groups are divided into two for each of 32 requests, or eight for each of 8.
    assert_eq!(Batch::equal(128, 1, 32, 4096, 66).check(), 32);
    assert_eq!(Batch::equal(128, 1, 8, 8192, 66).check(), 16);
    // The 132 groups are divided into four for each of 32 requests.
    assert_eq!(Batch::equal(16, 1, 32, 4096, 132).check(), 16);
    for batch in [
        Batch::equal(128, 1, 32, 4096, 66),
        Batch::equal(128, 1, 8, 8192, 66),
        Batch::equal(16, 1, 32, 4096, 132),
    ] {
        for item in batch.items().into_iter().flatten() {
            assert_eq!(item.combiners, item.splits, "no group has two items");
        }
    }
}

#[test]
fn tiles_of_unequal_length_get_groups_of_their_own() {
    let batch = Batch {
        heads: 16,
        query_len: 4,
        queries: None,
        lens: vec![1024, 4096, 16_384, 32_768],
        groups: 132,
    };
    // There are 848 KV tiles, so 132 groups need seven each.
    assert_eq!(batch.check(), 7);
    assert!(batch.items().iter().all(|items| items.len() <= 1));
}

#[test]
fn arguments_that_cannot_be_divided_are_refused() {
    let mut params = MlaDecodeParams::default();
    let refusal = |params: &MlaDecodeParams, groups, group| {
        let mut count = 0;
        // SAFETY: there is no room for items, and the values behind the other pointers live.
        let status = unsafe {
            raw::mla_decode_sm90_work_items(
                params,
                groups,
                group,
                std::ptr::null_mut(),
                0,
                &mut count,
            )
        };
        checked("mla_decode_sm90_work_items", status)
    };
    assert!(refusal(&params, 1, 0).unwrap_err().contains("heads"));
    let lens = [64, -1];
    (params.heads, params.query_len, params.requests) = (16, 1, 1);
    (params.latent_dim, params.rope_dim) = (512, 64);
    params.cache_format = raw::MLA_CACHE_BF16 as i32;
    assert!(refusal(&params, 1, 0).unwrap_err().contains("kv_lens"));
    params.kv_lens = lens.as_ptr();
    refusal(&params, 1, 0).unwrap();
    assert!(refusal(&params, 161, 0).unwrap_err().contains("groups"));
    assert!(refusal(&params, 2, 2).unwrap_err().contains("group"));
    params.requests = 2;
    assert!(refusal(&params, 1, 0).unwrap_err().contains("kv_lens"));
    for requests in [0, -1, 1025, 4096, i32::MAX] {
        params.requests = requests;
        let error = refusal(&params, 1, 0).unwrap_err();
        assert!(error.contains(&format!("requests: given {requests}, accepted 1..=1024")));
    }
}
