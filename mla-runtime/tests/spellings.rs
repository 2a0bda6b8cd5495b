//! Tests the spellings of configurations. Each key that affects numbers is either read, or refused
//! by its name.

use mla_runtime::model::{ModelConfig, Rope, RotaryStyle};
use serde_json::{Value, json};

fn with(mut config: Value, changes: Value) -> Value {
    let changes = changes.as_object().unwrap().clone();
    config.as_object_mut().unwrap().extend(changes);
    config
}

/// A configuration with DeepSeek-V3's dimensions and eight layers, with changes. Null removes a
/// key.
fn text(changes: Value) -> String {
    let base = json!({
        "num_attention_heads": 128, "num_hidden_layers": 8, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "torch_dtype": "bfloat16", "rope_theta": 10000, "max_position_embeddings": 163_840,
    });
    with(base, changes).to_string()
}

fn read(changes: Value) -> ModelConfig {
    let text = text(changes);
    ModelConfig::from_hf_config(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(changes: Value) -> String {
    let text = text(changes);
    match ModelConfig::from_hf_config(&text) {
        Err(error) => error.to_string(),
        Ok(model) => panic!("{text}: read as {model:?}"),
    }
}

fn indexed(changes: Value) -> Value {
    let indexer = json!({"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128});
    with(indexer, changes)
}

/// The rows of a table: changes, an arrow, and what is expected. Further lines of a row are
/// indented.
fn rows(table: &str) -> impl Iterator<Item = (Value, String)> {
    table.trim().split("\n{").map(|row| {
        let words: Vec<&str> = row.split_whitespace().collect();
        let row = format!("{{{}", words.join(" ").trim_start_matches('{'));
        let (changes, expected) = row.split_once(" => ").unwrap();
        let changes = serde_json::from_str(changes);
        (
            changes.unwrap_or_else(|error| panic!("{row}: {error}")),
            expected.to_owned(),
        )
    })
}

/// Configurations that are refused, with the sentence of each error.
const REFUSED: &str = r#"
{"attention_kv_lora_dim": 256} =>
    kv_lora_rank: given 512, accepted 256, as attention_kv_lora_dim has it
{"q_head_dim": 128} => q_head_dim: given 128, accepted 192, as other fields have it
{"yarn": {"factor": 36}, "rope_scaling": {"type": "linear", "factor": 2}} =>
    yarn: given a section, accepted another, as rope_scaling has it
{"yarn": {"factor": 36, "gamma": 2}} =>
    yarn.gamma: given 2, accepted nothing or null: it is not known if this changes the attention
{"model_type": "longcat_flash", "num_layers": 28, "num_hidden_layers": 30} =>
    num_hidden_layers: given 30, accepted 28, as num_layers has it
{"model_type": "longcat_flash"} =>
    num_layers: given nothing, accepted an integer from 1 to 65536
{"full_attention_layers": [8], "linear_attention_type": "x"} =>
    full_attention_layers: given an array of 1, accepted numbers from 0 on, each once, of
    num_hidden_layers = 8
{"layer_group_size": 4, "full_attention_layers": [0, 4], "linear_attention_type": "x"} =>
    full_attention_layers: given layers [0, 4], accepted layers [3, 7], as layer_group_size has it
{"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2]}} =>
    linear_attn_config.kda_layers: given 2 layers, accepted the rest of 8, without 2, as
    linear_attn_config.full_attn_layers has it
{"linear_attn_config": {"full_attn_layers": [0, 4]}} =>
    linear_attn_config.full_attn_layers: given an array of 2, accepted numbers from 1 on, each once,
    of num_hidden_layers = 8
{"linear_attn_config": {"full_attn_layers": [4, 4]}} =>
    linear_attn_config.full_attn_layers: given an array of 2, accepted numbers from 1 on, each once,
    of num_hidden_layers = 8
{"linear_attn_config": {"full_attn_layers": [9]}} =>
    linear_attn_config.full_attn_layers: given an array of 1, accepted numbers from 1 on, each once,
    of num_hidden_layers = 8
{"linear_attn_config": {}} =>
    full_attn_layers: given nothing as linear_attn_config.full_attn_layers, accepted a list of the
    layers with full attention
{"layer_group_size": 0} => layer_group_size: given 0, accepted an integer from 1 to 65536
{"mla_use_nope": 1} => mla_use_nope: given 1, accepted true or false
{"layer_types": ["full_attention"]} =>
    layer_types: given an array of 1, accepted a list of strings, of num_hidden_layers = 8
{"layer_types": [1, 2], "num_hidden_layers": 2} =>
    layer_types: given an array of 2, accepted a list of strings, of num_hidden_layers = 2
{"layer_types": "full"} =>
    layer_types: given "full", accepted a list of strings, of num_hidden_layers = 8
{"layer_types": ["full_attention"], "num_hidden_layers": 1, "index_topk": 2048} =>
    layer_types: given no sparse layer, accepted 2048, as index_topk has it
{"layer_types": ["sparse"], "num_hidden_layers": 1} =>
    index_topk: given nothing, accepted an integer from 1 to 65536 beside sparse layer_types
{"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2} =>
    layer_types: given "sliding_attention", accepted a model without a sliding window, which no
    backend here has
{"model_type": "other", "compress_ratios": [0, 4, 128]} =>
    compress_ratios: given an array, accepted a model without compressed caches and windows beside
    them, which no backend here has
{"use_mla": 0} =>
    use_mla: given 0, accepted a model without keys and values of every head in the cache, which no
    backend here has
{"attn_logit_softcapping": 50.0} =>
    attn_logit_softcapping: given 50.0, accepted a model without a soft cap of logits, which no
    backend here has
{"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128, "index_k_norm_type": "batch"} =>
    index_k_norm_type: given "batch", accepted rms or layernorm
{"attention_gate_type": "channelwise"} =>
    attention_gate_type: given "channelwise", accepted elementwise, element_wise, headwise,
    head_wise or none
{"attention_gate_type": "headwise", "gated_mla": true, "gating_type": "elementwise"} =>
    gating_type: given elementwise, accepted headwise, as attention_gate_type has it
{"rope_theta": null, "rope_parameters": {"rope_theta": 8e6},
    "rope_scaling": {"type": "linear", "factor": 2}} =>
    rope_parameters.rope_theta: given 8000000.0, accepted nothing, as rope_scaling has it
{"rope_scaling": {"type": "yarn", "rope_type": "default", "factor": 40}} =>
    rope_scaling.type: given yarn, accepted default, as rope_scaling.rope_type has it
{"rope_scaling": {"rope_type": "YARN", "factor": 40}} =>
    rope_scaling.type: given "YARN", accepted default, linear, yarn, deepseek_yarn, dynamic,
    longrope, su, llama3, mrope, ntk or none
{"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    "layer_types": ["full_attention"], "num_hidden_layers": 1} =>
    rope_parameters.full_attention: given nothing, accepted an object: there are layers of this kind
{"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}} =>
    rope_parameters: given a section for each kind of layer, accepted a model with layers of one of
    them
{"rope_scaling": {"rope_type": "yarn", "factor": 64, "rope_theta": 5e5,
    "original_max_position_embeddings": 4096, "max_position_embeddings": 4096}} =>
    rope_scaling.max_position_embeddings: given 4096, accepted 163840, as max_position_embeddings
    has it
"#;

#[test]
fn refusals() {
    for (changes, expected) in rows(REFUSED) {
        assert_eq!(refused(changes), expected);
    }
}

#[test]
fn nested_text_models() {
    let inner = || serde_json::from_str::<Value>(&text(json!({"n_heads": 128}))).unwrap();
    for config in [
        json!({"text_config": inner()}),
        json!({"language_config": inner(), "vision_config": {"rope_theta": 7}}),
        json!({"llm_config": inner(), "text_config": {"rope_dim": null}}),
        json!({"thinker_config": {"text_config": inner()}, "rope_theta": 5e5}),
    ] {
        let model = ModelConfig::from_hf_config(&config.to_string()).unwrap();
        assert_eq!(model, read(json!({})));
    }
    let two = json!({"text_config": inner(), "llm_config": inner()});
    let error = ModelConfig::from_hf_config(&two.to_string()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "llm_config: given an object, accepted one text model, as text_config has it"
    );
}

#[test]
fn dimensions_have_other_names() {
    let pangu = json!({
        "model_type": "pangu_ultra_moe", "num_hidden_layers": 8, "num_attention_heads": 128,
        "attention_q_lora_dim": 1536, "attention_qk_dim": 128, "attention_qk_rope_dim": 64,
        "attention_kv_lora_dim": 512, "attention_v_dim": 128, "torch_dtype": "bfloat16",
        "max_position_embeddings": 163_840, "num_mtp_layers": 3,
    });
    let model = ModelConfig::from_hf_config(&pangu.to_string()).unwrap();
    let expected = read(json!({"rope_interleaved": false, "num_nextn_predict_layers": 3}));
    assert_eq!(model, expected);
    assert_eq!(
        (model.rope.style, model.draft_layers),
        (RotaryStyle::Halves, 3)
    );
    for none in [json!(null), json!(0), json!(-1), json!(-1.0)] {
        assert_eq!(read(json!({"q_lora_rank": none})).q_lora_rank, None);
        let model = read(indexed(json!({"index_topk": none, "index_n_heads": null,
            "index_head_dim": null, "sliding_window": none})));
        assert_eq!(model.index_topk, None);
    }
    assert_eq!(read(indexed(json!({"index_topk": 0}))).indexer, None);
    // The value of `qk_rope_head_dim` gives R. Other widths must agree with it or do not matter.
    let same = json!({"head_dim": 576, "partial_rotary_factor": 0.5, "qk_head_dim": 192});
    assert_eq!(read(same), read(json!({})));
    let absent = read(json!({"use_mla_nope": true}));
    assert_eq!((absent.dims.head.rope, absent.rope.rotates), (0, true));
    assert_eq!(absent.softmax_scale(), 1.0 / 128f64.sqrt());
    for still in ["mla_use_nope", "mla_nope", "kda_nope"] {
        let model = read(json!({still: true}));
        assert_eq!((model.dims.head.rope, model.rope.rotates), (64, false));
    }
}

#[test]
fn non_json_numbers() {
    let plain = text(json!({}));
    let with_mark = format!("\u{feff}{plain}");
    assert_eq!(ModelConfig::from_hf_config(&with_mark), Ok(read(json!({}))));
    let before = |fields: &str| plain.replacen('{', &format!("{{{fields},"), 1);
    let others = before(r#""time_limit": [0.0, Infinity, -Infinity], "z": NaN, "n": "\"NaN""#);
    assert_eq!(ModelConfig::from_hf_config(&others), Ok(read(json!({}))));
    let own = before(r#""rope_scaling": {"type": "linear", "factor": Infinity}"#);
    assert_eq!(
        ModelConfig::from_hf_config(&own).unwrap_err().to_string(),
        "rope_scaling.factor: given \"Infinity\", accepted a number above 0"
    );
    let yarn = json!({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096.0});
    let rope = read(json!({"rope_scaling": yarn, "num_hidden_layers": 8.0})).rope;
    assert_eq!(rope, rope.with_yarn(40.0, Some(4096)));
    assert_eq!(
        read(json!({"torch_dtype": "torch.bfloat16"})),
        read(json!({}))
    );
}

#[test]
fn mistrals_own_file_is_read() {
    let params = |apply: bool| {
        let json = json!({
            "dim": 7168, "n_layers": 61, "n_heads": 128, "n_kv_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "rope_theta": 10000.0, "max_position_embeddings": 294_912,
            "yarn": {"original_max_position_embeddings": 8192, "factor": 36, "beta": 32,
                "alpha": 1, "apply_scale": apply},
            "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
        });
        ModelConfig::from_hf_config(&json.to_string()).unwrap()
    };
    let model = params(false);
    let yarn = model.rope.with_yarn(36.0, Some(8192)).with_mscale(1.0, 1.0);
    assert_eq!(model.rope, yarn.with_applied_scale(false));
    assert_eq!((model.heads, model.layers), (128, Some(61)));
    assert_eq!(model.query_factor(8191), Some(1.0));
    assert_eq!(model.query_factor(8192), Some(1.0 + 0.1 * 1f64.ln_1p()));
    assert_eq!(model.softmax_scale(), 1.0 / 192f64.sqrt());
    assert_eq!(model.rope.attention_factor(), 1.0);
    // m = 0.1·ln 36 + 1.
    let m = 1.358_351_893_845_611;
    let scale = params(true).softmax_scale();
    assert!((scale * 192f64.sqrt() / (m * m) - 1.0).abs() < 1e-12);
}

#[test]
fn deepseeks_own_file_has_yarn_without_saying_so() {
    let read = |changes: Value| {
        let own = json!({
            "vocab_size": 129_280, "dim": 7168, "inter_dim": 18432, "moe_inter_dim": 2048,
            "n_layers": 61, "n_dense_layers": 3, "n_heads": 128, "n_activated_experts": 8,
            "route_scale": 2.5, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "dtype": "fp8",
        });
        ModelConfig::from_hf_config(&with(own, changes).to_string()).unwrap()
    };
    let yarn = Rope::plain(1e4).with_yarn(40.0, Some(4096));
    let model = read(json!({}));
    let published = ModelConfig::preset("deepseek-v3").unwrap();
    let rope = yarn.with_mscale(1.0, 1.0);
    assert_eq!((model.rope, model.dtype), (rope, published.dtype));
    assert_eq!((model.heads, model.layers), (128, Some(61)));
    assert_eq!(model.softmax_scale(), published.softmax_scale());
    let lite = read(json!({"q_lora_rank": 0, "mscale": 0.707, "dtype": "bf16"}));
    assert_eq!(lite.rope, yarn.with_mscale(0.707, 0.707));
    assert_eq!(lite.q_lora_rank, None);
    let other = read(json!({"rope_factor": 8, "original_seq_len": 2048, "beta_fast": 16}));
    let expected = Rope::plain(1e4)
        .with_yarn(8.0, Some(2048))
        .with_mscale(1.0, 1.0);
    assert_eq!(other.rope, expected.with_betas(16.0, 1.0));
}

#[test]
fn a_familys_class_fills_in_what_a_file_leaves_out() {
    let of = |family: &str, changes: Value| read(with(json!({"model_type": family}), changes));
    let hy4 = of("hy_v4", json!({"gating_type": "headwise"}));
    assert_eq!((hy4.output_gate, hy4.sinks), (Some(1), true));
    let off = of(
        "hy_v4",
        json!({"gated_mla": false, "learnable_sink": false}),
    );
    assert_eq!((off.output_gate, off.sinks), (None, false));
    let gigachat = of("gigachat3_5", json!({"linear_attention_type": null}));
    assert!(gigachat.output_gate.is_some() && gigachat.scaled_query_latents);
    let dots3 = of(
        "dots3_note_omni",
        indexed(json!({
            "layer_types": vec!["full_attention"; 8], "k_rope_only_layernorm": null,
        })),
    );
    assert_eq!(dots3.output_gate, Some(1));
    assert!(dots3.scaled_latents && dots3.rotary_key_norm);
    assert_eq!(dots3.indexer.unwrap().rotary, RotaryStyle::Interleaved);
    assert_eq!(dots3.indexers(8), 8);
    for family in ["minicpm3", "pangu_ultra_moe", "openpangu_v2"] {
        assert_eq!(of(family, json!({})).rope.style, RotaryStyle::Halves);
        let other = of(family, json!({"rope_interleave": true}));
        assert_eq!(other.rope.style, RotaryStyle::Interleaved);
    }
    let one = indexed(json!({"model_type": "glm5_next", "index_kpool": 1,
        "layer_types": vec!["full_attention"; 8]}));
    assert!(read(one).indexer.is_some());
}

/// The layers with a cache of these configurations, and the other ones. If the other key of
/// `full_attention_layers` is missing and not null, the model is a hybrid.
const LAYERS: &str = r#"
{"model_type": "longcat_flash", "num_layers": 28, "num_hidden_layers": null} => 56+0
{"model_type": "longcat_flash", "num_layers": 28, "num_hidden_layers": 28} => 56+0
{"model_type": "longcat_flash", "num_layers": 28, "num_hidden_layers": 56} => 56+0
{"model_type": "longcat_flash", "num_layers": 4, "num_hidden_layers": null,
    "attention_method": "LSA", "index_topk": null} => 8+0
{"architectures": ["LongcatForCausalLM"], "num_layers": 14, "num_hidden_layers": null} => 28+0
{"num_layers": 8, "num_hidden_layers": null, "fa_interval": 4} => 2+6
{"model_type": "longcat_flash", "num_layers": 8, "num_hidden_layers": null, "fa_interval": 4} => 2+6
{"layer_group_size": 4, "num_hidden_layers": 21} => 6+15
{"layer_group_size": 6, "num_hidden_layers": 42} => 7+35
{"full_attention_layers": [3, 7], "linear_attention_type": "GatedDeltaNet"} => 2+6
{"full_attention_layers": [3, 7], "linear_attention_type": null} => 8+0
{"full_attention_layers": [3, 7]} => 2+6
{"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}} => 2+6
{"layer_types": ["attention", "linear_attention"], "num_hidden_layers": 2} => 1+1
{"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
    "linear_attention_type": "GatedDeltaNet"} => 1+1
{"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
    "linear_attn_config": {"num_heads": 64}} => 1+1
{"model_type": "glm5_next", "index_kpool": 1,
    "linear_attn_config": {"full_attn_layers": [3, 7], "kda_layers": [0, 1, 2, 4, 5, 6]}} => 2+6
"#;

#[test]
fn layers_are_counted_by_their_caches() {
    for (changes, expected) in rows(LAYERS) {
        let model = read(changes.clone());
        let counts = format!("{}+{}", model.layers.unwrap(), model.other_layers);
        assert_eq!(counts, expected, "{changes}");
    }
}

#[test]
fn sparse_and_dense_layers_have_names() {
    let types = |types: [&str; 4], others: Value| {
        let changes = json!({"layer_types": types, "num_hidden_layers": 4});
        with(indexed(changes), others)
    };
    let dense = "full_attention";
    let model = read(types(
        [dense, "sparse_attention", "sparse", "indexed_attention"],
        json!({"index_topk_pattern": "FFSC"}),
    ));
    let has = [0, 1, 2, 3].map(|layer| (model.has_indexer(layer), model.list_source(layer)));
    assert_eq!(has, [(false, 0), (true, 1), (false, 1), (true, 3)]);
    assert_eq!((model.indexers(4), model.dense_layers(4)), (2, 1));
    // A linear layer has no number among the layers with a cache.
    let linear = "linear_attention";
    let model = read(types([linear, "sparse", linear, "sparse"], json!({})));
    assert_eq!((model.layers, model.indexers(2)), (Some(2), 2));
    let all = read(types([dense; 4], json!({"use_dsa": true})));
    assert_eq!(all.indexers(4), 4);
    let off = read(types([dense; 4], json!({"use_dsa": false})));
    assert_eq!((off.index_topk, off.indexer), (None, None));
}

#[test]
fn lists_are_shared_by_any_spelling() {
    let own = |changes: Value| {
        let model = read(indexed(changes));
        (0..8)
            .filter(|layer| model.has_indexer(*layer))
            .collect::<Vec<u32>>()
    };
    assert_eq!(
        own(json!({"index_topk_pattern": ["C", "S", "S", "F", "S", "S", "S", "S"]})),
        [0, 3]
    );
    assert_eq!(own(json!({"index_topk_freq": 4})), [0, 1, 5]);
    assert_eq!(own(json!({"cli_factor": 2})), [0, 2, 4, 6]);
    let hy4 = json!({"model_type": "hy_v4"});
    assert_eq!(own(hy4.clone()), [0, 1, 5]);
    // The indexer of this model rotates the last values, and the pairing of rotary elements is
    // disputed.
    let model = read(indexed(hy4));
    assert_eq!((model.indexer, model.index_topk), (None, Some(2048)));
    assert!(model.foreign_indexer.is_some() && model.rotary_style_is_disputed);
    for key in ["index_init_tokens", "index_local_tokens"] {
        let model = read(indexed(json!({key: 16})));
        assert!(model.indexer.is_none() && model.foreign_indexer.is_some());
    }
    assert!(
        read(indexed(json!({"index_k_norm_type": "rms"})))
            .foreign_indexer
            .is_some()
    );
    let pooled = read(indexed(
        json!({"model_type": "glm5_next", "qk_rope_head_dim": 0,
            "layer_types": vec!["full_attention"; 8]}),
    ));
    assert_eq!(pooled.indexer.unwrap().pool, 16);
}

/// The values of the output gate for each head, of which each has 128.
const GATES: &str = r#"
{"mla_use_output_gate": true} => Some(128)
{"gated_attention": true} => Some(128)
{"attn_elementwise_gate": true} => Some(128)
{"gated_mla": true, "gating_type": "elementwise"} => Some(128)
{"gated_mla": true, "gating_type": "headwise"} => Some(1)
{"gated_mla": false, "gating_type": "headwise"} => None
{"attention_gate_type": "headwise"} => Some(1)
{"attention_gate_type": "none"} => None
{"gated_attention_proj_granularity_type": "head_wise"} => Some(1)
{"gated_attention_proj_granularity_type": "element_wise"} => Some(128)
"#;

#[test]
fn gates_have_a_granularity() {
    for (changes, expected) in rows(GATES) {
        let gate = read(changes.clone()).output_gate;
        assert_eq!(format!("{gate:?}"), expected, "{changes}");
    }
}

#[test]
fn engine_owned_fields() {
    let scaled = json!({
        "hidden_size": 6144, "mla_scale_q_lora": true, "mla_scale_kv_lora": true,
        "k_rope_only_layernorm": true, "learnable_sink": true, "gated_attention": true,
        "layer_group_size": 4, "num_nextn_predict_layers": 3,
    });
    let model = read(scaled);
    assert!(model.scaled_query_latents && model.scaled_latents);
    assert_eq!(model.latent_factor(1536), Some(2.0));
    assert_eq!(model.latent_factor(512), Some(12f64.sqrt()));
    assert_eq!(
        model.engine_work(),
        [
            "outputs have a gate, one for each head and value, by whose sigmoid the engine \
             multiplies them, or the layer",
            "each head has a learnt sink, which the engine passes",
            "the engine multiplies query latents by 2.000000 behind their norm",
            "the engine multiplies latents by 3.464102 behind their norm",
            "the engine normalises rotary keys before it rotates them",
            "6 layers have a linear attention, which is the engine's",
            "layers of drafts, each with a cache of its own beside those counted: 3",
        ]
    );
    for key in ["apply_mla_qkv_lora_rescale", "use_mla_scaling_factor"] {
        let model = read(json!({key: true}));
        assert!(model.scaled_query_latents && model.scaled_latents);
        assert_eq!(model.latent_factor(512), None);
    }
    let disputed = ModelConfig::preset("mistral-small-4").unwrap();
    assert_eq!(disputed.engine_work().len(), 2);
    let chosen = ModelConfig::preset("mistral-small-4").map(|mut model| {
        model.rope = model.rope.with_applied_scale(false);
        (model.softmax_scale(), model.engine_work().len())
    });
    assert_eq!(chosen, Ok((1.0 / 128f64.sqrt(), 1)));
}

#[test]
fn rotation_section_order() {
    let plain = |theta: f64| Rope::plain(theta).with_max_positions(163_840);
    let section = json!({"rope_type": "yarn", "factor": 64, "rope_theta": 5e5,
        "original_max_position_embeddings": 4096});
    let expected = plain(5e5).with_yarn(64.0, Some(4096));
    let sliding = json!({"rope_type": "default", "rope_theta": 1e4});
    for changes in [
        json!({"rope_parameters": section}),
        json!({"rope_parameters": section, "rope_scaling": {}}),
        json!({"rope_parameters": section, "rope_scaling": section}),
        json!({"rope_parameters": {"rope_theta": 8e6}, "rope_scaling": section}),
        json!({"original_max_position_embeddings": 4096, "rope_scaling":
            with(section.clone(), json!({"original_max_position_embeddings": 8192}))}),
        json!({"rope_parameters": {"full_attention": section, "sliding_attention": sliding}}),
        json!({"rope_parameters": {"deepseek_sparse_attention": section}}),
        json!({"rope_parameters": {"attention": section, "chunked_attention": sliding}}),
        json!({"rope_parameters": {"sparse": section, "linear_attention": sliding},
            "layer_types": ["sparse", "linear_attention"], "num_hidden_layers": 2,
            "index_topk": 64}),
    ] {
        assert_eq!(read(changes.clone()).rope, expected, "{changes}");
    }
    // A text model's own section has precedence over one around it.
    let inner: Value = serde_json::from_str(&text(json!({"rope_parameters": section}))).unwrap();
    let outer = json!({"text_config": inner, "rope_scaling": {"type": "linear", "factor": 2}});
    let model = ModelConfig::from_hf_config(&outer.to_string()).unwrap();
    assert_eq!(model.rope, expected);
    // A base further in wins over that of a section around it, which has the rest.
    let inner = |changes| serde_json::from_str::<Value>(&text(changes)).unwrap();
    for (theta, expected) in [(json!(1e6), 1e6), (json!(null), 5e5)] {
        let around = json!({"text_config": inner(json!({"rope_theta": theta})),
            "rope_theta": 7, "rope_parameters": section});
        let rope = ModelConfig::from_hf_config(&around.to_string())
            .unwrap()
            .rope;
        assert_eq!(rope, plain(expected).with_yarn(64.0, Some(4096)));
    }
    let su = json!({"type": "su", "rope_type": "longrope", "long_factor": [1.0]});
    let model = read(json!({"rope_scaling": su}));
    assert_eq!(
        model.engine_work(),
        ["the engine makes the tables of the rotation, whose scaling is longrope"]
    );
    let tables = model.rope.cos_sin(64, 1);
    assert_eq!(
        tables.unwrap_err().to_string(),
        "rope_scaling.type: given longrope, accepted yarn, linear, default or none: there are no \
         tables of another kind"
    );
}

#[test]
fn yarn_keys_change_numbers() {
    let yarn = |changes: Value| {
        let section = json!({"type": "yarn", "factor": 40, "mscale_all_dim": 1,
            "original_max_position_embeddings": 4096});
        read(json!({"rope_scaling": with(section, changes)}))
    };
    // m = 0.1·ln 40 + 1.
    let m = 1.368_887_945_411_393_6;
    let half = yarn(json!({"attn_factor": 0.5, "mscale_all_dim": 0}));
    assert!((half.rope.attention_factor() - m / 2.0).abs() < 1e-15);
    assert_eq!(
        yarn(json!({"attention_factor": 1.0})).softmax_scale(),
        1.0 / 192f64.sqrt()
    );
    let off = yarn(json!({"apply_yarn_scaling": false, "attention_factor": 1.5}));
    assert_eq!(off.softmax_scale(), 1.0 / 192f64.sqrt());
    assert_eq!(off.rope.attention_factor(), 1.0);
    // The first pair keeps nothing of its own frequency.
    let interpolated = yarn(json!({"extrapolation_factor": 0})).rope;
    assert_eq!(interpolated.frequencies(64).unwrap()[0], 1.0 / 40.0);
}

#[test]
fn number_changing_keys() {
    let unknown = |field: &str, given: &str| {
        format!(
            "{field}: given {given}, accepted nothing or null: it is not known if this changes \
             the attention"
        )
    };
    let keys = "attention_scale attn_output_gate beta_fast block_types gate_bias \
                hybrid_override_pattern index_temperature kda_layers layers_block_type \
                linear_layer_interval mscale query_pre_attn_scalar rope_factor rope_is_neox \
                sink_tokens sparse_block_size swa_rope_theta use_rope_scaling_v2 window_size";
    for key in keys.split(' ') {
        assert_eq!(refused(json!({key: 2})), unknown(key, "2"));
        read(json!({key: null}));
        let nested: Value = serde_json::from_str(&text(json!({key: 2}))).unwrap();
        let error = ModelConfig::from_hf_config(&json!({"text_config": nested}).to_string());
        assert_eq!(
            error.unwrap_err().to_string(),
            unknown(&format!("text_config.{key}"), "2")
        );
    }
    for (kind, key) in [
        ("yarn", "ntk_factor"),
        ("yarn", "long_factor"),
        ("linear", "mscale"),
        ("longrope", "mscale_all_dim"),
        ("default", "factor"),
    ] {
        let mut section = json!({"type": kind, key: 2});
        if kind != "default" {
            section["factor"] = json!(2);
        }
        let message = unknown(&format!("rope_scaling.{key}"), "2");
        assert_eq!(refused(json!({"rope_scaling": section})), message);
    }
    // Keys of other parts of a model, and switches that are off.
    let harmless = json!({
        "attention_bias": false, "attention_dropout": 0.0, "routed_scaling_factor": 2.5,
        "moe_gate_type": "x", "linear_attn_norm_size": 2, "image_token_index": 7, "scale_emb": 12,
        "use_sink": false, "mtp_loss_scaling_factor": 0, "kda_safe_gate": true,
        "mlp_layer_types": ["dense"], "attn_temperature_tuning": false,
        "attention_chunk_size": null, "param_sink_number": 0, "swa_layers": [],
        "attn_res_block_size": 12, "learnable_sink_init": 0.0, "layernorm_gating_weight": 2.0,
        "attention_distillation": false, "softmax_type": "vanilla", "mla": true, "use_mla": true,
        "multi_latent_attention": true, "attention_method": "mla", "attn_groupnorm": false,
        "linear_key_head_dim": 2, "kda_layernorm": true, "is_neox_style": false, "alibi": false,
        "position_embedding_type": "rope", "sliding_window": 4096, "use_sliding_window": false,
    });
    assert_eq!(read(harmless), read(json!({})));
    let foreign = json!({
        "alibi": true, "attention_chunk_size": 8192, "attn_temperature_tuning": true,
        "att_impl_type": "GQA", "attention_method": "GQA", "attn_groupnorm": true,
        "index_dsa_use_layernorm": false, "mla": false, "softmax_type": "off-by-one",
        "num_krope_heads": 2, "param_sink_number": 128, "position_embedding_type": "learned",
        "sliding_window_size": 512, "swa_layers": [1], "use_mla": "false", "v_head_dim": 0,
    });
    for (key, value) in foreign.as_object().unwrap() {
        let error = refused(json!({key: value}));
        assert!(error.starts_with(&format!("{key}: given ")), "{error}");
        assert!(error.ends_with(", which no backend here has"), "{error}");
    }
}
