//! The values of keys, and their form in files.

use clap::ValueEnum;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::range::Range;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// The switch is on.
    On,
    /// The switch is off.
    Off,
}

impl Switch {
    pub const fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

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

impl Route {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Absorbed => "absorbed",
            Self::Expanded => "expanded",
        }
    }
}

/// A range in a sweep file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(
    untagged,
    expecting = "accepted: a number, a list of them, a text such as 1..128*2, or start, stop, and \
                 step or factor"
)]
pub enum RangeSetting {
    /// A single number.
    One(u32),
    /// A list of numbers.
    List(Vec<u32>),
    /// A text in the form of an argument.
    Text(String),
    /// The numbers from `start` to `stop`.
    Steps(Steps),
}

/// The numbers from `start` up to `stop`, by `step` (1 if left out) or by `factor`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Steps {
    start: u32,
    stop: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    factor: Option<u32>,
}

impl RangeSetting {
    pub(crate) fn read(&self) -> Result<Range, String> {
        match self {
            Self::One(number) => Range::list(vec![*number]),
            Self::List(numbers) => Range::list(numbers.clone()),
            Self::Text(text) => text.parse(),
            Self::Steps(steps) => match (steps.step, steps.factor) {
                (step, None) => Range::stepped(steps.start, steps.stop, step.unwrap_or(1)),
                (None, Some(factor)) => Range::multiplied(steps.start, steps.stop, factor),
                (Some(_), Some(_)) => {
                    Err("range: given a step and a factor, accepted one of them".to_owned())
                }
            },
        }
    }
}

impl<'de> Deserialize<'de> for Switch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Some YAML parsers read these words as truth values.
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "accepted: on or off")]
        enum Given {
            Truth(bool),
            Word(String),
        }
        match Given::deserialize(deserializer)? {
            Given::Truth(true) => Ok(Self::On),
            Given::Truth(false) => Ok(Self::Off),
            Given::Word(word) => match &*word {
                "on" => Ok(Self::On),
                "off" => Ok(Self::Off),
                _ => Err(D::Error::custom(format!(
                    "given {word:?}, accepted on or off"
                ))),
            },
        }
    }
}

/// Reads one value, or a list of them.
pub(super) fn list<'de, D, T>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "accepted: a value that the argument of this name takes, or a list of them"
    )]
    enum Given<T> {
        One(T),
        Many(Vec<T>),
    }
    match Given::deserialize(deserializer)? {
        Given::One(value) => Ok(Some(vec![value])),
        Given::Many(values) if values.is_empty() => Err(D::Error::custom(
            "given an empty list, accepted at least one value",
        )),
        Given::Many(values) => Ok(Some(values)),
    }
}

/// Describes the fault in a line of a file for the person who wrote the file. The message of the
/// YAML reader is for programmers.
pub(super) fn fault(error: &serde_saphyr::Error) -> String {
    use serde_saphyr::Error as Yaml;
    let error = error.without_snippet();
    let accepted = match error {
        Yaml::Unexpected { expected, .. } => match *expected {
            "sequence start" => "a list",
            "mapping start" => "keys with their values, as in mla-cli/sweeps",
            "string scalar" => "a text",
            _ => return error.to_string(),
        },
        Yaml::InvalidScalar { ty: "u32", .. } => "a whole number from 0 to 4294967295",
        Yaml::DuplicateMappingKey { .. } => "each key once",
        _ => return error.to_string(),
    };
    let place = error.location().map_or_else(String::new, |place| {
        format!(" at line {}, column {}", place.line(), place.column())
    });
    format!("accepted: {accepted}{place}")
}
