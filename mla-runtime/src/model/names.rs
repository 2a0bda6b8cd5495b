//! The keys of configurations: the table of spellings, the keys that are read, and the keys that do
//! not concern attention although their names suggest it.

use std::sync::LazyLock;

use serde_json::{Value, json};

/// The objects that hold the text model within a multimodal model.
pub(super) const NESTED: &[&str] = &[
    "text_config",
    "language_config",
    "llm_config",
    "thinker_config",
];

/// A key and its other spellings. Two spellings in one object must agree.
pub(super) const SPELLINGS: &[(&str, &[&str])] = &[
    ("num_hidden_layers", &["n_layers"]),
    ("num_attention_heads", &["n_heads"]),
    ("hidden_size", &["dim"]),
    ("kv_lora_rank", &["attention_kv_lora_dim"]),
    ("q_lora_rank", &["attention_q_lora_dim"]),
    ("qk_nope_head_dim", &["attention_qk_dim"]),
    ("qk_rope_head_dim", &["attention_qk_rope_dim"]),
    ("v_head_dim", &["attention_v_dim"]),
    ("qk_head_dim", &["q_head_dim"]),
    ("max_position_embeddings", &["model_max_length"]),
    (
        "num_nextn_predict_layers",
        &["num_mtp_layers", "mtp_num_layers"],
    ),
    ("rope_interleave", &["rope_interleaved"]),
    // With this key the rotary parts exist but are not rotated. With `use_mla_nope` they do not
    // exist.
    ("mla_use_nope", &["mla_nope", "kda_nope"]),
    (
        "mla_scale_q_lora",
        &["apply_mla_qkv_lora_rescale", "use_mla_scaling_factor"],
    ),
    (
        "mla_scale_kv_lora",
        &["apply_mla_qkv_lora_rescale", "use_mla_scaling_factor"],
    ),
    ("layer_group_size", &["fa_interval"]),
    ("use_mla", &["mla", "multi_latent_attention"]),
    ("sliding_window", &["sliding_window_size"]),
];

/// A key's own name, and its other spellings.
pub(super) fn spellings(field: &str) -> impl Iterator<Item = &str> {
    let others = SPELLINGS.iter().find(|(name, _)| *name == field);
    let others = others.map_or(&[][..], |(_, others)| *others);
    [field].into_iter().chain(others.iter().copied())
}

/// The defaults of a family for keys that a file leaves out. The family is recognised by the
/// beginning of its `model_type` or of an architecture.
pub(super) static DEFAULTS: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "dots3": {
            "apply_mla_qkv_lora_rescale": true, "attention_gate_type": "headwise",
            "indexer_rope_interleave": true, "k_rope_only_layernorm": true, "use_dsa": true,
        },
        "gigachat3_5": {"gated_attention": true, "use_mla_scaling_factor": true},
        "glm5_next": {"index_kpool": 16, "use_dsa": true},
        "glm53_flash": {"index_kpool": 16, "use_dsa": true},
        "hy_v4": {"gated_mla": true, "learnable_sink": true},
        "minicpm3": {"rope_interleave": false},
        "openpangu": {"rope_interleave": false},
        "pangu": {"rope_interleave": false},
    })
});

/// Keys that are read only under this name. Without this list, some would be refused because their
/// names suggest attention.
const READ: &[&str] = &[
    "alibi",
    "apply_mla_qkv_lora_rescale",
    "attention_chunk_size",
    "attention_gate_type",
    "attention_method",
    "attention_type",
    "attn_elementwise_gate",
    "attn_groupnorm",
    "attn_logit_softcapping",
    "attn_temperature_tuning",
    "cli_factor",
    "compress_ratios",
    "full_attention_layers",
    "gated_attention",
    "gated_attention_proj_granularity_type",
    "gated_mla",
    "gating_type",
    "index_dsa_use_layernorm",
    "index_head_dim",
    "index_init_tokens",
    "index_k_norm_type",
    "index_kpool",
    "index_kpool_always_select_tail",
    "index_kpool_compress",
    "index_local_tokens",
    "index_n_heads",
    "index_skip_topk_offset",
    "index_topk",
    "index_topk_freq",
    "index_topk_pattern",
    "indexer_rope_interleave",
    "indexer_types",
    "k_rope_only_layernorm",
    "learnable_sink",
    "linear_attention_type",
    "linear_attn_config",
    "llama_4_scaling",
    "mla_use_output_gate",
    "num_krope_heads",
    "param_sink_number",
    "position_embedding_type",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_dim",
    "sliding_window_list",
    "softmax_type",
    "swa_layers",
    "use_dsa",
    "use_mla_nope",
    "use_mla_scaling_factor",
    "use_sliding_window",
    "yarn",
];

/// Keys whose names suggest attention, but that change none of the numbers here. They concern
/// biases of projections, dropout, factors of experts and embeddings, and drafts.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "attention_bias",
    "attention_distillation",
    "attention_dropout",
    "attention_out_bias",
    "attention_output_bias",
    "attention_probs_dropout_prob",
    "attention_qkv_bias",
    // The softmax is always in f32.
    "attention_softmax_in_fp32",
    "attn_dropout",
    "attn_implementation",
    // Layers that add the outputs of earlier layers to theirs.
    "attn_res_block_size",
    "capacity_factor",
    "cross_attention_hidden_size",
    "decoder_sparse_step",
    "dsa_mtp_cli",
    "embedding_scale",
    "enable_attention_fp32_softmax",
    // The cap of the logits over the vocabulary.
    "final_logit_softcapping",
    "ignore_index",
    // Scores are computed in pieces of this size.
    "index_chunk_size",
    "index_share_for_mtp_iteration",
    "initializer_factor",
    "layernorm_gating_weight",
    "learnable_sink_init",
    "lm_head_scale",
    "logit_scale",
    "max_window_layers",
    "nextn_is_sparse",
    "no_kda_lora",
    "num_kv_heads_for_linear_attn",
    "output_attentions",
    // This key never shrinks R, which `qk_rope_head_dim` gives.
    "partial_rotary_factor",
    "residual_scale",
    "route_scale",
    "routed_scaling_factor",
    "scale_depth",
    "scale_emb",
    "scale_fmt",
    // Models with windows are refused anyway.
    "swa_attention_gate_type",
];

/// Prefixes of keys that belong to other parts of a model.
const OTHER_PARTS: &[&str] = &[
    "audio_", "ffn_", "gdn_", "hc_", "image_", "kda_", "linear_", "mamba_", "mhc_", "mlp_", "mm_",
    "moe_", "mtp_", "router_", "video_", "vision_",
];

/// Prefixes of switches. A switch that is off asks for nothing.
pub(super) const SWITCHES: &[&str] = &["add_", "enable_", "has_", "is_", "use_", "with_"];

/// Parts of names that suggest attention.
const SUSPECTS: &[&str] = &[
    "alibi",
    "attention",
    "attn",
    "block_type",
    "cla_",
    "compress",
    "dsa",
    "factor",
    "gate",
    "gating",
    "hybrid",
    "index",
    "interleav",
    "kpool",
    "kv_shared",
    "llama_4",
    "lora",
    "mixer",
    "mla",
    "neox",
    "nope",
    "ntk",
    "pos_enc",
    "position_embedding_type",
    "rope",
    "rotary",
    "scale",
    "scaling",
    "sink",
    "sliding",
    "soft_cap",
    "softcap",
    "softmax",
    "sparse",
    "swa",
    "theta",
    "use_cla",
    "window",
    "yarn",
];

/// Keys of the rotary embedding in DeepSeek's own inference files. Each has the key that a rotary
/// section uses for the same value, and the default of `ModelArgs`. The inference files have no
/// rotary section, and are recognised by the key `inter_dim`.
pub(super) const OF_INFERENCE: &[(&str, &str, f64)] = &[
    ("rope_factor", "factor", 40.0),
    (
        "original_seq_len",
        "original_max_position_embeddings",
        4096.0,
    ),
    ("beta_fast", "beta_fast", 32.0),
    ("beta_slow", "beta_slow", 1.0),
    ("mscale", "mscale", 1.0),
    ("mscale", "mscale_all_dim", 1.0),
];

/// Keys that are read only in a rotary section.
const OF_A_SECTION: &[&str] = &[
    "beta_fast",
    "beta_slow",
    "extrapolation_factor",
    "original_seq_len",
    "truncate",
];

/// Returns true for a key that may say which layers have linear attention. No key of that kind is
/// known by the beginning of its name.
fn names_layers(key: &str) -> bool {
    let has = |parts: &[&str]| parts.iter().any(|part| key.contains(part));
    has(&["gdn", "kda", "linear", "mamba"])
        && has(&[
            "_layers",
            "_layer_",
            "_interval",
            "_period",
            "_pattern",
            "_freq",
        ])
}

/// Returns true for a key that may concern the attention in layers that make drafts.
fn is_of_drafts_attention(key: &str) -> bool {
    let parts = ["index", "rope", "sparse", "window"];
    key.starts_with("mtp_") && parts.iter().any(|part| key.contains(part))
}

/// Returns true for a key that is read, or that does not concern attention.
pub(super) fn is_known(key: &str) -> bool {
    let spelt = |(name, others): &(&str, &[&str])| *name == key || others.contains(&key);
    READ.contains(&key)
        || HARMLESS.contains(&key)
        || NESTED.contains(&key)
        || SPELLINGS.iter().any(spelt)
        || (OTHER_PARTS.iter().any(|begin| key.starts_with(begin))
            && !names_layers(key)
            && !is_of_drafts_attention(key))
        || key.ends_with("_token_index")
        || ["expert", "router", "moe"]
            .iter()
            .any(|part| key.contains(part))
}

/// Returns true for a key whose name suggests attention.
pub(super) fn is_suspect(key: &str) -> bool {
    OF_A_SECTION.contains(&key)
        || names_layers(key)
        || SUSPECTS.iter().any(|part| key.contains(part))
}

/// Returns true if both are equal. Numbers are compared by value: 1 equals 1.0.
pub(super) fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_is_listed_twice_or_in_vain() {
        let spelt = SPELLINGS.iter().flat_map(|(name, _)| [*name]);
        let mut all: Vec<&str> = spelt.chain(READ.iter().copied()).collect();
        all.extend(HARMLESS);
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
        for key in READ.iter().chain(HARMLESS) {
            assert!(is_suspect(key), "{key} would pass without being listed");
        }
    }
}
