//! Index keys more than 2³¹ bytes from the first one. The memory between them is mapped but never
//! touched.

use fastrand::Rng;
use mla_cpu::Cpu;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, IndexDevice as _, IndexKeys};
use mla_runtime::model::IndexerConfig;
use mla_runtime::tensor::{ArrayRef, TensorMut, TensorRef};

use crate::{Batch, Tables, random};

const PAGE: usize = 64;
const TOKENS: usize = 2 * PAGE;
const WIDTH: usize = 128;

const PAGE_WORDS: usize = PAGE * (WIDTH + 4) / 4;

/// Writes keys to a cache of `pages` pages. Returns the logits of one request's last token over
/// these keys, and the words of its two pages.
fn logits(pages: usize, tables: [i32; 2]) -> (Vec<f32>, [Vec<u32>; 2]) {
    let mut rng = Rng::with_seed(20);
    let config = IndexerConfig::GLM_5;
    let heads = config.heads as usize;
    let keys = random(&mut rng, TOKENS * WIDTH);
    let [weight, bias] = [0, 1].map(|_| random(&mut rng, WIDTH));
    let queries: Vec<u8> = (0..heads * WIDTH).map(|_| rng.u8(0..126)).collect();
    let weights = random(&mut rng, heads);
    let rotary = Tables::new((0..TOKENS as i64).collect(), 64, config.rotary);
    let batch = Batch {
        starts: vec![0, 1],
        lens: vec![TOKENS as i32],
        tables: tables.to_vec(),
        max_pages: 2,
        page_size: PAGE,
        pages,
    };
    let slots: Vec<i64> = (0..TOKENS).map(|at| batch.slot(0, at) as i64).collect();
    let layout = IndexCacheLayout::contiguous(&config, pages, PAGE);
    // Zeroed memory takes no pages until it is written.
    let mut cache = vec![0u32; pages * layout.page_stride / 4];
    let cpu = Cpu::new();
    let keys = IndexKeys::new(
        TensorRef::from_slice(&keys, [TOKENS, 1, WIDTH]).unwrap(),
        [
            TensorRef::from_slice(&weight, [1, 1, WIDTH]).unwrap(),
            TensorRef::from_slice(&bias, [1, 1, WIDTH]).unwrap(),
        ],
        ArrayRef::from_slice(&slots),
        IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout).unwrap(),
    )
    .with_rotary(rotary.view());
    cpu.write_index_keys(&config, keys).unwrap();
    let mut logits = vec![f32::NAN; TOKENS];
    cpu.index_logits(
        &config,
        &queries[..],
        TensorRef::from_slice(&weights, [1, 1, heads]).unwrap(),
        &IndexCacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout).unwrap(),
        &batch.view(0..1),
        TensorMut::from_slice(&mut logits, [1, 1, TOKENS]).unwrap(),
    )
    .unwrap();
    let words = tables.map(|page| cache[page as usize * PAGE_WORDS..][..PAGE_WORDS].to_vec());
    (logits, words)
}

#[test]
fn far_keys() {
    let page_bytes = 4 * PAGE_WORDS;
    let pages = (1 << 31) / page_bytes + 3;
    assert!((pages - 2) * page_bytes > 1 << 31);
    let near = logits(3, [2, 1]);
    let far = logits(pages, [pages as i32 - 1, pages as i32 - 2]);
    assert!(near == far);
    assert!(
        near.0
            .iter()
            .all(|logit| logit.is_finite() && *logit != 0.0)
    );
}
