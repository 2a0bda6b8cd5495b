//! Tests views of extreme sizes. Each is either refused or has its usual meaning.

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::device::{Device as _, Fp8Blocks};
use mla_runtime::indexer::IndexCacheLayout;
use mla_runtime::layer::{MlaLayer, StepPlan, StepRequest, Weights};
use mla_runtime::model::{DType, HeadDims, IndexerConfig, KvFormat, MlaDims};
use mla_runtime::plan::memory::MemoryNeeds;
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, CacheStrides, Layout, LseLayout, LseRef,
    Memory as _, Natural, TensorMut, TensorRef,
};
use mla_runtime::{Result, named};

const DIMS: MlaDims = MlaDims::new(8, HeadDims::new(4, 4, 4));

/// Returns `len` bytes at an address that is aligned for every view.
fn bytes(len: usize) -> &'static [u8] {
    #[repr(align(16))]
    struct Aligned([u8; 128]);
    static ZEROS: Aligned = Aligned([0; 128]);
    &ZEROS.0[..len]
}

#[test]
fn overflowing_sizes_are_refused() {
    let refused = |layout| {
        let view = TensorRef::<Cpu>::new(bytes(64), layout).map(drop);
        view.unwrap_err().to_string()
    };
    for shape in [[2, usize::MAX, 2], [usize::MAX; 3], [1, 1 << 40, 1 << 40]] {
        let layout = Layout::contiguous(DType::F32, shape);
        assert_eq!(layout.elements(), usize::MAX);
        assert!(
            refused(layout).ends_with("accepted one that lies within 64 bytes"),
            "{layout}"
        );
    }
    assert_eq!(
        Layout::contiguous(DType::F32, [usize::MAX, 0, 2]).elements(),
        0
    );
    let cache = CacheLayout::contiguous(DIMS, KvFormat::F32, 2, usize::MAX);
    assert_eq!(cache.slots(), usize::MAX);
    assert!(CacheRef::<Cpu>::new(bytes(96), cache).is_err());
    let index = IndexCacheLayout::contiguous(&IndexerConfig::GLM_5, usize::MAX, usize::MAX);
    assert_eq!(index.slots(), usize::MAX);
    let widest = HeadDims::new(u32::MAX, u32::MAX, u32::MAX);
    assert_eq!(
        (widest.qk(), MlaDims::new(u32::MAX, widest).row()),
        (u32::MAX, u32::MAX)
    );
}

#[test]
fn refused_views_are_named() {
    fn said<T>(name: &'static str, view: Result<T>) -> String {
        let error = named(name, view).map(drop).unwrap_err();
        // The first name stays.
        let again = named(name, Err::<(), _>(error));
        again.unwrap_err().to_string()
    }
    let mut out = [0u8; 64];
    let layout = Layout::contiguous(DType::F32, [2, 2, 4]);
    assert_eq!(
        said("q_latent", TensorRef::<Cpu>::new(bytes(60), layout)),
        "q_latent: given layout f32 [2, 2, 4] strides [8, 4, 1], accepted one that lies within 60 \
         bytes"
    );
    assert_eq!(
        said("q_latent", TensorRef::<Cpu>::new(&bytes(66)[2..], layout)),
        "q_latent: given address 2 bytes past a multiple of 4, accepted a multiple of 4 bytes"
    );
    let overlapping = Layout {
        strides: [1, 1, 1],
        ..layout
    };
    assert_eq!(
        said("attended", TensorMut::<Cpu>::new(&mut out, overlapping)),
        "attended: given layout f32 [2, 2, 4] strides [1, 1, 1], accepted an output in which no \
         two indices share an element"
    );
    assert_eq!(
        said("lens", ArrayRef::<Cpu, i64>::new(bytes(64), 9)),
        "lens: given array length 9, accepted at most 8 elements of i64"
    );
    let lse = LseLayout::heads_first(4, 5);
    assert_eq!(
        said("lse", LseRef::<Cpu, Natural>::new(bytes(64), lse)),
        "lse: given lse layout 4 heads of 5 tokens, rows 5 apart, accepted rows that do not \
         overlap and lie within 64 bytes"
    );
    let cache = CacheLayout::contiguous(DIMS, KvFormat::F32, 1, 1);
    assert_eq!(
        said(
            "layer 3",
            CacheRef::<Cpu>::new(bytes(48), cache.with_scale(2.0))
        ),
        "layer 3: given cache scale 2.0, accepted 1, as f32 rows have no scale"
    );
    assert_eq!(
        said("layer 3", CacheMut::<Cpu>::new(&mut out[..32], cache)),
        "layer 3: given cache layout 1 pages of 1 f32 rows of (8,4), strides of 48 and 48 bytes, \
         accepted rows of 48 bytes that do not overlap and lie within 32 bytes"
    );
    // An error that is not about an argument stays unchanged.
    let error = named("cache", Cpu::new().allocate(usize::MAX)).map(drop);
    assert_eq!(
        error.unwrap_err().to_string(),
        "memory: given a need of 18446744073709551615 bytes on cpu, accepted as many as are free"
    );
}

#[test]
fn bad_split_caches_are_refused() {
    let split = CacheLayout::split(DIMS, KvFormat::F32, 2, 2);
    assert_eq!((split.page_stride, split.row_stride), (64, 32));
    let rope = CacheStrides {
        page_stride: 32,
        row_stride: 16,
    };
    assert_eq!(split.split_rope, Some(rope));
    let said = |rope_len: usize, layout: CacheLayout| {
        let view = CacheRef::<Cpu>::split(bytes(128), bytes(rope_len), layout).map(drop);
        view.err().map(|error| error.to_string())
    };
    assert_eq!(said(64, split), None);
    // The last row of a page needs no bytes after it.
    let apart = |page_stride, row_stride| {
        split.with_split_rope(Some(CacheStrides {
            page_stride,
            row_stride,
        }))
    };
    assert_eq!(said(96, apart(48, 20)), None);
    let fields = [
        (
            said(63, split),
            "rotary keys of 16 bytes that do not overlap and lie within 63 bytes",
        ),
        (said(128, apart(24, 16)), "within 128 bytes"),
        (said(128, apart(48, 15)), "within 128 bytes"),
        (said(128, apart(0, 1 << 27)), "less than 2^27 bytes"),
        (
            said(128, split.with_row_stride(28)),
            "rows of 32 bytes that do not overlap and lie within 128 bytes",
        ),
        (
            said(64, CacheLayout::contiguous(DIMS, KvFormat::F32, 2, 2)),
            "cache: given two tensors, accepted one tensor, as the layout says",
        ),
        (
            said(
                64,
                CacheLayout::split(MlaDims::new(8, HeadDims::new(4, 0, 4)), KvFormat::F32, 1, 1),
            ),
            "cache dims: given two tensors with R = 0, accepted R of 1 and up, or one row",
        ),
        (
            said(
                64,
                CacheLayout::split(
                    MlaDims::new(128, HeadDims::new(4, 4, 4)),
                    KvFormat::Fp8DsMla,
                    0,
                    1,
                ),
            ),
            "cache format: given fp8_ds_mla in two tensors, accepted f32, f16, bf16 or fp8 in two \
             tensors, or one row",
        ),
        (
            said(64, split.with_scale(0.5)),
            "cache scale: given 0.5, accepted 1, as f32 rows have no scale",
        ),
    ];
    for (refused, wanted) in fields {
        let refused = refused.unwrap_or_default();
        assert!(refused.ends_with(wanted), "{refused}");
    }
    assert_eq!(
        CacheRef::<Cpu>::new(bytes(128), split)
            .map(drop)
            .unwrap_err()
            .to_string(),
        "cache: given one tensor, accepted two tensors, as the layout says"
    );
}

#[test]
fn views_without_elements() {
    // Their extents and strides may exceed any memory. They must not be added up.
    for shape in [[0, 2, 2], [2, 0, 2], [2, 2, 0]] {
        let gapless = Layout::contiguous(DType::F32, shape);
        let layout = Layout {
            strides: [usize::MAX, usize::MAX - 1, usize::MAX - 2],
            ..gapless
        };
        let view = TensorRef::<Cpu>::new(&[], layout).unwrap();
        assert_eq!(*view.layout(), gapless);
        let to = TensorMut::<Cpu>::new(&mut [], layout).unwrap();
        assert_eq!(*to.layout(), gapless);
        let places = &[0, 1][..shape[0]];
        let cpu = Cpu::new();
        cpu.scatter_rows(view, ArrayRef::from_slice(places), to)
            .unwrap();
    }
    let nothing = ArrayRef::from_slice(&[]);
    let blocks = Fp8Blocks::<Cpu>::from_row(&[], nothing, [usize::MAX, 0], 127).unwrap();
    assert_eq!(blocks.rows(1..usize::MAX).unwrap().first_row(), 0);
    // A problem without a latent is refused when a layer is made.
    let none = MlaDims::new(0, HeadDims::new(4, 4, 4));
    let config = LayerConfig::new(Problem::new(none, 2, DType::F32), 0.1);
    let layout = Layout {
        strides: [0, usize::MAX, 1],
        ..Layout::contiguous(DType::F32, [1, 16, 0])
    };
    let view = TensorRef::<Cpu>::new(&[], layout).unwrap();
    Weights::from_checkpoint(view, &config).unwrap();
    // These rows have no bytes.
    let none = MlaDims::new(0, HeadDims::new(4, 0, 4));
    let cache = |pages, page_size| {
        let layout = CacheLayout::contiguous(none, KvFormat::F32, pages, page_size);
        CacheRef::<Cpu>::new(&[], layout).map(drop)
    };
    cache(1 << 40, 1 << 22).unwrap();
    for (pages, page_size) in [(2, usize::MAX), (usize::MAX, 1), (1 << 62, 2)] {
        let error = cache(pages, page_size).unwrap_err().to_string();
        assert!(
            error.ends_with(", accepted fewer than 2^63 slots"),
            "{error}"
        );
    }
}

#[test]
fn block_table_rows() {
    // If rows of eight entries were read as rows of four, the entries would belong to other
    // requests.
    let entries = [0; 16];
    let table = |requests, max_pages| {
        BlockTable::<Cpu>::new(ArrayRef::from_slice(&entries), requests, max_pages).map(drop)
    };
    assert_eq!(
        table(2, 4).unwrap_err().to_string(),
        "block table: given 2 requests of 4 pages, accepted rows that make up its 16 entries"
    );
    assert!(table(3, 8).is_err() && table(usize::MAX, 2).is_err());
    table(2, 8).unwrap();
}

#[test]
fn extreme_limits_and_pages() {
    let problem = Problem::new(DIMS, 2, DType::F32);
    let none = problem.with_page_size(0);
    let limits = StepLimits::new(2, 2, 2);
    for (page_size, refusal) in [
        (0, "page_size: given 0, accepted 1 to 2147483647"),
        (
            u32::MAX,
            "page_size: given 4294967295, accepted 1 to 2147483647",
        ),
    ] {
        let needs = MemoryNeeds::of_steps(&problem.with_page_size(page_size), &limits).map(drop);
        assert_eq!(needs.unwrap_err().to_string(), refusal);
    }
    let refusal = "page_size: given 0, accepted 1 and up";
    let step = StepPlan::within(&none, &limits, 1, &[StepRequest::new(1, 1, &[0])]).map(drop);
    assert_eq!(step.unwrap_err().to_string(), refusal);
    let many = limits.with_pages_per_request(usize::MAX / 2);
    let step =
        StepPlan::within(&problem, &many, 1, &[StepRequest::<i32>::new(1, 9, &[])]).map(drop);
    assert_eq!(
        step.unwrap_err().to_string(),
        "requests.pages: given 0 of request 0, accepted at least 1, for 9 tokens"
    );
    // No request can have more new tokens than a step.
    let config = LayerConfig::new(problem.with_query_len(QueryLen::Ragged), 0.1);
    let layer = MlaLayer::<CpuPrefill, CpuDecode>::of(&Cpu::new(), &config).unwrap();
    let limits = limits.with_decode_query_len(usize::MAX);
    layer.workspace(&limits).unwrap();

    let wide = MlaDims::new(8, HeadDims::new(4, 65537, 4));
    let config = LayerConfig::new(Problem::new(wide, 2, DType::F32), 0.1);
    let layer = MlaLayer::<CpuPrefill, CpuDecode>::of(&Cpu::new(), &config).map(drop);
    assert_eq!(
        layer.unwrap_err().to_string(),
        "dims: given (4,65537,4), accepted P and V of 1 to 65536, and R of 0 to 65536"
    );
}

#[test]
fn single_rows_take_any_stride() {
    const GROUP: MlaDims = MlaDims::new(128, HeadDims::new(4, 1, 4));
    let group = &[0; 134];
    for stride in [0, 1, usize::MAX] {
        let layout = Layout {
            dtype: DType::F32,
            shape: [1, 1, 4],
            strides: [stride, stride, 1],
        };
        let view = TensorRef::<Cpu>::new(bytes(16), layout).unwrap();
        assert_eq!(*view.layout(), Layout::contiguous(DType::F32, [1, 1, 4]));
        view.require_aligned("query", 16).unwrap();

        let cache = CacheLayout::contiguous(DIMS, KvFormat::F32, 1, 2);
        let strided = CacheRef::<Cpu>::new(bytes(96), cache.with_page_stride(stride)).unwrap();
        assert_eq!(*strided.layout(), cache);
        // A row of 132 + 2 bytes begins with floats, so the next row must be aligned for floats.
        let cache = CacheLayout::contiguous(GROUP, KvFormat::Fp8DsMla, 1, 1);
        let single = cache.with_row_stride(stride).with_page_stride(stride);
        let single = *CacheRef::<Cpu>::new(group, single).unwrap().layout();
        assert_eq!((single.row_stride, single.page_stride), (144, 144));

        let layout = LseLayout {
            row_stride: stride,
            ..LseLayout::heads_first(1, 3)
        };
        let lse = LseRef::<Cpu, Natural>::new(bytes(12), layout).unwrap();
        assert_eq!(lse.layout(), LseLayout::heads_first(1, 3));
    }
    // Several rows with a stride of 0 do not count as a single row.
    let layout = Layout {
        strides: [0, 4, 1],
        ..Layout::contiguous(DType::F32, [3, 1, 4])
    };
    let view = TensorRef::<Cpu>::new(bytes(16), layout).unwrap();
    assert_eq!(
        view.require_aligned("query", 16).unwrap_err().to_string(),
        "query: given f32 [3, 1, 4] strides [0, 4, 1], accepted a last axis of stride 1, and rows \
         apart by multiples of 16 bytes"
    );
    let one = view.narrow(0, 1..2).unwrap();
    one.require_aligned("query", 16).unwrap();
}
