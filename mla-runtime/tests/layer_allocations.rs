//! A layer call allocates nothing.
//!
//! What is counted: every allocation of this thread within `forward`, through backends chosen at
//! run time, on a device whose operations and backends do nothing. So what is left is the layer's
//! own work: checks, views, chunks, dispatch. (What the CPU device does within an operation is its
//! own: it hands tasks to a thread pool, which may allocate. A GPU's enqueues.)

mod common;

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;

use mla_cpu::Buffer;
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeCall, LayerConfig, PrefillBackend, PrefillCall, StepLimits,
};
use mla_runtime::batch::Request;
use mla_runtime::cache::{CacheLayout, CacheMut};
use mla_runtime::capability::Platform;
use mla_runtime::device::Memory as _;
use mla_runtime::dims::MlaDims;
use mla_runtime::dtype::DType;
use mla_runtime::layer::{LayerCall, MlaLayer, StepBatch, Weights};
use mla_runtime::lse::{LseLayout, LseMut};
use mla_runtime::plan::slots::BlockTables;
use mla_runtime::problem::Problem;
use mla_runtime::registry::Registry;
use mla_runtime::spec::{BackendSpec, Phase, QueryFormat, QueryLen};
use mla_runtime::tensor::{Layout, TensorMut, TensorRef};

use crate::common::{Bytes, done, operations, set_ordinal};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every method is the system allocator's; counting touches nothing that it returns, and the
// counter needs no allocation itself.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(memory) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, memory: Memory) {
        // SAFETY: `pointer` came from `System` by the methods here.
        unsafe { System.dealloc(pointer, memory) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, memory: Memory, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: `pointer` came from `System` by the methods here.
        unsafe { System.realloc(pointer, memory, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

// A processor that has memory and does nothing, and counts how often it was asked to.
type Inert = Bytes<true>;

/// Backends that ask for as much work of the layer as there is, and do none.
struct Nothing;

impl PrefillBackend for Nothing {
    type Device = Inert;
    type State = u64;
    type Metadata = u64;

    const SPEC: BackendSpec =
        BackendSpec::new("NOTHING", Phase::Prefill, Platform::Cpu).with_padded_values(true);

    fn new(_: &Inert, _: &LayerConfig) -> Result<Self> {
        Ok(Self)
    }

    fn workspace_bytes(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
        Ok(1000)
    }

    fn state(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
        Ok(0)
    }

    fn metadata(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
        Ok(0)
    }

    unsafe fn prefill(
        &self,
        _: &Inert,
        _: PrefillCall<'_, Inert>,
        _: &mut u64,
        _: &u64,
    ) -> Result<()> {
        done()
    }
}

impl DecodeBackend for Nothing {
    type Device = Inert;
    type State = u64;
    type Metadata = u64;

    const SPEC: BackendSpec = BackendSpec::new("NOTHING", Phase::Decode, Platform::Cpu)
        .with_query_len(QueryLen::Ragged)
        .with_query_format(QueryFormat::Concatenated);

    fn new(_: &Inert, _: &LayerConfig) -> Result<Self> {
        Ok(Self)
    }

    fn workspace_bytes(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
        Ok(300)
    }

    fn state(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
        Ok(0)
    }

    fn metadata(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
        Ok(0)
    }

    unsafe fn decode(
        &self,
        _: &Inert,
        _: DecodeCall<'_, Inert>,
        _: &mut u64,
        _: &u64,
    ) -> Result<()> {
        done()
    }
}

fn view(buffer: &Buffer, shape: [usize; 3]) -> TensorRef<'_, Inert> {
    TensorRef::new(Inert::bytes(buffer), Layout::contiguous(DType::BF16, shape)).unwrap()
}

#[test]
fn a_call_allocates_nothing() {
    const HEADS: usize = 16;
    let device: Inert = Bytes;
    let config = LayerConfig::new(
        Problem::new(MlaDims::R1, HEADS as u32, DType::BF16).with_query_len(QueryLen::Ragged),
        0.07,
    );
    let mut registry = Registry::empty();
    registry.add(<Nothing as PrefillBackend>::ENTRY).unwrap();
    registry.add(<Nothing as DecodeBackend>::ENTRY).unwrap();
    let prefill = registry
        .instantiate_prefill("NOTHING", &device, &config)
        .unwrap();
    let decode = registry
        .instantiate_decode("NOTHING", &device, &config)
        .unwrap();
    let layer = MlaLayer::new(&device, &config, prefill, decode).unwrap();

    let limits = StepLimits::new(4, 64, 8)
        .with_decode_query_len(2)
        .with_context_rows(128);
    let mut workspace = layer.workspace(&limits).unwrap();
    // What backends say they allocate is in the plan.
    assert_eq!(workspace.plan().backend_bytes, 512 + 1024);

    let requests = [(1, 300), (2, 500), (7, 400), (20, 20)].map(|(q, kv)| Request::new(q, kv));
    let pages: Vec<i32> = (0..4 * 8).collect();
    let batch = StepBatch::new(&requests, BlockTables::new(&pages, 8, 64).unwrap());
    workspace.prepare(&layer, &batch).unwrap();
    assert_eq!(workspace.absorbed_tokens(), 3);
    assert_eq!(workspace.context().chunks.len(), 4);

    let tokens = workspace.tokens();
    let bytes = |elements: usize| device.allocate(elements * 2).unwrap();
    let weights = bytes(512 * HEADS * 256);
    let query = bytes(tokens * HEADS * 192);
    let (latent, rope) = (bytes(tokens * 512), bytes(tokens * 64));
    let mut out = bytes(tokens * HEADS * 128);
    let mut lse = bytes(2 * tokens * HEADS);
    let cache_layout = CacheLayout::contiguous(MlaDims::R1, config.problem.kv_format, 32, 64);
    let mut cache = bytes(32 * 64 * 576);
    for with_lse in [true, false] {
        operations();
        let before = ALLOCATIONS.get();
        // The views too are made without allocating, as an engine makes them for every layer.
        let weights = view(&weights, [1, 512, HEADS * 256]);
        layer
            .forward(
                &mut workspace,
                LayerCall::new(
                    Weights::new(weights, &config).unwrap(),
                    view(&query, [tokens, HEADS, 192]),
                    [
                        view(&latent, [tokens, 1, 512]),
                        view(&rope, [tokens, 1, 64]),
                    ],
                    CacheMut::new(Inert::bytes_mut(&mut cache), cache_layout).unwrap(),
                    TensorMut::new(
                        Inert::bytes_mut(&mut out),
                        Layout::contiguous(DType::BF16, [tokens, HEADS, 128]),
                    )
                    .unwrap(),
                )
                .with_lse(with_lse.then(|| {
                    let layout = LseLayout::heads_first(HEADS, tokens);
                    LseMut::new(Inert::bytes_mut(&mut lse), layout).unwrap()
                })),
            )
            .unwrap();
        assert_eq!(ALLOCATIONS.get() - before, 0);
        // 1 cache write; absorbed: 2 products, 1 copy, 1 attention; new tokens: 2 products, 1 copy,
        // 1 attention, 1 slice; per chunk: 1 gather, 2 products, 1 copy, 1 attention, 1 merge.
        assert_eq!(operations(), 1 + 4 + 5 + 4 * 6);
    }

    // What the device's operations would refuse is refused before any of them.
    let columns = Layout {
        dtype: DType::BF16,
        shape: [tokens, HEADS, 192],
        strides: [1, tokens, tokens * HEADS],
    };
    let scattered = Layout {
        dtype: DType::BF16,
        shape: [1, 512, HEADS * 256],
        strides: [0, HEADS * 512, 2],
    };
    let wide = bytes(2 * 512 * HEADS * 256);
    for (query_layout, weights_layout, message) in [
        (
            columns,
            Layout::contiguous(DType::BF16, scattered.shape),
            format!("query: given {columns}, accepted a last axis of stride 1"),
        ),
        (
            Layout::contiguous(DType::BF16, columns.shape),
            scattered,
            "W_kv_b: given bf16 [16, 128, 512] strides [512, 2, 8192], accepted an axis of stride 1"
                .to_owned(),
        ),
    ] {
        let weights = TensorRef::new(Inert::bytes(&wide), weights_layout).unwrap();
        let refused = layer.forward(
            &mut workspace,
            LayerCall::new(
                Weights::new(weights, &config).unwrap(),
                TensorRef::new(Inert::bytes(&query), query_layout).unwrap(),
                [
                    view(&latent, [tokens, 1, 512]),
                    view(&rope, [tokens, 1, 64]),
                ],
                CacheMut::new(Inert::bytes_mut(&mut cache), cache_layout).unwrap(),
                TensorMut::new(
                    Inert::bytes_mut(&mut out),
                    Layout::contiguous(DType::BF16, [tokens, HEADS, 128]),
                )
                .unwrap(),
            ),
        );
        assert_eq!(refused.unwrap_err().to_string(), message);
        assert_eq!(operations(), 0);
    }
}

/// Its addresses mean nothing to another device.
#[test]
fn a_workspace_is_for_the_device_that_it_was_made_on() {
    let device: Inert = Bytes;
    let config = LayerConfig::new(Problem::new(MlaDims::R1, 16, DType::BF16), 0.07);
    let layer = MlaLayer::<Nothing, Nothing>::of(&device, &config).unwrap();
    set_ordinal(1);
    let mut workspace = layer.workspace(&StepLimits::new(1, 1, 1)).unwrap();
    let tables = BlockTables::new(&[0], 1, config.problem.page_size).unwrap();
    let requests = [Request::new(1, 1)];
    let batch = StepBatch::new(&requests, tables);
    workspace.prepare(&layer, &batch).unwrap();
    set_ordinal(0);
    assert_eq!(
        workspace.prepare(&layer, &batch).unwrap_err().to_string(),
        "workspace: given one on device 1, accepted one on device 0, as the layer is"
    );
}
