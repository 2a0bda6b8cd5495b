//! Checks a configuration's keys against the tables of names.

use serde_json::Value;

use super::fields::{Fields, contradiction, shown, unknown_key};
use super::{engine, names};
use crate::Result;

/// Refuses unknown keys that may change the results, and spellings that disagree.
pub(super) fn check(fields: &Fields<'_>) -> Result<()> {
    let of_inference = |key: &str| {
        fields.is_of_inference() && names::OF_INFERENCE.iter().any(|(name, ..)| *name == key)
    };
    let is_known = |key: &str| names::is_known(key) || of_inference(key);
    for (path, object) in fields.levels() {
        for (key, value) in *object {
            if !value.is_null()
                && names::is_suspect(key)
                && !is_known(key)
                && !is_off(fields, key, value)?
            {
                return Err(unknown_key(format!("{path}{key}"), shown(value)));
            }
        }
        for (name, others) in names::SPELLINGS {
            let of = |key: &&str| object.get(*key).filter(|value| !value.is_null());
            let given = [name].into_iter().chain(*others);
            let mut given = given.filter_map(|key| of(key).map(|value| (key, value)));
            let Some((first, value)) = given.next() else {
                continue;
            };
            if let Some((second, other)) = given.find(|(_, other)| !names::same(value, other)) {
                return Err(contradiction(
                    format!("{path}{first}"),
                    shown(value),
                    format!("{path}{second}"),
                    shown(other),
                ));
            }
        }
    }
    Ok(())
}

/// Returns true for a switch that is off, so that it asks for nothing. A switch for something that
/// the model otherwise has is not off: it may contradict another key.
fn is_off(fields: &Fields<'_>, key: &str, value: &Value) -> Result<bool> {
    let about = |parts: &[&str]| parts.iter().any(|part| key.contains(part));
    let of_gates = about(&["gate", "gating"]);
    let is_switch = of_gates || names::SWITCHES.iter().any(|begin| key.starts_with(begin));
    let has_no_window = fields.switch("use_sliding_window")? == Some(false);
    if key.starts_with("swa_") && has_no_window {
        return Ok(true);
    }
    if *value != false || !is_switch {
        return Ok(false);
    }
    let has = |sections: &[&str]| sections.iter().any(|name| fields.get(name).is_some());
    let has_halves = fields.switch("rope_interleave")? == Some(false);
    let contradicts = about(&["rope", "rotary", "interleav", "pos_enc"])
        || about(&["neox"]) && has_halves
        || about(&["yarn", "scal"]) && has(&["rope_scaling", "rope_parameters", "yarn"])
        || about(&["index", "dsa", "sparse"]) && fields.optional_or_none("index_topk")?.is_some()
        || of_gates && engine::gate(fields)?.is_some()
        || about(&["sink"]) && fields.flag("learnable_sink")?;
    Ok(!contradicts)
}
