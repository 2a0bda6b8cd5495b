//! The public models known by name, each with its configuration.

use super::ModelConfig;
use crate::{Error, Result, suggestion};

/// A public model and its configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Preset {
    /// The name, in lower case: `deepseek-v3.2`.
    pub name: &'static str,
    /// The public files that contain these numbers.
    pub source: &'static str,
    /// The fields that no file of the publisher confirms; none for most models.
    pub unconfirmed: &'static [&'static str],
    /// The fields of the model's `config.json` or `params.json` that affect the numbers.
    pub json: &'static str,
}

impl Preset {
    /// A public model by its name.
    ///
    /// # Errors
    ///
    /// If there is no such model. The error lists the existing names and suggests a similar one.
    pub fn named(name: &str) -> Result<&'static Self> {
        let found = PRESETS.iter().find(|preset| preset.name == name);
        found.ok_or_else(|| {
            let names = || PRESETS.iter().map(|preset| preset.name);
            let hint = suggestion::nearest(name, names())
                .map_or_else(String::new, |name| format!("; did you mean {name}?"));
            let accepted = names().collect::<Vec<_>>().join(", ") + &hint;
            Error::argument(
                "model",
                format!("{:?}", suggestion::shortened(name)),
                accepted,
            )
        })
    }

    /// The configuration, as [`ModelConfig::from_hf_config`] reads it.
    ///
    /// # Errors
    ///
    /// If the model needs a property that no backend here has. The error names it.
    pub fn config(&self) -> Result<ModelConfig> {
        ModelConfig::from_hf_config(self.json)
    }
}

/// Writes rows of [`PRESETS`] from a name, its file in `models/`, its source, and the unconfirmed
/// fields.
macro_rules! presets {
    ($($name:literal = $file:literal, $source:literal $(, unconfirmed: $($field:literal)*)?;)*) => {
        &[$(Preset {
            name: $name,
            source: $source,
            unconfirmed: &[$($($field),*)?],
            json: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/", $file, ".json")),
        }),*]
    };
}

/// The public models known by name. They include models that are refused because no backend
/// supports them.
///
/// `kimi-k2` is the first Kimi-K2-Instruct, whose context is extended by a factor of 32. The
/// versions 0905 and Thinking have a factor of 64 and otherwise the same attention.
///
/// `mistral-small-4` has the numbers of its `config.json`, so its softmax scale includes yarn's
/// factor m²: 0.194969. Mistral's own `params.json` says `apply_scale: false`, and the scale is
/// then 0.088388. An engine that follows `params.json` leaves out the factor with
/// [`Rope::with_applied_scale`](super::Rope::with_applied_scale).
pub const PRESETS: &[Preset] = presets! {
    "deepseek-v2-lite" = "deepseek-v2-lite", "config.json of deepseek-ai/DeepSeek-V2-Lite";
    "deepseek-v2" = "deepseek-v2", "config.json of deepseek-ai/DeepSeek-V2";
    "deepseek-v3" = "deepseek-v3", "config.json of deepseek-ai/DeepSeek-V3";
    "deepseek-r1" = "deepseek-v3", "config.json of deepseek-ai/DeepSeek-R1";
    "deepseek-v3.1" = "deepseek-v3", "config.json of deepseek-ai/DeepSeek-V3.1";
    "deepseek-v3.2" = "deepseek-v3.2", "config.json of deepseek-ai/DeepSeek-V3.2";
    "deepseek-v4" = "deepseek-v4", "config.json of deepseek-ai/DeepSeek-V4-Flash";
    "deepseek-v4.1" = "deepseek-v4.1", "vLLM's transformers_utils/configs/deepseek_v41.py";
    "deepseek-vl2" = "deepseek-vl2", "vLLM's transformers_utils/configs/deepseek_vl2.py",
        unconfirmed: "num_hidden_layers" "num_attention_heads" "kv_lora_rank" "qk_nope_head_dim"
        "qk_rope_head_dim" "v_head_dim" "q_lora_rank" "rope_theta" "max_position_embeddings";
    "deepseek-vl2-tiny" = "deepseek-vl2-tiny", "config.json of deepseek-ai/deepseek-vl2-tiny",
        unconfirmed: "num_hidden_layers" "num_attention_heads";
    "kimi-k2" = "kimi-k2", "config.json of moonshotai/Kimi-K2-Instruct";
    "kimi-k2.5" = "kimi-k2.5", "config.json of moonshotai/Kimi-K2.5";
    "kimi-k2.6" = "kimi-k2.5", "config.json of moonshotai/Kimi-K2.6";
    "kimi-k2.7" = "kimi-k2.5", "config.json of moonshotai/Kimi-K2.7";
    "kimi-k3" = "kimi-k3", "config.json of moonshotai/Kimi-K3";
    "kimi-linear-48b" = "kimi-linear-48b", "config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct";
    "moonlight-16b" = "moonlight-16b", "config.json of moonshotai/Moonlight-16B-A3B";
    "glm-4.7-flash" = "glm-4.7-flash", "config.json of zai-org/GLM-4.7-Flash";
    "glm-5" = "glm-5", "config.json of zai-org/GLM-5";
    "glm-5.1" = "glm-5", "config.json of zai-org/GLM-5.1";
    "glm-5.2" = "glm-5.2", "config.json of zai-org/GLM-5.2";
    "glm-5.3" = "glm-5.2", "config.json of zai-org/GLM-5.2, whose numbers it is taken to have",
        unconfirmed: "num_hidden_layers" "num_attention_heads" "q_lora_rank" "index_topk_freq"
        "index_skip_topk_offset" "rope_theta" "max_position_embeddings";
    "glm-5.3-flash" = "glm-5.3-flash", "vLLM's transformers_utils/configs/glm5_next.py",
        unconfirmed: "max_position_embeddings";
    "hy4-preview" = "hy4-preview",
        "config.json of tencent/Hy4-preview; rotation: vLLM's and llama.cpp's hy_v4";
    "dots3-note" = "dots3-note",
        "vLLM's models/dots3_note and transformers' configuration_dots3_note_omni.py",
        unconfirmed: "max_position_embeddings" "sliding_window_size";
    "mistral-large-3" = "mistral-large-3", "params.json of Mistral-Large-3",
        unconfirmed: "max_position_embeddings";
    "mistral-small-4" = "mistral-small-4", "config.json of Mistral-Small-4-119B";
    "longcat-flash" = "longcat-flash", "config.json of meituan-longcat/LongCat-Flash-Chat";
    "longcat-flash-lite" = "longcat-flash-lite", "vLLM's longcat_flash_ngram",
        unconfirmed: "rope_theta" "max_position_embeddings";
    "longcat-flash-lite-sparse" = "longcat-flash-lite-sparse",
        "config.json of meituan-longcat/LongCat-Flash-Lite-Sparse, as unslothai/unsloth tests it";
    "ling-2.6-flash" = "ling-2.6-flash", "SGLang's models/bailing_moe_linear.py",
        unconfirmed: "num_attention_heads" "q_lora_rank" "rope_theta" "max_position_embeddings";
    "ling-3.0-tiny" = "ling-3.0-tiny", "config.json of inclusionAI/Ling-3.0-tiny";
    "ling-3.0-flash" = "ling-3.0-flash", "config.json of inclusionAI/Ling-3.0-flash",
        unconfirmed: "num_attention_heads" "q_lora_rank";
    "gigachat-3.5" = "gigachat-3.5", "vLLM's transformers_utils/configs/gigachat3_5.py",
        unconfirmed: "full_attention_layers" "num_nextn_predict_layers" "rope_scaling"
        "max_position_embeddings";
    "openpangu-ultra-moe" = "openpangu-ultra-moe", "vLLM's models/openpangu.py",
        unconfirmed: "max_position_embeddings";
    "openpangu-2-flash" = "openpangu-2-flash", "llama.cpp's and vLLM-MLX's openpangu_v2",
        unconfirmed: "num_attention_heads" "kv_lora_rank" "qk_nope_head_dim" "qk_rope_head_dim"
        "v_head_dim" "q_lora_rank" "index_n_heads";
    "minicpm3" = "minicpm3", "config.json of openbmb/MiniCPM3-4B";
    "axk1" = "axk1", "vLLM's transformers_utils/configs/AXK1.py",
        unconfirmed: "rope_scaling";
    "sarvam-105b" = "sarvam-105b", "transformers' configuration_sarvam_mla.py",
        unconfirmed: "rope_scaling" "max_position_embeddings";
    "step-5" = "step-5", "vLLM's step5",
        unconfirmed: "head_dim";
};
