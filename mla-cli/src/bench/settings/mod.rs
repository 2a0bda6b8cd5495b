//! The settings of a benchmark, from arguments and sweep files, which have the same keys.
//!
//! A key with a list of values is an axis: a benchmark has a row for every combination. An argument
//! replaces the file's value for the same key.

pub(crate) mod range;
pub(crate) mod template;
mod values;

use std::collections::BTreeMap;
use std::path::Path;

use clap::builder::TypedValueParser;
use clap::{Args as _, Command, FromArgMatches as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use self::range::read_range;
use self::values::argument;
pub(crate) use self::values::{Measure, Route, name_of, on_or_off};
use super::lists::{ListKind, Lists};
use crate::args::input::read_text;
use crate::args::{list_width, named, natural, positive, samples, warm_up};
use crate::device::DeviceName;
use crate::error::CliError;

/// The keys that distinguish cases if they have several values. A case is what has to be computed.
pub(super) const OF_CASE: [&str; 8] = [
    "model", "dims", "dtype", "heads", "kv", "topk", "lists", "valid",
];

/// The keys that distinguish contenders, besides their names. A contender is a way to compute a
/// case.
pub(super) const OF_CONTENDER: [&str; 7] = [
    "page",
    "split_cache",
    "batch_invariant",
    "threshold",
    "query_chunk",
    "rows",
    "own_rows",
];

/// The keys that have an effect only on some rows, and the condition for it.
const EFFECTS: [(&str, &str); 10] = [
    ("kv", FROM_CACHE),
    ("page", FROM_CACHE),
    ("split_cache", FROM_CACHE),
    ("prefill", "where a batch has requests on the expanded path"),
    ("decode", ABSORBED),
    ("path", LAYER),
    ("threshold", LAYER),
    (
        "query_chunk",
        "where the layer is timed and a request on the absorbed path is longer",
    ),
    (
        "rows",
        "where the layer is timed and a request on the expanded path has context",
    ),
    (
        "own_rows",
        "where the layer is timed and a batch has several requests",
    ),
];
const FROM_CACHE: &str = "where something is read from the cache, which a fresh prefill does not";
const ABSORBED: &str = "where a batch has requests on the absorbed path";
const LAYER: &str = "where the layer is timed";

/// Returns the condition under which a key has an effect.
pub(super) fn effective(key: &str) -> &'static str {
    let known = EFFECTS.iter().find(|(name, _)| *name == key);
    known.map_or("", |(_, condition)| *condition)
}

/// The default seed of random numbers.
pub const SEED: u32 = 1;

/// The keys.
#[derive(clap::Args, Clone, Default, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The topic of the sweep. Only files have this key.
    #[arg(skip)]
    pub description: Option<String>,
    /// Batches in the form of `mla spec`. A name in braces stands for the numbers of its range:
    /// `{b}q1s{s}k`.
    #[arg(value_name = "SPEC")]
    pub batches: Vec<String>,
    /// The numbers of a name: `b=1,8,32` or `b=1..16` or `b=0..64+16` or `b=1..128*2`.
    #[arg(long = "range", value_name = "NAME=RANGE")]
    pub range: Vec<String>,
    /// Part to time [default: the attention alone for decodes of up to 16 new tokens and for
    /// prefills without context, otherwise the layer; the layer, too, if one of its keys is given].
    #[arg(long, value_name = "WHAT")]
    pub measure: Option<Measure>,
    /// Device to run on [default: cpu].
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceName>,
    /// Models by name, or paths of their Hugging Face config.json [default: deepseek-r1].
    #[arg(long, value_name = "MODEL", value_delimiter = ',')]
    pub model: Option<Vec<String>>,
    /// Dimensions instead of the model's, each as LxPxRxV: 512x128x64x128.
    #[arg(
        long,
        value_name = "DIMS",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    pub dims: Option<Vec<String>>,
    /// Query heads on one device [default: the model's].
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = positive)]
    pub heads: Option<Vec<u32>>,
    /// Dtypes of queries, weights and outputs [default: the model's, or bf16].
    #[arg(long, value_name = "DTYPE", value_delimiter = ',')]
    pub dtype: Option<Vec<String>>,
    /// Formats of the cache [default: the dtype].
    #[arg(long, value_name = "FORMAT", value_delimiter = ',')]
    pub kv: Option<Vec<String>>,
    /// Tokens in a page of the cache [default: 64].
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = positive)]
    pub page: Option<Vec<u32>>,
    /// Keep latents and rotary keys in two tensors, or in rows of both [default: off].
    #[arg(long, value_name = "SWITCH", value_delimiter = ',', value_parser = switch())]
    pub split_cache: Option<Vec<bool>>,
    /// Ask for results whose bits do not depend on the batch [default: off].
    #[arg(long, value_name = "SWITCH", value_delimiter = ',', value_parser = switch())]
    pub batch_invariant: Option<Vec<bool>>,
    /// Number of entries of each query token's list of slots. Attention is then sparse and
    /// absorbed, and measured alone [default: attend to the whole context].
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = list_width)]
    pub topk: Option<Vec<u32>>,
    /// Distribution of the entries of lists [default: random].
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    pub lists: Option<Vec<ListKind>>,
    /// Number of entries of a list that name a slot, if the context is long enough. The others are
    /// -1 [default: all].
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = list_width)]
    pub valid: Option<Vec<u32>>,
    /// Backends to compare, each in its phase. `all` stands for all that fit [default: the best
    /// that fits].
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub backends: Option<Vec<String>>,
    /// Prefill backends to compare.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        conflicts_with = "backends"
    )]
    pub prefill: Option<Vec<String>>,
    /// Decode backends to compare.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        conflicts_with = "backends"
    )]
    pub decode: Option<Vec<String>>,
    /// Paths to send the whole batch on, in place of the threshold's choice. With both paths, the
    /// crossover is found: the query length at which expanding becomes faster [default: by the
    /// threshold].
    #[arg(
        long,
        value_name = "PATH",
        value_delimiter = ',',
        conflicts_with = "threshold"
    )]
    pub path: Option<Vec<Route>>,
    /// Maximum number of new tokens of a request on the absorbed path [default: the crossover, but
    /// no more than the decode backends accept].
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = natural)]
    pub threshold: Option<Vec<u32>>,
    /// Divide requests on the absorbed path into chunks of this many query tokens.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = positive)]
    pub query_chunk: Option<Vec<u32>>,
    /// W: rows of the context workspace [default: the customary budget].
    #[arg(long, value_name = "W", value_delimiter = ',', value_parser = positive)]
    pub rows: Option<Vec<u32>>,
    /// Give the layer its tensors in the engine's own order or in the order of the step. In the
    /// engine's own order, the last request comes first, and the layer copies rows by an index
    /// [default: off].
    #[arg(long, value_name = "SWITCH", value_delimiter = ',', value_parser = switch())]
    pub own_rows: Option<Vec<bool>>,
    /// Number of layers that run one after another in each sample, each with its own cache. Times
    /// are per layer [default: 1].
    #[arg(long, value_name = "N", value_parser = positive)]
    pub layers: Option<u32>,
    /// Timed runs of each row [default: 30].
    #[arg(long, value_name = "N", value_parser = samples)]
    pub samples: Option<u32>,
    /// Untimed runs of each row before the samples [default: 3].
    #[arg(long, value_name = "N", value_parser = warm_up)]
    pub warm_up: Option<u32>,
    /// Replay a CUDA graph [default: on for a GPU].
    #[arg(long, value_name = "SWITCH", value_parser = switch())]
    pub graphs: Option<bool>,
    /// Fill the hardware caches with other data before every sample [default: on].
    #[arg(long, value_name = "SWITCH", value_parser = switch())]
    pub cold_cache: Option<bool>,
    /// Output rows of each row's last layer that are compared with attention in f64 [default: 16].
    #[arg(long, value_name = "N", value_parser = positive)]
    pub check: Option<u32>,
    /// Seed of the random numbers [default: 1].
    #[arg(long, value_name = "N", value_parser = natural)]
    pub seed: Option<u32>,
}

impl Settings {
    /// Returns the settings of a file, each replaced by the one in `self` if that is given.
    pub fn over(self, path: &Path) -> Result<Self, CliError> {
        let refused = |message| CliError::file("--config", path, message);
        let text = read_text(path, "a sweep file, as in mla-cli/sweeps").map_err(refused)?;
        let mut keys = read_keys(&text).map_err(refused)?;
        let name = |range: &str| range.split('=').next().map(str::to_owned);
        let given: Vec<_> = self.range.iter().map(|range| name(range)).collect();
        let of_file = keys.get("range").and_then(Value::as_array);
        let of_file = of_file.into_iter().flatten().filter_map(Value::as_str);
        let kept = of_file.filter(|range| !given.contains(&name(range)));
        let range = kept.map(str::to_owned).chain(self.range.clone()).collect();
        keys.extend(self.keys());
        // The values were made from settings, which are written in the form in which they are read.
        let merged: Self = serde_json::from_value(keys.into()).expect("these are settings");
        Ok(Self { range, ..merged })
    }

    /// Returns all combinations of the lists of sparse attention, or one `None` if attention is
    /// dense.
    pub fn lists(&self) -> Result<Vec<Option<Lists>>, CliError> {
        let Some(widths) = &self.topk else {
            let argument = match (&self.lists, &self.valid) {
                (None, None) => return Ok(vec![None]),
                (Some(_), _) => "lists",
                (None, _) => "valid",
            };
            return Err(CliError::argument(
                argument,
                "a value without topk",
                "one beside topk, which makes attention sparse",
            ));
        };
        let mut all = Vec::new();
        for &topk in widths {
            for &kind in self.lists.as_deref().unwrap_or(&[ListKind::Random]) {
                for &valid in self.valid.as_deref().unwrap_or(&[topk]) {
                    if valid > topk {
                        let accepted = format!("at most topk, {topk}");
                        return Err(CliError::argument("valid", valid.to_string(), accepted));
                    }
                    all.push(Some(Lists { kind, topk, valid }));
                }
            }
        }
        Ok(all)
    }

    /// Returns the numbers of each name, from arguments and file.
    pub(crate) fn ranges(&self) -> Result<BTreeMap<String, Vec<u32>>, CliError> {
        let mut ranges = BTreeMap::new();
        for given in &self.range {
            let (name, range) = split_range(given)?;
            let range = read_range(range).map_err(CliError::BatchSpec)?;
            if ranges.insert(name.to_owned(), range).is_some() {
                return Err(CliError::argument(
                    "--range",
                    format!("{name} twice"),
                    "each name once",
                ));
            }
        }
        Ok(ranges)
    }

    /// Returns the given keys with their values.
    pub fn keys(&self) -> Map<String, Value> {
        // The values are strings, numbers and lists.
        let Ok(Value::Object(mut keys)) = serde_json::to_value(self) else {
            unreachable!("settings are an object");
        };
        keys.retain(|_, value| match value {
            Value::Array(list) => !list.is_empty(),
            value => !value.is_null(),
        });
        keys
    }

    /// Returns every given key that has an effect only on some rows, with the number of its values.
    pub fn given(&self) -> Vec<(&'static str, usize)> {
        let keys = self.keys();
        let count = |(key, _)| Some((key, keys.get(key)?.as_array()?.len()));
        EFFECTS.into_iter().filter_map(count).collect()
    }

    /// Returns those of the keys that have several values.
    pub fn several(&self, of: &[&'static str]) -> Vec<&'static str> {
        let keys = self.keys();
        let values = |key: &str| keys.get(key).and_then(Value::as_array).map_or(0, Vec::len);
        of.iter().copied().filter(|key| values(key) > 1).collect()
    }

    /// Refuses settings for properties that a file of cases itself defines.
    pub fn refuse_beside_cases(&self) -> Result<(), CliError> {
        let keys = self.keys();
        let others = ["batches", "range", "measure", "path"];
        let mut of_file = others.into_iter().chain(OF_CASE).chain(OF_CONTENDER);
        match of_file.find(|key| keys.contains_key(*key)) {
            None => Ok(()),
            Some(key) => Err(CliError::argument(
                key,
                "a value beside --cases",
                "one of the two: the file says what its cases are",
            )),
        }
    }

    /// Refuses a value that occurs twice on an axis, since it would give equal rows.
    pub fn refuse_repetitions(&self) -> Result<(), CliError> {
        let keys = self.keys();
        let others = ["backends", "prefill", "decode", "path"];
        for key in OF_CASE.into_iter().chain(OF_CONTENDER).chain(others) {
            let values = keys.get(key).and_then(Value::as_array);
            let values = values.map_or(&[][..], Vec::as_slice);
            let mut places = values.iter().enumerate();
            if let Some((_, twice)) = places.find(|(at, value)| values[..*at].contains(value)) {
                let given = format!("{} twice", argument(twice).unwrap_or_default());
                return Err(CliError::argument(key, given, "each value once"));
            }
        }
        Ok(())
    }
}

/// Reads the keys of a sweep file as the arguments of the same names. An error names the line.
fn read_keys(text: &str) -> Result<Map<String, Value>, String> {
    let file: Map<String, Value> = serde_saphyr::from_str(text).map_err(|error| {
        let line = error.location().map_or(1, |place| place.line());
        let line = text.lines().nth(line.saturating_sub(1) as usize);
        let line = line.unwrap_or_default().trim();
        let fault = error.without_snippet();
        format!("given {line:?}: {fault}; accepted: keys with their values, as in mla-cli/sweeps")
    })?;
    let mut keys = Map::new();
    for (key, value) in file {
        let read = read_key(&key, &value).map_err(|fault| {
            let is_of_key = |line: &&str| {
                let rest = line.trim_start().strip_prefix(&*key);
                rest.is_some_and(|rest| rest.trim_start().starts_with(':'))
            };
            let line = text.lines().find(is_of_key);
            format!("given {:?}: {fault}", line.unwrap_or(&key).trim())
        })?;
        keys.extend(read.keys());
    }
    Ok(keys)
}

fn read_key(key: &str, value: &Value) -> Result<Settings, String> {
    if let ("description", Value::String(text)) = (key, value) {
        return Ok(Settings {
            description: Some(text.clone()),
            ..Settings::default()
        });
    }
    let arguments: Option<Vec<String>> = match (key, value) {
        ("batches", Value::Array(specs)) => {
            let specs = specs.iter().map(argument);
            std::iter::once(Some("--".to_owned()))
                .chain(specs)
                .collect()
        }
        ("ranges", Value::Object(ranges)) => {
            let ranges = ranges.iter();
            ranges
                .map(|(name, range)| Some(format!("--range={name}={}", argument(range)?)))
                .collect()
        }
        ("batches", _) => return Err("accepted: a list".to_owned()),
        ("ranges", _) | ("range", _) => {
            return Err("accepted: names with their ranges, as ranges".to_owned());
        }
        _ => argument(value).map(|text| vec![format!("--{}={text}", key.replace('_', "-"))]),
    };
    let arguments = arguments.ok_or(
        "accepted: a value that the argument of this name takes, or a list of such values",
    )?;
    let command = Settings::augment_args(Command::new("sweep").no_binary_name(true));
    let matches = command.try_get_matches_from(arguments);
    let settings = matches.and_then(|matches| Settings::from_arg_matches(&matches));
    settings.map_err(|error| {
        // Usage and hints follow an empty line.
        let text = error.to_string();
        let fault = text.split("\n\n").next().unwrap_or_default();
        let words: Vec<&str> = fault.split_whitespace().collect();
        words.join(" ").replacen("error: ", "", 1)
    })
}

/// Returns the parser of a switch.
fn switch() -> impl TypedValueParser<Value = bool> {
    named(&[true, false], on_or_off)
}

/// Splits a range in an argument into its name and its numbers.
fn split_range(given: &str) -> Result<(&str, &str), CliError> {
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase());
    let parts = given.split_once('=').filter(|(name, _)| is_name(name));
    parts.ok_or_else(|| {
        CliError::argument(
            "--range",
            format!("{given:?}"),
            "a name of letters a to z, =, and its numbers: b=1,8,32 or b=1..16 or b=1..128*2",
        )
    })
}
