//! Launches of the indexer's kernels.

use std::ptr::null_mut;

use mla_kernels::raw::{
    MlaCacheWriteParams, MlaIndexKeysParams, MlaIndexLogitsParams, MlaIndexQueriesParams,
    MlaIndexRotary, MlaTopkParams, mla_index_keys_sm90, mla_index_logits_sm90,
    mla_index_queries_sm90, mla_index_write_sm90, mla_topk_sm90,
};

use mla_runtime::model::{DType, KvFormat, MlaDims};

use super::calls::{self, dtype_number};
use super::runtime::MULTIPROCESSORS;
use super::{Held, Recorded, address};

const TOKENS: i32 = 37;

fn rotary() -> MlaIndexRotary {
    MlaIndexRotary {
        positions: address(1),
        cos: address(2),
        sin: address(3),
        table_stride: 32,
        positions_len: 5000,
        style: 1,
    }
}

fn keys() -> MlaIndexKeysParams {
    MlaIndexKeysParams {
        keys: address(4),
        norm_weight: address(5),
        norm_bias: address(6),
        slots: address(7),
        cache: address(8),
        rotary: rotary(),
        norm_weight_dtype: dtype_number(DType::F32),
        norm_bias_dtype: dtype_number(DType::F32),
        ..calls::index_keys(TOKENS, 300)
    }
}

fn queries() -> MlaIndexQueriesParams {
    MlaIndexQueriesParams {
        queries: address(9),
        head_weights: address(10),
        values: address(11),
        weights: address(12),
        rotary: rotary(),
        hadamard: 1,
        ..calls::index_queries(TOKENS, 63)
    }
}

#[test]
fn index_keys_and_queries() {
    Held::all_of("cuda/sm90/indexer/quantise/", |held| {
        // SAFETY: launches are recorded and not made, here and below, so nothing is read.
        held.holds(
            || unsafe { mla_index_keys_sm90(&keys(), null_mut()) },
            |_| [],
        );
        // SAFETY: as above.
        held.holds(
            || unsafe { mla_index_queries_sm90(&queries(), null_mut()) },
            |_| [],
        );
        for dtype in [DType::BF16, DType::F16] {
            let formats = [KvFormat::of(dtype), KvFormat::Fp8, KvFormat::Fp8DsMla];
            for (format, rotated) in formats.into_iter().flat_map(|it| [(it, false), (it, true)]) {
                let rows = MlaCacheWriteParams {
                    latent: address(14),
                    rope: address(15),
                    slots: address(16),
                    cache: address(17),
                    positions: if rotated { address(13) } else { null_mut() },
                    cos: address(18),
                    sin: address(19),
                    query_rope: if rotated { address(20) } else { null_mut() },
                    query_rope_out: address(20),
                    table_stride: 32,
                    query_token_stride: 10 * 64,
                    query_head_stride: 64,
                    query_out_token_stride: 10 * 64,
                    query_out_head_stride: 64,
                    positions_len: 5000,
                    heads: 10,
                    rotary_style: 1,
                    ..calls::cache_write(MlaDims::R1, dtype, format, TOKENS, 300)
                };
                // A thread rotates 8 of the 32 pairs of a head.
                let query_blocks = if rotated {
                    (TOKENS * 10 * 4 + 127) / 128
                } else {
                    0
                };
                let (keys, queries) = (keys(), queries());
                held.holds(
                    // SAFETY: as above.
                    || unsafe { mla_index_write_sm90(&rows, &keys, &queries, null_mut()) },
                    |_| [("query_blocks", query_blocks.into())],
                );
            }
        }
    });
}

#[test]
fn index_logits() {
    Held::all_of("cuda/sm90/indexer/logits/", |held| {
        for (heads, rows_of_request) in [32, 64].into_iter().flat_map(|heads| {
            let rows = [1, 2, 4, 6, 8, 12, 16];
            rows.map(|rows| (heads, rows))
        }) {
            for (requests, columns, page_size) in [(1, 5000, 64), (40, 70_000, 48), (3, 300, 1)] {
                let extents = [requests * rows_of_request, requests, columns];
                let p = MlaIndexLogitsParams {
                    queries: address(1),
                    weights: address(2),
                    cache: address(3),
                    query_starts: address(4),
                    seq_lens: address(5),
                    block_table: address(6),
                    logits: address(7),
                    after_queries: 1,
                    ..calls::index_logits(heads, extents, [page_size, 70_000], 900)
                };
                let choices = |made: &Recorded| {
                    [
                        ("multiprocessors", MULTIPROCESSORS.into()),
                        ("ranges", made.number("p.ranges")),
                        ("queries", p.queries.addr() as i64),
                    ]
                };
                // SAFETY: as above.
                held.holds(|| unsafe { mla_index_logits_sm90(&p, null_mut()) }, choices);
            }
        }
    });
}

#[test]
fn index_topk() {
    Held::all_of("cuda/sm90/indexer/topk/", |held| {
        for (rows, columns, topk) in [
            (1, 2000, 512),
            (100, 5000, 2048),
            (1000, 5000, 512),
            (1000, 200_000, 2048),
            (2, 30_000, 2048),
            (10, 20_000, 2048),
            (1, 700_000, 2048),
            (1, 50_000, 2048),
            (20, 50_000, 2048),
            (1, 128_000, 2048),
            (1, 200_000, 2048),
            (30, 100_000, 2048),
        ] {
            let p = MlaTopkParams {
                logits: address(1),
                query_starts: address(2),
                seq_lens: address(3),
                block_table: address(4),
                lists: address(5),
                after_logits: 1,
                ..calls::topk(topk, [rows, rows, columns], 10_000, 70_000)
            };
            let choices = |made: &Recorded| {
                let [ctas, ..] = made.cluster.map(i64::from);
                [("rows", rows.into()), ("ctas", ctas), ("pages", p.pages)]
            };
            // SAFETY: as above.
            held.holds(|| unsafe { mla_topk_sm90(&p, null_mut()) }, choices);
        }
    });
}
