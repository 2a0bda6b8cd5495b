//! Checks that the selection is exact and deterministic for any logits.

use fastrand::Rng;
use mla_conformance::reference::largest;
use mla_cpu::Cpu;
use mla_runtime::indexer::IndexDevice as _;
use mla_runtime::tensor::TensorRef;

use crate::refusals::{Refused, refused};
use crate::{Batch, random, wide};

/// Compares the lists for some logits with the expected ones.
fn check(
    rng: &mut Rng,
    requests: &[(usize, usize)],
    width: usize,
    make: impl Fn(&mut Rng, usize) -> Vec<f32>,
) {
    let page_size = [1, 16, 48, 64][rng.usize(0..4)];
    let batch = Batch::new(rng, requests, page_size);
    let columns = batch.longest();
    let rows = batch.rows();
    // Logits that a token does not see are infinite, and so larger than any that it sees.
    let mut logits = vec![f32::INFINITY; rows.len() * columns];
    for (row, (_, seen)) in logits.chunks_mut(columns.max(1)).zip(&rows) {
        row[..*seen].copy_from_slice(&make(rng, *seen));
    }
    let lists = select(&batch, &logits, width);
    assert_eq!(lists, select(&batch, &logits, width));
    for (token, (request, seen)) in rows.iter().enumerate() {
        let values = wide(&logits[token * columns..][..*seen]);
        let mut expected: Vec<i32> = largest(&values, width)
            .into_iter()
            .map(|position| batch.slot(*request, position) as i32)
            .collect();
        expected.resize(width, -1);
        assert!(
            lists[token * width..(token + 1) * width] == expected,
            "token {token}, which sees {seen} of {requests:?}"
        );
    }
}

fn select(batch: &Batch, logits: &[f32], width: usize) -> Vec<i32> {
    let (tokens, columns) = (batch.tokens(), batch.longest());
    let mut lists = vec![i32::MIN; tokens * width];
    Cpu::new()
        .select_slots(
            TensorRef::from_slice(logits, [1, tokens, columns]).unwrap(),
            &batch.view(0..tokens),
            batch.page_size,
            bytemuck::cast_slice_mut(&mut lists),
            width,
        )
        .unwrap();
    lists
}

/// Makes the kinds of rows that selections often get wrong.
fn row(rng: &mut Rng, count: usize) -> Vec<f32> {
    let base = rng.f32() * 8.0 - 4.0;
    match rng.usize(0..10) {
        0 => random(rng, count),
        // Clustered values: almost equal, with equal top bits.
        1 => (0..count).map(|_| base + rng.f32() * 1e-5).collect(),
        2 => (0..count)
            .map(|_| f32::from_bits(base.to_bits() & !0x3ff | rng.u32(0..1024)))
            .collect(),
        // Few different values.
        3 => (0..count).map(|_| base + rng.u32(0..3) as f32).collect(),
        4 => vec![base; count],
        5 => (0..count).map(|i| i as f32).collect(),
        6 => (0..count).map(|i| -(i as f32)).collect(),
        // A tail of −inf, with NaN elsewhere.
        7 => {
            let mut row = random(rng, count);
            let tail = rng.usize(0..=count);
            row[tail..].fill(f32::NEG_INFINITY);
            row
        }
        8 => {
            let special = [
                f32::NAN,
                -f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                0.0,
                -0.0,
                1e-45,
            ];
            (0..count)
                .map(|_| special[rng.usize(0..special.len())])
                .collect()
        }
        // A peak of equal values among small ones.
        _ => (0..count)
            .map(|i| {
                if i % 7 == 3 {
                    base.abs() + 9.0
                } else {
                    rng.f32()
                }
            })
            .collect(),
    }
}

#[test]
fn ten_thousand_rows() {
    let mut rng = Rng::with_seed(10);
    let mut rows = 0;
    while rows < 10_000 {
        let width = [1, 7, 32, 64][rng.usize(0..4)];
        let requests: Vec<(usize, usize)> = (0..rng.usize(1..40))
            .map(|_| {
                let q = rng.usize(0..6);
                (
                    q,
                    if rng.u8(0..20) == 0 {
                        0
                    } else {
                        q + rng.usize(0..300)
                    },
                )
            })
            .collect();
        check(&mut rng, &requests, width, row);
        rows += requests.iter().map(|(q, _)| q).sum::<usize>();
    }
}

#[test]
fn lengths_about_topk() {
    let mut rng = Rng::with_seed(11);
    let k = 2048;
    for _ in 0..10 {
        let lens = [0, 1, 2, k - 1, k, k + 1, k + 2, 3 * k, 5000];
        let requests: Vec<(usize, usize)> = lens.into_iter().map(|len| (1, len)).collect();
        check(&mut rng, &requests, k, row);
    }
    // The tokens of this request see from k − 2 to k + 3 positions.
    check(&mut rng, &[(6, k + 3)], k, row);
}

#[test]
fn rows_of_200_000() {
    let mut rng = Rng::with_seed(12);
    for _ in 0..10 {
        check(&mut rng, &[(1, 200_000)], 2048, row);
    }
}

pub(crate) fn refused() -> Refused {
    let select = |entry: i32, width, page_size| {
        let mut batch = Batch::new(&mut Rng::with_seed(1), &[(1, 5)], 16);
        batch.tables[0] = entry;
        let mut room = [0i32; 4];
        Cpu::new().select_slots(
            TensorRef::from_slice(&[0.0f32; 5], [1, 1, 5]).unwrap(),
            &batch.view(0..1),
            page_size,
            bytemuck::cast_slice_mut(&mut room),
            width,
        )
    };
    refused! {
        "selection: lists longer than their memory", select(0, 5, 16);
        "selection: lists of nothing", select(0, 0, 16);
        "selection: pages of no tokens", select(0, 4, 0);
        "selection: the largest page", select(i32::MAX, 4, 16);
        "selection: a negative page", select(-7, 4, 16);
    }
}
