//! Configurations as families and engines write them: switches that are off, families that are
//! known by their architecture, levels that share fields, and layers of two kinds.

use mla_runtime::model::{ModelConfig, RotaryStyle};
use serde_json::{Value, json};

/// A model with these changes. Null keeps a field as null.
fn with(changes: Value) -> Value {
    let mut config = json!({
        "num_attention_heads": 16, "num_hidden_layers": 8, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    });
    let fields = config.as_object_mut().unwrap();
    fields.extend(changes.as_object().unwrap().clone());
    config
}

fn read(changes: Value) -> Result<ModelConfig, String> {
    let config = with(changes).to_string();
    ModelConfig::from_hf_config(&config).map_err(|error| error.to_string())
}

fn plain() -> Result<ModelConfig, String> {
    read(json!({}))
}

const SPARSE: [(&str, u32); 3] = [
    ("index_topk", 2048),
    ("index_n_heads", 32),
    ("index_head_dim", 128),
];

fn sparse(changes: Value) -> Value {
    let mut fields = changes;
    for (name, value) in SPARSE {
        fields[name] = json!(value);
    }
    fields
}

#[test]
fn keys_of_other_parts_are_no_keys_of_attention() {
    for key in [
        "hc_sinkhorn_iters",
        "mhc_sinkhorn_iterations",
        "index_chunk_size",
        "nextn_is_sparse",
        "attention_softmax_in_fp32",
        "_attn_implementation_internal",
        "initializer_factor",
        "capacity_factor",
        "final_logit_softcapping",
        "interleave_moe_layer_step",
        "mtp_loss_scaling_factor",
    ] {
        assert_eq!(read(json!({key: 20})), plain(), "{key}");
    }
}

#[test]
fn names_of_attention_are_known_or_refused() {
    for key in [
        "factor",
        "long_factor",
        "ntk_alpha",
        "query_factor",
        "theta",
        "truncate",
        "qk_interleaved",
        "logits_soft_cap",
        "mtp_index_topk",
        "mtp_sliding_window",
        "num_kv_shared_layers",
        "use_cla",
        "cla_share_factor",
    ] {
        let refused = read(json!({key: 2})).unwrap_err();
        let known = "nothing or null: it is not known if this changes the attention";
        assert_eq!(refused, format!("{key}: given 2, accepted {known}"));
    }
}

#[test]
fn a_switch_that_is_off_is_skipped_only_if_nothing_contradicts_it() {
    let yarn = json!({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096});
    let gate = json!({"mla_use_output_gate": true});
    for (key, beside) in [
        ("use_rope", json!({})),
        ("use_interleaved_rope", json!({})),
        ("use_pos_enc", json!({})),
        ("is_neox_style", json!({"rope_interleave": false})),
        ("use_yarn", json!({"rope_scaling": yarn})),
        ("use_mscale", json!({"rope_scaling": yarn})),
        ("use_sparse_attention", sparse(json!({}))),
        ("enable_dsa", sparse(json!({}))),
        ("use_indexer", sparse(json!({}))),
        ("use_attn_gate", gate),
        ("add_attention_sink_bias", json!({"learnable_sink": true})),
    ] {
        let mut changes = beside;
        changes[key] = json!(false);
        let refused = read(changes).unwrap_err();
        assert!(
            refused.starts_with(&format!("{key}: given false")),
            "{refused}"
        );
    }
    for key in [
        "use_yarn",
        "use_sparse_attention",
        "use_attn_gate",
        "attn_output_gate",
        "add_attention_sink_bias",
    ] {
        assert_eq!(read(json!({key: false})), plain(), "{key}");
    }
    let windows = json!({"use_sliding_window": false, "swa_head_dim": 192, "sliding_window": 512});
    assert_eq!(read(windows), plain());
}

#[test]
fn a_family_is_known_by_its_architecture_too() {
    let of = |name: &str| read(json!({"architectures": [name]}));
    for name in [
        "MiniCPM3ForCausalLM",
        "PanguUltraMoEForCausalLM",
        "OpenPanguV2ForCausalLM",
    ] {
        assert_eq!(of(name).unwrap().rope.style, RotaryStyle::Halves, "{name}");
    }
    let hy4 = of("HYV4ForCausalLM").unwrap();
    assert_eq!((hy4.output_gate, hy4.sinks), (Some(128), true));
    let text = read(
        json!({"architectures": "LongcatFlashForCausalLM", "num_layers": 8,
        "num_hidden_layers": null}),
    );
    assert_eq!(text.unwrap().layers, Some(16));
    for (changes, field) in [
        (
            json!({"architectures": ["DeepseekV4ForCausalLM"]}),
            "architectures",
        ),
        (
            json!({"model_type": "deepseek_v41", "text_config": with(json!({
                "model_type": "deepseek_v3"}))}),
            "model_type",
        ),
    ] {
        let refused = read(changes).unwrap_err();
        assert!(
            refused.starts_with(&format!("{field}: given ")),
            "{refused}"
        );
        assert!(refused.contains("compressed caches"), "{refused}");
    }
}

#[test]
fn a_family_with_layers_of_two_kinds_says_which() {
    for (family, key) in [
        ("glm5_next", "linear_attn_config"),
        ("bailing_hybrid", "layer_group_size"),
        ("dots3_note_omni", "layer_types"),
    ] {
        let refused = read(json!({"model_type": family})).unwrap_err();
        let expected = format!("{key}: given nothing, accepted which layers have latent attention");
        assert!(refused.starts_with(&expected), "{refused}");
    }
    let full = json!({"model_type": "dots3_note_omni", "use_sliding_window": false});
    assert_eq!(read(full).unwrap().layers, Some(8));
}

#[test]
fn layers_may_be_listed_in_any_order_and_by_either_list() {
    let four = Some(2);
    let of = |config: Value| read(json!({"linear_attn_config": config}));
    let unsorted = of(json!({"full_attn_layers": [8, 4]})).unwrap();
    assert_eq!((unsorted.layers, unsorted.other_layers), (four, 6));
    let others = of(json!({"kda_layers": [1, 2, 3, 5, 6, 7]})).unwrap();
    assert_eq!(others, unsorted);
    for (changes, message) in [
        (
            json!({"linear_attn_config": "kda"}),
            "linear_attn_config: given \"kda\", accepted an object or null",
        ),
        (
            json!({"linear_attn_config": {"full_attn_layers": [4, 4]}}),
            "linear_attn_config.full_attn_layers: given an array of 2, accepted numbers from 1 on, \
             each once, of num_hidden_layers = 8",
        ),
        (
            json!({"layer_types": vec!["linear_attention"; 8]}),
            "layer_types: given no such layer, accepted at least one layer with latent attention",
        ),
        (
            json!({"num_hidden_layers": null, "num_layers": 8}),
            "num_hidden_layers: given nothing, accepted an integer from 1 to 65536: num_layers is \
             read in LongCat's models alone",
        ),
    ] {
        assert_eq!(read(changes), Err(message.to_owned()));
    }
    let windowless = json!({"layer_types": vec!["full_attention"; 8], "sliding_window": 512});
    assert_eq!(read(windowless), plain());
}

#[test]
fn fields_count_on_whatever_level_they_stand() {
    let outer = |inner: Value| read(json!({"text_config": inner}));
    let refused = outer(json!({"sliding_window": 512})).unwrap_err();
    assert!(
        refused.starts_with("text_config.sliding_window: given 512"),
        "{refused}"
    );
    assert_eq!(
        outer(json!({"mla_use_output_gate": true}))
            .unwrap()
            .output_gate,
        Some(128)
    );
    let yarn = json!({"type": "yarn", "factor": 40, "mscale_all_dim": 1,
        "original_max_position_embeddings": 4096});
    let scaled = outer(json!({"rope_scaling": yarn})).unwrap();
    assert!((scaled.softmax_scale() - 0.135_233_778).abs() < 1e-8);
    // Two names of the type on two levels: the inner one wins.
    let dtypes = read(json!({"torch_dtype": "float32", "text_config": {"dtype": "bfloat16"}}));
    let dtype = dtypes.unwrap().dtype;
    assert_eq!(dtype, read(json!({"dtype": "bfloat16"})).unwrap().dtype);
    let lost = read(json!({"rope_parameters": {"rope_theta": 5e5},
        "text_config": {"rope_scaling": {"type": "linear", "factor": 2}}}));
    assert_eq!(
        lost.unwrap_err(),
        "rope_parameters.rope_theta: given 500000.0, accepted nothing, as \
         text_config.rope_scaling has it"
    );
}

#[test]
fn sections_of_the_rotation() {
    let yarn = json!({"rope_type": "yarn", "factor": 40, "rope_theta": 5e5, "mscale_all_dim": 1,
        "original_max_position_embeddings": 4096});
    let nulls = json!({"rope_scaling": {"type": null, "factor": null}, "rope_parameters": yarn});
    let read_nulls = read(nulls).unwrap();
    assert_eq!(read_nulls.rope.theta, 5e5);
    assert!(read_nulls.rope.has_yarn());
    let plain = json!({"type": "yarn", "factor": 40, "attn_factor": 0.5,
        "apply_yarn_scaling": false, "original_max_position_embeddings": 4096});
    let plain = read(json!({"rope_scaling": plain})).unwrap();
    assert_eq!(plain.rope.attention_factor(), 1.0);
    let axes = json!({"rope_type": "default", "mrope_section": [8, 12, 12]});
    let work = read(json!({"rope_scaling": axes})).unwrap().engine_work();
    assert_eq!(
        work,
        ["the engine makes the tables of the rotation, whose scaling is mrope"]
    );
    assert_eq!(
        read(json!({"qk_rope_head_dim": 63})).unwrap_err(),
        "qk_rope_head_dim: given 63, accepted an even number, as pairs are rotated"
    );
    // Rotary parts that do not exist need no width.
    let ling = |changes: Value| {
        let mut fields = json!({"use_mla_nope": true});
        fields
            .as_object_mut()
            .unwrap()
            .extend(changes.as_object().unwrap().clone());
        read(fields).unwrap().dims.head
    };
    for changes in [
        json!({"qk_rope_head_dim": null}),
        json!({"qk_rope_head_dim": null, "qk_head_dim": 128}),
        json!({"qk_head_dim": 192}),
        json!({"qk_head_dim": 128}),
    ] {
        let head = ling(changes);
        assert_eq!((head.nope, head.rope), (128, 0));
    }
}

#[test]
fn lists_of_a_sparse_model() {
    let own = |changes: Value| {
        let model = read(sparse(changes)).unwrap();
        let layers = (0..8).filter(|layer| model.has_indexer(*layer));
        layers.collect::<Vec<u32>>()
    };
    let types = |shared: &[usize]| -> Vec<&str> {
        let word = |layer: usize| ["full", "shared"][usize::from(shared.contains(&layer))];
        (0..8).map(word).collect()
    };
    // The first spelling wins over the later ones.
    let both = json!({"indexer_types": types(&[3, 7]), "index_topk_freq": 1,
        "index_topk_pattern": "FFSSSSSS"});
    assert_eq!(own(both), [0, 1, 2, 4, 5, 6]);
    assert_eq!(
        own(json!({"index_topk_pattern": "FFSSFSSS", "index_topk_freq": 4})),
        [0, 1, 4]
    );
    let offset = json!({"index_topk_freq": 1, "index_skip_topk_offset": 0});
    assert_eq!(own(offset), [0, 1, 2, 3, 4, 5, 6, 7]);

    for (changes, message) in [
        (
            json!({"use_dsa": true}),
            "index_topk: given nothing, accepted an integer, as use_dsa asks for lists",
        ),
        (
            json!({"attention_method": "LSA"}),
            "index_topk: given nothing, accepted an integer, as attention_method asks for lists",
        ),
    ] {
        assert_eq!(read(changes), Err(message.to_owned()));
    }
    for none in [json!(0), Value::Null] {
        let dense = json!({"use_dsa": true, "index_topk": none});
        assert_eq!(read(dense).unwrap().index_topk, None);
        let named = json!({"model_type": "glm5_next", "layer_types": vec!["full_attention"; 8],
            "index_topk": none});
        assert_eq!(read(named).unwrap().index_topk, None);
    }
    let kinds = |dense: usize, all: usize| -> Vec<&str> {
        let word = |layer: usize| match layer < dense {
            true => "full_attention",
            false => "sparse_attention",
        };
        (0..all).map(word).collect()
    };
    let shares = json!({"layer_types": kinds(3, 8), "index_topk_freq": 4,
        "index_skip_topk_offset": 3});
    assert_eq!(
        read(sparse(shares)).unwrap_err(),
        "index_topk_freq: given 4, accepted an indexer in layer 3, the first that is sparse"
    );
    let mut behind = kinds(0, 290);
    behind.extend(kinds(10, 10));
    assert_eq!(
        read(sparse(
            json!({"num_hidden_layers": 300, "layer_types": behind})
        ))
        .unwrap_err(),
        "num_hidden_layers: given 300, accepted at most 256, if not all have an indexer"
    );
    assert_eq!(
        own(json!({"num_hidden_layers": 300})),
        [0, 1, 2, 3, 4, 5, 6, 7]
    );
}
