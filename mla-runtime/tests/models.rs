//! The models that are served: each is planned from its configuration, or refused by the name of
//! what is missing.

use std::collections::BTreeMap;
use std::path::Path;

use mla_cpu::{CpuDecode, CpuPrefill};
use mla_runtime::model::{DType, ModelConfig, PRESETS};
use mla_runtime::plan::memory::{self, MemoryNeeds};
use mla_runtime::select::{Registry, SelectionRequest};
use mla_runtime::spec::{Problem, Target};
use serde_json::{Value, json};

#[test]
fn example_configs_match_presets() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mla-cli/models");
    let examples: BTreeMap<String, ModelConfig> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let json = std::fs::read_to_string(&path).unwrap();
            let config = ModelConfig::from_hf_config(&json)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (name, config)
        })
        .collect();
    let presets: BTreeMap<String, ModelConfig> = PRESETS
        .iter()
        .map(|preset| (preset.name.to_owned(), preset.config))
        .collect();
    assert_eq!(examples, presets);
}

/// The facts of a model's attention that an engine has to know.
#[derive(PartialEq, Debug, Default)]
struct Known {
    layers: Option<u32>,
    others: u32,
    topk: Option<u32>,
    turns: bool,
    gated: bool,
    sinks: bool,
}

impl Known {
    fn of(model: &ModelConfig) -> Self {
        Self {
            layers: model.layers,
            others: model.other_layers,
            topk: model.index_topk,
            turns: model.rope.rotates,
            gated: model.output_gate,
            sinks: model.sinks,
        }
    }
}

/// The fields that every model has: heads, L, and (P, R, V).
fn fields(heads: u32, latent: u32, [nope, rope, v]: [u32; 3], others: Value) -> Value {
    let mut config = json!({
        "num_attention_heads": heads, "kv_lora_rank": latent, "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope, "v_head_dim": v, "torch_dtype": "bfloat16",
        "rope_theta": 10000.0, "max_position_embeddings": 131_072,
    });
    let own = others.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(own);
    config
}

const R1: [u32; 3] = [128, 64, 128];

/// `layer_types` of `others` linear layers before each one of `own`.
fn layer_types(own: &str, others: usize, groups: usize) -> Value {
    let group = [vec!["linear_attention"; others], vec![own]].concat();
    json!(group.repeat(groups))
}

fn indexer(heads: u32) -> Value {
    json!({"index_topk": 2048, "index_n_heads": heads, "index_head_dim": 128})
}

fn with(mut config: Value, others: Value) -> Value {
    let others = others.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(others);
    config
}

/// Models that are planned, by name.
fn planned() -> Vec<(&'static str, Value, Known)> {
    let turns = Known {
        turns: true,
        ..Known::default()
    };
    let layers = |layers| Known {
        layers: Some(layers),
        turns: true,
        ..Known::default()
    };
    let full: Vec<u32> = (1..=93)
        .filter(|layer| layer % 4 == 0)
        .chain([93])
        .collect();
    vec![
        (
            "DeepSeek-V2-Lite",
            fields(
                16,
                512,
                R1,
                json!({"num_hidden_layers": 27, "q_lora_rank": null}),
            ),
            layers(27),
        ),
        (
            "DeepSeek-V3.2",
            with(
                fields(128, 512, R1, json!({"num_hidden_layers": 61})),
                indexer(64),
            ),
            Known {
                topk: Some(2048),
                ..layers(61)
            },
        ),
        (
            "Kimi-K2.5",
            json!({"text_config": fields(64, 512, R1, json!({"num_hidden_layers": 61}))}),
            layers(61),
        ),
        (
            "Kimi-K3",
            json!({"model_type": "kimi_k3", "text_config": fields(96, 512, R1, json!({
                "num_hidden_layers": 93, "mla_use_nope": true, "mla_use_output_gate": true,
                "linear_attn_config": {"full_attn_layers": full, "num_heads": 96},
            }))}),
            Known {
                gated: true,
                turns: false,
                others: 69,
                ..layers(24)
            },
        ),
        (
            "Kimi-Linear-48B",
            fields(
                32,
                512,
                R1,
                json!({
                    "num_hidden_layers": 27, "mla_use_nope": true,
                    "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
                }),
            ),
            Known {
                turns: false,
                others: 20,
                ..layers(7)
            },
        ),
        (
            "GLM-5",
            with(
                fields(
                    64,
                    512,
                    [192, 64, 256],
                    json!({
                        "num_hidden_layers": 78, "indexer_rope_interleave": true,
                        "layer_types": vec!["deepseek_sparse_attention"; 78],
                    }),
                ),
                indexer(32),
            ),
            Known {
                topk: Some(2048),
                ..layers(78)
            },
        ),
        (
            "GLM-4.7-Flash",
            fields(20, 512, [192, 64, 256], json!({"num_hidden_layers": 47})),
            layers(47),
        ),
        (
            "Hy4-preview",
            with(
                fields(
                    64,
                    512,
                    [192, 64, 256],
                    json!({
                        "num_hidden_layers": 78, "gated_mla": true, "learnable_sink": true,
                    }),
                ),
                indexer(32),
            ),
            Known {
                topk: Some(2048),
                gated: true,
                sinks: true,
                ..layers(78)
            },
        ),
        (
            "Mistral-Small-4",
            fields(
                32,
                256,
                [64, 64, 128],
                json!({
                    "num_hidden_layers": 36, "sliding_window": null,
                }),
            ),
            layers(36),
        ),
        (
            "Ling-3.0-tiny",
            fields(
                16,
                512,
                R1,
                json!({"num_hidden_layers": 24, "layer_group_size": 4}),
            ),
            Known {
                others: 18,
                ..layers(6)
            },
        ),
        (
            "a hybrid by the types of its layers",
            fields(
                16,
                512,
                R1,
                json!({
                    "num_hidden_layers": 24, "layer_types": layer_types("full_attention", 3, 6),
                }),
            ),
            Known {
                others: 18,
                ..layers(6)
            },
        ),
        ("LongCat-Flash", fields(64, 512, R1, json!({})), turns),
        (
            "MiniCPM3",
            fields(
                40,
                256,
                [64, 32, 64],
                json!({
                    "num_hidden_layers": 62, "model_type": "minicpm3",
                }),
            ),
            layers(62),
        ),
    ]
}

#[test]
fn served_models_are_planned() {
    let registry = Registry::of::<(CpuPrefill, ()), (CpuDecode, ())>().unwrap();
    for (name, config, known) in planned() {
        let model = ModelConfig::from_hf_config(&config.to_string())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(Known::of(&model), known, "{name}");
        // One rank of eight, or as many as divide the heads.
        let ranks = [8, 4, 1]
            .into_iter()
            .find(|ranks| model.heads.is_multiple_of(*ranks));
        let heads = model.heads_per_rank(ranks.unwrap()).unwrap();
        let problem =
            Problem::new(model.dims, heads, DType::BF16).with_sparse(model.index_topk.is_some());
        let needs = MemoryNeeds::of(&problem)
            .unwrap()
            .with_layers(model.layers.unwrap_or(1))
            .with_pages(16)
            .with_absorbed_tokens(8)
            .with_expanded_tokens(64)
            .with_rows(128);
        let plan = memory::plan(&needs).unwrap_or_else(|error| panic!("{name}: {error}"));
        let row = 2 * u64::from(model.dims.row());
        let cache = u64::from(known.layers.unwrap_or(1)) * 16 * 64 * row;
        assert_eq!(plan.region("kv_cache").unwrap().bytes, cache, "{name}");
        registry
            .select(&SelectionRequest::new(Target::CPU, problem))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        // Without a rotation every angle is 0.
        if !known.turns {
            let [cos, sin] = model.rope.cos_sin(model.dims.head.rope, 3).unwrap();
            assert!(cos.iter().all(|cos| *cos == 1.0) && sin.iter().all(|sin| *sin == 0.0));
        }
    }
}

#[test]
fn unsupported_models_are_named() {
    const COMPRESSED: &str = "compressed caches and windows beside them";
    let unsupported = |field: &str, given: &str, missing: &str| {
        format!(
            "{field}: given {given}, accepted a model without {missing}, which no backend here has"
        )
    };
    let dots3 = json!({
        "num_hidden_layers": 2, "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
    });
    let by_types = json!({
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    });
    let flash = json!({
        "num_hidden_layers": 45, "mla_nope": true, "index_kpool": 4, "index_topk": 2048,
    });
    for (config, message) in [
        // It has no latent of its own kind, which would be a puzzling answer.
        (
            json!({"model_type": "deepseek_v4", "num_attention_heads": 64, "head_dim": 512}),
            unsupported("model_type", "\"deepseek_v4\"", COMPRESSED),
        ),
        (
            json!({"model_type": "other", "compress_ratios": [0, 4, 128]}),
            unsupported("compress_ratios", "an array", COMPRESSED),
        ),
        (
            fields(64, 1024, [192, 64, 128], dots3),
            unsupported("sliding_window", "512", "a sliding window"),
        ),
        (
            fields(64, 1024, [192, 64, 128], by_types),
            unsupported("layer_types", "\"sliding_attention\"", "a sliding window"),
        ),
        (
            json!({"text_config": fields(64, 512, [256, 0, 256], flash)}),
            unsupported("text_config.index_kpool", "4", "pooled index keys"),
        ),
        (
            fields(16, 512, R1, json!({"attn_logit_softcapping": 50.0})),
            unsupported("attn_logit_softcapping", "50.0", "a soft cap of logits"),
        ),
        (
            json!({"use_mla": false, "num_attention_heads": 10, "kv_lora_rank": null}),
            unsupported(
                "use_mla",
                "false",
                "keys and values of every head in the cache",
            ),
        ),
    ] {
        let error = ModelConfig::from_hf_config(&config.to_string()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let unused = json!({"sliding_window": 4096, "use_sliding_window": false});
    ModelConfig::from_hf_config(&fields(16, 512, R1, unused).to_string()).unwrap();
}

#[test]
fn bad_layer_kinds_are_refused() {
    let types = "a list of strings, of num_hidden_layers = 4";
    let numbers = "ascending numbers from 1 on, of num_hidden_layers = 4";
    let full = |layers: Value| json!({"linear_attn_config": {"full_attn_layers": layers}});
    for (others, message) in [
        (
            json!({"layer_types": ["full_attention"]}),
            format!("layer_types: given an array of 1, accepted {types}"),
        ),
        (
            json!({"layer_types": [1, 2, 3, 4]}),
            format!("layer_types: given an array of 4, accepted {types}"),
        ),
        (
            json!({"layer_types": "full"}),
            format!("layer_types: given \"full\", accepted {types}"),
        ),
        (
            full(json!([0, 4])),
            format!("linear_attn_config.full_attn_layers: given an array of 2, accepted {numbers}"),
        ),
        (
            full(json!([4, 4])),
            format!("linear_attn_config.full_attn_layers: given an array of 2, accepted {numbers}"),
        ),
        (
            full(json!([5])),
            format!("linear_attn_config.full_attn_layers: given an array of 1, accepted {numbers}"),
        ),
        (
            json!({"linear_attn_config": {}}),
            "full_attn_layers: given nothing as linear_attn_config.full_attn_layers, accepted a \
             list of the layers with full attention"
                .to_owned(),
        ),
        (
            json!({"layer_group_size": 0}),
            "layer_group_size: given 0, accepted an integer from 1 to 65536".to_owned(),
        ),
        (
            json!({"mla_use_nope": 1}),
            "mla_use_nope: given 1, accepted true or false".to_owned(),
        ),
    ] {
        let config = fields(16, 512, R1, with(json!({"num_hidden_layers": 4}), others));
        let error = ModelConfig::from_hf_config(&config.to_string()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}
