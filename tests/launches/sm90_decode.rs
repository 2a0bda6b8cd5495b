//! Launches of Hopper's decodes.

use std::ptr::null_mut;

use mla_kernels::raw::{MlaDecodeParams, MlaSparseParams, mla_decode_sm90, mla_sparse_sm90};

use mla_runtime::model::{DType, KvFormat, MlaDims};

use super::runtime::{L2_BYTES, MULTIPROCESSORS};
use super::{Held, ROWS, address, decode, sparse};

/// Heads and query tokens of query tiles, one for each kernel and each number of CTAs of a group.
const TILES: [[i32; 2]; 12] = [
    [8, 1],
    [16, 1],
    [16, 2],
    [64, 1],
    [128, 1],
    [96, 2],
    [64, 4],
    [80, 4],
    [64, 7],
    [100, 7],
    [64, 11],
    [64, 13],
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
        for dtype in [DType::BF16, DType::F16] {
            let plain = ROWS.map(|dims| (dims, KvFormat::of(dtype)));
            let quantised = [KvFormat::Fp8, KvFormat::Fp8PerToken];
            let quantised = quantised.map(|format| (MlaDims::R1, format));
            for (dims, format) in plain.into_iter().chain(quantised) {
                for tile in TILES {
                    hold(held, &decode(dims, dtype, format, tile, [5, 32]));
                    // Short requests, in pages that are no multiple of 64 tokens.
                    hold(
                        held,
                        &MlaDecodeParams {
                            page_size: 48,
                            ..decode(dims, dtype, format, tile, [1, 3])
                        },
                    );
                    // Rotary keys and query rows that lie apart, and more query tiles than CTAs.
                    let many = decode(dims, dtype, format, tile, [300, 32]);
                    let apart = if format.splits() {
                        address(9)
                    } else {
                        null_mut()
                    };
                    hold(
                        held,
                        &MlaDecodeParams {
                            cache_rope: apart,
                            cache_rope_page_stride: 64 * 64,
                            cache_rope_slot_stride: 64,
                            q_latent_token_stride: many.q_latent_token_stride + 64,
                            ..many
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
        for dtype in [DType::BF16, DType::F16] {
            let quantised = [KvFormat::Fp8, KvFormat::Fp8DsMla, KvFormat::Fp8PerToken];
            for format in [KvFormat::of(dtype)].into_iter().chain(quantised) {
                let heads = |rope| [8, 20, 64, 128].map(|heads| (rope, heads));
                for (rope, heads) in [64, 0].into_iter().flat_map(heads) {
                    for [tokens, width] in [[4, 2048], [132, 2048], [1, 100]] {
                        let extents = [tokens, width, 500];
                        hold(&sparse(rope, dtype, format, heads, extents));
                    }
                    if rope == 64 && format.splits() {
                        let bytes = format.rope_bytes(MlaDims::R1) as i64;
                        hold(&MlaSparseParams {
                            cache_rope: address(9),
                            cache_rope_page_stride: bytes * 64,
                            cache_rope_slot_stride: bytes,
                            ..sparse(rope, dtype, format, heads, [4, 2048, 500])
                        });
                    }
                }
            }
        }
    });
}
