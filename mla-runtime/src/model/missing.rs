//! Properties of models that no backend here supports. An error names the field that asks for the
//! property.

use serde_json::Value;

use super::fields::{Fields, shown};
use crate::{Error, Result};

/// A field, and the values of it that ask for something missing.
struct MissingFeature {
    field: &'static str,
    asks: fn(&Value) -> bool,
    missing: &'static str,
}

const ASKS: &[MissingFeature] = &[
    MissingFeature {
        field: "compress_ratios",
        asks: |_| true,
        missing: COMPRESSED,
    },
    MissingFeature {
        field: "use_mla",
        asks: |value| *value != true && value.as_f64() != Some(1.0),
        missing: EVERY_HEAD,
    },
    MissingFeature {
        field: "alibi",
        asks: is_set,
        missing: "a linear bias of the logits",
    },
    MissingFeature {
        field: "position_embedding_type",
        asks: |value| !is_one_of(value, &["rope", "rotary"]),
        missing: "positions that are not rotations",
    },
    MissingFeature {
        field: "v_head_dim",
        asks: |value| value.as_f64() == Some(0.0),
        missing: EVERY_HEAD,
    },
    MissingFeature {
        field: "attention_method",
        // LongCat's LSA is latent attention to lists of slots.
        asks: |value| !is_one_of(value, &["MLA", "LSA"]),
        missing: ANOTHER,
    },
    MissingFeature {
        field: "att_impl_type",
        asks: |value| !is_one_of(value, &["MLA"]),
        missing: ANOTHER,
    },
    MissingFeature {
        field: "softmax_type",
        asks: |value| value != "vanilla",
        missing: "another softmax",
    },
    MissingFeature {
        field: "attn_groupnorm",
        asks: is_set,
        missing: "a norm of each head's output",
    },
    MissingFeature {
        field: "attention_type",
        asks: |value| !is_one_of(value, &["MLA", "LlamaLatentAttention"]),
        missing: ANOTHER,
    },
    MissingFeature {
        field: "attn_logit_softcapping",
        asks: is_set,
        missing: "a soft cap of logits",
    },
    MissingFeature {
        field: "attention_chunk_size",
        asks: is_set,
        missing: "attention within chunks",
    },
    MissingFeature {
        field: "attn_temperature_tuning",
        asks: is_set,
        missing: "a temperature of attention that grows with the position",
    },
    MissingFeature {
        field: "num_krope_heads",
        asks: |value| value.as_f64() != Some(1.0),
        missing: "several rotary keys for each token",
    },
    MissingFeature {
        field: "param_sink_number",
        asks: is_set,
        missing: "learnt tokens that every query sees",
    },
    MissingFeature {
        field: "index_dsa_use_layernorm",
        asks: |value| *value == false,
        missing: "index keys without a LayerNorm",
    },
    MissingFeature {
        field: "swa_layers",
        asks: is_set,
        missing: WINDOW,
    },
    MissingFeature {
        field: "sliding_window_list",
        asks: is_set,
        missing: WINDOW,
    },
];

const COMPRESSED: &str = "compressed caches and windows beside them";

const EVERY_HEAD: &str = "keys and values of every head in the cache";

const ANOTHER: &str = "another attention than Multi-head Latent Attention";

/// The name of layers with a window in `layer_types`.
const WINDOWED: &str = "sliding_attention";

const WINDOW: &str = "a sliding window";

fn is_one_of(value: &Value, words: &[&str]) -> bool {
    let given = value.as_str().unwrap_or_default();
    words.iter().any(|word| word.eq_ignore_ascii_case(given))
}

/// Returns false for values that mean "none": 0, −1, false or an empty list. Any other value asks
/// for something.
fn is_set(value: &Value) -> bool {
    let is_none = matches!(value.as_f64(), Some(0.0 | -1.0));
    !is_none && *value != false && value.as_array().is_none_or(|list| !list.is_empty())
}

/// Refuses a model that asks for a missing property.
pub(super) fn check(fields: &Fields<'_>) -> Result<()> {
    if let Some((field, name)) = fields.named(&["deepseek_v4"]) {
        return Err(Error::Unsupported {
            field,
            given: format!("{name:?}"),
            missing: COMPRESSED,
        });
    }
    for ask in ASKS {
        refuse(fields, ask.field, ask.missing, ask.asks)?;
    }
    // Some configurations give the width of a window although no layer has a window. Where layers
    // are named, each name says which have one.
    match fields.get("use_sliding_window") {
        Some((_, Value::Bool(false))) => Ok(()),
        _ if fields
            .own_layer_types()
            .is_some_and(|own| !own.contains(&WINDOWED)) =>
        {
            Ok(())
        }
        _ => refuse(fields, "sliding_window", WINDOW, is_set),
    }
}

fn refuse(
    fields: &Fields<'_>,
    field: &str,
    missing: &'static str,
    asks: fn(&Value) -> bool,
) -> Result<()> {
    match fields.get(field) {
        Some((field, value)) if asks(value) => Err(Error::Unsupported {
            field,
            given: shown(value),
            missing,
        }),
        _ => Ok(()),
    }
}

/// The error for a kind of layer that `layer_types` names.
pub(super) fn layer(field: String, kind: &str) -> Error {
    let missing = match kind {
        WINDOWED => WINDOW,
        _ => "layers of another attention than a full, a sparse or a linear one",
    };
    Error::Unsupported {
        field,
        given: format!("{kind:?}"),
        missing,
    }
}
