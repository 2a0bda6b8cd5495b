//! Checks that the layer gives a request of a batch-invariant problem the same bits in any batch as
//! alone, and that other problems do not have this property.

use std::collections::BTreeSet;

use mla_kernels::backends::sm90::WgmmaAttn;
use mla_runtime::layer::MlaLayer;
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims};

use super::batch::{Batch, Case, Outcome};
use super::gathered::NoDecode;
use crate::common::{cache_bytes, gpu, rng};
use crate::tensors::pick;

/// The numbers of new tokens and of all tokens. New tokens are around the sizes from which on GEMMs
/// and expansions use other kernels if bits may depend on the batch. Contexts are around the rows
/// of a chunk, and some are longer than the keys of a split.
const REQUESTS: &[(u32, u32)] = &[
    (1, 1),
    (1, 1024),
    (31, 31),
    (2, 1026),
    (32, 32),
    (33, 1058),
    (64, 1087),
    (65, 65),
    (127, 2127),
    (129, 1154),
    (20, 5020),
    (300, 300),
];

/// Returns the batch of some of the requests, with their own numbers, pages and slots.
fn some_of(batch: &Batch, some: &[usize]) -> Batch {
    let starts = starts(batch);
    let tokens = |bytes: &[u8]| {
        let row = bytes.len() / batch.tokens();
        let rows = some
            .iter()
            .map(|at| starts[*at] * row..starts[*at + 1] * row);
        rows.flat_map(|range| bytes[range].to_vec()).collect()
    };
    let slots = some.iter().map(|at| starts[*at]..starts[*at + 1]);
    let tables = some
        .iter()
        .map(|at| at * batch.max_pages..(at + 1) * batch.max_pages);
    Batch {
        requests: some.iter().map(|at| batch.requests[*at]).collect(),
        tables: tables
            .flat_map(|range| batch.tables[range].to_vec())
            .collect(),
        slots: slots
            .flat_map(|range| batch.slots[range].to_vec())
            .collect(),
        query: tokens(&batch.query),
        latent: tokens(&batch.latent),
        rope: tokens(&batch.rope),
        ..batch.clone()
    }
}

/// Returns the first token of each request, and the end of the last.
fn starts(batch: &Batch) -> Vec<usize> {
    let mut starts = vec![0];
    for request in &batch.requests {
        starts.push(starts[starts.len() - 1] + request.q as usize);
    }
    starts
}

/// Returns each request's output, log-sum-exp, and new rows of the cache.
fn bits(batch: &Batch, outcome: &Outcome) -> Vec<Vec<u8>> {
    let (starts, tokens, layout) = (starts(batch), batch.tokens(), &batch.cache_layout);
    let row = outcome.out.len() / tokens;
    let pages = cache_bytes(layout) / layout.pages;
    let of_request = |pair: &[usize]| {
        let own = pair[0]..pair[1];
        let mut bits = outcome.out[own.start * row..own.end * row].to_vec();
        for head in outcome.lse.chunks_exact(4 * tokens) {
            bits.extend(&head[4 * own.start..4 * own.end]);
        }
        for slot in &batch.slots[own] {
            let (page, at) = (
                *slot as usize / layout.page_size,
                *slot as usize % layout.page_size,
            );
            let first = page * pages + at * layout.row_stride;
            bits.extend(&outcome.cache[first..first + layout.row_bytes()]);
        }
        bits
    };
    starts.windows(2).map(of_request).collect()
}

/// Runs random batches. Returns the requests that have other bits in some batch than alone.
fn differing(case: &Case) -> BTreeSet<usize> {
    let gpu = &*gpu();
    let layer: MlaLayer<WgmmaAttn, NoDecode> = MlaLayer::of(gpu, &case.config()).unwrap();
    let all = Batch::new(case);
    let run = |some: &[usize]| {
        let batch = some_of(&all, some);
        bits(&batch, &batch.run(&layer).unwrap())
    };
    let count = all.requests.len();
    let alone: Vec<_> = (0..count).map(|at| run(&[at]).remove(0)).collect();
    let mut rng = rng(case.seed);
    let mut differing = BTreeSet::new();
    for round in 0..12 {
        let of_ten = if round == 0 {
            10
        } else {
            pick(&mut rng, &[3, 5, 8])
        };
        let some: Vec<usize> = (0..count)
            .filter(|_| pick(&mut rng, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]) < of_ten)
            .collect();
        if some.is_empty() {
            continue;
        }
        let pairs = some.iter().zip(run(&some));
        differing.extend(
            pairs
                .filter(|(at, bits)| alone[**at] != *bits)
                .map(|(at, _)| *at),
        );
    }
    differing
}

fn cases() -> Vec<Case> {
    let case = Case {
        threshold: 0,
        context_rows: 1024,
        batch_invariant: true,
        ..Case::new(16, REQUESTS)
    };
    vec![
        // A context of 5000 tokens is one chunk, and its keys are divided.
        Case {
            context_rows: 8192,
            ..case.clone()
        },
        Case {
            dtype: DType::F16,
            kv_format: KvFormat::F16,
            ..case.clone()
        },
        // The rows of these caches are gathered before they are expanded.
        Case {
            kv_format: KvFormat::Fp8,
            ..case.clone()
        },
        Case {
            page_size: 32,
            ..case.clone()
        },
        // The kernel for products per head expands rows of another width.
        Case {
            dims: MlaDims::new(256, HeadDims::new(64, 32, 64)),
            ..case
        },
    ]
}

#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn a_batch_invariant_layer_gives_a_request_its_bits_in_any_batch() {
    for case in cases() {
        let differing = differing(&case);
        assert!(differing.is_empty(), "requests {differing:?} of {case:?}");
    }
}

/// The control experiment.
#[test]
#[ignore = "needs a Hopper GPU: cargo test -r --features sm90 --test gpu -- --ignored layer"]
fn other_layers_do_not() {
    let case = Case {
        batch_invariant: false,
        ..cases().remove(0)
    };
    assert!(!differing(&case).is_empty());
}
