//! Launches of Hopper's decodes.

use std::ptr::null_mut;

use mla_kernels::raw::{MlaDecodeParams, MlaSparseParams, mla_decode_sm90, mla_sparse_sm90};

use super::calls::{decode, sparse};
use super::runtime::{L2_BYTES, MULTIPROCESSORS};
use super::{Held, address};

/// Rows of query tiles, one for each kernel and each number of CTAs of a group.
const ROWS: [(i32, i32); 12] = [
    (8, 1),
    (16, 1),
    (16, 2),
    (64, 1),
    (128, 1),
    (96, 2),
    (64, 4),
    (80, 4),
    (64, 7),
    (100, 7),
    (64, 11),
    (64, 13),
];

fn hold(held: &mut Held, p: &MlaDecodeParams) {
    let choices = |made: &super::Recorded| {
        let rows = p.heads * p.query_len;
        // A group of more than two CTAs lies along the first axis of the grid.
        let group_ctas = match made.grid[1] {
            1 if rows <= 64 => 1,
            1 => 2,
            _ => made.grid[0].into(),
        };
        let bytes = if matches!(p.cache_format, 3 | 5) {
            1
        } else {
            2
        };
        let latent = p.cache.addr() as i64;
        let [rope, rope_slot_stride, rope_page_stride] = match p.cache_rope.addr() as i64 {
            0 => [
                latent + i64::from(p.latent_dim) * bytes,
                p.cache_slot_stride,
                p.cache_page_stride,
            ],
            rope => [rope, p.cache_rope_slot_stride, p.cache_rope_page_stride],
        };
        [
            ("group_ctas", group_ctas),
            ("multiprocessors", MULTIPROCESSORS.into()),
            ("l2_bytes", L2_BYTES.into()),
            ("tokens", p.tokens.into()),
            ("max_pages", p.max_pages.into()),
            ("pages", p.pages),
            ("cache", latent),
            ("cache_slot_stride", p.cache_slot_stride * bytes),
            ("cache_page_stride", p.cache_page_stride * bytes),
            ("cache_rope", rope),
            ("cache_rope_slot_stride", rope_slot_stride * bytes),
            ("cache_rope_page_stride", rope_page_stride * bytes),
        ]
    };
    // SAFETY: the launch is recorded and not made, so nothing is read at any address.
    held.holds(|| unsafe { mla_decode_sm90(p, null_mut()) }, choices);
}

#[test]
fn dense_decode() {
    Held::all_of("cuda/sm90/decode/dense/", |held| {
        for q_dtype in [0, 1] {
            let plain = [2, 1][q_dtype as usize];
            let kinds = [(512, 64), (512, 0), (256, 64), (256, 32)].map(|dims| (dims, plain));
            for (dims, format) in kinds
                .into_iter()
                .chain([3, 5].map(|format| ((512, 64), format)))
            {
                for rows in ROWS {
                    let usual = decode(dims, q_dtype, format, rows);
                    hold(held, &usual);
                    // Short requests, in pages that are no multiple of 64 tokens.
                    hold(
                        held,
                        &MlaDecodeParams {
                            max_pages: 3,
                            page_size: 48,
                            requests: 1,
                            tokens: rows.1,
                            ..usual
                        },
                    );
                    // Rotary keys and query rows that lie apart, and more query tiles than CTAs.
                    let apart = if format == 5 { null_mut() } else { address(9) };
                    hold(
                        held,
                        &MlaDecodeParams {
                            cache_rope: apart,
                            cache_rope_page_stride: 64 * 64,
                            cache_rope_slot_stride: 64,
                            q_latent_token_stride: usual.q_latent_token_stride + 64,
                            requests: 300,
                            tokens: 300 * rows.1,
                            lse_head_stride: 300 * 16,
                            ..usual
                        },
                    );
                }
            }
        }
    });
}

#[test]
fn sparse_decode() {
    Held::all_of("cuda/sm90/decode/sparse/", |held| {
        let mut hold = |p: &MlaSparseParams| {
            let choices = |made: &super::Recorded| {
                let [splits, ..] = made.cluster.map(i64::from);
                [
                    ("splits", splits),
                    ("clusters", i64::from(made.grid[0]) / splits),
                ]
            };
            // SAFETY: the launch is recorded and not made, so nothing is read at any address.
            held.holds(|| unsafe { mla_sparse_sm90(p, null_mut()) }, choices);
        };
        for q_dtype in [0, 1] {
            for format in [[2, 1][q_dtype as usize], 3, 4, 5] {
                let heads = |rope| [8, 20, 64, 128].map(|heads| (rope, heads));
                for (rope, heads) in [64, 0].into_iter().flat_map(heads) {
                    let usual = sparse(rope, q_dtype, format, heads);
                    hold(&usual);
                    hold(&MlaSparseParams {
                        tokens: 132,
                        ..usual
                    });
                    hold(&MlaSparseParams {
                        tokens: 1,
                        width: 100,
                        ..usual
                    });
                    if rope == 64 && format < 4 {
                        let bytes = if format == 3 { 64 } else { 128 };
                        hold(&MlaSparseParams {
                            cache_rope: address(9),
                            cache_rope_page_stride: bytes * 64,
                            cache_rope_slot_stride: bytes,
                            ..usual
                        });
                    }
                }
            }
        }
    });
}
