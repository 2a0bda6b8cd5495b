//! Compares the layer on the CPU device with an independent oracle.

mod backends;
mod case;
mod nan;
mod oracle;
mod rotation;
mod rows;
mod weights;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use backends::{Concatenated, Demanding, PANICS};
use mla_cpu::{Cpu, CpuDecode, CpuPrefill};
use mla_runtime::Result;
use mla_runtime::backend::{
    DecodeBackend as _, LayerConfig, PrefillBackend as _, SelectedDecode, SelectedPrefill,
};
use mla_runtime::layer::MlaLayer;
use mla_runtime::model::{DType, HeadDims, KvFormat, MlaDims, QueryScaling};
use mla_runtime::select::Registry;
use mla_runtime::spec::QueryLen;
use proptest::prelude::*;
use world::{Case, Outcome, World, floats};

type CpuLayer = MlaLayer<CpuPrefill, CpuDecode>;

fn cpu_layer(case: &Case) -> CpuLayer {
    MlaLayer::of(&Cpu::new(), &case.config()).unwrap()
}

fn layer_of(case: &Case, decode: &str) -> MlaLayer<SelectedPrefill<Cpu>, SelectedDecode<Cpu>> {
    selected_of(&case.config(), [&case.config(); 2], decode).unwrap()
}

/// A layer of a configuration, with backends that are made for these two.
fn selected_of(
    config: &LayerConfig,
    [prefill, decode]: [&LayerConfig; 2],
    name: &str,
) -> Result<MlaLayer<SelectedPrefill<Cpu>, SelectedDecode<Cpu>>> {
    let device = Cpu::new();
    let mut registry = Registry::empty();
    for entry in [CpuPrefill::ENTRY, CpuDecode::ENTRY, Concatenated::ENTRY] {
        registry.add(entry).unwrap();
    }
    let prefill = registry.instantiate_prefill("CPU", &device, prefill);
    let decode = registry.instantiate_decode(name, &device, decode);
    MlaLayer::new(&device, config, prefill.unwrap(), decode.unwrap())
}

/// The sentence of an error.
fn refused<T>(result: Result<T>) -> String {
    let error = result.err().expect("it is refused");
    error.to_string()
}

fn run(case: &Case) -> (World, Outcome) {
    let world = World::new(case);
    let outcome = world.run(&cpu_layer(case));
    world.check(&outcome).unwrap_or_else(|difference| {
        panic!("{difference} in {case:?}");
    });
    (world, outcome)
}

/// The largest difference of two outputs.
fn difference(dtype: DType, a: &Outcome, b: &Outcome) -> f64 {
    floats(dtype, &a.out)
        .iter()
        .zip(floats(dtype, &b.out))
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max)
}

/// A mixed batch of decodes, speculative decodes, extends and prefills, some of them ragged.
const MIXED: &[(u32, u32)] = &[
    (1, 37),
    (1, 1),
    (9, 9),
    (3, 20),
    (1, 64),
    (7, 50),
    (12, 13),
    (4, 4),
    (30, 90),
];

/// Dtypes, each with a cache format: of 32 bits, of 16 bits, and quantised.
const FORMATS: [(DType, KvFormat); 3] = [
    (DType::F32, KvFormat::F32),
    (DType::BF16, KvFormat::BF16),
    (DType::F16, KvFormat::Fp8),
];

/// Sinks of four heads.
const SINKS: [f32; 4] = [-0.5, 2.5, f32::INFINITY, f32::NEG_INFINITY];

/// Cases of both paths, with and without chunks of context, in each format.
fn paths() -> impl Iterator<Item = Case> {
    let paths = [(4, 64), (100, 64), (0, 64), (0, 4096), (9, 8)];
    let of = |(threshold, context_rows)| {
        FORMATS.map(|(dtype, kv_format)| Case {
            threshold,
            context_rows,
            dtype,
            kv_format,
            ..Case::small(MIXED)
        })
    };
    paths.into_iter().flat_map(of)
}

/// Cases of lists in each format. Requests of at most `dense_within` tokens are dense.
fn lists(threshold: u32, dense_within: u32) -> impl Iterator<Item = Case> {
    FORMATS.into_iter().map(move |(dtype, kv_format)| Case {
        threshold,
        dense_within,
        dtype,
        kv_format,
        sparse: true,
        ..Case::small(MIXED)
    })
}

#[test]
fn mixed_batch() {
    let (_, outcome) = run(&Case::small(MIXED));
    // The absorbed path has 1 + 1 + 3 + 1 + 4 tokens. The other requests have chunks.
    assert_eq!(outcome.absorbed_tokens, 10);
    assert_eq!(outcome.chunks, 2);
}

#[test]
fn square_matrix_orientation() {
    for transposed_weights in [true, false] {
        // One head of P + V = 16 + 16 by L = 32: the shape does not distinguish the two
        // orientations.
        let case = Case {
            heads: 1,
            transposed_weights,
            ..Case::small(MIXED)
        };
        let (world, right) = run(&case);
        let mut other = World::new(&case);
        other.case.transposed_weights = !transposed_weights;
        let wrong = other.run(&cpu_layer(&case));
        assert_eq!(world.weights.view().shape(), [1, 32, 32]);
        assert!(difference(case.dtype, &right, &wrong) > 0.01);
    }
}

#[test]
fn queries_are_scaled_by_position() {
    for case in paths().chain(lists(100, 0)) {
        let plain = Case { heads: 3, ..case };
        let query_scaling = Some(QueryScaling::new(0.4, 8));
        let (_, scaled) = run(&Case {
            query_scaling,
            ..plain.clone()
        });
        assert!(difference(plain.dtype, &scaled, &run(&plain).1) > 0.01);
    }
}

#[test]
fn query_scaling_needs_the_feature() {
    let scaled = |beta| Case {
        query_scaling: Some(QueryScaling::new(beta, 8)),
        ..Case::small(&[(2, 9)])
    };
    let (plain, case) = (Case::small(&[(2, 9)]).config(), scaled(0.4));
    let config = case.config();
    for (config, message) in [
        (
            config.with_query_scaling(None),
            "query_scaling: given None, accepted one with a finite beta of at least 0, as the \
             problem has query_scales",
        ),
        (
            plain.with_query_scaling(config.query_scaling),
            "query_scaling: given Some(QueryScaling { beta: 0.4, original_max_positions: 8 }), \
             accepted none, as the problem has no query_scales",
        ),
    ] {
        assert_eq!(refused(CpuLayer::of(&Cpu::new(), &config)), message);
    }
    let said = refused(MlaLayer::<CpuPrefill, Concatenated>::of(
        &Cpu::new(),
        &config,
    ));
    assert!(
        said.contains("features: given query_scales, accepted "),
        "{said}"
    );
    // A workspace has the factors of only one scaling.
    let other = scaled(0.5);
    let mut workspace = cpu_layer(&case).workspace(&case.limits()).unwrap();
    assert_eq!(
        refused(World::new(&other).prepare(&cpu_layer(&other), &mut workspace)),
        "query_scaling: given one for Some(QueryScaling { beta: 0.4, original_max_positions: 8 }), \
         accepted one for Some(QueryScaling { beta: 0.5, original_max_positions: 8 }), as the \
         layer has it"
    );
}

#[test]
fn non_causal_drafts() {
    for case in paths() {
        let case = Case { heads: 3, ..case };
        let (_, free) = run(&Case {
            causal: false,
            ..case.clone()
        });
        assert!(difference(case.dtype, &free, &run(&case).1) > 0.01);
    }
    // A single new token sees its whole request in both cases, so every backend supports it.
    let case = Case {
        causal: false,
        ..Case::small(&[(1, 9), (1, 1), (1, 40)])
    };
    let (world, free) = run(&case);
    let outcome = world.run(&layer_of(&case, "CONCATENATED"));
    assert!(difference(case.dtype, &free, &outcome) < 1e-5);
}

#[test]
fn non_causal_drafts_need_the_feature() {
    for (sparse, decode, accepted) in [
        (false, "CONCATENATED", "CONCATENATED has no non_causal"),
        (
            true,
            "CPU",
            "a token of a sparse problem sees what its list names",
        ),
    ] {
        let case = Case {
            causal: false,
            sparse,
            ..Case::small(&[(2, 9)])
        };
        let layer = layer_of(&case, decode);
        let mut workspace = layer.workspace(&case.limits()).unwrap();
        assert_eq!(
            refused(World::new(&case).prepare(&layer, &mut workspace)),
            format!("causal: given false, accepted true: {accepted}")
        );
    }
}

#[test]
fn absorbed_equals_expanded() {
    // The planner puts extends before prefills only on the expanded path. This batch is already in
    // both orders.
    let case = Case::small(&[(7, 50), (12, 13), (30, 90), (9, 9)]);
    let [absorbed, expanded] = [100, 0].map(|threshold| {
        run(&Case {
            threshold,
            ..case.clone()
        })
        .1
    });
    assert_eq!((absorbed.chunks, expanded.absorbed_tokens), (0, 0));
    assert_eq!(absorbed.cache, expanded.cache);
    assert!(difference(case.dtype, &absorbed, &expanded) < 1e-5);
}

#[test]
fn chunked_equals_unchunked() {
    let case = Case {
        threshold: 0,
        ..Case::small(&[(5, 77), (1, 30), (2, 3), (8, 8), (3, 41)])
    };
    let (_, whole) = run(&Case {
        context_rows: 256,
        ..case.clone()
    });
    // One call covers all 140 rows of context and the 19 new rows.
    assert_eq!(whole.chunks, 0);
    for context_rows in [4, 5, 7, 8, 12, 16, 31, 64, 100, 139, 140, 158] {
        let chunked = Case {
            context_rows,
            ..case.clone()
        };
        let (_, outcome) = run(&chunked);
        match context_rows {
            140.. => assert_eq!(outcome.chunks, 1),
            _ => assert!(outcome.chunks > 1, "{context_rows}"),
        }
        assert!(
            difference(case.dtype, &whole, &outcome) < 1e-5,
            "{context_rows}"
        );
    }
}

#[test]
fn empty_requests_and_padding() {
    let case = Case::small(&[
        (0, 0),
        (1, 37),
        (0, 12),
        (1, 0),
        (2, 0),
        (9, 9),
        (0, 40),
        (7, 50),
    ]);
    let (world, outcome) = run(&case);
    // Padding comes after the only decode and attends to nothing.
    let at = world.requests.iter().position(|r| r.q > r.kv).unwrap();
    assert_eq!(at, 1);
    let row = (case.heads * case.dims.head.v) as usize;
    let out = floats(case.dtype, &outcome.out);
    assert!(out[row..4 * row].iter().all(|value| *value == 0.0));
    for nothing in [&[][..], &[(0, 0)], &[(0, 9), (0, 0)]] {
        let (_, outcome) = run(&Case::small(nothing));
        assert!(outcome.out.is_empty());
    }
}

#[test]
fn cache_formats_round_trip() {
    for (dtype, kv_format) in [
        (DType::F32, KvFormat::F32),
        (DType::F16, KvFormat::F16),
        (DType::BF16, KvFormat::BF16),
        (DType::BF16, KvFormat::Fp8),
        (DType::F16, KvFormat::Fp8),
        (DType::BF16, KvFormat::Fp8DsMla),
        (DType::F16, KvFormat::Fp8DsMla),
        (DType::BF16, KvFormat::Fp8PerToken),
        (DType::F16, KvFormat::Fp8PerToken),
    ] {
        for threshold in [0, 4] {
            run(&Case {
                dtype,
                kv_format,
                threshold,
                dims: MlaDims::new(128, HeadDims::new(16, 8, 16)),
                ..Case::small(MIXED)
            });
        }
    }
}

/// Mixed batches of GLM-5.3-Flash, Mistral-Small-4 and MiniCPM3, whose rows and heads differ from
/// DeepSeek's.
#[test]
fn rows_and_heads_of_models() {
    for (latent, head) in [
        (512, HeadDims::new(256, 0, 256)),
        (256, HeadDims::new(64, 64, 128)),
        (256, HeadDims::new(64, 32, 64)),
    ] {
        for (dtype, kv_format, sparse) in [
            (DType::F32, KvFormat::F32, false),
            (DType::BF16, KvFormat::BF16, false),
            (DType::F16, KvFormat::Fp8, false),
            (DType::BF16, KvFormat::Fp8DsMla, true),
            (DType::BF16, KvFormat::Fp8PerToken, true),
            (DType::F16, KvFormat::F16, true),
        ] {
            // A threshold of 0 sends every request down the expanded path.
            for threshold in if sparse { [100, 30] } else { [0, 4] } {
                run(&Case {
                    dims: MlaDims::new(latent, head),
                    dtype,
                    kv_format,
                    sparse,
                    threshold,
                    ..Case::small(MIXED)
                });
            }
        }
    }
}

#[test]
fn split_cache_same_bits() {
    for (dtype, kv_format) in [
        (DType::F32, KvFormat::F32),
        (DType::F16, KvFormat::F16),
        (DType::BF16, KvFormat::BF16),
        (DType::BF16, KvFormat::Fp8),
    ] {
        for (threshold, sparse, dense_within) in
            [(0, false, 0), (4, false, 0), (64, true, 0), (4, true, 20)]
        {
            let case = Case {
                dtype,
                kv_format,
                threshold,
                sparse,
                dense_within,
                ..Case::small(MIXED)
            };
            let (_, one_row) = run(&case);
            let (_, split) = run(&Case {
                split_cache: true,
                ..case.clone()
            });
            assert!(split == one_row, "{case:?}");
        }
    }
}

#[test]
fn foreign_cache_is_refused() {
    for split_cache in [false, true] {
        let case = Case {
            split_cache,
            ..Case::small(&[(1, 5)])
        };
        let (mut world, layer) = (World::new(&case), cpu_layer(&case));
        let mut workspace = world.prepared(&layer);
        world.case.split_cache = !split_cache;
        let said = refused(world.forward(&layer, &mut workspace, true));
        let kinds = match split_cache {
            false => ["4, split", "4"],
            true => ["4", "4, split"],
        };
        let [given, accepted] = kinds.map(|kind| format!("f32 rows of (32, 8) in pages of {kind}"));
        assert_eq!(said, format!("cache: given {given}, accepted {accepted}"));
    }
}

#[test]
fn longer_requests_go_to_prefill() {
    let case = Case::small(&[(1, 9), (3, 20), (3, 30), (2, 17), (3, 3), (8, 40)]);
    let (_, outcome) = run(&Case {
        query_len: QueryLen::Uniform,
        ..case.clone()
    });
    assert_eq!(outcome.absorbed_tokens, 9);
    let (_, outcome) = run(&Case {
        query_len: QueryLen::Single,
        ..case
    });
    assert_eq!(outcome.absorbed_tokens, 1);
}

#[test]
fn sparse_tokens_attend_to_slots() {
    for kv_format in [KvFormat::BF16, KvFormat::Fp8DsMla, KvFormat::Fp8PerToken] {
        let case = Case {
            sparse: true,
            threshold: 100,
            dims: MlaDims::new(128, HeadDims::new(16, 8, 16)),
            dtype: DType::BF16,
            kv_format,
            ..Case::small(MIXED)
        };
        let (world, outcome) = run(&case);
        assert_eq!(outcome.absorbed_tokens, world.slots.len());
        // Attention to all slots would give a different result.
        let dense = World::new(&Case {
            sparse: false,
            ..case.clone()
        });
        assert!(dense.check(&outcome).is_err());
    }
}

#[test]
fn short_sparse_requests_are_dense() {
    for kv_format in [KvFormat::BF16, KvFormat::Fp8DsMla, KvFormat::Fp8PerToken] {
        let case = Case {
            sparse: true,
            dense_within: 40,
            threshold: 4,
            dims: MlaDims::new(128, HeadDims::new(16, 8, 16)),
            dtype: DType::BF16,
            kv_format,
            ..Case::small(MIXED)
        };
        let (_, outcome) = run(&case);
        // 9 of 9 and 12 of 13 tokens are on the expanded path. 7 of 50 and 30 of 90 have lists.
        assert_eq!(outcome.absorbed_tokens, 1 + 1 + 3 + 1 + 7 + 4 + 30);
        // If the cache has another format than the new tokens, its rows cannot be keys together
        // with them.
        let chunks = usize::from(kv_format != KvFormat::BF16);
        assert_eq!(outcome.chunks, chunks);
        // The same attention, with lists for all requests.
        let listed = Case {
            dense_within: 90,
            threshold: 100,
            ..case.clone()
        };
        let (_, absorbed) = run(&listed);
        assert_eq!(absorbed.chunks, 0);
    }
}

#[test]
fn second_cache_and_sinks() {
    let case = Case {
        sparse: true,
        threshold: 100,
        ..Case::small(MIXED)
    };
    let mut world = World::new(&case);
    world.two_caches = true;
    world.check(&world.run(&cpu_layer(&case))).unwrap();
    world.sinks = Some(SINKS.to_vec());
    world.check(&world.run(&cpu_layer(&case))).unwrap();
    world.check(&world.run(&layer_of(&case, "CPU"))).unwrap();
}

/// Tests sinks and gates on both paths, with and without chunks of context.
#[test]
fn sinks_and_gates() {
    // Prompts that come whole need no rows for context, but sinks need their log-sum-exps.
    let whole = Case {
        threshold: 1,
        context_rows: 0,
        ..Case::small(&[(1, 9), (7, 7), (5, 5)])
    };
    for case in paths().chain(lists(4, 40)).chain([whole]) {
        let (mut world, layer) = (World::new(&case), cpu_layer(&case));
        let mut workspace = world.prepared(&layer);
        for (sinks, gate) in [(true, 0), (false, 1), (true, 1), (true, 16)] {
            world.sinks = sinks.then(|| SINKS.to_vec());
            world.gate = None;
            if gate > 0 {
                world.set_gate(gate);
            }
            let outcome = world.forward(&layer, &mut workspace, true).unwrap();
            world.check(&outcome).unwrap_or_else(|difference| {
                panic!("{difference}, sinks {sinks}, gate of {gate}, in {case:?}");
            });
            let without = world.forward(&layer, &mut workspace, false).unwrap();
            assert_eq!(without.out, outcome.out);
        }
    }
}

#[test]
fn gates_and_second_caches_that_do_not_fit() {
    let case = Case {
        sparse: true,
        dense_within: 40,
        threshold: 4,
        ..Case::small(MIXED)
    };
    let (mut world, layer) = (World::new(&case), cpu_layer(&case));
    let mut workspace = world.prepared(&layer);
    let mut said = |world: &World| refused(world.forward(&layer, &mut workspace, true));
    world.set_gate(3);
    assert_eq!(
        said(&world),
        "gate: given f32 [68, 4, 3] strides [12, 3, 1], accepted f32 [68, 4, 16]"
    );
    (world.gate, world.two_caches) = (None, true);
    assert_eq!(
        said(&world),
        "slot_lists.second: given present, with 21 tokens on the expanded path, accepted absent: \
         the expanded path attends to one cache. A threshold of u32::MAX keeps all requests on the \
         absorbed path"
    );
}

#[test]
fn tensors_in_the_asked_layout() {
    fn check<const PACKED: bool>(case: &Case) {
        let world = World::new(case);
        let config = case.config();
        let layer: MlaLayer<Demanding<PACKED>, Concatenated> =
            MlaLayer::of(&Cpu::new(), &config).unwrap();
        world.check(&world.run(&layer)).unwrap();
    }
    for context_rows in [8, 256] {
        for (dtype, head) in [
            (DType::F32, HeadDims::new(16, 8, 16)),
            (DType::BF16, HeadDims::new(16, 8, 24)),
            (DType::F16, HeadDims::new(24, 4, 40)),
        ] {
            let case = Case {
                context_rows,
                dtype,
                kv_format: KvFormat::of(dtype),
                dims: MlaDims::new(32, head),
                ..Case::small(MIXED)
            };
            check::<true>(&case);
            check::<false>(&case);
        }
    }
}

#[test]
fn long_decodes_are_expanded() {
    // The case's threshold and its limit are 4.
    let case = Case::small(&[(1, 9), (3, 9), (4, 11), (4, 4)]);
    let world = World::new(&case);
    let all: CpuLayer = MlaLayer::of(&Cpu::new(), &case.config()).unwrap();
    assert_eq!(world.run(&all).absorbed_tokens, 12);
    let layer: MlaLayer<CpuPrefill, Concatenated> =
        MlaLayer::of(&Cpu::new(), &case.config()).unwrap();
    let outcome = world.run(&layer);
    assert_eq!(outcome.absorbed_tokens, 4);
    world.check(&outcome).unwrap();
    let limits = case.limits();
    assert_eq!((layer.threshold(&limits), all.threshold(&limits)), (3, 4));
    let workspace = layer.workspace(&limits).unwrap();
    assert_eq!(workspace.limits().decode_query_len, 3);
    // The plan has no memory for steps that cannot occur.
    let plan = layer.memory_plan(&limits, 1, 0).unwrap();
    assert_eq!(plan, *workspace.plan());
}

#[test]
fn selected_backends_compute_the_same_bits() {
    for (dtype, context_rows) in [(DType::F32, 16), (DType::BF16, 1024)] {
        let case = Case {
            dtype,
            kv_format: KvFormat::of(dtype),
            context_rows,
            ..Case::small(MIXED)
        };
        let world = World::new(&case);
        let of_types = world.run(&cpu_layer(&case));
        let selected = world.run(&layer_of(&case, "CPU"));
        assert_eq!(of_types, selected);
        world.check(&selected).unwrap();
    }
}

#[test]
fn panicked_step_does_not_run() {
    let case = Case::small(MIXED);
    let layer = MlaLayer::<CpuPrefill, Concatenated>::of(&Cpu::new(), &case.config()).unwrap();
    let world = World::new(&case);
    let mut workspace = layer.workspace(&case.limits()).unwrap();
    PANICS.set(true);
    let prepare = AssertUnwindSafe(|| world.prepare(&layer, &mut workspace));
    catch_unwind(prepare).unwrap_err();
    PANICS.set(false);
    let said = refused(world.forward(&layer, &mut workspace, true));
    assert!(said.contains("without a prepared step"), "{said}");
    world.prepare(&layer, &mut workspace).unwrap();
    world.forward(&layer, &mut workspace, true).unwrap();
}

/// Layers of selected backends have workspaces of one type, for any backends.
#[test]
fn foreign_workspace_is_refused() {
    let case = Case::small(MIXED);
    let (own, other) = (layer_of(&case, "CPU"), layer_of(&case, "CONCATENATED"));
    let refusal = "workspace: given one for decode backend CPU, accepted one for CONCATENATED, as \
                   the layer has it";
    let world = World::new(&case);
    let mut workspace = own.workspace(&case.limits()).unwrap();
    assert_eq!(refused(world.prepare(&other, &mut workspace)), refusal);
    world.prepare(&own, &mut workspace).unwrap();
    assert_eq!(
        refused(world.forward(&other, &mut workspace, true)),
        refusal
    );
    // The prepared step is still valid for layers of its own backends.
    world.forward(&own, &mut workspace, true).unwrap();
}

#[test]
fn backends_of_another_configuration_are_refused() {
    let config = Case::small(MIXED).config();
    let louder = config.with_softmax_scale(5.0);
    assert_eq!(
        refused(selected_of(&config, [&config, &louder], "CPU")),
        format!(
            "decode backend: given one for softmax_scale = 5, accepted one for softmax_scale = {}, \
             as the layer has it",
            config.softmax_scale
        )
    );
    let mut wider = config;
    wider.problem.heads = 5;
    assert_eq!(
        refused(selected_of(&config, [&wider, &config], "CPU")),
        "prefill backend: given one for heads = 5, accepted one for heads = 4, as the layer has it"
    );
}

#[test]
fn layers_share_a_workspace() {
    let case = Case::small(MIXED);
    // Two layers run one step: the requests are the same, but weights, queries and caches differ.
    let other = Case {
        seed: 1,
        ..case.clone()
    };
    let (first, mut second) = (World::new(&case), World::new(&other));
    second.weights = World::new(&Case { seed: 5, ..other }).weights;
    let layers = [cpu_layer(&case), cpu_layer(&case)];
    let alone = [first.run(&layers[0]), second.run(&layers[1])];
    let mut workspace = layers[0].workspace(&case.limits()).unwrap();
    first.prepare(&layers[1], &mut workspace).unwrap();
    for _ in 0..2 {
        let together = [
            first.forward(&layers[0], &mut workspace, true).unwrap(),
            second.forward(&layers[1], &mut workspace, true).unwrap(),
        ];
        assert_eq!(alone, together);
    }
    assert_ne!(alone[0].out, alone[1].out);
    second.check(&alone[1]).unwrap();
}

/// A request that grows token by token ends with the same result as one prefill.
#[test]
fn growing_equals_prefill() {
    const STEPS: u32 = 200;
    let mut case = Case::small(&[(STEPS, STEPS), (STEPS, STEPS)]);
    case.context_rows = 32;
    let whole = World::new(&case);
    let layer = cpu_layer(&case);
    let prefill = whole.run(&layer);
    whole.check(&prefill).unwrap();

    let mut workspace = layer.workspace(&case.limits()).unwrap();
    let mut steps = World::new(&case);
    let token_bytes = (case.heads * case.dims.head.v) as usize * case.dtype.bytes();
    for step in 0..STEPS {
        steps.step_of(&whole, step);
        steps.prepare(&layer, &mut workspace).unwrap();
        assert_eq!(workspace.absorbed_tokens(), 2);
        let outcome = steps.forward(&layer, &mut workspace, false).unwrap();
        steps.cache = outcome.cache;
        let out = floats(case.dtype, &outcome.out);
        for request in 0..2 {
            let row = out.len() / 2;
            let at = (request * STEPS + step) as usize * token_bytes;
            let expected = floats(case.dtype, &prefill.out[at..at + token_bytes]);
            for (given, expected) in out[request as usize * row..].iter().zip(expected) {
                assert!((given - expected).abs() < 1e-5, "step {step}");
            }
        }
    }
    assert_eq!(steps.cache, prefill.cache);
}

#[test]
fn plan_equals_allocation() {
    for (context_rows, threshold) in [(4, 0), (64, 4), (1000, 100)] {
        let case = Case {
            context_rows,
            threshold,
            ..Case::small(MIXED)
        };
        let layer = cpu_layer(&case);
        let workspace = layer.workspace(&case.limits()).unwrap();
        let plan = workspace.plan();
        assert_eq!(
            workspace.allocated_bytes().map(|bytes| bytes as u64),
            [plan.workspace_bytes, plan.step_bytes]
        );
        let with_cache = layer.memory_plan(&case.limits(), 3, 10).unwrap();
        let row = case.config().problem.kv_format.row_bytes(case.dims) as u64;
        let first = &with_cache.regions[0];
        assert_eq!((first.name(), first.bytes), ("kv_cache", 3 * 40 * row));
        assert_eq!(with_cache.workspace_bytes, plan.workspace_bytes);
    }
}

#[test]
fn slots_follow_block_tables() {
    let case = Case::small(&[(1, 37), (3, 20), (1, 0), (9, 9)]);
    let world = World::new(&case);
    let layer = cpu_layer(&case);
    let mut workspace = layer.workspace(&case.limits()).unwrap();
    let derived = world.plan(workspace.limits()).unwrap();
    let given = derived.clone().with_slots(&world.slots).unwrap();
    let [given, derived] = [given, derived].map(|plan| {
        workspace.prepare(&layer, &plan).unwrap();
        world.forward(&layer, &mut workspace, true).unwrap()
    });
    assert_eq!(given, derived);
    world.check(&derived).unwrap();
}

/// Batches without context to expand need no rows for context.
#[test]
fn no_room_without_context() {
    run(&Case {
        context_rows: 0,
        ..Case::small(&[(1, 30), (9, 9), (4, 20)])
    });
}

prop_compose! {
    fn cases()(
        dims in prop::sample::select(vec![
            MlaDims::new(32, HeadDims::new(16, 8, 16)),
            MlaDims::new(32, HeadDims::new(24, 4, 8)),
            MlaDims::new(48, HeadDims::new(8, 16, 40)),
            MlaDims::new(17, HeadDims::new(5, 3, 7)),
            MlaDims::new(128, HeadDims::new(16, 8, 16)),
            MlaDims::new(24, HeadDims::new(16, 0, 20)),
        ]),
        (dtype, format) in prop::sample::select(vec![
            (DType::F32, KvFormat::F32),
            (DType::F16, KvFormat::F16),
            (DType::BF16, KvFormat::BF16),
            (DType::BF16, KvFormat::Fp8),
            (DType::BF16, KvFormat::Fp8DsMla),
            (DType::BF16, KvFormat::Fp8PerToken),
        ]),
        requests in proptest::collection::vec(
            prop_oneof![
                4 => (1u32..3, 0u32..60),
                3 => (1u32..24, 0u32..60),
                1 => Just((0, 0)),
                1 => (0u32..1, 0u32..20),
            ],
            0..6,
        ),
        is_padded in any::<bool>(),
        heads in 1u32..6,
        page_size in prop::sample::select(vec![1u32, 3, 4, 16]),
        threshold in 0u32..10,
        rows in 0usize..80,
        transposed_weights in any::<bool>(),
        seed in any::<u64>(),
        query_len in prop::sample::select(QueryLen::ALL),
    ) -> Case {
        let mut requests: Vec<_> = requests.iter().map(|(q, context)| (*q, q + context)).collect();
        // Padding has the length of the absorbed path. To be uniform with padding, decodes have
        // single tokens.
        if is_padded && query_len == QueryLen::Ragged && threshold > 0 {
            requests.push((1, 0));
        }
        Case {
            query_scaling: (seed % 4 == 0).then(|| QueryScaling::new(0.2, 8)),
            dims,
            heads,
            dtype,
            kv_format: match format {
                _ if !format.holds(dims) => KvFormat::of(dtype),
                _ => format,
            },
            page_size,
            query_len,
            threshold,
            context_rows: rows.max(page_size as usize),
            causal: seed % 4 > 0,
            transposed_weights,
            seed,
            ..Case::small(&requests)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_batch(case in cases()) {
        let world = World::new(&case);
        let outcome = world.run(&cpu_layer(&case));
        prop_assert_eq!(world.check(&outcome), Ok(()));
    }
}
