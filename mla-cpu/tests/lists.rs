//! Rows far from the first row of a cache, in lists of slots and in block tables. The conformance
//! suite tests other properties of lists: entries that are no slots, repeated entries, and a second
//! cache.

mod common;

use half::bf16;
use mla_cpu::{Cpu, CpuDecode};
use mla_runtime::backend::{
    DecodeBackend, DecodeBatch, DecodeCall, LayerConfig, Output, Query, SlotLists, StepLimits,
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

/// Runs queries over a cache, and returns the bits of outputs and log-sum-exps. Each query is a
/// request of one token. Without lists, each attends to all positions in its row of `tables`.
fn run(
    queries: &[bf16],
    cache: CacheRef<'_, Cpu>,
    lists: Option<SlotLists<'_, Cpu>>,
    tables: &[i32],
) -> Vec<u32> {
    let cpu = Cpu::new();
    let tokens = queries.len() / (HEADS * ROW);
    let layout = *cache.layout();
    let problem = Problem::new(DIMS, HEADS as u32, DType::BF16)
        .with_kv_format(layout.format)
        .with_sparse(lists.is_some())
        .with_page_size(layout.page_size as u32)
        .with_query_len(QueryLen::Single);
    let backend = CpuDecode::new(&cpu, &LayerConfig::new(problem, 0.2)).unwrap();
    let limits = StepLimits::new(tokens, tokens, 1).with_decode_query_len(1);
    let mut state = backend.state(&cpu, &limits).unwrap();
    let lens = vec![layout.page_size as i32; tokens];
    let starts: Vec<i32> = (0..=tokens as i32).collect();
    let mut out = vec![bf16::NAN; tokens * HEADS * LATENT];
    let mut lse = vec![f32::NAN; HEADS * tokens];
    let batch = DecodeBatch::new(
        BlockTable::new(ArrayRef::from_slice(tables), tokens, 1).unwrap(),
        (ArrayRef::from_slice(&lens), layout.page_size),
        (ArrayRef::from_slice(&starts), 1),
    );
    let call = DecodeCall::new(
        Query::Concatenated(TensorRef::from_slice(queries, [tokens, HEADS, ROW]).unwrap()),
        cache.shorten(),
        batch,
        Output::Plain(TensorMut::from_slice(&mut out, [tokens, HEADS, LATENT]).unwrap()),
    )
    .with_lse(Some(LseMut::from_slice(&mut lse, HEADS, tokens).unwrap()))
    .with_slots(lists.as_ref().map(SlotLists::shorten));
    // SAFETY: the CPU's backend checks the arrays of a call; the state is its own.
    unsafe { backend.decode(&cpu, call, &mut state, &()) }.unwrap();
    let out = out.iter().map(|x| x.to_f32());
    out.chain(lse).map(f32::to_bits).collect()
}

/// Tests rows more than 2³¹ elements from the first one. The memory between them is mapped but
/// never touched.
#[test]
fn far_rows() {
    for format in [
        KvFormat::BF16,
        KvFormat::Fp8,
        KvFormat::Fp8DsMla,
        KvFormat::Fp8PerToken,
    ] {
        let near_layout = CacheLayout::contiguous(DIMS, format, 3, 64);
        let row = near_layout.row_stride;
        let element_bytes = format.dtype().map_or(1, DType::bytes);
        let pages = (1usize << 31) * element_bytes / near_layout.page_stride + 3;
        let far_layout = CacheLayout::contiguous(DIMS, format, pages, 64);
        let mut random = Random(5);
        let mut small = vec![0u8; 3 * near_layout.page_stride];
        // Zeroed memory takes no pages until it is written.
        let mut large = vec![0u8; pages * far_layout.page_stride];
        // The pages 0, 1 and 2 are the first page and the last two.
        let far_pages = [0, pages - 2, pages - 1];
        for slot in 0..3 * 64 {
            let far = far_pages[slot / 64] * 64 + slot % 64;
            let bytes: Vec<u8> = match format {
                KvFormat::BF16 => bytemuck::pod_collect_to_vec(&random.fill::<bf16>(ROW)),
                // These bits are valid scales and rotary values, too.
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
            let (slots, tables) = (list.map(|at| at as i32), tables.map(|page| page as i32));
            let lists = SlotLists::new(ArrayRef::from_slice(&slots), 4);
            [Some(lists), None].map(|lists| {
                let cache = CacheRef::new(bytes, layout).unwrap();
                run(&queries, cache, lists, &tables)
            })
        };
        let expected = attended(&small, near_layout, list, [2, 1]);
        let given = attended(&large, far_layout, far_list, [pages - 1, pages - 2]);
        assert!(given == expected, "{format:?}");
        let numbers = expected.concat().into_iter().map(f32::from_bits);
        assert!(numbers.clone().all(f32::is_finite), "{format:?}");
        assert!(numbers.into_iter().any(|x| x != 0.0), "{format:?}");
    }
}
