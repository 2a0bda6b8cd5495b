//! Tests selections, models and whole steps with random numbers of every size. Each call must
//! return, and all errors must have one form. `mla-runtime/tests/refusals.rs` tests other functions
//! at their limits.

use std::fmt::Display;

use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::backend::{LayerConfig, StepLimits};
use mla_runtime::layer::{MlaLayer, StepPlan, StepRequest};
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims, ModelConfig};
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Capability, Problem, QueryLen, Target};
use mla_runtime::tensor::RotaryTables;

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
fn random_calls() {
    attack(1);
}

/// Uses other numbers each time. `MLA_ATTACK_SEED` repeats a run.
#[test]
fn other_random_calls() {
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

const CALLS: [fn(&mut Numbers); 3] = [selection, models, steps];

/// Makes a selection for a random problem, and prints it.
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

/// Reads random configurations, and makes rotary tables of them.
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

/// Makes layers, workspaces and steps with random limits.
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
            // A layer without a memory plan has no workspace either.
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
                let [threshold, max_len] = [r.u32(), r.u32()];
                let dense_within = r.u32() * r.below(2) as u32;
                let limits = workspace.limits();
                for step in [
                    StepPlan::new(&workspace, &list),
                    StepPlan::within(&config.problem, limits, threshold, &list),
                    StepPlan::within(&config.problem, &r.limits(), threshold, &list),
                    StepPlan::in_order(&config.problem, limits, threshold, dense_within, &list),
                ] {
                    let Some(step) = said(step) else { continue };
                    said(workspace.prepare(&layer, &step));
                    said(workspace.prepare(&layer, &step.clone().with_max_len(Some(max_len))));
                    if let Some(padded) = said(step.padded_to(r.usize())) {
                        said(workspace.prepare(&layer, &padded));
                    }
                }
                let _ = (workspace.tokens(), workspace.absorbed_tokens());
            }
        }
    }
    let p = r.problem();
    let limits = r.limits();
    let list = [StepRequest::new(r.u32(), r.u32(), &[1, 2, 3])];
    said(StepPlan::within(&p, &limits, r.u32(), &list));
}

/// Random numbers: small, at a limit, or arbitrary.
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
