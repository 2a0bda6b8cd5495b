//! The settings of a benchmark, from arguments and sweep files: the same keys in both.
//!
//! A key that takes a list is an axis: a benchmark has a row for every combination. An argument
//! takes the place of the file's key.

mod range;
mod refusals;
pub(crate) mod template;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use self::range::Range;
pub(crate) use self::values::{Measure, Route, Switch};
use self::values::{RangeSetting, fault, list};
use super::lists::{ListKind, Lists};
use crate::args::input::read_text;
use crate::args::{list_width, natural, positive, samples, warm_up};
use crate::device::DeviceName;
use crate::error::CliError;

/// The keys that tell cases apart if they have several values: a case is what is to be computed.
pub(super) const OF_CASE: [&str; 8] = [
    "model", "dims", "dtype", "heads", "kv", "topk", "lists", "valid",
];

/// The keys that tell contenders apart, beside their names: a contender is how it is done.
pub(super) const OF_CONTENDER: [&str; 7] = [
    "page",
    "split_cache",
    "threshold",
    "query_chunk",
    "rows",
    "own_rows",
    "num_splits",
];

/// The keys that have an effect on some rows alone, and the condition.
const EFFECTS: [(&str, &str); 11] = [
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
    ("num_splits", ABSORBED),
];
const FROM_CACHE: &str = "where something is read from the cache, which a fresh prefill does not";
const ABSORBED: &str = "where a batch has requests on the absorbed path";
const LAYER: &str = "where the layer is timed";

/// The condition under which a key has an effect.
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
    /// The topic of the sweep; in files only.
    #[arg(skip)]
    pub description: Option<String>,
    /// Batches, as `mla spec` reads them. A name in braces stands for the numbers of its range:
    /// `{b}q1s{s}k`.
    #[arg(value_name = "SPEC")]
    pub batches: Vec<String>,
    /// The numbers of a name: `b=1,8,32` or `b=1..16` or `b=0..64+16` or `b=1..128*2`.
    #[arg(long = "range", value_name = "NAME=RANGE")]
    #[serde(skip)]
    pub range: Vec<String>,
    /// The same, in files.
    #[arg(skip)]
    pub ranges: BTreeMap<String, RangeSetting>,
    /// Subject of the timing [default: attention alone for decodes of up to 16 new tokens and for
    /// prefills without context, and the layer for any other batch and for a key of the layer's].
    #[arg(long, value_name = "WHAT")]
    pub measure: Option<Measure>,
    /// Device to run on [default: cpu].
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceName>,
    /// Models by name, or paths of their Hugging Face config.json [default: deepseek-r1].
    #[arg(long, value_name = "MODEL", value_delimiter = ',')]
    #[serde(deserialize_with = "list")]
    pub model: Option<Vec<String>>,
    /// Dimensions instead of the model's, each as LxPxRxV: 512x128x64x128.
    #[arg(
        long,
        value_name = "DIMS",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    #[serde(deserialize_with = "list")]
    pub dims: Option<Vec<String>>,
    /// Query heads on one device [default: the model's].
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = positive)]
    #[serde(deserialize_with = "list")]
    pub heads: Option<Vec<u32>>,
    /// Dtypes of queries, weights and outputs [default: the model's, or bf16].
    #[arg(long, value_name = "DTYPE", value_delimiter = ',')]
    #[serde(deserialize_with = "list")]
    pub dtype: Option<Vec<String>>,
    /// Formats of the cache [default: the dtype].
    #[arg(long, value_name = "FORMAT", value_delimiter = ',')]
    #[serde(deserialize_with = "list")]
    pub kv: Option<Vec<String>>,
    /// Tokens in a page of the cache [default: 64].
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = positive)]
    #[serde(deserialize_with = "list")]
    pub page: Option<Vec<u32>>,
    /// Keep latents and rotary keys in two tensors, or in rows of both [default: off].
    #[arg(long, value_name = "SWITCH", value_delimiter = ',')]
    #[serde(deserialize_with = "list")]
    pub split_cache: Option<Vec<Switch>>,
    /// Entries of each query token's list of slots: attention is then sparse, absorbed and alone
    /// [default: to the whole context].
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = list_width)]
    #[serde(deserialize_with = "list")]
    pub topk: Option<Vec<u32>>,
    /// Distribution of the entries of lists [default: random].
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    #[serde(deserialize_with = "list")]
    pub lists: Option<Vec<ListKind>>,
    /// Entries of a list that name a slot, if the context has that many; the others are -1
    /// [default: all].
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = list_width)]
    #[serde(deserialize_with = "list")]
    pub valid: Option<Vec<u32>>,
    /// Backends to compare, each in its phase; `all` is all that fit [default: the best that fits].
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    #[serde(deserialize_with = "list")]
    pub backends: Option<Vec<String>>,
    /// Prefill backends to compare.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        conflicts_with = "backends"
    )]
    #[serde(deserialize_with = "list")]
    pub prefill: Option<Vec<String>>,
    /// Decode backends to compare.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        conflicts_with = "backends"
    )]
    #[serde(deserialize_with = "list")]
    pub decode: Option<Vec<String>>,
    /// Paths that the whole batch is sent on, whatever the threshold. With both, the query length
    /// at which expanding becomes the faster one is found [default: by the threshold].
    #[arg(
        long,
        value_name = "PATH",
        value_delimiter = ',',
        conflicts_with = "threshold"
    )]
    #[serde(deserialize_with = "list")]
    pub path: Option<Vec<Route>>,
    /// Maximal number of new tokens of a request on the absorbed path [default: the crossover, but
    /// no more than the decode backends take].
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = natural)]
    #[serde(deserialize_with = "list")]
    pub threshold: Option<Vec<u32>>,
    /// Requests on the absorbed path go to the backend in chunks of this many query tokens.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = positive)]
    #[serde(deserialize_with = "list")]
    pub query_chunk: Option<Vec<u32>>,
    /// W: rows of the context workspace [default: the customary budget].
    #[arg(long, value_name = "W", value_delimiter = ',', value_parser = positive)]
    #[serde(deserialize_with = "list")]
    pub rows: Option<Vec<u32>>,
    /// Give the layer its tensors in an order of the engine's own, the last request first, of which
    /// it copies rows by an index, or in the order of the step [default: off].
    #[arg(long, value_name = "SWITCH", value_delimiter = ',')]
    #[serde(deserialize_with = "list")]
    pub own_rows: Option<Vec<Switch>>,
    /// Parts at most into which the decode backend divides each request's rows, if it lets others
    /// decide [default: its own choice].
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = positive)]
    #[serde(deserialize_with = "list")]
    pub num_splits: Option<Vec<u32>>,
    /// Layers that run one after another in each sample, with caches of their own; times are per
    /// layer [default: 1].
    #[arg(long, value_name = "N", value_parser = positive)]
    pub layers: Option<u32>,
    /// Timed runs of each row [default: 30].
    #[arg(long, value_name = "N", value_parser = samples)]
    pub samples: Option<u32>,
    /// Runs of each row that do not count [default: 3].
    #[arg(long, value_name = "N", value_parser = warm_up)]
    pub warm_up: Option<u32>,
    /// Replay a CUDA graph, or not [default: on for a GPU].
    #[arg(long)]
    pub graphs: Option<Switch>,
    /// Fill the caches with something else before every sample, or not [default: on].
    #[arg(long)]
    pub cold_cache: Option<Switch>,
    /// Output rows of each row's last layer that are compared with attention in f64 [default: 16].
    #[arg(long, value_name = "N", value_parser = positive)]
    pub check: Option<u32>,
    /// Seed of the random numbers [default: 1].
    #[arg(long, value_name = "N", value_parser = natural)]
    pub seed: Option<u32>,
}

impl Settings {
    /// The settings of a file, each replaced by the one in `self` if that is given.
    pub fn over(self, path: &Path) -> Result<Self, CliError> {
        let refused = |message| CliError::file("--config", path, message);
        let text = read_text(path, "a sweep file, as in mla-cli/sweeps").map_err(refused)?;
        let file: Self = serde_saphyr::from_str(&text).map_err(|error| {
            let line = error.location().map_or(1, |place| place.line());
            let given = text.lines().nth(line.saturating_sub(1) as usize);
            let given = given.unwrap_or_default().trim();
            refused(format!("given {given:?}: {}", fault(&error)))
        })?;
        if let Some(refusal) = file.number_out_of_range() {
            return Err(refused(refusal));
        }
        let mut keys = file.keys();
        keys.extend(self.keys());
        // They were made of settings, which are written as they are read.
        let merged: Self = serde_json::from_value(keys.into()).expect("these are settings");
        Ok(Self {
            range: self.range,
            ..merged
        })
    }

    /// All defaults, on a device.
    pub fn on(device: DeviceName) -> Self {
        Self {
            device: Some(device),
            ..Self::default()
        }
    }

    /// The lists of sparse attention, every combination; one absence where attention is dense.
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

    /// The numbers of each name, by arguments and file.
    pub(crate) fn ranges(&self) -> Result<BTreeMap<String, Range>, CliError> {
        let mut ranges = BTreeMap::new();
        for (name, range) in &self.ranges {
            if !is_name(name) {
                return Err(CliError::argument("ranges", format!("{name:?}"), NAME));
            }
            ranges.insert(name.clone(), range.read().map_err(CliError::BatchSpec)?);
        }
        let mut given_before = BTreeSet::new();
        for given in &self.range {
            let (name, range) = split_range(given)?;
            if !given_before.insert(name) {
                return Err(CliError::argument(
                    "--range",
                    format!("{name} twice"),
                    "each name once",
                ));
            }
            let range = range.parse().map_err(CliError::BatchSpec)?;
            ranges.insert(name.to_owned(), range);
        }
        Ok(ranges)
    }

    /// The keys that are given, and their values.
    pub fn keys(&self) -> Map<String, Value> {
        // Strings, numbers and lists.
        let Ok(Value::Object(mut keys)) = serde_json::to_value(self) else {
            unreachable!("settings are an object");
        };
        keys.retain(|_, value| match value {
            Value::Array(list) => !list.is_empty(),
            Value::Object(ranges) => !ranges.is_empty(),
            value => !value.is_null(),
        });
        keys
    }

    /// Every key that was given and that has an effect on some rows alone, and the number of its
    /// values.
    pub fn given(&self) -> Vec<(&'static str, usize)> {
        let keys = self.keys();
        let count = |(key, _)| Some((key, keys.get(key)?.as_array()?.len()));
        EFFECTS.into_iter().filter_map(count).collect()
    }

    /// The keys among these that have several values.
    pub fn several(&self, of: &[&'static str]) -> Vec<&'static str> {
        let keys = self.keys();
        let values = |key: &str| keys.get(key).and_then(Value::as_array).map_or(0, Vec::len);
        of.iter().copied().filter(|key| values(key) > 1).collect()
    }
}

const NAME: &str = "a name of letters a to z";

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// The name and the numbers of a range as an argument has them.
fn split_range(given: &str) -> Result<(&str, &str), CliError> {
    let parts = given.split_once('=').filter(|(name, _)| is_name(name));
    parts.ok_or_else(|| {
        CliError::argument(
            "--range",
            format!("{given:?}"),
            format!("{NAME}, =, and its numbers: b=1,8,32 or b=1..16 or b=1..128*2"),
        )
    })
}
