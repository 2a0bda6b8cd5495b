//! Checks that a layer's call allocates nothing.
//!
//! The test counts every allocation of this thread within `forward`. Backends are chosen at run
//! time, and the operations of the device and the backends do nothing. The count is therefore that
//! of the layer's own work: checks, views, chunks, dispatch. (An operation of the CPU device may
//! allocate, because it passes tasks to a thread pool. A GPU's operation only enqueues.)

#[path = "common/allocations.rs"]
mod allocations;
mod common;

use mla_cpu::Buffer;
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend, DecodeCall, LayerConfig, PrefillBackend, PrefillCall, SelectedDecode,
    SelectedPrefill, SlotLists, StepLimits,
};
use mla_runtime::layer::{LayerCall, MlaLayer, StepPlan, StepRequest, Weights};
use mla_runtime::model::{DType, MlaDims, RotaryStyle};
use mla_runtime::select::Registry;
use mla_runtime::spec::{BackendSpec, Phase, Platform, Problem, QueryFormat, QueryLen};
use mla_runtime::tensor::{
    ArrayRef, CacheLayout, CacheMut, CacheRef, Layout, LseLayout, LseMut, Memory as _, Rotary,
    TensorMut, TensorRef,
};

use crate::allocations::count;
use crate::common::{Bytes, done, operations, set_handle, set_ordinal};

// A processor that has memory but computes nothing. It counts its operations.
type Inert = Bytes<true>;

/// Backends that require as much work of the layer as possible, but do none themselves.
struct Nothing;

macro_rules! nothing {
    ($backend:ident, $run:ident($call:ident), $bytes:literal, $spec:expr) => {
        impl $backend for Nothing {
            type Device = Inert;
            type State = u64;
            type Metadata = u64;

            const SPEC: BackendSpec = $spec;

            fn new(_: &Inert, _: &LayerConfig) -> Result<Self> {
                Ok(Self)
            }

            fn workspace_bytes(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
                Ok($bytes)
            }

            fn state(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
                Ok(0)
            }

            fn metadata(&self, _: &Inert, _: &StepLimits) -> Result<u64> {
                Ok(0)
            }

            unsafe fn $run(
                &self,
                _: &Inert,
                _: $call<'_, Inert>,
                _: &mut u64,
                _: &u64,
            ) -> Result<()> {
                done()
            }
        }
    };
}

nothing! {
    PrefillBackend, prefill(PrefillCall), 1000,
    BackendSpec::new("NOTHING", Phase::Prefill, Platform::Cpu)
}

nothing! {
    DecodeBackend, decode(DecodeCall), 300,
    BackendSpec::new("NOTHING", Phase::Decode, Platform::Cpu)
        .with_query_len(QueryLen::Ragged)
        .with_query_format(QueryFormat::Concatenated)
}

const HEADS: usize = 16;

/// The buffers of a call, under the names that errors use. Any of them may belong to another
/// handle.
struct Buffers {
    tokens: usize,
    pages: usize,
    all: [(&'static str, Buffer); 16],
}

impl Buffers {
    fn new(tokens: usize, pages: usize) -> Self {
        let cache = 2 * pages * 64 * 576;
        let bytes = [
            // Large enough for weights with gaps, too.
            ("W_kv_b", 2 * 2 * 512 * HEADS * 256),
            ("query", 2 * tokens * HEADS * 192),
            ("latent", 2 * tokens * 512),
            ("rope", 2 * tokens * 64),
            ("cache", cache),
            ("out", 2 * tokens * HEADS * 128),
            ("lse", 4 * tokens * HEADS),
            ("sinks", 4 * HEADS),
            ("gate", 2 * tokens * HEADS),
            ("rotary.cos", 4 * 32),
            ("rotary.sin", 4 * 32),
            ("rotary.positions", 8),
            ("slot_lists.slots", 4),
            ("slot_lists.counts", 4),
            ("slot_lists.second.cache", cache),
            ("slot_lists.second.slots", 4),
        ];
        let all = bytes.map(|(name, bytes)| (name, Bytes::<true>.allocate(bytes).unwrap()));
        Self { tokens, pages, all }
    }

    /// The layouts of queries and weights without gaps.
    fn layouts(&self) -> [Layout; 2] {
        [[self.tokens, HEADS, 192], [1, 512, HEADS * 256]]
            .map(|shape| Layout::contiguous(DType::BF16, shape))
    }

    /// A call with queries and weights of these layouts. A call of a single decode may have lists
    /// of slots, or else sinks and a rotation.
    fn call(
        &mut self,
        config: &LayerConfig,
        [query, weights]: [Layout; 2],
        lists: Option<bool>,
    ) -> LayerCall<'_, Inert> {
        fn view(buffer: &Buffer, layout: Layout) -> TensorRef<'_, Inert> {
            TensorRef::new(Inert::bytes(buffer), layout).unwrap()
        }
        let [
            kv_b,
            of_query,
            latent,
            rope,
            cache,
            out,
            lse,
            sinks,
            gate,
            cos,
            sin,
            positions,
            slots,
            counts,
            second_cache,
            second_slots,
        ] = self.all.each_mut().map(|(_, buffer)| buffer);
        let tokens = self.tokens;
        let rows = |shape| Layout::contiguous(DType::BF16, shape);
        let layout = CacheLayout::contiguous(MlaDims::R1, config.problem.kv_format, self.pages, 64);
        let call = LayerCall::new(
            Weights::from_transposed(view(kv_b, weights), config).unwrap(),
            view(of_query, query),
            [
                view(latent, rows([tokens, 1, 512])),
                view(rope, rows([tokens, 1, 64])),
            ],
            CacheMut::new(Inert::bytes_mut(cache), layout).unwrap(),
            TensorMut::new(Inert::bytes_mut(out), rows([tokens, HEADS, 128])).unwrap(),
        );
        let lse_layout = LseLayout::heads_first(HEADS, tokens);
        let call = call.with_lse(LseMut::new(Inert::bytes_mut(lse), lse_layout).unwrap());
        let Some(lists) = lists else {
            return call;
        };
        let table = Layout::contiguous(DType::F32, [1, 1, 32]);
        let [cos, sin] = [&*cos, &*sin].map(|buffer| view(buffer, table));
        let positions = ArrayRef::new(Inert::bytes(positions), 1).unwrap();
        let list = |buffer| ArrayRef::new(Inert::bytes(buffer), 1).unwrap();
        let second = CacheRef::new(Inert::bytes(second_cache), layout).unwrap();
        let second = (second, list(second_slots), 1);
        let of_slots = SlotLists::new(list(slots), 1)
            .with_counts(Some(list(counts)))
            .with_second(Some(second));
        let of_gate = view(gate, rows([tokens, HEADS, 1]));
        call.with_sinks((!lists).then(|| ArrayRef::new(Inert::bytes(sinks), HEADS).unwrap()))
            .with_gate((!lists).then_some(of_gate))
            .with_rotary((!lists).then(|| {
                Rotary::new(None, [cos, sin], RotaryStyle::Interleaved).with_positions(positions)
            }))
            .with_slot_lists(lists.then_some(of_slots))
    }
}

#[test]
fn a_call_allocates_nothing() {
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
    // The plan contains the bytes that the backends declare.
    assert_eq!(workspace.plan().backend_bytes, 512 + 1024);

    let pages: Vec<i32> = (0..4 * 8).collect();
    let requests = [(0, 1, 300), (1, 2, 500), (2, 7, 400), (3, 20, 20)];
    let requests = requests.map(|(at, new, total)| StepRequest::new(new, total, &pages[8 * at..]));
    let step = StepPlan::new(&workspace, &requests).unwrap();
    workspace.prepare(&layer, &step).unwrap();
    assert_eq!(workspace.absorbed_tokens(), 3);
    assert_eq!(workspace.context().len(), 4);

    let tokens = workspace.tokens();
    let mut buffers = Buffers::new(tokens, 32);
    let layouts = buffers.layouts();
    for with_lse in [true, false] {
        operations();
        // Views are also made without allocations, as an engine makes them for every layer.
        let allocations = count(|| {
            let mut call = buffers.call(&config, layouts, None);
            if !with_lse {
                call = call.with_lse(None);
            }
            layer.forward(&mut workspace, call).unwrap();
        });
        assert_eq!(allocations, 0);
        // 1 cache write. Absorbed path: 2 products, 1 copy, 1 attention. New tokens: 2 products, 1
        // copy, 1 attention. Per chunk: 1 gather, 2 products, 1 copy, 1 attention, 1 merge.
        assert_eq!(operations(), 1 + 4 + 4 + 4 * 6);
    }

    // Tensors that an operation of the device would refuse are refused before any operation.
    let strided = |of: Layout, strides| Layout { strides, ..of };
    let columns = strided(layouts[0], [1, tokens, tokens * HEADS]);
    let scattered = strided(layouts[1], [0, HEADS * 512, 2]);
    for (layouts, message) in [
        (
            [columns, layouts[1]],
            format!("query: given {columns}, accepted a last axis of stride 1"),
        ),
        (
            [layouts[0], scattered],
            "W_kv_b: given bf16 [16, 128, 512] strides [512, 2, 8192], accepted an axis of stride 1"
                .to_owned(),
        ),
    ] {
        let refused = layer.forward(&mut workspace, buffers.call(&config, layouts, None));
        assert_eq!(refused.unwrap_err().to_string(), message);
        assert_eq!(operations(), 0);
    }
}

/// A workspace's addresses are not valid on another device.
#[test]
fn workspace_keeps_its_device() {
    let device: Inert = Bytes;
    let config = LayerConfig::new(Problem::new(MlaDims::R1, 16, DType::BF16), 0.07);
    let layer = MlaLayer::<Nothing, Nothing>::of(&device, &config).unwrap();
    set_ordinal(1);
    let mut workspace = layer.workspace(&StepLimits::new(1, 1, 1)).unwrap();
    let step = StepPlan::new(&workspace, &[StepRequest::new(1, 1, &[0])]).unwrap();
    workspace.prepare(&layer, &step).unwrap();
    set_ordinal(0);
    assert_eq!(
        workspace.prepare(&layer, &step).unwrap_err().to_string(),
        "workspace: given one on device 1, accepted one on device 0, as the layer is"
    );
}

/// Backends that were made for a device can be used only with that device.
#[test]
fn selected_backend_keeps_its_device() {
    let device: Inert = Bytes;
    let config = LayerConfig::new(Problem::new(MlaDims::R1, 16, DType::BF16), 0.07);
    let prefill = <Nothing as PrefillBackend>::ENTRY;
    let decode = <Nothing as DecodeBackend>::ENTRY;
    let refused = |of_prefill, of_decode| {
        set_ordinal(of_prefill);
        let prefill = prefill.make(&device, &config).unwrap().unwrap();
        set_ordinal(of_decode);
        let decode = decode.make(&device, &config).unwrap().unwrap();
        set_ordinal(0);
        let layer = MlaLayer::<SelectedPrefill<_>, SelectedDecode<_>>::new(
            &device, &config, prefill, decode,
        );
        layer.map(drop).map_err(|error| error.to_string())
    };
    refused(0, 0).unwrap();
    for (ordinals, backend) in [([1, 0], "prefill"), ([0, 1], "decode"), ([1, 1], "prefill")] {
        assert_eq!(
            refused(ordinals[0], ordinals[1]).unwrap_err(),
            format!(
                "{backend} backend: given one for device 1, accepted one for device 0, as the \
                 layer is"
            )
        );
    }
}

/// The work of two handles is not ordered.
#[test]
fn foreign_memory_is_refused() {
    let device: Inert = Bytes;
    let config = LayerConfig::new(Problem::new(MlaDims::R1, 16, DType::BF16), 0.07);
    let layer = MlaLayer::<Nothing, Nothing>::of(&device, &config).unwrap();
    let limits = StepLimits::new(1, 1, 1);
    let mut workspace = layer.workspace(&limits).unwrap();
    set_handle(1);
    let mut theirs = layer.workspace(&limits).unwrap();
    set_handle(0);
    let step = StepPlan::new(&workspace, &[StepRequest::new(1, 1, &[0])]).unwrap();
    workspace.prepare(&layer, &step).unwrap();
    operations();
    let refused = |field| format!("{field}: given memory of handle 1, accepted memory of handle 0");
    let message = |result: Result<()>| result.unwrap_err().to_string();
    assert_eq!(message(theirs.prepare(&layer, &step)), refused("workspace"));

    let mut decode = Buffers::new(1, 1);
    let layouts = decode.layouts();
    for at in 0..decode.all.len() {
        let (field, buffer) = &mut decode.all[at];
        let field = *field;
        set_handle(1);
        let foreign = device.allocate(buffer.as_bytes().len()).unwrap();
        let own = std::mem::replace(buffer, foreign);
        set_handle(0);
        let lists = field.starts_with("slot_lists");
        let call = decode.call(&config, layouts, Some(lists));
        assert_eq!(message(layer.forward(&mut workspace, call)), refused(field));
        assert_eq!(operations(), 0, "{field}");
        decode.all[at].1 = own;
    }
    let call = decode.call(&config, layouts, Some(false));
    assert_eq!(
        message(layer.forward(&mut theirs, call)),
        refused("workspace")
    );
    assert_eq!(operations(), 0);
}
