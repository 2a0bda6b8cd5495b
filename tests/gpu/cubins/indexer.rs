//! The indexer's kernels by their descriptions, beside the library's launches of the same problems.

use mla_kernels::raw::{
    self, MlaIndexKeysParams, MlaIndexLogitsParams, MlaIndexQueriesParams, MlaTopkParams,
};

use super::{agree, at, device, gpu, manifest, numbers, pair, run, small, upload_all};
use crate::calls;

const REQUESTS: usize = 5;
const HEADS: usize = 32;
const WIDTH: usize = 128;
const PAGE_SIZE: usize = 64;
const PAGES: usize = 40;
const MAX_PAGES: usize = 8;
const COLUMNS: usize = MAX_PAGES * PAGE_SIZE;
const TOPK: usize = 64;
/// Bytes of a page: values, and then scales.
const PAGE_BYTES: usize = PAGE_SIZE * (WIDTH + 4);

#[test]
#[ignore = "needs a Hopper GPU and `cargo xtask cubins`: \
            cargo test -r --features sm90 --test gpu -- --ignored cubins"]
fn the_indexer_has_the_librarys_bits_by_its_description_alone() {
    let gpu = &*gpu();
    let manifest = manifest();
    // A key for each slot of the cache.
    let slots = PAGES * PAGE_SIZE;
    let (keys, _) = small(gpu, slots * WIDTH, 1);
    let (norm, _) = small(gpu, WIDTH, 3);
    let (bias, _) = small(gpu, WIDTH, 4);
    let places = upload_all(gpu, &(0..slots as i64).collect::<Vec<_>>());
    let caches = pair(gpu, PAGES * PAGE_BYTES, 0xff);
    let given = numbers([
        ("p.keys", at(&keys)),
        ("p.norm_weight", at(&norm)),
        ("p.norm_bias", at(&bias)),
        ("p.slots", at(&places)),
        ("p.cache", at(&caches[0])),
        ("p.key_stride", WIDTH as i64),
        ("p.page_stride", PAGE_BYTES as i64),
        ("p.pages", PAGES as i64),
        ("p.tokens", slots as i64),
        ("p.page_size", PAGE_SIZE as i64),
        ("p.width", WIDTH as i64),
        ("p.hadamard", 1),
        ("p.epsilon", 1e-6f32.to_bits().into()),
    ]);
    let quantise = "cuda/sm90/indexer/quantise/api.cu";
    run(gpu, &manifest, [quantise, "index keys"], &given);
    let params = MlaIndexKeysParams {
        keys: at(&keys) as *const _,
        norm_weight: at(&norm) as *const _,
        norm_bias: at(&bias) as *const _,
        slots: at(&places) as *const _,
        cache: at(&caches[1]) as *mut _,
        ..calls::index_keys(slots as i32, PAGES as i64)
    };
    // SAFETY: the arguments are those of memory that lives until the end, here and below.
    let launched = unsafe {
        raw::check(
            "index keys",
            raw::mla_index_keys_sm90(&params, gpu.raw_stream()),
        )
    };
    agree(gpu, "index keys", launched, &[&caches]);

    let (queries, _) = small(gpu, REQUESTS * HEADS * WIDTH, 5);
    let (head_weights, _) = small(gpu, REQUESTS * HEADS, 6);
    let values = pair(gpu, REQUESTS * HEADS * WIDTH, 0xff);
    let weights = pair(gpu, REQUESTS * HEADS * 4, 0xff);
    let given = numbers([
        ("p.queries", at(&queries)),
        ("p.head_weights", at(&head_weights)),
        ("p.values", at(&values[0])),
        ("p.weights", at(&weights[0])),
        ("p.query_token_stride", (HEADS * WIDTH) as i64),
        ("p.query_head_stride", WIDTH as i64),
        ("p.head_weight_stride", HEADS as i64),
        ("p.tokens", REQUESTS as i64),
        ("p.heads", HEADS as i64),
        ("p.width", WIDTH as i64),
        ("p.weight_scale", 0.5f32.to_bits().into()),
    ]);
    run(gpu, &manifest, [quantise, "index queries"], &given);
    let params = MlaIndexQueriesParams {
        queries: at(&queries) as *const _,
        head_weights: at(&head_weights) as *const _,
        values: at(&values[1]) as *mut _,
        weights: at(&weights[1]) as *mut _,
        ..calls::index_queries(REQUESTS as i32, HEADS as i32)
    };
    // SAFETY: as above.
    let launched = unsafe {
        raw::check(
            "index queries",
            raw::mla_index_queries_sm90(&params, gpu.raw_stream()),
        )
    };
    agree(gpu, "index queries", launched, &[&values, &weights]);

    // A query token of each request.
    let starts: Vec<i32> = (0..=REQUESTS as i32).collect();
    let starts = upload_all(gpu, &starts);
    let lens = upload_all(gpu, &[512i32, 70, 300, 63, 449]);
    let table: Vec<i32> = (0..PAGES as i32).map(|i| i * 7 % PAGES as i32).collect();
    let table = upload_all(gpu, &table);
    let logits = pair(gpu, REQUESTS * COLUMNS * 4, 0);
    let rows = numbers([
        ("p.rows.query_starts", at(&starts)),
        ("p.rows.seq_lens", at(&lens)),
        ("p.rows.block_table", at(&table)),
        ("p.rows.block_table_stride", MAX_PAGES as i64),
        ("p.rows.requests", REQUESTS as i64),
        ("p.rows.columns", COLUMNS as i64),
        ("p.rows.max_pages", MAX_PAGES as i64),
        ("p.rows.page_size", PAGE_SIZE as i64),
    ]);
    let mut given = rows.clone();
    given.extend(numbers([
        ("p.weights", at(&weights[0])),
        ("p.cache", at(&caches[0])),
        ("p.logits", at(&logits[0])),
        ("p.page_stride", PAGE_BYTES as i64),
        ("p.logits_stride", COLUMNS as i64),
        ("p.count", REQUESTS as i64),
        ("p.pages", PAGES as i64),
        ("multiprocessors", device(gpu)[0]),
        ("ranges", 1),
        ("queries", at(&values[0])),
    ]));
    let call = "index logits of 32 heads: 1 tokens";
    run(
        gpu,
        &manifest,
        ["cuda/sm90/indexer/logits/api.cu", call],
        &given,
    );
    let extents = [REQUESTS, REQUESTS, COLUMNS].map(|extent| extent as i32);
    let pages = [PAGE_SIZE, MAX_PAGES].map(|extent| extent as i32);
    let params = MlaIndexLogitsParams {
        queries: at(&values[0]) as *const _,
        weights: at(&weights[0]) as *const _,
        cache: at(&caches[0]) as *const _,
        query_starts: at(&starts) as *const _,
        seq_lens: at(&lens) as *const _,
        block_table: at(&table) as *const _,
        logits: at(&logits[1]) as *mut _,
        ..calls::index_logits(HEADS as i32, extents, pages, PAGES as i64)
    };
    // SAFETY: as above.
    let launched = unsafe {
        raw::check(
            "index logits",
            raw::mla_index_logits_sm90(&params, gpu.raw_stream()),
        )
    };
    agree(gpu, "index logits", launched, &[&logits]);

    // The result depends neither on the CTAs of a row nor on the room for candidates.
    for (call, ctas) in [
        ("top-k: a CTA of 512 threads for each row, one on an SM", 1),
        ("top-k: a CTA of 256 threads for each row, four on an SM", 1),
        ("top-k: a cluster for each row;", 4),
    ] {
        let lists = pair(gpu, REQUESTS * TOPK * 4, 0x7f);
        let mut given = rows.clone();
        given.extend(numbers([
            ("p.logits", at(&logits[0])),
            ("p.lists", at(&lists[0])),
            ("p.logits_stride", COLUMNS as i64),
            ("p.list_stride", TOPK as i64),
            ("p.topk", TOPK as i64),
            ("p.candidates", 512),
            ("rows", REQUESTS as i64),
            ("ctas", ctas),
            ("pages", PAGES as i64),
        ]));
        run(
            gpu,
            &manifest,
            ["cuda/sm90/indexer/topk/api.cu", call],
            &given,
        );
        let params = MlaTopkParams {
            logits: at(&logits[0]) as *const _,
            query_starts: at(&starts) as *const _,
            seq_lens: at(&lens) as *const _,
            block_table: at(&table) as *const _,
            lists: at(&lists[1]) as *mut _,
            ..calls::topk(TOPK as i32, extents, MAX_PAGES as i32, PAGES as i64)
        };
        // SAFETY: as above.
        let launched = unsafe { raw::check(call, raw::mla_topk_sm90(&params, gpu.raw_stream())) };
        agree(gpu, call, launched, &[&lists]);
    }
}
