//! Public calls with numbers of every size: each returns for any input, and all errors have one
//! form.

use std::fmt::Display;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::batch::{
    BatchSpec, Request,
    template::{Range, Template},
};
use mla_runtime::indexer::{IndexCacheLayout, IndexCacheRef, IndexLimits, IndexNeeds, Indexer};
use mla_runtime::layer::{MlaLayer, Step, StepBatch, StepRequest};
use mla_runtime::model::{
    DType, HeadDims, IndexDims, IndexerConfig, KvFormat, MlaDims, ModelConfig,
};
use mla_runtime::plan::{
    context::{ChunkLimits, plan_chunks},
    crossover::*,
    memory::{self, MemoryNeeds},
    parallel::ContextParallel,
    slots::BlockTables,
    split,
    workspace::row_budget,
};
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Capability, Problem, QueryLen, Target};
use mla_runtime::tensor::{
    ArrayRef, BlockTable, CacheLayout, CacheMut, CacheRef, Layout, LseLayout, LseRef, Natural,
    RotaryTables, TensorMut, TensorRef,
};

const ROUNDS: usize = 400;

/// Returns the result of a call. Asserts that an error names the accepted values.
fn said<T, E: Display>(result: Result<T, E>) -> Option<T> {
    result
        .map_err(|error| {
            let said = error.to_string();
            assert!(said.contains("accepted"), "{said}");
        })
        .ok()
}

#[test]
fn every_call_returns() {
    attack(1);
}

/// Tries other numbers each time: `MLA_ATTACK_SEED` repeats them.
#[test]
fn every_call_returns_for_other_numbers() {
    attack(crate::attack::seed());
}

fn attack(seed: u64) {
    let mut numbers = Numbers(fastrand::Rng::with_seed(seed));
    for _ in 0..ROUNDS {
        for call in CALLS {
            call(&mut numbers);
        }
    }
}

const CALLS: [fn(&mut Numbers); 10] = [
    selection, specs, chunks, memory, crossovers, splits, tensors, caches, models, steps,
];

/// A selection for any problem, and what it says.
fn selection(r: &mut Numbers) {
    let p = r.problem();
    let _ = (
        p.dims.row(),
        p.dims.head.qk(),
        p.dims.head.kv_b(),
        p.kv_format.row_bytes(p.dims),
        p.to_owned(),
    );
    let registry = Registry::linked().unwrap();
    let target = match r.below(3) {
        0 => Target::CPU,
        1 => Target::dry_run(Capability::new(9, 0)),
        _ => Target::dry_run(Capability::new(r.u32() as u8, r.u32() as u8)),
    };
    if let Some(selection) = said(registry.select(&SelectionRequest::new(target, p))) {
        assert!(!selection.explanation.to_string().is_empty());
    }
}

/// Specs of batches, templates and ranges.
fn specs(r: &mut Numbers) {
    let spec = [
        "q1",
        "4q2k_8q4s1k",
        "9999999q1",
        "q1s",
        "1048576q2147483647",
        "8q1s2097151k",
        "k",
        "q2097152k",
    ];
    let mut s = r.pick(&spec).to_owned();
    for _ in 0..r.below(4) {
        let at = r.below(s.len() + 1);
        if s.is_char_boundary(at) {
            s.insert(
                at,
                r.pick(&['q', 's', 'k', '_', '0', '9', 'é', ' ', '{', '}', 'b']),
            );
        }
    }
    if let Ok(b) = s.parse::<BatchSpec>() {
        let _ = (
            b.label(),
            b.to_string(),
            b.query_tokens(),
            b.kv_tokens(),
            b.max_kv_len(),
        );
    }
    if let Ok(t) = s.parse::<Template>() {
        let ranges: Vec<_> = t
            .names()
            .iter()
            .map(|_| Range::list(vec![1, u32::MAX]).unwrap())
            .collect();
        said(t.expand(&ranges));
    }
    said(Range::stepped(r.u32(), r.u32(), r.u32()));
    said(Range::multiplied(r.u32(), r.u32(), r.u32()));
    let _ = format!("{}..{}*{}", r.u32(), r.u32(), r.u32()).parse::<Range>();
}

/// Context plans, alone and dealt over ranks.
fn chunks(r: &mut Numbers) {
    let n = r.below(6);
    let lens: Vec<u32> = (0..n).map(|_| r.small()).collect();
    let parallel = ContextParallel::new(r.u32(), r.u32());
    let mut limits = ChunkLimits::new(r.u32(), r.u32());
    if r.below(2) == 0 {
        limits = limits.with_max_chunk(Some(r.u32()));
    }
    if let Ok(p) = parallel {
        if r.below(2) == 0 && p.world() < 100 {
            limits = limits.with_parallel(Some(p));
        }
        let _ = (
            p.period(),
            p.alignment(r.u32()),
            p.rank_of(r.next()),
            p.local_position(r.next()),
            p.global_position(r.u32(), r.next()),
            p.local_len(r.u32(), r.u32()),
            p.padded_local_len(r.u32()),
        );
        said(row_budget(r.u32(), r.u32(), r.u32(), p));
    }
    let total: u64 = lens.iter().map(|l| u64::from(*l)).sum();
    if total / u64::from(limits.rows.max(1)) > 100_000 {
        return;
    }
    if let Ok(plan) = plan_chunks(&lens, &limits) {
        for c in &plan.chunks {
            let _ = (
                c.rows(),
                c.max_seq_len(),
                c.cumulative_seq_lens(),
                c.segments().count(),
            );
        }
    }
}

/// Memory plans, and what fits.
fn memory(r: &mut Numbers) {
    let p = r.problem();
    let limits = r.limits();
    let needs = match r.below(2) {
        0 => MemoryNeeds::of(&p).map_err(Into::into),
        _ => MemoryNeeds::of_steps(&p, &limits),
    };
    if let Ok(mut needs) = needs {
        needs = needs.with_pages(r.next()).with_layers(r.u32());
        if r.below(2) == 0 {
            needs = needs
                .with_rows(r.u32())
                .with_absorbed_tokens(r.u32())
                .with_expanded_tokens(r.u32())
                .with_alignment(r.next())
                .with_step_bytes(r.next())
                .with_decode_workspace(r.next())
                .with_padded_values(true);
        }
        if r.below(2) == 0 {
            needs = needs.with_heads(r.u32()).with_packed_keys(true);
        }
        let index = IndexNeeds::of(
            IndexDims::new(r.u32(), r.u32(), r.u32(), r.u32()),
            &IndexLimits::new(limits).with_logits_bytes(r.next()),
            r.u32(),
        );
        if r.below(2) == 0 {
            needs = needs.with_indexer(said(index));
        }
        said(memory::plan(&needs));
        said(memory::max_rows(&needs, r.next()));
        said(memory::max_pages(&needs, r.next()));
    }
}

/// Crossovers of any model.
fn crossovers(r: &mut Numbers) {
    let dims = r.dims();
    let heads = r.u32();
    let traffic = ExpansionTraffic::new(r.u32()).with_packed_keys(r.below(2) == 0);
    let mut a = Attention::new(dims, heads, traffic);
    if r.below(2) == 0 {
        a = a.with_context_len(Some(r.u32()));
    }
    let _ = (
        absorbed_cost(dims, heads, r.u32(), r.u32()),
        expanded_cost(dims, heads, r.u32(), r.u32(), traffic),
    );
    for m in [Machine::Arithmetic, Machine::Gpu(GpuFigures::H200)] {
        let _ = (crossover(&a, &m), threshold(&a, &m));
    }
    let _ = (
        a.absorbed_seconds(r.u32(), &GpuFigures::H200),
        a.expanded_seconds(r.u32(), &GpuFigures::H200),
    );
}

/// Splits, block tables and slots.
fn splits(r: &mut Numbers) {
    let n = r.below(6);
    let requests: Vec<Request> = (0..n).map(|_| Request::new(r.small(), r.small())).collect();
    for q in &requests {
        let _ = (
            q.kind(),
            q.context_len(),
            q.is_padding(),
            q.is_speculative_decode(),
        );
    }
    said(split::split(&requests, r.u32(), r.below(2) == 0));
    let pages: Vec<i32> = (0..r.below(20)).map(|_| r.u32() as i32).collect();
    if let Ok(t) = BlockTables::new(&pages, r.small() as usize, r.u32()) {
        said(t.slot(r.usize(), r.next()));
        said(t.slot(r.below(4), r.below(100) as u64));
        if requests.iter().all(|q| q.q < 100_000 || (!q.is_padding())) {
            said(t.new_token_slots(&requests));
        }
        said(t.slots_of([(r.u32() as i32, r.next() as i64)]));
    }
}

/// Tensors, log-sum-exps and arrays, and parts of them.
fn tensors(r: &mut Numbers) {
    let bytes = vec![0u8; 64 * r.below(40)];
    let mut out = bytes.clone();
    let l = Layout {
        dtype: r.pick(DType::ALL),
        shape: [r.usize(), r.usize(), r.usize()],
        strides: [r.usize(), r.usize(), r.usize()],
    };
    let _ = (l.elements(), l.span_bytes(), l.to_string());
    let c = Layout::contiguous(l.dtype, l.shape);
    for l in [l, c] {
        if let Ok(t) = TensorRef::<Cpu>::new(&bytes, l) {
            let axis = r.below(3);
            said(t.narrow(axis, r.usize()..r.usize()));
            said(t.broadcast(axis, r.usize()));
            let _ = t.transpose(0, 1);
            let small = r.below(4);
            // An index outside is a panic, as it is of a slice.
            if let Ok(n) = t.narrow(axis, small..small + 1)
                && n.layout().elements() > 0
            {
                let _ = n.at([0, 0, 0]);
            }
        }
        if let Ok(t) = TensorMut::<Cpu>::new(&mut out, l) {
            said(t.narrow(r.below(3), r.usize()..r.usize()));
        }
    }
    let _ = TensorRef::<Cpu>::from_slice(&[0f32; 24], [r.usize(), r.usize(), r.usize()]);
    let lse = LseLayout {
        heads: r.usize(),
        tokens: r.usize(),
        row_stride: r.usize(),
    };
    if let Ok(l) = LseRef::<Cpu, Natural>::new(&bytes, lse) {
        said(l.tokens(r.usize()..r.usize()));
    }
    if let Ok(a) = ArrayRef::<Cpu, i32>::new(&bytes, r.usize()) {
        said(a.range(r.usize()..r.usize()));
        if let Ok(b) = BlockTable::new(a, r.usize(), r.usize()) {
            said(b.range(r.usize()..r.usize()));
        }
    }
}

/// Caches, and those of indexers.
fn caches(r: &mut Numbers) {
    let cpu = Cpu::new();
    let mut bytes = vec![0u8; 4096];
    let dims = if r.below(2) == 0 {
        MlaDims::new(8, HeadDims::new(4, 4, 4))
    } else {
        r.dims()
    };
    let l = CacheLayout::contiguous(dims, r.pick(KvFormat::ALL), r.usize(), r.usize());
    let l2 = l
        .with_page_stride(r.usize())
        .with_row_stride(r.usize())
        .with_scale(r.pick(&[0.0, 1.0, 2.0, f32::NAN, f32::INFINITY, 1e30, 1e-30, -1.0]));
    for l in [l, l2] {
        let _ = (l.slots(), l.to_string());
        said(CacheRef::<Cpu>::new(&bytes, l));
        said(CacheMut::<Cpu>::new(&mut bytes, l));
    }
    let d = IndexDims::new(r.u32(), r.u32(), r.u32(), r.u32());
    let i = IndexCacheLayout::contiguous(d, r.usize(), r.usize());
    for i in [i, i.with_page_stride(r.usize()).with_width(r.usize())] {
        let _ = i.slots();
        if IndexCacheRef::<Cpu>::new(&bytes, i).is_ok() && i.pages > 0 {
            let _ = (i.values_at(0), i.scale_at(i.slots() - 1));
        }
    }
    let c = IndexerConfig::new(d, mla_runtime::model::RotaryStyle::Halves);
    let _ = (c.check(), c.weight_scale());
    said(Indexer::new(&cpu, &c, &r.problem()));
}

/// Configurations, and rotary tables of them.
fn models(r: &mut Numbers) {
    let cpu = Cpu::new();
    let text = format!(
        r#"{{
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
            "num_attention_heads": {}, "kv_lora_rank": {}, "qk_nope_head_dim": {},
            "qk_rope_head_dim": {}, "v_head_dim": {}, "max_position_embeddings": {},
            "rope_theta": {}, "rope_scaling": {{
                "type": "{}", "factor": {}, "original_max_position_embeddings": {},
                "beta_fast": {}, "beta_slow": {}
            }},
            "num_hidden_layers": {}, "torch_dtype": "bfloat16"
        }}"#,
        r.u32(),
        r.u32(),
        r.u32(),
        r.small() % 100 * 2,
        r.u32(),
        r.u32(),
        r.pick(&["10000", "0", "-1", "1e300", "1"]),
        r.pick(&["yarn", "linear", "su"]),
        r.pick(&["40", "0", "-3", "1e-9", "1e300"]),
        r.u32(),
        r.pick(&["32", "0", "-1", "1e300"]),
        r.pick(&["1", "0", "-1", "1e300"]),
        r.u32()
    );
    if let Ok(m) = ModelConfig::from_hf_config(&text) {
        let _ = (
            m.softmax_scale(),
            m.heads_per_rank(r.u32()).map_err(|e| e.to_string()),
        );
        let _ = m.rope.frequencies(r.small());
        if m.dims.head.rope <= 65536 {
            said(RotaryTables::new(&cpu, &m.rope, m.dims.head.rope, r.below(50)).map(|_| ()));
        }
    }
}

/// Layers, workspaces and steps of any limits.
fn steps(r: &mut Numbers) {
    let cpu = Cpu::new();
    let config = LayerConfig::new(r.problem(), r.pick(&[0.1, 0.0, f32::NAN]));
    if let Ok(layer) = MlaLayer::<CpuPrefill, CpuDecode>::of(&cpu, &config) {
        let limits = r.limits();
        let _ = layer.threshold(&limits);
        let plan = layer.memory_plan(&limits, r.u32(), r.next());
        said(layer.memory_needs(&limits, 1, 1));
        let fits = layer
            .memory_plan(&limits, 1, 1)
            .is_ok_and(|p| p.total_bytes < 1 << 28);
        said(plan);
        if !fits {
            // A layer without a plan has no workspace either.
            if layer.memory_plan(&limits, 1, 1).is_err() {
                assert!(said(layer.workspace(&limits)).is_none());
            }
            return;
        }
        if let Ok(mut workspace) = layer.workspace(&limits) {
            for _ in 0..3 {
                let pages: Vec<i32> = (0..r.below(20))
                    .map(|_| {
                        if r.below(8) == 0 {
                            r.u32() as i32
                        } else {
                            r.below(30) as i32
                        }
                    })
                    .collect();
                let n = r.below(5);
                let list: Vec<StepRequest> = (0..n)
                    .map(|_| {
                        StepRequest::new(r.small(), r.small(), &pages[r.below(pages.len() + 1)..])
                    })
                    .collect();
                if let Some(step) = said(Step::plan(&workspace, &list)) {
                    said(workspace.prepare(&layer, &step.batch().unwrap()));
                    if let Some(padded) = said(step.padded_to(r.usize())) {
                        said(workspace.prepare(&layer, &padded.batch().unwrap()));
                    }
                }
                let requests: Vec<Request> =
                    (0..n).map(|_| Request::new(r.small(), r.small())).collect();
                if let Ok(t) = BlockTables::new(&pages, r.below(5), config.problem.page_size) {
                    let mut b = StepBatch::new(&requests, t);
                    if r.below(2) == 0 {
                        b = b
                            .with_threshold(Some(r.u32()))
                            .with_max_len(Some(r.u32()))
                            .with_dense_within(r.u32());
                    }
                    said(workspace.prepare(&layer, &b));
                }
                let _ = (workspace.tokens(), workspace.absorbed_tokens());
            }
        }
    }
    let p = r.problem();
    let limits = r.limits();
    let list = [StepRequest::new(r.u32(), r.u32(), &[1, 2, 3])];
    said(Step::within(&p, &limits, r.u32(), &list));
}

/// Numbers that are small, at an edge, or anything.
struct Numbers(fastrand::Rng);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn u32(&mut self) -> u32 {
        match self.below(4) {
            0 => self.pick(&[0, 1, 2, 3, 4, 8, 16, 64, 128, 512]),
            1 => self.pick(&[
                i32::MAX as u32,
                i32::MAX as u32 - 1,
                1 << 31,
                u32::MAX,
                u32::MAX - 1,
                1 << 30,
                65535,
                65536,
                65537,
            ]),
            2 => self.below(300) as u32,
            _ => self.next() as u32,
        }
    }

    fn small(&mut self) -> u32 {
        if self.below(6) == 0 {
            self.u32()
        } else {
            self.below(40) as u32
        }
    }

    fn usize(&mut self) -> usize {
        match self.below(4) {
            0 => self.pick(&[0, 1, 2, 3, 4, 8, 16, 64]),
            1 => self.pick(&[
                usize::MAX,
                usize::MAX / 2,
                usize::MAX / 4 + 1,
                1 << 62,
                1 << 48,
                1 << 32,
                (1 << 31) - 1,
                1 << 31,
            ]),
            2 => self.below(300),
            _ => self.u32() as usize,
        }
    }

    fn dims(&mut self) -> MlaDims {
        if self.below(3) == 0 {
            return MlaDims::new(64, HeadDims::new(32, 16, 32));
        }
        MlaDims::new(
            self.u32(),
            HeadDims::new(self.u32(), self.u32(), self.u32()),
        )
    }

    fn problem(&mut self) -> Problem {
        let heads = if self.below(2) == 0 { 2 } else { self.u32() };
        let mut p = Problem::new(self.dims(), heads, self.pick(DType::ALL));
        if self.below(3) == 0 {
            p = p.with_kv_format(self.pick(KvFormat::ALL));
        }
        if self.below(2) == 0 {
            p = p.with_page_size(self.u32());
        }
        p = p.with_query_len(self.pick(QueryLen::ALL));
        if self.below(4) == 0 {
            p = p.with_sparse(true);
        }
        p
    }

    fn limits(&mut self) -> StepLimits {
        let big = self.below(3) == 0;
        let n = |r: &mut Self| if big { r.usize() } else { 1 + r.below(40) };
        StepLimits::new(n(self), n(self), n(self))
            .with_decode_query_len(n(self))
            .with_context_rows(n(self))
    }
}
