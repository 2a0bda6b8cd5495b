//! The values of keys, and their form in files.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The part to time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// One backend's attention alone.
    Attention,
    /// The whole layer: cache write, projections, attention, context, merges.
    Layer,
}

/// The two forms of attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Route {
    /// The path of decode backends.
    Absorbed,
    /// The path of prefill backends.
    Expanded,
}

/// Returns the name of a value in arguments and files.
pub(crate) fn name_of(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Returns the name of a switch's value.
pub(crate) const fn on_or_off(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

/// Returns a value in the form of an argument.
pub(super) fn argument(value: &Value) -> Option<String> {
    Some(match value {
        Value::Bool(is_on) => on_or_off(*is_on).to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        Value::Array(values) => {
            let values: Option<Vec<String>> = values.iter().map(argument).collect();
            values?.join(",")
        }
        Value::Null | Value::Object(_) => return None,
    })
}
