//! Checks that sizes beyond any memory are refused. Tensors without elements must take neither
//! memory nor time.
//!
//! The allocator of this program refuses requests larger than [`LARGEST`], as on a machine whose
//! memory is full. Code that does not handle this ends the whole program.

use std::alloc::{GlobalAlloc, Layout as Allocation, System};

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::device::{Device, GatherRows};
use mla_runtime::layer::{MlaLayer, StepPlan, StepRequest};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims, RotaryStyle};
use mla_runtime::plan::slots::BlockTables;
use mla_runtime::spec::{Problem, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, Base2TokensFirst, CacheLayout, CacheMut, CacheRef, Layout, LseLayout, LseMut, LseRef,
    Rotary, TensorMut, TensorRef,
};
use mla_runtime::{Error, Result};

const LARGEST: usize = 64 << 20;

struct Full;

// SAFETY: both methods are the system allocator's, or return null, as an allocator may.
unsafe impl GlobalAlloc for Full {
    unsafe fn alloc(&self, memory: Allocation) -> *mut u8 {
        match memory.size() <= LARGEST {
            // SAFETY: the caller keeps the contract of `alloc`.
            true => unsafe { System.alloc(memory) },
            false => std::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, memory: Allocation) {
        // SAFETY: `pointer` came from `System` by the method above.
        unsafe { System.dealloc(pointer, memory) }
    }
}

#[global_allocator]
static ALLOCATOR: Full = Full;

const DIMS: MlaDims = MlaDims::new(8, HeadDims::new(4, 4, 4));
/// A size that exceeds any memory.
const HUGE: usize = 1 << 62;

fn assert_out_of_memory<T>(what: &str, result: Result<T>) {
    match result {
        Err(Error::OutOfMemory { bytes, .. }) => assert!(bytes > LARGEST as u64, "{what}"),
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => panic!("{what}: not refused"),
    }
}

fn problem() -> Problem {
    Problem::new(DIMS, 2, DType::F32)
        .with_page_size(4)
        .with_query_len(QueryLen::Ragged)
}

#[test]
fn large_limits_run_out_of_memory() {
    let config = LayerConfig::new(problem(), 0.1);
    let layer = MlaLayer::<CpuPrefill, CpuDecode>::of(&Cpu::new(), &config).unwrap();
    let small = StepLimits::new(2, 8, 4).with_context_rows(8);
    for (name, limits) in [
        ("tokens", small.with_tokens((1 << 31) - 2)),
        ("requests", small.with_requests((1 << 29) - 1)),
        ("pages", StepLimits::new(2, 8, 1 << 28)),
        ("context rows", small.with_context_rows((1 << 31) - 2)),
        ("all", StepLimits::new(1 << 26, 1 << 30, 31)),
    ] {
        assert_out_of_memory(name, layer.workspace(&limits));
        layer.workspace(&small).unwrap();
    }
}

#[test]
fn long_steps_run_out_of_memory() {
    // The row of every request is as wide as that of the longest request.
    let pages: Vec<i32> = (0..1 << 16).collect();
    let mut requests = vec![StepRequest::<i32>::new(0, 0, &[]); 1 << 12];
    requests.push(StepRequest::new(1, 1 << 18, &pages));
    let limits = StepLimits::new(usize::MAX, usize::MAX, 1 << 16);
    let step = StepPlan::within(&problem(), &limits, 1, &requests);
    assert_out_of_memory("tables", step);

    let one = [StepRequest::new(1, 1, &[0])];
    let step = || StepPlan::within(&problem(), &limits, 1, &one).unwrap();
    for requests in [1 << 30, HUGE, usize::MAX] {
        assert_out_of_memory("padding", step().padded_to(requests));
    }
    assert_eq!(step().padded_to(3).unwrap().tokens(), 3);

    let tables = BlockTables::new(&[0, 1], 1, 1 << 30).unwrap();
    for request in [Request::new(u32::MAX, 0), Request::new(1 << 30, 1 << 30)] {
        let slots = tables.new_token_slots(&[request]);
        assert_out_of_memory("slots", slots);
    }
}

fn read<'a>(shape: [usize; 3]) -> TensorRef<'a, Cpu> {
    let none: &[u8] = &[];
    TensorRef::new(none, Layout::contiguous(DType::F32, shape)).unwrap()
}

fn written(shape: [usize; 3]) -> TensorMut<'static, Cpu> {
    let none: &mut [u8] = &mut [];
    TensorMut::new(none, Layout::contiguous(DType::F32, shape)).unwrap()
}

#[test]
fn empty_tensors_take_no_time() {
    let cpu = Cpu::new();
    for [tokens, heads] in [[0, 2], [2, 0], [0, HUGE], [HUGE, 0], [0, 0]] {
        let shape = [tokens, heads, HUGE];
        let layout = LseLayout::heads_first(heads, tokens);
        let lse = || LseMut::<Cpu>::new(&mut [], layout).unwrap();
        let other = LseRef::<Cpu>::new(&[], layout).unwrap();
        cpu.merge(written(shape), lse(), read(shape), other)
            .unwrap();
        let from = LseRef::<Cpu, Base2TokensFirst>::new(&[], layout).unwrap();
        cpu.convert_lse(from, lse()).unwrap();
    }
    for shape in [[0, HUGE, HUGE], [HUGE, 0, HUGE], [HUGE, HUGE, 0]] {
        cpu.copy(read(shape), written(shape)).unwrap();
        cpu.clear(written(shape)).unwrap();
        cpu.scale_outputs(written(shape), None, None).unwrap();
        cpu.scale_outputs(written(shape), None, Some(read(shape)))
            .unwrap();
        let [batch, m, n] = shape;
        cpu.gemm(read([batch, m, 0]), read([batch, 0, n]), written(shape))
            .unwrap();
        let (positions, angles) = (vec![0; batch.min(4)], read([1, 0, n / 2]));
        let rotary = Rotary::new(
            ArrayRef::from_slice(&positions),
            [angles; 2],
            RotaryStyle::Halves,
        );
        let rotated = cpu.rotate(&rotary, written(shape));
        // Tables with that number of positions do not fit into any memory.
        assert_eq!(rotated.is_ok(), batch == 0, "{shape:?}");
    }
    for (rows, shape) in [(1, [2, HUGE, 0]), (0, [0, HUGE, HUGE])] {
        let [_, heads, width] = shape;
        let (from, places) = (read([rows, heads, width]), [0; 1]);
        let places = ArrayRef::from_slice(&places[..rows]);
        cpu.scatter_rows(from, places, written(shape)).unwrap();
    }
    assert!(cpu.rotate(&rotary_of(2), written([2, HUGE, 0])).is_ok());
}

fn rotary_of(tokens: usize) -> Rotary<'static, Cpu> {
    let positions = ArrayRef::from_slice(&[0; 4][..tokens]);
    Rotary::new(positions, [read([1, 1, 0]); 2], RotaryStyle::Halves)
}

#[test]
fn wide_rows_are_refused() {
    let cpu = Cpu::new();
    let dims = MlaDims::new(1 << 30, HeadDims::new(4, 1 << 30, 4));
    let layout = CacheLayout::contiguous(dims, KvFormat::F32, 0, 4);
    let cache = || {
        let none: &mut [u8] = &mut [];
        CacheMut::<Cpu>::new(none, layout).unwrap()
    };
    let row = [0, 1, 1 << 30];
    let slots = ArrayRef::from_slice(&[]);
    let write = cpu.write_cache(read(row), read(row), slots, cache());
    assert_out_of_memory("write", write);
    let angles = read([1, 0, 1 << 29]);
    let rotary = Rotary::new(ArrayRef::from_slice(&[]), [angles; 2], RotaryStyle::Halves);
    let write = cpu.write_cache_rotated(read(row), read(row), &rotary, None, slots, cache());
    assert_out_of_memory("rotated write", write);
    // A repeated element makes a view of any width.
    let one = [1.0f32];
    let wide = TensorRef::<Cpu>::from_slice(&one, [1, 1, 1]).unwrap();
    let mut product = [0.0f32];
    for k in [1 << 30, HUGE] {
        let (a, b) = (wide.broadcast(2, k).unwrap(), wide.broadcast(1, k).unwrap());
        let product = TensorMut::from_slice(&mut product, [1, 1, 1]).unwrap();
        assert!(cpu.gemm(a, b, product).is_err(), "{k}");
    }
    let (table, starts) = (ArrayRef::from_slice(&[]), ArrayRef::from_slice(&[0]));
    let table = mla_runtime::tensor::BlockTable::new(table, 0, 1).unwrap();
    let rows = GatherRows::new(table, ArrayRef::from_slice(&[]), starts, 0);
    let from = CacheRef::<Cpu>::new(&[], layout).unwrap();
    assert_out_of_memory(
        "gather",
        cpu.gather_cache(from, rows, written(row), written(row)),
    );
}
