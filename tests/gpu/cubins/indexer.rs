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
    // Both launches have outputs of their own, here and below.
    let call = |own: usize| MlaIndexKeysParams {
        keys: at(&keys) as *const _,
        norm_weight: at(&norm) as *const _,
        norm_bias: at(&bias) as *const _,
        slots: at(&places) as *const _,
        cache: at(&caches[own]) as *mut _,
        ..calls::index_keys(slots as i32, PAGES as i64)
    };
    let mut given = fields! {
        "p.", call(0);
        keys norm_weight norm_bias slots cache key_stride page_stride pages tokens page_size width
        hadamard
    };
    given.extend(numbers([("p.epsilon", call(0).epsilon.to_bits().into())]));
    let quantise = "cuda/sm90/indexer/quantise/api.cu";
    run(gpu, &manifest, [quantise, "index keys"], &given);
    // SAFETY: the arguments are those of memory that lives until the end, here and below.
    let status = unsafe { raw::mla_index_keys_sm90(&call(1), gpu.raw_stream()) };
    agree(gpu, "index keys", status, &[&caches]);

    let (queries, _) = small(gpu, REQUESTS * HEADS * WIDTH, 5);
    let (head_weights, _) = small(gpu, REQUESTS * HEADS, 6);
    let values = pair(gpu, REQUESTS * HEADS * WIDTH, 0xff);
    let weights = pair(gpu, REQUESTS * HEADS * 4, 0xff);
    let call = |own: usize| MlaIndexQueriesParams {
        queries: at(&queries) as *const _,
        head_weights: at(&head_weights) as *const _,
        values: at(&values[own]) as *mut _,
        weights: at(&weights[own]) as *mut _,
        ..calls::index_queries(REQUESTS as i32, HEADS as i32)
    };
    let mut given = fields! {
        "p.", call(0);
        queries head_weights values weights query_token_stride query_head_stride head_weight_stride
        tokens heads width
    };
    given.extend(numbers([(
        "p.weight_scale",
        call(0).weight_scale.to_bits().into(),
    )]));
    run(gpu, &manifest, [quantise, "index queries"], &given);
    // SAFETY: as above.
    let status = unsafe { raw::mla_index_queries_sm90(&call(1), gpu.raw_stream()) };
    agree(gpu, "index queries", status, &[&values, &weights]);

    // A query token of each request.
    let starts: Vec<i32> = (0..=REQUESTS as i32).collect();
    let starts = upload_all(gpu, &starts);
    let lens = upload_all(gpu, &[512i32, 70, 300, 63, 449]);
    let table: Vec<i32> = (0..PAGES as i32).map(|i| i * 7 % PAGES as i32).collect();
    let table = upload_all(gpu, &table);
    let logits = pair(gpu, REQUESTS * COLUMNS * 4, 0);
    let extents = [REQUESTS, REQUESTS, COLUMNS].map(|extent| extent as i32);
    let pages = [PAGE_SIZE, MAX_PAGES].map(|extent| extent as i32);
    let call = |own: usize| MlaIndexLogitsParams {
        queries: at(&values[0]) as *const _,
        weights: at(&weights[0]) as *const _,
        cache: at(&caches[0]) as *const _,
        query_starts: at(&starts) as *const _,
        seq_lens: at(&lens) as *const _,
        block_table: at(&table) as *const _,
        logits: at(&logits[own]) as *mut _,
        ..calls::index_logits(HEADS as i32, extents, pages, PAGES as i64)
    };
    let rows = fields! {
        "p.rows.", call(0);
        query_starts seq_lens block_table block_table_stride requests columns max_pages page_size
    };
    let mut given = rows.clone();
    given.extend(fields!("p.", call(0); weights cache logits page_stride logits_stride pages));
    given.extend(fields!("", call(0); queries));
    given.extend(numbers([
        ("p.count", REQUESTS as i64),
        ("multiprocessors", device(gpu)[0]),
        ("ranges", 1),
    ]));
    let kernel = [
        "cuda/sm90/indexer/logits/api.cu",
        "index logits of 32 heads: 1 tokens",
    ];
    run(gpu, &manifest, kernel, &given);
    // SAFETY: as above.
    let status = unsafe { raw::mla_index_logits_sm90(&call(1), gpu.raw_stream()) };
    agree(gpu, "index logits", status, &[&logits]);

    // The result depends neither on the CTAs of a row nor on the room for candidates.
    for (which, ctas) in [
        ("top-k: a CTA of 512 threads for each row, one on an SM", 1),
        ("top-k: a CTA of 256 threads for each row, four on an SM", 1),
        ("top-k: a cluster for each row;", 4),
    ] {
        let lists = pair(gpu, REQUESTS * TOPK * 4, 0x7f);
        let call = |own: usize| MlaTopkParams {
            logits: at(&logits[0]) as *const _,
            query_starts: at(&starts) as *const _,
            seq_lens: at(&lens) as *const _,
            block_table: at(&table) as *const _,
            lists: at(&lists[own]) as *mut _,
            ..calls::topk(TOPK as i32, extents, MAX_PAGES as i32, PAGES as i64)
        };
        let mut given = rows.clone();
        given.extend(fields!("p.", call(0); logits lists logits_stride list_stride topk));
        given.extend(fields!("", call(0); rows pages));
        given.extend(numbers([("p.candidates", 512), ("ctas", ctas)]));
        run(
            gpu,
            &manifest,
            ["cuda/sm90/indexer/topk/api.cu", which],
            &given,
        );
        // SAFETY: as above.
        let status = unsafe { raw::mla_topk_sm90(&call(1), gpu.raw_stream()) };
        agree(gpu, which, status, &[&lists]);
    }
}
