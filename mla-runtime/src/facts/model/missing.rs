//! Properties of attention that no backend here has: a model that asks for one is refused by its
//! name.

use serde_json::Value;

use super::{Fields, ModelError, shown};

/// A field that asks for something, if its value is one of those that do.
struct Ask {
    field: &'static str,
    asks: fn(&Value) -> bool,
    missing: &'static str,
}

const ASKS: &[Ask] = &[
    Ask {
        field: "model_type",
        asks: |value| {
            value
                .as_str()
                .is_some_and(|name| name.starts_with("deepseek_v4"))
        },
        missing: COMPRESSED,
    },
    Ask {
        field: "compress_ratios",
        asks: |_| true,
        missing: COMPRESSED,
    },
    Ask {
        field: "use_mla",
        asks: |value| *value == false,
        missing: "keys and values of every head in the cache",
    },
    Ask {
        field: "attn_logit_softcapping",
        asks: is_set,
        missing: "a soft cap of logits",
    },
    Ask {
        field: "index_kpool",
        asks: |value| *value != 1,
        missing: "pooled index keys",
    },
];

const COMPRESSED: &str = "compressed caches and windows beside them";

const WINDOW: &str = "a sliding window";

/// Returns true if a number is not 0. A value that is no number asks for something, too, unless it
/// is false.
fn is_set(value: &Value) -> bool {
    value.as_f64() != Some(0.0) && *value != false
}

/// Refuses a model that asks for what is missing.
pub(super) fn check(fields: &Fields<'_>) -> Result<(), ModelError> {
    for ask in ASKS {
        refuse(fields, ask.field, ask.missing, ask.asks)?;
    }
    // Some configurations name the width of a window that no layer has.
    match fields.get("use_sliding_window") {
        Some((_, Value::Bool(false))) => Ok(()),
        _ => refuse(fields, "sliding_window", WINDOW, is_set),
    }
}

fn refuse(
    fields: &Fields<'_>,
    field: &str,
    missing: &'static str,
    asks: fn(&Value) -> bool,
) -> Result<(), ModelError> {
    match fields.get(field) {
        Some((field, value)) if asks(value) => Err(ModelError::Unsupported {
            field,
            given: shown(value),
            missing,
        }),
        _ => Ok(()),
    }
}

/// The refusal of a kind of layer by its name in `layer_types`.
pub(super) fn layer(field: String, kind: &str) -> ModelError {
    let missing = match kind {
        "sliding_attention" => WINDOW,
        _ => "layers of another attention than a full, a sparse or a linear one",
    };
    ModelError::Unsupported {
        field,
        given: format!("{kind:?}"),
        missing,
    }
}
