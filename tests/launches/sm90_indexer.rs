//! Launches of the indexer's kernels.

use std::ptr::null_mut;

use mla_kernels::raw::{
    MlaCacheWriteParams, MlaIndexKeysParams, MlaIndexLogitsParams, MlaIndexQueriesParams,
    MlaIndexRotary, MlaTopkParams, mla_index_keys_sm90, mla_index_logits_sm90,
    mla_index_queries_sm90, mla_index_write_sm90, mla_topk_sm90,
};

use super::runtime::MULTIPROCESSORS;
use super::{Held, Recorded, address};

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
        key_stride: 128,
        page_stride: 64 * 132,
        pages: 300,
        tokens: 37,
        page_size: 64,
        width: 128,
        keys_dtype: 0,
        norm_weight_dtype: 3,
        norm_bias_dtype: 3,
        hadamard: 1,
        epsilon: 1e-6,
    }
}

fn queries() -> MlaIndexQueriesParams {
    MlaIndexQueriesParams {
        queries: address(9),
        head_weights: address(10),
        values: address(11),
        weights: address(12),
        rotary: rotary(),
        query_token_stride: 64 * 128,
        query_head_stride: 128,
        head_weight_stride: 64,
        tokens: 37,
        heads: 63,
        width: 128,
        queries_dtype: 0,
        head_weights_dtype: 0,
        hadamard: 1,
        weight_scale: 0.5,
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
        for (dtype, format) in [(0, 2), (0, 3), (0, 4), (1, 1), (1, 3), (1, 4)] {
            for positions in [null_mut::<i64>(), address(13)] {
                let row = [1152, 1152, 1152, 576, 656][format as usize];
                let rotated = !positions.is_null();
                let rows = MlaCacheWriteParams {
                    latent: address(14),
                    rope: address(15),
                    slots: address(16),
                    cache: address(17),
                    cache_rope: null_mut(),
                    positions,
                    cos: address(18),
                    sin: address(19),
                    query_rope: if rotated { address(20) } else { null_mut() },
                    query_rope_out: address(20),
                    latent_token_stride: 576,
                    rope_token_stride: 576,
                    cache_page_stride: row * 64,
                    cache_slot_stride: row,
                    cache_rope_page_stride: 0,
                    cache_rope_slot_stride: 0,
                    table_stride: 32,
                    query_token_stride: 10 * 64,
                    query_head_stride: 64,
                    query_out_token_stride: 10 * 64,
                    query_out_head_stride: 64,
                    pages: 300,
                    positions_len: 5000,
                    tokens: 37,
                    page_size: 64,
                    heads: 10,
                    latent_dim: 512,
                    rope_dim: 64,
                    dtype,
                    cache_format: format,
                    rotary_style: 1,
                    cache_scale: 1.0,
                };
                // A thread rotates 8 of the 32 pairs of a head.
                let query_blocks = if rotated {
                    (37u32 * 10 * 4).div_ceil(128).into()
                } else {
                    0
                };
                let (keys, queries) = (keys(), queries());
                held.holds(
                    // SAFETY: as above.
                    || unsafe { mla_index_write_sm90(&rows, &keys, &queries, null_mut()) },
                    |_| [("query_blocks", query_blocks)],
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
                let p = MlaIndexLogitsParams {
                    queries: address(1),
                    weights: address(2),
                    cache: address(3),
                    query_starts: address(4),
                    seq_lens: address(5),
                    block_table: address(6),
                    logits: address(7),
                    page_stride: (page_size * 132 + 15) / 16 * 16,
                    block_table_stride: 70_000,
                    logits_stride: 70_000,
                    pages: 900,
                    rows: requests * rows_of_request,
                    first_token: 0,
                    requests,
                    columns,
                    max_pages: 70_000,
                    page_size: page_size as i32,
                    heads,
                    width: 128,
                    after_queries: 1,
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
                logits_stride: columns + columns % 4,
                block_table_stride: 10_000,
                list_stride: topk,
                pages: 70_000,
                rows,
                first_token: 0,
                requests: rows,
                columns: columns as i32,
                topk: topk as i32,
                max_pages: 10_000,
                page_size: 64,
                after_logits: 1,
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
