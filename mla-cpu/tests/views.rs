//! Tests views of extreme sizes. Each is either refused or has its usual meaning. `views.txt` has
//! the errors of refused views and operands: `BLESS=1 cargo test -p mla-cpu --test views` writes it
//! anew.

#[path = "common/refusals.rs"]
mod refusals;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::device::{Device as _, Fp8Blocks, absorption};
use mla_runtime::indexer::IndexCacheLayout;
use mla_runtime::layer::{MlaLayer, StepPlan, StepRequest, Weights};
use mla_runtime::model::{DType, HeadDims, IndexerConfig, KvFormat, MlaDims};
use mla_runtime::plan::memory::MemoryNeeds;
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, CacheStrides, Layout, LseLayout, LseMut,
    LseRef, Memory as _, Natural, TensorMut, TensorRef,
};
use mla_runtime::{Result, named};
use refusals::{Refused, refused};

type Layer = MlaLayer<CpuPrefill, CpuDecode>;

const DIMS: MlaDims = MlaDims::new(8, HeadDims::new(4, 4, 4));

/// Returns `len` bytes at an address that is aligned for every view.
fn bytes(len: usize) -> &'static [u8] {
    #[repr(align(16))]
    struct Aligned([u8; 128]);
    static ZEROS: Aligned = Aligned([0; 128]);
    &ZEROS.0[..len]
}

fn tensor(bytes: &[u8], layout: Layout) -> Result<()> {
    named("q_latent", TensorRef::<Cpu>::new(bytes, layout)).map(drop)
}

fn single_views() -> Refused {
    let of_shape = |shape| tensor(bytes(64), Layout::contiguous(DType::F32, shape));
    let layout = Layout::contiguous(DType::F32, [2, 2, 4]);
    let overlapping = Layout {
        strides: [1, 1, 1],
        ..layout
    };
    let lse = LseLayout::heads_first(4, 5);
    let cache = CacheLayout::contiguous(DIMS, KvFormat::F32, 1, 1);
    let long = CacheLayout::contiguous(DIMS, KvFormat::F32, 2, usize::MAX);
    let narrow = CacheLayout::contiguous(MlaDims::R1, KvFormat::BF16, 2, 64).with_row_stride(4);
    let repeated = Layout {
        strides: [0, 4, 1],
        ..Layout::contiguous(DType::F32, [3, 1, 4])
    };
    let repeated = TensorRef::<Cpu>::new(bytes(16), repeated).unwrap();
    let (one, small) = (
        Layout::contiguous(DType::F32, [1, 1, 4]),
        LseLayout::heads_first(2, 2),
    );
    let mut out = vec![0u128; 4];
    let out: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
    let without = |pages, page_size| {
        let none = MlaDims::new(0, HeadDims::new(4, 0, 4));
        let layout = CacheLayout::contiguous(none, KvFormat::F32, pages, page_size);
        CacheRef::<Cpu>::new(&[], layout)
    };
    // If rows of eight entries were read as rows of four, the entries would belong to other
    // requests.
    let entries = [0; 16];
    let table = |requests, pages| {
        BlockTable::<Cpu>::new(ArrayRef::from_slice(&entries), requests, pages).map(drop)
    };
    refused! {
        "tensor: sizes that overflow", of_shape([2, usize::MAX, 2]);
        "tensor: the largest sizes", of_shape([usize::MAX; 3]);
        "tensor: a product of sizes that overflows", of_shape([1, 1 << 40, 1 << 40]);
        "tensor: longer than its bytes", tensor(bytes(60), layout);
        "tensor: named twice", named("q_latent", tensor(bytes(60), layout));
        "tensor: at two bytes past its alignment", tensor(&bytes(66)[2..], layout);
        "tensor: rows that repeat a row, for 16 bytes", repeated.require_aligned("query", 16);
        "output: elements that overlap",
            named("attended", TensorMut::<Cpu>::new(&mut *out, overlapping));
        "output: at an odd address", TensorMut::<Cpu>::new(&mut out[1..], one);
        "array: longer than its bytes",
            named("lens", ArrayRef::<Cpu, i64>::new(bytes(64), 9));
        "array: at an odd address", ArrayRef::<Cpu, i32>::new(&bytes(64)[1..], 4);
        "lse: longer than its bytes",
            named("lse", LseRef::<Cpu, Natural>::new(bytes(64), lse));
        "lse: at an odd address", LseRef::<Cpu>::new(&bytes(64)[1..], small);
        "lse: written at an odd address", LseMut::<Cpu>::new(&mut out[1..], small);
        "cache: a scale that its format does not have",
            named("layer 3", CacheRef::<Cpu>::new(bytes(48), cache.with_scale(2.0)));
        "cache: longer than its bytes",
            named("layer 3", CacheMut::<Cpu>::new(&mut out[..32], cache));
        "cache: sizes that overflow", CacheRef::<Cpu>::new(bytes(96), long);
        "cache: rows that overlap", CacheRef::<Cpu>::new(&[0; 64], narrow);
        // These rows have no bytes.
        "cache: the largest pages without bytes", without(2, usize::MAX);
        "cache: as many pages without bytes", without(usize::MAX, 1);
        "cache: 2^63 slots without bytes", without(1 << 62, 2);
        "block table: rows of half the entries", table(2, 4);
        "block table: a row too many", table(3, 8);
        "block table: sizes that overflow", table(usize::MAX, 2);
        // This error is not about an argument, and stays unchanged.
        "memory: a name for it", named("cache", Cpu::new().allocate(usize::MAX));
    }
}

fn split_caches() -> Refused {
    let split = CacheLayout::split(DIMS, KvFormat::F32, 2, 2);
    let apart = |page_stride, row_stride| {
        split.with_split_rope(Some(CacheStrides {
            page_stride,
            row_stride,
        }))
    };
    let cache = |rope: usize, layout| CacheRef::<Cpu>::split(bytes(128), bytes(rope), layout);
    let no_rope = MlaDims::new(8, HeadDims::new(4, 0, 4));
    let grouped = MlaDims::new(128, HeadDims::new(4, 4, 4));
    // The last row of a page needs no bytes after it.
    for (rope, layout) in [(64, split), (96, apart(48, 20))] {
        cache(rope, layout).unwrap();
    }
    refused! {
        "split cache: rotary keys longer than their bytes", cache(63, split);
        "split cache: pages of rotary keys that overlap", cache(128, apart(24, 16));
        "split cache: rotary keys that overlap", cache(128, apart(48, 15));
        "split cache: rotary keys too far apart", cache(128, apart(0, 1 << 27));
        "split cache: latents that overlap", cache(128, split.with_row_stride(28));
        "split cache: a layout of one tensor",
            cache(64, CacheLayout::contiguous(DIMS, KvFormat::F32, 2, 2));
        "split cache: no rotary keys", cache(64, CacheLayout::split(no_rope, KvFormat::F32, 1, 1));
        "split cache: a format of one tensor",
            cache(64, CacheLayout::split(grouped, KvFormat::Fp8DsMla, 0, 1));
        "split cache: a scale that its format does not have", cache(64, split.with_scale(0.5));
        "split cache: one tensor", CacheRef::<Cpu>::new(bytes(128), split);
    }
}

fn limits_and_operands() -> Refused {
    let problem = Problem::new(DIMS, 2, DType::F32);
    let limits = StepLimits::new(2, 2, 2);
    let needs = |page_size| MemoryNeeds::of_steps(&problem.with_page_size(page_size), &limits);
    let plan = |problem: Problem, limits: StepLimits, request| {
        StepPlan::within(&problem, &limits, 1, &[request]).map(drop)
    };
    let wide = MlaDims::new(8, HeadDims::new(4, 65537, 4));
    let wide = LayerConfig::new(Problem::new(wide, 2, DType::F32), 0.1);
    let absorbed = |weights| {
        let (from, mut to) = ([0.0f32; 256], [0.0f32; 16]);
        let read = |shape| TensorRef::<Cpu>::from_slice(&from, shape).unwrap();
        let mut to = TensorMut::from_slice(&mut to, [2, 1, 8]).unwrap();
        absorption(&read([2, 1, 8]), &read(weights), &mut to).map(drop)
    };
    let written = |slots: [i64; 2]| {
        let dims = MlaDims::new(2, HeadDims::new(1, 1, 1));
        let layout = CacheLayout::contiguous(dims, KvFormat::F32, 2, 2);
        let mut cache = [0f32; 12];
        let read = |shape| TensorRef::from_slice(&[1.0f32; 4], shape).unwrap();
        let to = CacheMut::new(bytemuck::cast_slice_mut(&mut cache), layout)?;
        let slots = ArrayRef::from_slice(&slots);
        let result = Cpu::new().write_cache(read([2, 1, 2]), read([2, 1, 1]), slots, to);
        assert_eq!(cache, [0.0; 12]);
        result
    };
    refused! {
        "needs: pages of no tokens", needs(0);
        "needs: the largest pages", needs(u32::MAX);
        "plan: pages of no tokens",
            plan(problem.with_page_size(0), limits, StepRequest::new(1, 1, &[0]));
        "plan: no pages, although more than all are allowed", plan(
            problem,
            limits.with_pages_per_request(usize::MAX / 2),
            StepRequest::<i32>::new(1, 9, &[]),
        );
        "layer: a wide rotary part", Layer::of(&Cpu::new(), &wide);
        "absorption: weights for wider queries", absorbed([1, 9, 8]);
        "absorption: weights of a wider latent", absorbed([1, 8, 9]);
        "cache write: a slot past the cache", written([0, 4]);
        "cache write: a slot below −1", written([-2, 0]);
        "cache write: one slot twice", written([3, 3]);
    }
}

#[test]
fn refused_views_and_operands() {
    let cases = [single_views(), split_caches(), limits_and_operands()];
    refusals::compare("views.txt", cases.into_iter().flatten());
}

#[test]
fn sizes_saturate() {
    for shape in [[2, usize::MAX, 2], [usize::MAX; 3], [1, 1 << 40, 1 << 40]] {
        assert_eq!(Layout::contiguous(DType::F32, shape).elements(), usize::MAX);
    }
    let empty = Layout::contiguous(DType::F32, [usize::MAX, 0, 2]);
    assert_eq!(empty.elements(), 0);
    let cache = CacheLayout::contiguous(DIMS, KvFormat::F32, 2, usize::MAX);
    assert_eq!(cache.slots(), usize::MAX);
    let index = IndexCacheLayout::contiguous(&IndexerConfig::GLM_5, usize::MAX, usize::MAX);
    assert_eq!(index.slots(), usize::MAX);
    let widest = HeadDims::new(u32::MAX, u32::MAX, u32::MAX);
    assert_eq!(
        (widest.qk(), MlaDims::new(u32::MAX, widest).row()),
        (u32::MAX, u32::MAX)
    );
    let split = CacheLayout::split(DIMS, KvFormat::F32, 2, 2);
    assert_eq!((split.page_stride, split.row_stride), (64, 32));
    let rope = CacheStrides {
        page_stride: 32,
        row_stride: 16,
    };
    assert_eq!(split.split_rope, Some(rope));
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
    let none = CacheLayout::contiguous(
        MlaDims::new(0, HeadDims::new(4, 0, 4)),
        KvFormat::F32,
        1 << 40,
        1 << 22,
    );
    CacheRef::<Cpu>::new(&[], none).unwrap();
}

#[test]
fn extreme_limits_and_tables() {
    BlockTable::<Cpu>::new(ArrayRef::from_slice(&[0; 16]), 2, 8).unwrap();
    // No request can have more new tokens than a step.
    let problem = Problem::new(DIMS, 2, DType::F32).with_query_len(QueryLen::Ragged);
    let layer = Layer::of(&Cpu::new(), &LayerConfig::new(problem, 0.1)).unwrap();
    let limits = StepLimits::new(2, 2, 2).with_decode_query_len(usize::MAX);
    layer.workspace(&limits).unwrap();
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
    assert!(view.require_aligned("query", 16).is_err());
    let one = view.narrow(0, 1..2).unwrap();
    one.require_aligned("query", 16).unwrap();
}
