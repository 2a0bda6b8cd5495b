//! Calls every public function that takes sizes with the smallest and the largest sizes, alone and
//! in combinations. Each call must return a value, or an error with the given and the accepted
//! values in one sentence. It must never panic, in a build with overflow checks.

use std::fmt::Display;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::Request;
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheMut, Indexer};
use mla_runtime::layer::{MlaLayer, StepPlan, StepRequest, Weights};
use mla_runtime::model::{
    DType, HeadDims, IndexerConfig, KvFormat, MlaDims, ModelConfig, Rope, RotaryStyle,
};
use mla_runtime::plan::context::plan_chunks;
use mla_runtime::plan::crossover::{Machine, crossover, threshold};
use mla_runtime::plan::memory::{self, MemoryNeeds};
use mla_runtime::plan::parallel::ContextParallel;
use mla_runtime::plan::slots::BlockTables;
use mla_runtime::plan::split;
use mla_runtime::plan::workspace::row_budget;
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Capability, Phase, Problem, QueryLen, Target};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, Layout, LseLayout, LseMut, LseRef,
    Memory, Rotary, RotaryTables, TensorMut, TensorRef,
};

/// Sizes at which arithmetic is most likely to fail.
const U32: [u32; 6] = [0, 1, 7, 1 << 16, i32::MAX as u32, u32::MAX];
const USIZE: [usize; 6] = [0, 1, 7, 1 << 31, isize::MAX as usize, usize::MAX];

/// Asserts that an error names a field, the given value and the accepted values.
fn check<T, E: Display>(result: Result<T, E>) -> Option<T> {
    let sentence = match result {
        Ok(value) => return Some(value),
        Err(error) => error.to_string(),
    };
    let parts = sentence
        .split_once(": given ")
        .and_then(|(field, rest)| Some((field, rest.split_once(", accepted ")?)));
    let Some((field, (given, accepted))) = parts else {
        panic!("not `field: given X, accepted Y`: {sentence}");
    };
    for (name, part) in [("field", field), ("given", given), ("accepted", accepted)] {
        assert!(!part.trim().is_empty(), "no {name}: {sentence}");
    }
    // The accepted values must exclude the refused value.
    assert!(!["any", "everything"].contains(&accepted), "{sentence}");
    None
}

/// Every tuple of `N` numbers out of `from`.
fn tuples<T: Copy, const N: usize>(from: &[T]) -> impl Iterator<Item = [T; N]> {
    (0..from.len().pow(N as u32)).map(|mut index| {
        [(); N].map(|()| {
            let value = from[index % from.len()];
            index /= from.len();
            value
        })
    })
}

fn dims([latent, nope, rope, v]: [u32; 4]) -> MlaDims {
    MlaDims::new(latent, HeadDims::new(nope, rope, v))
}

fn small() -> Problem {
    Problem::new(dims([8, 4, 2, 4]), 2, DType::F32)
        .with_page_size(4)
        .with_query_len(QueryLen::Ragged)
}

#[test]
fn problems() {
    let device = Cpu::new();
    let registry = Registry::linked().unwrap();
    for [latent, nope, rope, v] in tuples(&U32) {
        for [heads, page_size] in tuples(&U32) {
            let problem = Problem::new(dims([latent, nope, rope, v]), heads, DType::BF16)
                .with_page_size(page_size);
            if let Some(fault) = problem.fault() {
                check::<(), _>(Err(fault));
            }
            check(MemoryNeeds::of(&problem));
        }
    }
    for format in KvFormat::ALL {
        for [latent, rope] in tuples(&U32) {
            for [heads, page_size] in tuples(&U32) {
                let problem = Problem::new(dims([latent, 4, rope, 4]), heads, DType::BF16)
                    .with_kv_format(*format)
                    .with_page_size(page_size);
                let config = LayerConfig::new(problem, 1.0);
                check(MlaLayer::<CpuPrefill, CpuDecode>::of(&device, &config));
                let request = SelectionRequest::new(Target::CPU, problem);
                check(registry.explain(&request));
            }
        }
    }
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let config = LayerConfig::new(small(), scale);
        check(MlaLayer::<CpuPrefill, CpuDecode>::of(&device, &config));
    }
}

#[test]
fn page_size_0_is_refused() {
    let refusal = |name: &str| {
        let registry = Registry::known();
        let entry = registry.get(Phase::Decode, name).unwrap();
        let problem = Problem::new(MlaDims::R1, 128, DType::BF16).with_page_size(0);
        let reasons = entry.spec.validate(Target::CPU, &problem);
        let of_pages = |reason: &mla_runtime::spec::Reason| reason.field() == "page_size";
        reasons.iter().find(of_pages).unwrap().to_string()
    };
    for (name, accepted) in [
        ("CPU", "1 and up"),
        ("TRITON_MLA", "multiples of 16"),
        ("FLASHMLA", "64"),
        ("CUTLASS_MLA", "16, 32, 64, 128"),
    ] {
        let expected = format!("page_size: given 0, accepted {accepted}");
        assert_eq!(refusal(name), expected);
    }
}

#[test]
fn plans_of_context() {
    for [world, interleave] in tuples(&U32) {
        let Some(parallel) = check(ContextParallel::new(world, interleave)) else {
            continue;
        };
        for [a, b] in tuples(&U32) {
            check(parallel.local_len(a, b));
            let _ = (
                parallel.rank_of(u64::MAX),
                parallel.local_position(u64::MAX),
            );
        }
    }
    for [a, b, c] in tuples(&U32) {
        check(row_budget(a, b, c));
    }
    for [rows, align] in tuples(&U32) {
        for own_cuts in [false, true] {
            if let Some(plan) = check(plan_chunks(&[1, 0, 7], rows, align, own_cuts)) {
                for chunk in &plan {
                    let _ = (chunk.rows(), chunk.max_seq_len(), chunk.segments().count());
                }
            }
            if rows >= 1 << 16 {
                check(plan_chunks(&[u32::MAX, 0, u32::MAX], rows, align, own_cuts));
            }
        }
    }
    check(plan_chunks(&[u32::MAX], 1, 1, false));
}

#[test]
fn slots_and_splits() {
    for max_pages in USIZE {
        for page_size in U32 {
            check(BlockTables::new(
                &[1, 2, 3, 4, 5, 6, i32::MAX],
                max_pages,
                page_size,
            ));
            let entries = [i32::MAX, -1, 0, 1];
            if let Ok(tables) = BlockTables::new(&entries, max_pages, page_size) {
                for request in USIZE {
                    for position in USIZE {
                        check(tables.slot(request, position as u64));
                    }
                }
                let contradiction = [Request::new(u32::MAX, 1)];
                check(tables.new_token_slots(&contradiction));
                check(tables.slots_of([(-1, i64::MIN), (i32::MAX, i64::MAX)]));
            }
        }
    }
    for [a, b, c, d] in tuples(&U32) {
        let request = Request::new(a, b);
        let _ = (request.context_len(), request.is_padding());
        for uniform in [false, true] {
            let requests = [Request::new(a, b), Request::new(c, d)];
            check(split::order(&requests, |_| a, uniform));
        }
    }
}

#[test]
fn memory_plans() {
    let sizes = [0, 1, 1 << 16, u32::MAX];
    for [heads, layers, absorbed, expanded, rows] in tuples(&sizes) {
        for problem in [small(), Problem::new(dims([65536; 4]), 1, DType::F32)] {
            let needs = MemoryNeeds::of(&problem)
                .unwrap()
                .with_heads(heads)
                .with_layers(layers)
                .with_absorbed_tokens(absorbed)
                .with_expanded_tokens(expanded)
                .with_rows(rows);
            check(memory::plan(&needs));
            check(memory::plan(&needs.with_packed_keys(true)));
            for bytes in [0, 1 << 40, u64::MAX] {
                check(memory::max_rows(&needs, bytes));
                check(memory::max_pages(&needs, bytes));
            }
        }
    }
    let needs = MemoryNeeds::of(&small()).unwrap();
    for number in [0, 1, 3, 1 << 40, u64::MAX] {
        check(memory::plan(&needs.with_pages(number)));
        check(memory::plan(&needs.with_alignment(number)));
        check(memory::plan(&needs.with_step_bytes(number)));
        check(memory::plan(&needs.with_decode_workspace(number)));
        check(memory::plan(
            &needs.with_step_bytes(number).with_prefill_workspace(number),
        ));
    }
}

#[test]
fn limits_of_steps() {
    let device = Cpu::new();
    let config = LayerConfig::new(small(), 1.0);
    let layer = MlaLayer::<CpuPrefill, CpuDecode>::of(&device, &config).unwrap();
    let sparse = small().with_sparse(true);
    let config = IndexerConfig::new(2, 8, 2, 4);
    let indexer = Indexer::new(&device, &config, &sparse).unwrap();
    let pages = [3, 1];
    let requests = [
        StepRequest::new(1, 5, &pages),
        StepRequest::new(4, 4, &pages[..1]),
    ];
    for [requests_limit, tokens, pages_per_request, rows] in tuples(&USIZE) {
        for query_len in [0, 4, usize::MAX] {
            let limits = StepLimits::new(requests_limit, tokens, pages_per_request)
                .with_context_rows(rows)
                .with_decode_query_len(query_len);
            check(layer.memory_plan(&limits, 1, 0));
            check(MemoryNeeds::of_steps(&sparse, &limits));
            let _ = layer.threshold(&limits);
            for page_size in [4, u32::MAX] {
                let needs = MemoryNeeds::of(&sparse.with_page_size(page_size)).unwrap();
                check(needs.with_indexer(indexer.config(), &limits, 1));
            }
            check(indexer.memory_plan(&limits, u32::MAX, u64::MAX));
            check(StepPlan::within(&small(), &limits, 1, &requests));
        }
    }
}

#[test]
fn steps() {
    let limits = StepLimits::new(2, 16, 4).with_context_rows(8);
    let pages = [5, 6, 7, 8];
    for [new, total] in tuples(&U32) {
        for count in 0..=4 {
            for threshold in U32 {
                let request = StepRequest::new(new, total, &pages[..count]);
                check(StepPlan::within(&small(), &limits, threshold, &[request]));
            }
        }
    }
    let negative = StepRequest::new(1, 1, &[-1]);
    check(StepPlan::within(&small(), &limits, 1, &[negative]));
    let one = StepRequest::new(1, 1, &pages);
    check(StepPlan::within(&small(), &limits, 1, &[one; 2]));
    check(StepPlan::within(&small(), &limits, 1, &[one; 3]));
    let step = StepPlan::within(&small(), &limits, 1, &[one]).unwrap();
    for requests in USIZE {
        check(step.clone().padded_to(requests));
    }

    let device = Cpu::new();
    let config = LayerConfig::new(small(), 1.0);
    let layer = MlaLayer::<CpuPrefill, CpuDecode>::of(&device, &config).unwrap();
    let mut workspace = layer.workspace(&limits).unwrap();
    for [new, total, longest] in tuples(&U32) {
        let requests = [StepRequest::new(new, total, &pages)];
        for [threshold, dense_within] in [[1, 0], [longest, 0], [1, longest]] {
            let (problem, limits) = (&small(), &limits);
            let step = StepPlan::in_order(problem, limits, threshold, dense_within, &requests);
            if let Some(step) = check(step) {
                check(workspace.prepare(&layer, &step));
                check(step.clone().with_slots(&[i64::MIN, i64::MAX]));
                check(workspace.prepare(&layer, &step.with_max_len(Some(longest))));
            }
        }
    }
    for page_size in U32 {
        let problem = small().with_page_size(page_size);
        let one = [StepRequest::new(1, 1, &pages)];
        if let Some(step) = check(StepPlan::within(&problem, &limits, 1, &one)) {
            check(workspace.prepare(&layer, &step));
        }
    }
}

#[test]
fn crossovers() {
    let rates = [
        0.0,
        1.0,
        -1.0,
        f64::MIN_POSITIVE,
        f64::MAX,
        f64::NAN,
        f64::INFINITY,
    ];
    for multiprocessors in U32 {
        for [flop, bytes] in tuples(&rates) {
            check(Machine::gpu(multiprocessors, flop, bytes));
        }
    }
    let largest = Machine::gpu(1 << 16, 1e15, 1e12).unwrap();
    for [heads, context_len, width] in tuples(&U32) {
        let problem = Problem::new(dims([width; 4]), heads, DType::BF16);
        for machine in [Machine::ARITHMETIC, Machine::H200] {
            assert!(!crossover(&machine, &problem, true, Some(context_len)).is_nan());
            assert!(threshold(&machine, &problem, true, Some(context_len)) >= 1);
        }
    }
    let problem = Problem::new(dims([u32::MAX; 4]), u32::MAX, DType::F32);
    assert!(threshold(&largest, &problem, false, None) >= 1);
}

#[test]
fn tensors() {
    let bytes = [0u64; 8];
    let bytes: &[u8] = bytemuck::cast_slice(&bytes);
    for shape in tuples(&USIZE) {
        for strides in tuples(&USIZE) {
            let layout = Layout {
                dtype: DType::F32,
                shape,
                strides,
            };
            let _ = (layout.elements(), layout.span_bytes(), layout.to_string());
            check(TensorMut::<Cpu>::new(&mut bytes.to_vec(), layout));
            let Some(view) = check(TensorRef::<Cpu>::new(bytes, layout)) else {
                continue;
            };
            for axis in 0..3 {
                for [from, to] in tuples(&USIZE) {
                    check(view.narrow(axis, from..to));
                }
                for count in USIZE {
                    if let Some(repeated) = check(view.broadcast(axis, count)) {
                        check(repeated.narrow(axis, 1..count));
                        check(repeated.require_aligned("query", 16));
                    }
                }
            }
        }
        check(TensorRef::<Cpu>::new(
            bytes,
            Layout::contiguous(DType::F16, shape),
        ));
    }
    // Elements must not be at an odd address.
    check(TensorRef::<Cpu>::new(
        &bytes[1..],
        Layout::contiguous(DType::F16, [1; 3]),
    ));
    check(ArrayRef::<Cpu, i64>::new(&bytes[4..], 1));
    for [len, from, to] in tuples(&USIZE) {
        let Some(array) = check(ArrayRef::<Cpu, i32>::new(bytes, len)) else {
            continue;
        };
        check(array.range(from..to));
        if let Some(table) = check(BlockTable::new(array, from, to)) {
            check(table.range(to..from));
            check(table.range(0..to));
        }
    }
    for [heads, tokens, row_stride] in tuples(&USIZE) {
        let layout = LseLayout {
            heads,
            tokens,
            row_stride,
        };
        check(LseMut::<Cpu>::new(&mut bytes.to_vec(), layout));
        let Some(view) = check(LseRef::<Cpu>::new(bytes, layout)) else {
            continue;
        };
        for [from, to] in tuples(&USIZE) {
            check(view.tokens(from..to));
        }
    }
}

#[test]
fn caches() {
    let mut words = [0u64; 64];
    let bytes = [0u64; 64];
    let bytes: &[u8] = bytemuck::cast_slice(&bytes);
    for [pages, page_size, page_stride, row_stride] in tuples(&USIZE) {
        for format in KvFormat::ALL {
            for dims in [dims([4, 1, 4, 1]), dims([u32::MAX; 4])] {
                let layout = CacheLayout::contiguous(dims, *format, pages, page_size);
                check(CacheRef::<Cpu>::new(bytes, layout));
                let layout = layout
                    .with_page_stride(page_stride)
                    .with_row_stride(row_stride);
                check(CacheRef::<Cpu>::new(bytes, layout));
                check(CacheMut::<Cpu>::new(&mut bytes.to_vec(), layout));
                let _ = layout.slots();
            }
        }
        let index: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let layout =
            IndexCacheLayout::contiguous(&IndexerConfig::new(1, 4, 2, 1), pages, page_size);
        if let Some(cache) = check(IndexCacheMut::<Cpu>::new(index, layout))
            && layout.slots() > 0
        {
            let _ = (
                cache.layout().values_at(0),
                layout.scale_at(layout.slots() - 1),
            );
        }
        let layout = layout.with_width(row_stride).with_page_stride(page_stride);
        check(IndexCacheMut::<Cpu>::new(index, layout));
    }
    for scale in [
        0.0,
        -1.0,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::NAN,
        f32::INFINITY,
    ] {
        for format in KvFormat::ALL {
            let layout = CacheLayout::contiguous(dims([4, 1, 4, 1]), *format, 1, 1);
            check(CacheRef::<Cpu>::new(bytes, layout.with_scale(scale)));
        }
    }
}

#[test]
fn indexers() {
    let device = Cpu::new();
    for [heads, width, rope, topk] in tuples(&U32) {
        for hadamard in [false, true] {
            let config = IndexerConfig::new(heads, width, rope, topk).with_hadamard(hadamard);
            check(config.check());
            check(Indexer::new(&device, &config, &small().with_sparse(true)));
            check(Indexer::new(&device, &config, &small()));
        }
    }
    for epsilon in [-1.0, f32::NAN, f32::INFINITY] {
        check(IndexerConfig::GLM_5.with_epsilon(epsilon).check());
    }
}

#[test]
fn rotary_tables() {
    let numbers = [0.0, -1.0, 1.0, 1e4, f64::MAX, f64::NAN, f64::INFINITY];
    let device = Cpu::new();
    for [theta, factor] in tuples(&numbers) {
        let plain = Rope::plain(theta);
        for rope in [
            plain,
            plain.with_linear(factor),
            plain.with_yarn(factor, Some(4096)),
            plain.with_yarn(factor, None),
        ] {
            for width in [0, 1, 8, 65536, 65538, u32::MAX] {
                check(rope.frequencies(width));
            }
            for positions in [0, 3, usize::MAX] {
                check(rope.cos_sin(8, positions));
                check(RotaryTables::new(&device, &rope, 8, positions));
            }
        }
    }
    // The two tables would have 2⁶⁰ bytes each.
    let error = Rope::plain(1e4)
        .cos_sin(65536, i32::MAX as usize)
        .unwrap_err();
    check::<(), _>(Err(error));

    let tables = [0f32; 64];
    let positions = [0i64; 4];
    let table = TensorRef::<Cpu>::from_slice::<f32>(&tables, [1, 4, 4]).unwrap();
    let positions = ArrayRef::from_slice(&positions);
    let rotary = Rotary::new(positions, [table; 2], RotaryStyle::Halves);
    for [tokens, width] in tuples(&USIZE) {
        check(rotary.check(tokens, width));
    }
}

#[test]
fn weights() {
    let values = [0f32; 64];
    for shape in [[1, 8, 8], [1, 8, 16], [8, 1, 16], [0; 3]] {
        if let Ok(view) = TensorRef::<Cpu>::from_slice::<f32>(&values, shape) {
            for [latent, nope, v, heads] in tuples(&U32) {
                let problem = Problem::new(dims([latent, nope, 2, v]), heads, DType::F32);
                check(Weights::from_transposed(
                    view,
                    &LayerConfig::new(problem, 1.0),
                ));
            }
        }
    }
    check(Cpu::new().upload(&[1], &mut []));
    check(Cpu::new().download(&[1], &mut []));
}

#[test]
fn names_and_texts() {
    let registry = Registry::known();
    let texts = [
        "",
        "x",
        "Ü",
        "0",
        "-1",
        "1..",
        "q",
        "{",
        "{b}q1",
        "9.0.0",
        "1048576q2147483647",
        "8q1s2097151k",
        "q2097152k",
        "1..4294967295*0",
        "9",
        "FLASH_MLA",
    ];
    for text in texts {
        check(registry.get(Phase::Decode, text));
        check(Registry::empty().get(Phase::Prefill, text));
        check(text.parse::<Capability>());
        check(ModelConfig::preset(text));
        check(ModelConfig::from_hf_config(text));
    }
    let model = ModelConfig::preset("deepseek-r1").unwrap();
    for ranks in U32 {
        check(model.heads_per_rank(ranks));
    }
    let mut registry = Registry::of::<(CpuPrefill, ()), (CpuDecode, ())>().unwrap();
    let entry = *registry.get(Phase::Decode, "CPU").unwrap();
    check(registry.add(entry));
    let request = SelectionRequest::new(Target::dry_run(Capability::new(9, 0)), small());
    check(registry.select(&request.clone().with_decode("CPU")));
    check(registry.select(&request));
}
