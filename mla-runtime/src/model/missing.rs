//! Properties of models that no backend here supports. An error names the field that asks for the
//! property.

use serde_json::Value;

use super::fields::{Fields, shown};
use crate::{Error, Result};

/// A field, the values of it that ask for something missing, and the name of that.
type Ask = (&'static str, fn(&Value) -> bool, &'static str);

const ASKS: &[Ask] = &[
    ("compress_ratios", |_| true, COMPRESSED),
    (
        "use_mla",
        |value| *value != true && value.as_f64() != Some(1.0),
        EVERY_HEAD,
    ),
    ("alibi", is_set, "a linear bias of the logits"),
    (
        "position_embedding_type",
        |value| !is_one_of(value, &["rope", "rotary"]),
        "positions that are not rotations",
    ),
    (
        "v_head_dim",
        |value| value.as_f64() == Some(0.0),
        EVERY_HEAD,
    ),
    // LongCat's LSA is latent attention to lists of slots.
    (
        "attention_method",
        |value| !is_one_of(value, &["MLA", "LSA"]),
        ANOTHER,
    ),
    (
        "att_impl_type",
        |value| !is_one_of(value, &["MLA"]),
        ANOTHER,
    ),
    (
        "softmax_type",
        |value| value != "vanilla",
        "another softmax",
    ),
    ("attn_groupnorm", is_set, "a norm of each head's output"),
    (
        "attention_type",
        |value| !is_one_of(value, &["MLA", "LlamaLatentAttention"]),
        ANOTHER,
    ),
    ("attn_logit_softcapping", is_set, "a soft cap of logits"),
    ("attention_chunk_size", is_set, "attention within chunks"),
    (
        "attn_temperature_tuning",
        is_set,
        "a temperature of attention that grows with the position",
    ),
    (
        "num_krope_heads",
        |value| value.as_f64() != Some(1.0),
        "several rotary keys for each token",
    ),
    (
        "param_sink_number",
        is_set,
        "learnt tokens that every query sees",
    ),
    (
        "index_dsa_use_layernorm",
        |value| *value == false,
        "index keys without a LayerNorm",
    ),
    ("swa_layers", is_set, WINDOW),
    ("sliding_window_list", is_set, WINDOW),
];

const COMPRESSED: &str = "compressed caches and windows beside them";

const EVERY_HEAD: &str = "keys and values of every head in the cache";

const ANOTHER: &str = "another attention than Multi-head Latent Attention";

/// The name of layers with a window in `layer_types`.
const WINDOWED: &str = "sliding_attention";

const WINDOW: &str = "a sliding window";

/// Returns true for one of these words, in any case.
pub(super) fn is_one_of(value: &Value, words: &[&str]) -> bool {
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
    for (field, asks, missing) in ASKS {
        refuse(fields, field, missing, *asks)?;
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
