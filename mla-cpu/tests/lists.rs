//! Sparse attention to lists of slots: entries that are no slots, entries that stand twice, lists
//! without any, two caches, and rows far from the first.

mod common;

use bytemuck::Pod;
use half::bf16;
use mla_conformance::reference::attend;
use mla_cpu::{Cpu, CpuDecode};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, ListedCache, Output, Query, SlotLists,
    StepLimits,
};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheRef, LseMut, TensorMut, TensorRef,
};

use common::Random;

const DIMS: MlaDims = MlaDims::new(128, HeadDims::new(16, 8, 16));
const LATENT: usize = 128;
const ROW: usize = 136;
const HEADS: usize = 3;
const PAGE: usize = 4;
const PAGES: usize = 5;
const SLOTS: usize = PAGE * PAGES;
const SCALE: f32 = 0.2;

/// Returns numbers that name no slot of a cache of `slots` slots.
fn no_slots(slots: usize) -> [i32; 5] {
    [-1, i32::MIN, i32::MAX, slots as i32, slots as i32 + 1]
}

/// Outputs, and log-sum-exps of `[heads, tokens]`.
type Attended = (Vec<f32>, Vec<f32>);

/// Queries of one token for each list, over a cache of f32 and a second, shorter one.
struct World {
    queries: Vec<f32>,
    caches: [Vec<f32>; 2],
}

/// The lists of a call: entries, and how many each token has.
#[derive(Clone, Copy)]
struct Lists<'a> {
    slots: &'a [i32],
    width: usize,
    counts: Option<&'a [i32]>,
    second: Option<(&'a [i32], usize)>,
}

impl World {
    fn new(seed: u64, tokens: usize) -> Self {
        let mut random = Random(seed);
        Self {
            queries: random.fill(tokens * HEADS * ROW),
            caches: [random.fill(SLOTS * ROW), random.fill(2 * PAGE * ROW)],
        }
    }

    fn layout(pages: usize) -> CacheLayout {
        CacheLayout::contiguous(DIMS, KvFormat::F32, pages, PAGE)
    }

    fn attend(&self, lists: Lists<'_>) -> Attended {
        let array = ArrayRef::from_slice;
        let second = lists.second.map(|(slots, width)| {
            let bytes = bytemuck::cast_slice(&self.caches[1]);
            let cache = CacheRef::new(bytes, Self::layout(2)).unwrap();
            ListedCache::new(cache, array(slots), width)
        });
        let slots = SlotLists::new(array(lists.slots), lists.width)
            .with_counts(lists.counts.map(array))
            .with_second(second);
        let cache = CacheRef::new(bytemuck::cast_slice(&self.caches[0]), Self::layout(PAGES));
        run(&self.queries, cache.unwrap(), Some(slots), &[])
    }

    /// Computes the attention of one token in f64, to rows of each cache.
    fn reference(&self, rows: [&[usize]; 2]) -> (Vec<f64>, Vec<f64>) {
        let [first, second] = [0, 1].map(|cache| {
            let row = |slot: &usize| &self.caches[cache][slot * ROW..][..ROW];
            rows[cache].iter().map(row).collect::<Vec<_>>()
        });
        let keys: Vec<Vec<f64>> = [first, second]
            .concat()
            .into_iter()
            .map(|row| row.iter().map(|x| f64::from(*x)).collect())
            .collect();
        let values: Vec<&[f64]> = keys.iter().map(|row| &row[..LATENT]).collect();
        let keys: Vec<&[f64]> = keys.iter().map(Vec::as_slice).collect();
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for query in self.queries.chunks(ROW).take(HEADS) {
            let query: Vec<f64> = query.iter().map(|x| f64::from(*x)).collect();
            let (head, sum) = attend(&query, &keys, &values, SCALE.into());
            out.extend(head);
            lse.push(sum);
        }
        (out, lse)
    }
}

/// Runs queries over a cache; each is a request of one token. Without lists each attends to all
/// positions of its row of `tables`.
fn run<T: mla_runtime::model::Element + Pod>(
    queries: &[T],
    cache: CacheRef<'_, Cpu>,
    lists: Option<SlotLists<'_, Cpu>>,
    tables: &[i32],
) -> Attended {
    let cpu = Cpu::new();
    let tokens = queries.len() / (HEADS * ROW);
    let layout = *cache.layout();
    let problem = Problem::new(DIMS, HEADS as u32, T::DTYPE)
        .with_kv_format(layout.format)
        .with_sparse(lists.is_some())
        .with_page_size(layout.page_size as u32)
        .with_query_len(QueryLen::Single);
    let backend = CpuDecode::new(&cpu, &LayerConfig::new(problem, SCALE)).unwrap();
    let max_pages = (tables.len() / tokens).max(1);
    let limits = StepLimits::new(tokens, tokens, max_pages).with_decode_query_len(1);
    let mut state = backend.state(&cpu, &limits).unwrap();
    let unused = vec![0; tokens];
    let (tables, len) = match tables {
        [] => (&unused[..], 0),
        _ => (tables, max_pages * layout.page_size),
    };
    let lens = vec![len as i32; tokens];
    let starts: Vec<i32> = (0..=tokens as i32).collect();
    let mut out = vec![T::from_f32(f32::NAN); tokens * HEADS * LATENT];
    let mut lse = vec![f32::NAN; HEADS * tokens];
    let batch = DecodeBatch::new(
        BlockTable::new(ArrayRef::from_slice(tables), tokens, max_pages).unwrap(),
        (ArrayRef::from_slice(&lens), len),
        (ArrayRef::from_slice(&starts), 1),
    );
    let to = TensorMut::from_slice(&mut out, [tokens, HEADS, LATENT]).unwrap();
    let call = DecodeCall::new(
        Query::Concatenated(TensorRef::from_slice(queries, [tokens, HEADS, ROW]).unwrap()),
        cache.shorten(),
        batch,
        Output::Plain(to),
    )
    .with_lse(Some(LseMut::from_slice(&mut lse, HEADS, tokens).unwrap()))
    .with_slots(lists.as_ref().map(SlotLists::shorten));
    // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
    unsafe { backend.decode(&cpu, call, &mut state, &()) }.unwrap();
    (out.iter().map(|x| x.to_f32()).collect(), lse)
}

fn bits((out, lse): &Attended) -> Vec<u32> {
    out.iter().chain(lse).map(|x| x.to_bits()).collect()
}

fn near(given: &[f32], expected: &[f64]) {
    assert_eq!(given.len(), expected.len());
    for (given, expected) in given.iter().zip(expected) {
        let difference = (f64::from(*given) - expected).abs();
        assert!(difference < 1e-5, "{given}, expected {expected}");
    }
}

#[test]
fn invalid_entries_are_skipped() {
    let world = World::new(1, 1);
    let list = [7, 0, 19, 3, 11];
    let plain = Lists {
        slots: &list,
        width: list.len(),
        counts: None,
        second: None,
    };
    let expected = bits(&world.attend(plain));
    for entry in no_slots(SLOTS) {
        for at in 0..=list.len() {
            for repeated in [1, 40] {
                let mut longer = list.to_vec();
                longer.splice(at..at, vec![entry; repeated]);
                let given = world.attend(Lists {
                    slots: &longer,
                    width: longer.len(),
                    ..plain
                });
                assert_eq!(bits(&given), expected, "{repeated} of {entry} at {at}");
            }
        }
    }
    // The last slot is one.
    let without = world.attend(Lists {
        slots: &[7, 0, -1, 3, 11],
        ..plain
    });
    assert_ne!(bits(&without), expected);
}

#[test]
fn repeated_slots_count_twice() {
    let world = World::new(2, 1);
    let given = world.attend(Lists {
        slots: &[4, 9, 4, 4, -1, 9],
        width: 6,
        counts: None,
        second: None,
    });
    let (out, lse) = world.reference([&[4, 9, 4, 4, 9], &[]]);
    near(&given.0, &out);
    near(&given.1, &lse);
    let (once, _) = world.reference([&[4, 9], &[]]);
    let apart = once.iter().zip(&out).map(|(a, b)| (a - b).abs());
    assert!(apart.fold(0.0, f64::max) > 1e-3, "the case tells nothing");
}

#[test]
fn tokens_without_entries_attend_to_nothing() {
    let world = World::new(3, 4);
    let bad = no_slots(SLOTS);
    let slots = [&bad[..4], &[1, 2, 3, 4], &[1, 2, 3, 4], &[1, 2, 3, 4]].concat();
    let (out, lse) = world.attend(Lists {
        slots: &slots,
        width: 4,
        counts: Some(&[4, 0, i32::MIN, 2]),
        second: None,
    });
    for token in 0..4 {
        let row = &out[token * HEADS * LATENT..][..HEADS * LATENT];
        let nothing = token < 3;
        assert_eq!(row.iter().all(|x| *x == 0.0), nothing, "token {token}");
        for head in 0..HEADS {
            let lse = lse[head * 4 + token];
            assert_eq!(lse == f32::NEG_INFINITY, nothing, "token {token}");
            assert!(!lse.is_nan());
        }
    }
    // Lists of no width.
    let (out, lse) = world.attend(Lists {
        slots: &[],
        width: 0,
        counts: None,
        second: None,
    });
    assert!(out.iter().all(|x| *x == 0.0));
    assert!(lse.iter().all(|x| *x == f32::NEG_INFINITY));
}

#[test]
fn second_cache_slots() {
    let world = World::new(4, 1);
    // Slot 9 is one of the first cache alone, which has 20; the second one has 8.
    let second = [9, 7, -1, i32::MAX, 8, 0, 7];
    let given = world.attend(Lists {
        slots: &[9, 20, 0, i32::MIN],
        width: 4,
        counts: Some(&[3]),
        second: Some((&second, second.len())),
    });
    let (out, lse) = world.reference([&[9, 0], &[7, 0, 7]]);
    near(&given.0, &out);
    near(&given.1, &lse);
}

/// Rows further than 2³¹ elements from the first one. The memory between them is mapped, but never
/// touched.
#[test]
fn far_rows() {
    for format in [KvFormat::BF16, KvFormat::Fp8, KvFormat::Fp8DsMla] {
        let near_layout = CacheLayout::contiguous(DIMS, format, 3, 64);
        let row = near_layout.row_stride;
        let element_bytes = format.dtype().map_or(1, DType::bytes);
        let pages = (1usize << 31) * element_bytes / near_layout.page_stride + 3;
        let far_layout = CacheLayout::contiguous(DIMS, format, pages, 64);
        let mut random = Random(5);
        let mut small = vec![0u8; 3 * near_layout.page_stride];
        // Zeroed memory takes no pages until it is written.
        let mut large = vec![0u8; pages * far_layout.page_stride];
        // Pages 0, 1 and 2 are the first one and the last two.
        let far_pages = [0, pages - 2, pages - 1];
        for slot in 0..3 * 64 {
            let far = far_pages[slot / 64] * 64 + slot % 64;
            let bytes: Vec<u8> = match format {
                KvFormat::BF16 => bytemuck::pod_collect_to_vec(&random.fill::<bf16>(ROW)),
                // Scales and rotary values of these bits are numbers, too.
                _ => (0..row)
                    .map(|_| (random.next().abs() * 60.0) as u8)
                    .collect(),
            };
            small[slot * row..][..row].copy_from_slice(&bytes);
            large[far * row..][..row].copy_from_slice(&bytes);
        }
        assert!(far_pages[1] * far_layout.page_stride >= (1 << 31) * element_bytes);
        let queries: Vec<bf16> = random.fill(2 * HEADS * ROW);
        let list = [3, 64, 190, 191, 70, 1, 128, 2];
        let far_list = list.map(|slot| far_pages[slot / 64] * 64 + slot % 64);
        let attended = |bytes: &[u8], layout, list: [usize; 8], tables: [usize; 2]| {
            let slots = list.map(|slot| slot as i32);
            let lists = SlotLists::new(ArrayRef::from_slice(&slots), 4);
            let cache = CacheRef::new(bytes, layout).unwrap();
            let sparse = run(&queries, cache, Some(lists), &[]);
            let cache = CacheRef::new(bytes, layout).unwrap();
            let dense = run(&queries, cache, None, &tables.map(|page| page as i32));
            [bits(&sparse), bits(&dense)]
        };
        let expected = attended(&small, near_layout, list, [2, 1]);
        let given = attended(&large, far_layout, far_list, [pages - 1, pages - 2]);
        assert!(given == expected, "{format:?}");
        let numbers = expected.concat().into_iter().map(f32::from_bits);
        assert!(numbers.clone().all(f32::is_finite), "{format:?}");
        assert!(numbers.into_iter().any(|x| x != 0.0), "{format:?}");
    }
}
