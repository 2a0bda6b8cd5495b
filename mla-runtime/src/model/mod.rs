//! The facts of attention in a model's configuration.
//!
//! A configuration comes from the `config.json` that a model is published with
//! ([`ModelConfig::from_hf_config`]). Public models that this crate knows can be loaded by name
//! ([`ModelConfig::preset`]).

mod dims;
mod dtype;
mod engine;
mod fields;
mod index;
mod indexer;
mod keys;
mod kv_format;
mod layers;
mod missing;
mod names;
mod presets;
mod rope;
mod rotary_style;
mod section;

pub use dims::{HeadDims, MAX_DIM, MlaDims};
pub use dtype::{DType, Element};
use engine::GateGranularity;
use fields::Fields;
pub use indexer::IndexerConfig;
use indexer::{IndexLayers, LayerLists, MAX_LAYERS};
pub use kv_format::KvFormat;
pub use presets::{PRESETS, Preset};
pub use rope::{QueryScaling, Rope};
pub use rotary_style::RotaryStyle;

use crate::{Error, Result};

// Lengths are signed 32-bit integers on devices.
const MAX_POSITIONS: u32 = i32::MAX as u32;

/// The attention of a model: the dimensions of one layer, and what the layers have in common.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct ModelConfig {
    /// L and (P, R, V).
    pub dims: MlaDims,
    /// H: the number of query heads of the whole model; see [`Self::heads_per_rank`].
    pub heads: u32,
    /// The number of layers with this attention, and so with a cache, if the configuration gives
    /// it. Each of LongCat's layers counts twice.
    pub layers: Option<u32>,
    /// The number of layers that have linear attention instead; 0 in most models. The engine runs
    /// these layers itself.
    pub other_layers: u32,
    /// The element type of weights and activations, if the configuration gives it.
    pub dtype: Option<DType>,
    /// The number of layers that predict further tokens. Each has a cache of its own, in addition
    /// to those of [`Self::layers`]. They make drafts, and an engine may leave them out.
    pub draft_layers: u32,
    /// The rank of the query projection; `None` if the query is projected in one step.
    pub q_lora_rank: Option<u32>,
    /// The number of cached tokens that each query token attends to in sparse attention; `None` if
    /// it attends to all.
    pub index_topk: Option<u32>,
    /// The indexer that chooses these tokens, if the configuration describes one.
    pub indexer: Option<IndexerConfig>,
    /// The reason why [`IndexerConfig`] cannot express the indexer of the configuration. In this
    /// case the engine makes the lists itself, and `indexer` is `None`.
    pub foreign_indexer: Option<&'static str>,
    /// The layers that have an indexer, and those that share the list of an earlier layer.
    pub(crate) index_layers: IndexLayers,
    /// The rotary embedding.
    pub rope: Rope,
    /// The number of gate values for each head, 1 or V; `None` if there is no gate. The engine
    /// multiplies the layer's output by the sigmoid of the gate before the output projection.
    pub output_gate: Option<u32>,
    /// True if each head has a learnt sink. The engine passes the sinks as
    /// [`LayerCall::sinks`](crate::layer::LayerCall::sinks).
    pub sinks: bool,
    /// A scale factor of queries that grows with their position.
    pub query_scaling: Option<QueryScaling>,
    /// True if the engine multiplies the query's latent by its [factor](Self::latent_factor) after
    /// the norm. This scales the whole query.
    pub scaled_query_latents: bool,
    /// True if the engine multiplies the latent of keys and values by its factor.
    pub scaled_latents: bool,
    /// The width of the hidden state, if latents are scaled and the configuration gives it.
    hidden_size: Option<u32>,
    /// True if the engine normalises rotary keys before it rotates them.
    pub rotary_key_norm: bool,
    /// True if public implementations disagree about the [pairs](Rope::style) that are rotated.
    pub rotary_style_is_disputed: bool,
}

fn divisors(heads: u32) -> String {
    let divisors: Vec<String> = (1..=heads)
        .filter(|&ranks| heads.is_multiple_of(ranks))
        .map(|ranks| ranks.to_string())
        .collect();
    divisors.join(", ")
}

/// Reads L and (P, R, V).
fn dims(fields: &Fields<'_>) -> Result<MlaDims> {
    let heads = fields.required("num_attention_heads", 1)?;
    let nope = fields.required("qk_nope_head_dim", 1)?;
    // With `use_mla_nope` there are no rotary parts, whatever width a file gives them. With
    // `mla_use_nope` there are, but they are not rotated.
    let rope = match fields.flag("use_mla_nope")? {
        true => 0,
        false => fields.required("qk_rope_head_dim", 0)?,
    };
    let given = fields.optional("qk_rope_head_dim", 0)?.unwrap_or(0);
    if fields.optional("qk_head_dim", 0)? != Some(nope + rope) {
        fields.check_width("qk_head_dim", nope + given)?;
    }
    fields.check_width("rotary_dim", given)?;
    if rope % 2 == 1 && !fields.flag("mla_use_nope")? {
        let accepted = "an even number, as pairs are rotated";
        return Err(Error::argument("qk_rope_head_dim", rope, accepted));
    }
    let latent = fields.required("kv_lora_rank", 1)?;
    let head = HeadDims::new(nope, rope, fields.v_head_dim(heads)?);
    Ok(MlaDims::new(latent, head))
}

impl ModelConfig {
    /// The configuration of a public model, by its name in [`PRESETS`].
    ///
    /// # Errors
    ///
    /// If there is no such model ([`Preset::named`]), or if it needs a property that no backend
    /// here has.
    pub fn preset(name: &str) -> Result<Self> {
        Preset::named(name)?.config()
    }

    /// Reads the text of a Hugging Face `config.json`.
    ///
    /// A field is looked for in the innermost text model first (`text_config`, `language_config`,
    /// `llm_config` or `thinker_config`, at any depth), and then in the objects around it. The
    /// innermost one wins. Two spellings in one object must agree. Null means that a field is
    /// absent. Mistral's own `params.json` is read as well. A byte order mark is skipped, and so
    /// are numbers that JSON lacks (`NaN`, `Infinity`) in fields that are not about attention.
    ///
    /// Fields that are not about attention are ignored. A field whose name suggests attention must
    /// be known, or the error names it. Such names contain `attention`, `index`, `gate`, `window`,
    /// `rope`, `scale`, `sink` and the like. The same holds for every field of the rotary section.
    /// A switch (`use_…`, `enable_…`) that is false is skipped, unless the model has what it names.
    ///
    /// | field | |
    /// |---|---|
    /// | `kv_lora_rank`, `qk_nope_head_dim`, `num_attention_heads` (`n_heads`) | positive |
    /// | `v_head_dim` | positive; MiniCPM3 leaves it out and means `hidden_size / num_attention_heads` |
    /// | `qk_rope_head_dim` | may be 0; R is 0 with `use_mla_nope`, too |
    /// | `attention_kv_lora_dim`, `attention_q_lora_dim`, `attention_qk_dim`, `attention_qk_rope_dim`, `attention_v_dim` | the same dimensions in openPangu |
    /// | `use_mla` (`mla`, `multi_latent_attention`), `attention_method`, `attention_type`, `att_impl_type`, `softmax_type`, `position_embedding_type`, `alibi` | left out, or a value that means this attention |
    /// | `num_hidden_layers` (`n_layers`), or LongCat's `num_layers`, each with two caches | positive, or left out, or null |
    /// | `q_lora_rank`, `index_topk` | positive; left out, null, 0 and −1: none |
    /// | `num_nextn_predict_layers` (`num_mtp_layers`, `mtp_num_layers`) | the number of layers that make drafts |
    /// | `layer_types`, `linear_attn_config.full_attn_layers` (from 1 on), `full_attention_layers` (from 0 on; all layers have it if `linear_attention_type` is null), or `layer_group_size` (`fa_interval`: the last layer of each group has it, and so has every layer after the last whole group) | the layers that have this attention rather than a linear one; all layers, if these fields are left out. `layer_types` also says which layers are sparse |
    /// | `index_n_heads`, `index_head_dim` | positive, with `index_topk`, or both left out |
    /// | `indexer_rope_interleave` | `true` or `false` (also if it is left out) |
    /// | `indexer_types`, else `index_topk_pattern`, else `index_topk_freq` with `index_skip_topk_offset`, else `cli_factor` | the layers that have an indexer; every layer, if all these fields are left out |
    /// | `index_kpool` | the number of tokens that share an index key, a divisor of 64 and of `index_topk`; 1, if left out |
    /// | `index_kpool_always_select_tail`, `index_kpool_compress` | true, or left out, or null; with pools, false means that the engine makes the lists itself |
    /// | `index_k_norm_type`, `index_init_tokens`, `index_local_tokens` | the engine makes the lists itself: [`Self::foreign_indexer`] |
    /// | `dtype` or `torch_dtype` | `float32`, `float16` or `bfloat16`, or left out, or null |
    /// | `max_position_embeddings` (`model_max_length`) | positive, or left out, or null |
    /// | `rope_theta` | above 1, here or in the rotary section (`rope_scaling` or `rope_parameters`); 10000 if left out |
    /// | `rope_interleave` (`rope_interleaved`) | true or false; true, if left out |
    /// | `mla_use_nope` (`mla_nope`, `kda_nope`) | true if rotary parts are not rotated; false, if left out |
    /// | `mla_use_output_gate`, `gated_attention`, `gated_mla` with `gating_type`, `attn_elementwise_gate`, `attention_gate_type`, or `gated_attention_proj_granularity_type` | a gate and its [values](Self::output_gate) for each head; none, if all are left out |
    /// | `learnable_sink` | true or false; false, if left out |
    /// | `mla_scale_q_lora`, `mla_scale_kv_lora`, or both as `apply_mla_qkv_lora_rescale` or `use_mla_scaling_factor` | factors of [latents](Self::latent_factor) |
    /// | `rope_scaling` or `rope_parameters` | an object, or left out, or null, or empty; of type (`type` and `rope_type` must agree) `linear` with a `factor`, or `yarn` with a `factor` and its other fields: `original_max_position_embeddings`, `beta_fast`, `beta_slow`, `mscale`, `mscale_all_dim`, `attention_factor`, `attn_factor`, `extrapolation_factor`, `truncate`, `apply_yarn_scaling` and `apply_scale`. `rope_scaling` wins over `rope_parameters`. Sections by kind of layer must be equal for all layers with this attention |
    /// | `llama_4_scaling_beta` in the rotary section, or `llama_4_scaling` | at least 0, or left out, or null; above 0 with the original context: a [factor of queries](Self::query_factor) |
    ///
    /// A missing field has the default of the model's family, if that differs from the table. This
    /// concerns a gate and sinks in Hy4, and pairs of halves in MiniCPM3 and openPangu. The family
    /// is known by `model_type` or `architectures`. Families with layers of two kinds (GLM-5.3,
    /// Ling, dots3) have to say which layers are of which.
    ///
    /// The file of DeepSeek's own inference program, recognised by its `inter_dim`, is read as
    /// well. Its rotation always has yarn, even if the file does not mention it (`rope_factor`,
    /// `original_seq_len`, `mscale`).
    ///
    /// Some scalings of other types are read, too: `longrope` (`su`), `dynamic`, `llama3`, `mrope`
    /// and `ntk`. [`Rope::frequencies`] later refuses to make tables for them.
    ///
    /// # Errors
    ///
    /// If a required field is missing, or if a field has a value that is not accepted. Also if the
    /// model needs a property that no backend here has, such as a sliding window, a soft cap of
    /// logits or compressed caches (DeepSeek-V4).
    pub fn from_hf_config(json: &str) -> Result<Self> {
        let value = fields::parse(json)?;
        let fields = Fields::new(&value)?;
        missing::check(&fields)?;
        fields.check_form()?;
        keys::check(&fields)?;
        let dims = dims(&fields)?;
        let layers = layers::read(&fields)?;
        let index_topk = fields.optional_or_none("index_topk")?;
        let index_topk = match fields.switch("use_dsa")? {
            Some(false) => None,
            _ => index_topk,
        };
        index::check_topk(&fields)?;
        layers.check_topk(index_topk)?;
        let foreign_indexer =
            index::foreign(&fields, dims.head.rope)?.filter(|_| index_topk.is_some());
        let indexer = index::indexer(&fields, dims.head.rope, index_topk)?;
        let gate = engine::gate(&fields)?;
        let (rope, query_scaling) = section::read(&fields)?;
        let scaled_query_latents = fields.flag("mla_scale_q_lora")?;
        let scaled_latents = fields.flag("mla_scale_kv_lora")?;
        Ok(Self {
            dims,
            heads: fields.required("num_attention_heads", 1)?,
            layers: layers.own(),
            other_layers: layers.other(),
            draft_layers: fields.optional("num_nextn_predict_layers", 0)?.unwrap_or(0),
            dtype: fields.dtype()?,
            q_lora_rank: fields.optional_or_none("q_lora_rank")?,
            index_topk,
            indexer: indexer.filter(|_| foreign_indexer.is_none()),
            foreign_indexer,
            index_layers: index::layers(&fields, &layers)?,
            rope,
            output_gate: gate.map(|gate| match gate {
                GateGranularity::Head => 1,
                GateGranularity::HeadAndValue => dims.head.v,
            }),
            sinks: fields.flag("learnable_sink")?,
            query_scaling,
            scaled_query_latents,
            scaled_latents,
            hidden_size: match scaled_query_latents || scaled_latents {
                true => fields.optional("hidden_size", 1)?,
                false => None,
            },
            rotary_key_norm: engine::rotary_key_norm(&fields)?,
            rotary_style_is_disputed: fields.is_of(&["hy_v4"]),
        })
    }

    /// Returns the factor of scores before the softmax, the same in the absorbed and the expanded
    /// form. It is 1/√(P+R). If the model has yarn, [m²](Rope::softmax_mscale) multiplies it,
    /// because queries and keys each have a factor of m.
    pub fn softmax_scale(&self) -> f64 {
        let mscale = self.rope.softmax_mscale();
        mscale * mscale / f64::from(self.dims.head.qk()).sqrt()
    }

    /// The number of heads of each rank under tensor parallelism.
    ///
    /// # Errors
    ///
    /// If `ranks` does not divide the number of heads. The error lists the divisors.
    pub fn heads_per_rank(&self, ranks: u32) -> Result<u32> {
        if ranks == 0 || !self.heads.is_multiple_of(ranks) {
            let (heads, divisors) = (self.heads, divisors(self.heads));
            let accepted = format!("a divisor of the {heads} heads: {divisors}");
            return Err(Error::argument("ranks", ranks, accepted));
        }
        Ok(self.heads / ranks)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::fields::shown;
    use super::*;

    fn deepseek() -> Value {
        json!({
            "num_attention_heads": 128, "num_hidden_layers": 61, "q_lora_rank": 1536,
            "num_nextn_predict_layers": 1,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "torch_dtype": "bfloat16", "vocab_size": 129280,
            "rope_theta": 10000, "max_position_embeddings": 163840,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
            },
        })
    }

    fn deepseek_v3() -> ModelConfig {
        ModelConfig::preset("deepseek-v3").unwrap()
    }

    /// [`deepseek`] with some fields replaced; null removes one.
    fn with(changes: Value) -> Value {
        let mut config = deepseek();
        for (field, value) in changes.as_object().unwrap() {
            match value {
                Value::Null => config.as_object_mut().unwrap().remove(field),
                value => config
                    .as_object_mut()
                    .unwrap()
                    .insert(field.clone(), value.clone()),
            };
        }
        config
    }

    fn read(config: &Value) -> Result<ModelConfig> {
        ModelConfig::from_hf_config(&config.to_string())
    }

    #[test]
    fn reads_a_config_flat_or_nested() {
        assert_eq!(read(&deepseek()), Ok(deepseek_v3()));
        assert_eq!(read(&json!({"text_config": deepseek()})), Ok(deepseek_v3()));
        // Fields that the inner object lacks are taken from the top level. Fields of the inner
        // object win.
        let mut nested = deepseek();
        nested.as_object_mut().unwrap().remove("torch_dtype");
        let config = json!({
            "text_config": nested, "torch_dtype": "float16", "num_attention_heads": 3,
        });
        let expected = ModelConfig {
            dtype: Some(DType::F16),
            ..deepseek_v3()
        };
        assert_eq!(read(&config), Ok(expected));
        let changed = with(json!({"text_config": null}));
        assert_eq!(read(&changed), Ok(deepseek_v3()));
    }

    #[test]
    fn reads_the_optional_fields() {
        let bare = with(json!({
            "torch_dtype": null, "rope_scaling": null, "q_lora_rank": null,
            "num_hidden_layers": null,
        }));
        let config = read(&bare).unwrap();
        assert_eq!((config.dtype, config.layers), (None, None));
        assert_eq!((config.q_lora_rank, config.rope.has_yarn()), (None, false));
        for (changes, dtype) in [
            (json!({"torch_dtype": "float32"}), DType::F32),
            (json!({"torch_dtype": null, "dtype": "float16"}), DType::F16),
            (json!({"dtype": "bfloat16"}), DType::BF16),
        ] {
            assert_eq!(read(&with(changes)).unwrap().dtype, Some(dtype));
        }
        let config = read(&with(json!({"index_topk": 2048, "qk_rope_head_dim": 0}))).unwrap();
        assert_eq!((config.index_topk, config.dims.head.rope), (Some(2048), 0));
    }

    #[test]
    fn reads_yarn_in_all_spellings() {
        let yarn = |rope: Value| read(&with(json!({"rope_scaling": rope}))).unwrap().rope;
        // If the original context is missing, it is the model's context.
        let of = |factor, mscale_all_dim| {
            let plain = yarn(json!({"rope_theta": 10000}));
            plain
                .with_yarn(factor, Some(163_840))
                .with_mscale(1.0, mscale_all_dim)
        };
        assert_eq!(yarn(json!({"type": "yarn", "factor": 40})), of(40.0, 0.0));
        let rope = json!({"rope_type": "deepseek_yarn", "factor": 4.5, "mscale_all_dim": 0.707});
        assert_eq!(yarn(rope), of(4.5, 0.707));
        for other in [
            json!({"rope_type": "default", "rope_theta": 10000}),
            json!({"type": "longrope", "long_factor": [1.0]}),
            json!({"rope_theta": 10000}),
        ] {
            assert!(!yarn(other).has_yarn());
        }
        let parameters = with(json!({
            "rope_scaling": null,
            "rope_parameters": {"rope_type": "yarn", "factor": 2, "mscale_all_dim": 1},
        }));
        assert_eq!(read(&parameters).unwrap().rope, of(2.0, 1.0));
    }

    #[test]
    fn softmax_scales() {
        let scale = |name: &str| ModelConfig::preset(name).unwrap().softmax_scale();
        // m = 0.1·ln 40 + 1 = 1.368888, and m²/√192.
        assert!((scale("deepseek-v3") - 0.135_233_8).abs() < 1e-7);
        // m = 0.0707·ln 40 + 1 = 1.260804.
        assert!((scale("deepseek-v2") - 0.114_721_4).abs() < 1e-7);
        // m = 0.1·ln 32 + 1 = 1.346574.
        assert!((scale("kimi-k2") - 0.130_860_8).abs() < 1e-7);
        assert_eq!(scale("glm-5"), 1.0 / 16.0);
        assert_eq!(scale("minicpm3"), 1.0 / 96f64.sqrt());
        assert_eq!(scale("glm-4.7-flash"), 1.0 / 16.0);
        // m = 0.1·ln 128 + 1 = 1.485203, and m²/√128; without it 1/√128.
        assert!((scale("mistral-small-4") - 0.194_969_494_7).abs() < 1e-9);
        let mut own = ModelConfig::preset("mistral-small-4").unwrap();
        own.rope = own.rope.with_applied_scale(false);
        assert_eq!(own.softmax_scale(), 1.0 / 128f64.sqrt());
        assert_eq!(own.rope.attention_factor(), 1.0);
    }

    #[test]
    fn queries_grow_with_their_position() {
        let model = ModelConfig::preset("mistral-small-4").unwrap();
        for (position, expected) in [
            (0, 1.0),
            (8191, 1.0),
            (8192, 1.0 + 0.1 * 2f64.ln()),
            (1_048_575, 1.0 + 0.1 * 128f64.ln()),
        ] {
            let given = model.query_factor(position).unwrap();
            assert!((given - expected).abs() < 1e-15, "{position}: {given}");
        }
        // The scaling is read with any kind of rotation. The file must give the original context.
        let plain = |rope: Value| {
            let config = read(&with(
                json!({"rope_scaling": null, "rope_parameters": rope}),
            ))?;
            Ok::<_, Error>(config.query_scaling)
        };
        let rope = json!({"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 100});
        assert_eq!(plain(rope), Ok(Some(QueryScaling::new(0.5, 100))));
        assert_eq!(plain(json!({"llama_4_scaling_beta": 0})), Ok(None));
        assert_eq!(
            plain(json!({"llama_4_scaling_beta": 0.1}))
                .unwrap_err()
                .to_string(),
            "original_max_position_embeddings: given nothing as \
             rope_parameters.original_max_position_embeddings, accepted an integer above 0, from \
             which llama_4_scaling_beta counts"
        );
    }

    #[test]
    fn minicpm3_derives_its_value_width() {
        let minicpm3 = |changes: Value| {
            let mut all = json!({"v_head_dim": null, "model_type": "minicpm3"});
            all.as_object_mut()
                .unwrap()
                .extend(changes.as_object().unwrap().clone());
            read(&with(all))
        };
        let v = minicpm3(json!({"hidden_size": 8192})).unwrap().dims.head.v;
        assert_eq!(v, 64);
        let v = minicpm3(json!({"hidden_size": 8192, "v_head_dim": 96}))
            .unwrap()
            .dims
            .head
            .v;
        assert_eq!(v, 96);
        assert_eq!(
            minicpm3(json!({"hidden_size": 100}))
                .unwrap_err()
                .to_string(),
            "hidden_size: given 100, accepted a multiple of num_attention_heads, 128, where \
             v_head_dim is left out"
        );
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for (config, place, given) in [
            (json!(3), "config", "3"),
            (json!([]), "config", "an array"),
            (with(json!({"text_config": "x"})), "text_config", "\"x\""),
        ] {
            let message = format!("{place}: given {given}, accepted a JSON object");
            assert_eq!(read(&config).unwrap_err().to_string(), message);
        }
        let message = "config: given text that is not JSON (EOF while parsing an object at line 1 \
                       column 1), accepted a model's config.json";
        let error = ModelConfig::from_hf_config("{").unwrap_err();
        assert_eq!(error.to_string(), message);
    }

    #[test]
    fn missing_fields_are_named() {
        let refused = |config: &Value, message: &str| {
            assert_eq!(read(config).unwrap_err().to_string(), message);
        };
        for field in ["kv_lora_rank", "v_head_dim", "num_attention_heads"] {
            let message = format!("{field}: given nothing, accepted {INTEGER}");
            refused(&with(json!({field: null})), &message);
        }
        refused(
            &json!({"model_type": "llama", "num_attention_heads": 32, "hidden_size": 4096}),
            "kv_lora_rank: given nothing, accepted a model with Multi-head Latent Attention",
        );
        let nested = json!({"text_config": with(json!({"qk_nope_head_dim": null}))});
        let message = format!(
            "qk_nope_head_dim: given nothing as text_config.qk_nope_head_dim or qk_nope_head_dim, \
             accepted {INTEGER}"
        );
        refused(&nested, &message);
        refused(
            &with(json!({"rope_scaling": {"type": "yarn"}})),
            "factor: given nothing as rope_scaling.factor, accepted a number above 0",
        );
        refused(
            &with(json!({"rope_scaling": {"factor": 2, "mscale_all_dim": 1}})),
            "type: given nothing as rope_scaling.type or rope_scaling.rope_type, accepted a \
             string; \"yarn\" if mscale_all_dim is to apply",
        );
    }

    const INTEGER: &str = "an integer from 1 to 65536";

    /// Values that are not valid as a number of heads, layers or columns.
    fn no_counts() -> [Value; 8] {
        let huge = 4_294_967_424u64;
        [
            json!(-512),
            json!(512.5),
            json!("512"),
            json!(true),
            json!([512]),
            json!({"value": 512}),
            json!(huge),
            json!(1e300),
        ]
    }

    #[test]
    fn malformed_values_are_refused_by_the_name_of_their_field() {
        for field in [
            "num_attention_heads",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "kv_lora_rank",
            "v_head_dim",
            "num_hidden_layers",
            "q_lora_rank",
            "index_topk",
        ] {
            let min = u32::from(field != "qk_rope_head_dim");
            let accepted = format!("an integer from {min} to 65536");
            for value in no_counts() {
                let message = format!("{field}: given {}, accepted {accepted}", shown(&value));
                let flat = read(&with(json!({field: value})));
                assert_eq!(flat.unwrap_err().to_string(), message);
                let nested = read(&json!({"text_config": with(json!({field: value}))}));
                let message = format!("text_config.{message}");
                assert_eq!(nested.unwrap_err().to_string(), message);
            }
        }
        let zero = read(&with(json!({"kv_lora_rank": 0})));
        let message = format!("kv_lora_rank: given 0, accepted {INTEGER}");
        assert_eq!(zero.unwrap_err().to_string(), message);
    }

    #[test]
    fn other_values_that_are_not_accepted_are_refused() {
        for (changes, message) in [
            (
                json!({"torch_dtype": "float8_e4m3fn"}),
                "torch_dtype: given \"float8_e4m3fn\", accepted float32, float16 or bfloat16",
            ),
            (
                json!({"dtype": "float16"}),
                "dtype: given f16, accepted bf16, as torch_dtype has it",
            ),
            (
                json!({"max_position_embeddings": 0}),
                "max_position_embeddings: given 0, accepted an integer from 1 to 2147483647",
            ),
            (
                json!({"rope_scaling": "yarn"}),
                "rope_scaling: given \"yarn\", accepted an object or null",
            ),
            (
                json!({"rope_scaling": {"type": "yarn", "factor": 0}}),
                "rope_scaling.factor: given 0, accepted a number above 0",
            ),
            (
                json!({"rope_scaling": {"type": "yarn", "factor": 2, "mscale_all_dim": "1"}}),
                "rope_scaling.mscale_all_dim: given \"1\", accepted a number, at least 0",
            ),
            (
                json!({"rope_scaling": {"type": 7}}),
                "rope_scaling.type: given 7, accepted a string, such as \"yarn\"",
            ),
        ] {
            let error = read(&with(changes)).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }

    #[test]
    fn presets_by_name() {
        for preset in PRESETS {
            assert_eq!(Preset::named(preset.name), Ok(preset));
            assert_eq!(ModelConfig::preset(preset.name), preset.config());
        }
        let names = PRESETS.iter().map(|preset| preset.name);
        let names = names.collect::<Vec<_>>().join(", ");
        for (given, suggestion) in [
            ("deepseek-v32", "; did you mean deepseek-v3.2?"),
            ("DeepSeek-R1", "; did you mean deepseek-r1?"),
            ("kimi-2", "; did you mean kimi-k2?"),
            ("glm5", "; did you mean glm-5?"),
            ("llama", ""),
            ("", ""),
        ] {
            let error = ModelConfig::preset(given).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("model: given {given:?}, accepted {names}{suggestion}")
            );
        }
    }

    #[test]
    fn heads_are_divided_evenly() {
        let minicpm3 = ModelConfig::preset("minicpm3").unwrap();
        assert_eq!(deepseek_v3().heads_per_rank(8), Ok(16));
        assert_eq!(minicpm3.heads_per_rank(1), Ok(40));
        for ranks in [0, 3, 80] {
            assert_eq!(
                minicpm3.heads_per_rank(ranks).unwrap_err().to_string(),
                format!(
                    "ranks: given {ranks}, accepted a divisor of the 40 heads: 1, 2, 4, 5, 8, 10, \
                     20, 40"
                )
            );
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC*", value: i64) {
            let _ = ModelConfig::from_hf_config(&text);
            let _ = ModelConfig::preset(&text);
            let _ = read(&with(json!({"kv_lora_rank": value, "dtype": text})));
        }
    }
}
