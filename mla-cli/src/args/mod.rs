//! Arguments that several subcommands take, and how their values are read.

pub(crate) mod input;

use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use mla_runtime::model::{DType, IndexerConfig, KvFormat, MAX_DIM, ModelConfig, Preset};
use mla_runtime::spec::{Feature, FeatureSet};
use serde::Serialize;

use self::input::read_text;
use crate::error::CliError;

/// The format of the output.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table for people.
    Table,
    /// JSON for programs.
    Json,
}

impl Format {
    /// Formats the output: as a table, which `table` makes only if it is needed, or as JSON.
    pub fn write(self, report: &impl Serialize, table: impl FnOnce() -> String) -> String {
        match self {
            Self::Table => table(),
            Self::Json => json(report),
        }
    }
}

/// Formats a result as JSON.
pub fn json(result: &impl Serialize) -> String {
    // Strings, numbers, lists and structs can always be written as JSON.
    serde_json::to_string_pretty(result).expect("the result is JSON") + "\n"
}

/// The choice of a model.
#[derive(Args)]
pub struct ModelArgs {
    /// A public model, by name.
    #[arg(
        long,
        value_name = "NAME",
        default_value = "deepseek-r1",
        conflicts_with = "config"
    )]
    model: String,
    /// A model's own Hugging Face config.json.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Query heads on one device, after any tensor parallelism [default: the model's].
    #[arg(long, value_name = "N", value_parser = head_count)]
    heads: Option<u32>,
    /// The dtype of queries, weights and outputs [default: the model's, or bf16].
    #[arg(long, value_parser = named(DType::ALL, DType::name))]
    dtype: Option<DType>,
    /// Apply or leave out yarn's correction of the softmax scale, in place of what the
    /// configuration says. Implementations of some models disagree about it.
    #[arg(long, value_name = "BOOL")]
    apply_scale: Option<bool>,
}

/// A model as the arguments describe it.
pub struct Model {
    /// The preset's name or the file's path.
    pub name: String,
    pub config: ModelConfig,
    pub heads: u32,
    pub dtype: DType,
    /// The fields that no file of the publisher confirms.
    unconfirmed: &'static [&'static str],
}

impl ModelArgs {
    pub fn read(&self) -> Result<Model, CliError> {
        let (name, config, unconfirmed) = match &self.config {
            Some(path) => {
                let config = read_config("--config", path)?;
                (path.display().to_string(), config, &[][..])
            }
            None => {
                let preset = Preset::named(&self.model).map_err(CliError::Preset)?;
                (self.model.clone(), preset.config()?, preset.unconfirmed)
            }
        };
        let config = match self.apply_scale {
            Some(applies) => scaled(config, applies)?,
            None => config,
        };
        Ok(Model {
            name,
            config,
            heads: self.heads.unwrap_or(config.heads),
            dtype: self.dtype.or(config.dtype).unwrap_or(DType::BF16),
            unconfirmed,
        })
    }
}

/// Returns the model with or without yarn's corrections.
fn scaled(mut config: ModelConfig, applies: bool) -> Result<ModelConfig, CliError> {
    if !config.rope.has_yarn() {
        let accepted = "nothing: the model has no yarn";
        return Err(CliError::argument(
            "--apply-scale",
            applies.to_string(),
            accepted,
        ));
    }
    config.rope = config.rope.with_applied_scale(applies);
    Ok(config)
}

/// The form of attention to use if a model has an indexer.
#[derive(Args)]
pub(crate) struct SparseArgs {
    /// Attend to lists of slots, as models with an indexer do unless --dense is given.
    #[arg(long, conflicts_with = "dense")]
    sparse: bool,
    /// Attend to all context, although the model has an indexer that selects from it.
    #[arg(long)]
    dense: bool,
}

impl SparseArgs {
    /// True if the layer attends to lists of slots.
    pub(crate) fn read(&self, model: &Model) -> bool {
        self.sparse || (model.is_sparse() && !self.dense)
    }
}

impl Model {
    /// True if the model has an indexer, even if only the engine supports it.
    fn is_sparse(&self) -> bool {
        self.config.indexer.is_some() || self.config.foreign_indexer.is_some()
    }

    /// Returns lines about the softmax scale and the rotation, and a line for each task that is
    /// left to the engine.
    pub fn engine_work(&self) -> String {
        let (scale, rope) = (self.config.softmax_scale(), self.config.rope);
        let numbers = format!("Softmax scale {scale:.6}.\nRotation: {rope}.\n");
        let work = self.config.engine_work();
        let unconfirmed = (!self.unconfirmed.is_empty()).then(|| {
            let fields = self.unconfirmed.join(", ");
            format!("no file of the publisher's confirms {fields}")
        });
        let lines = work.into_iter().chain(unconfirmed);
        lines.fold(numbers, |text, line| text + &format!("Note: {line}.\n"))
    }

    /// Returns the features that the model's attention needs.
    pub fn features(&self) -> FeatureSet {
        features(&self.config)
    }

    /// Returns the model's indexer, or an error if it has none.
    pub fn indexer(&self) -> Result<IndexerConfig, CliError> {
        self.config.indexer.ok_or_else(|| {
            CliError::argument(
                "--model",
                format!("{}, which has no indexer", self.name),
                "a model with index_n_heads, index_head_dim and index_topk, such as deepseek-v3.2 \
                 or glm-5",
            )
        })
    }
}

/// Returns the features that the attention of a model needs.
pub(crate) fn features(config: &ModelConfig) -> FeatureSet {
    match config.sinks {
        true => FeatureSet::of(&[Feature::Sinks]),
        false => FeatureSet::NONE,
    }
}

/// Reads the model from a Hugging Face config.json.
pub(crate) fn read_config(argument: &'static str, path: &Path) -> Result<ModelConfig, CliError> {
    let json = read_text(path, "a model's config.json");
    let json = json.map_err(|why| CliError::file(argument, path, why))?;
    ModelConfig::from_hf_config(&json).map_err(|error| CliError::file(argument, path, error))
}

/// Returns a parser for the values of a closed set, by name.
pub fn named<T: Copy + Send + Sync>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(all.iter().map(|value| name(*value))).try_map(move |given| {
        let found = all.iter().find(|value| name(**value) == given);
        // The parser accepts only the names of `all`.
        found.copied().ok_or("no such value")
    })
}

/// Returns a value of a closed set by its name, or the names that are accepted.
#[cfg(feature = "bench")]
pub(crate) fn find_named<T: Copy>(
    given: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, String> {
    let found = all.iter().copied().find(|value| name(*value) == given);
    found.ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|value| name(*value)).collect();
        names.join(", ")
    })
}

/// Returns the features of a problem with such a cache.
pub(crate) fn cache_features(split: bool) -> FeatureSet {
    match split {
        true => FeatureSet::of(&[Feature::SplitCache]),
        false => FeatureSet::of(&[]),
    }
}

/// Returns the parser for names of cache formats.
pub(crate) fn kv_format() -> impl TypedValueParser<Value = KvFormat> {
    named(KvFormat::ALL, KvFormat::name)
}

/// Parses a number from 1 up.
pub fn positive(text: &str) -> Result<u32, String> {
    within(text, 1, u32::MAX)
}

/// Parses a number of heads, up to the maximum of a [`Problem`](mla_runtime::spec::Problem).
fn head_count(text: &str) -> Result<u32, String> {
    within(text, 1, MAX_DIM)
}

/// Parses a number from 0 up.
pub(crate) fn natural(text: &str) -> Result<u32, String> {
    within(text, 0, u32::MAX)
}

/// Parses the number of samples. The maximum is small enough to keep all times in memory.
#[cfg(feature = "bench")]
pub fn samples(text: &str) -> Result<u32, String> {
    within(text, 1, MAX_SAMPLES)
}

/// Parses the number of warm-up runs before the samples.
#[cfg(feature = "bench")]
pub fn warm_up(text: &str) -> Result<u32, String> {
    within(text, 0, MAX_SAMPLES)
}

/// Parses the number of entries of a list of slots.
#[cfg(feature = "bench")]
pub(crate) fn list_width(text: &str) -> Result<u32, String> {
    within(text, 1, MAX_LIST_WIDTH)
}

/// The maximum number of entries of a list, hundreds of times that of any model.
#[cfg(feature = "bench")]
pub(crate) const MAX_LIST_WIDTH: u32 = 1 << 20;

/// The maximum number of samples of one row.
#[cfg(feature = "bench")]
pub(crate) const MAX_SAMPLES: u32 = 1_000_000;

/// Parses an amount of memory.
pub(crate) fn size(text: &str) -> Result<ByteSize, String> {
    match text.parse() {
        // Larger values are parsed as this one.
        Ok(ByteSize(u64::MAX)) => Err(format!("given {text:?}, accepted less than 16 EiB")),
        Ok(size) => Ok(size),
        Err(_) => Err(format!(
            "given {text:?}, accepted bytes, or a number with a unit such as 80GiB or 1.5TB"
        )),
    }
}

// Only ASCII digits are accepted: no sign, no space, no other script.
fn within(text: &str, min: u32, max: u32) -> Result<u32, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse()
        .ok()
        .filter(|number| digits && (min..=max).contains(number))
        .ok_or_else(|| format!("given {text:?}, accepted a number from {min} to {max}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_strictly() {
        assert_eq!(positive("64"), Ok(64));
        assert_eq!(natural("0"), Ok(0));
        for text in [
            "",
            "0",
            "+1",
            "-1",
            " 1",
            "1 ",
            "1\n",
            "1k",
            "٣",
            "4294967296",
        ] {
            let message = format!("given {text:?}, accepted a number from 1 to 4294967295");
            assert_eq!(positive(text), Err(message));
        }
    }
}
