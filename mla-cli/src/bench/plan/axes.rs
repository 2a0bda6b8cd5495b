//! The batches and models of a sweep.

use std::collections::BTreeSet;
use std::path::PathBuf;

use mla_runtime::model::{DType, KvFormat, MlaDims, ModelConfig};

use crate::args::{find_named, read_config};
use crate::batch::BatchSpec;
use crate::bench::dims::{DIMS, read_dims};
use crate::bench::settings::Settings;
use crate::bench::settings::template::Template;
use crate::error::CliError;

/// A batch of a sweep.
pub(super) struct Batch {
    pub spec: BatchSpec,
    pub text: String,
    /// The batch in words.
    pub label: String,
}

pub(super) fn batches(settings: &Settings) -> Result<Vec<Batch>, CliError> {
    if settings.batches.is_empty() {
        return Err(CliError::argument(
            "SPEC",
            "none",
            "at least one batch, such as 8q1s4k, by arguments, --config or --cases",
        ));
    }
    let ranges = settings.ranges()?;
    let mut unused: BTreeSet<&str> = ranges.keys().map(String::as_str).collect();
    let mut batches = Vec::new();
    for text in &settings.batches {
        let template: Template = text.parse().map_err(CliError::BatchSpec)?;
        let mut numbers = Vec::new();
        for name in template.names() {
            let Some(range) = ranges.get(name) else {
                return Err(CliError::argument(
                    "--range",
                    format!("none for {{{name}}} of {text}"),
                    format!("its numbers: --range {name}=1,8,32"),
                ));
            };
            unused.remove(name.as_str());
            numbers.push(range.clone());
        }
        let specs = template.expand(&numbers).map_err(CliError::BatchSpec)?;
        batches.extend(specs.into_iter().map(|spec| Batch {
            text: spec.to_string(),
            label: spec.label(),
            spec,
        }));
    }
    if let Some(name) = unused.first() {
        return Err(CliError::argument(
            "--range",
            format!("{name}, which occurs in no batch"),
            format!("names of a batch, as in {{{name}}}q1s1k"),
        ));
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = batches.iter().find(|batch| !seen.insert(&batch.text)) {
        return Err(CliError::argument(
            "SPEC",
            format!("{} twice", twice.text),
            "each batch once",
        ));
    }
    Ok(batches)
}

/// A model of a sweep, with dims and dtype.
pub(super) struct Model {
    pub parameters: Vec<(&'static str, String)>,
    pub dims: MlaDims,
    pub heads: u32,
    pub dtype: DType,
    pub kv_formats: Vec<KvFormat>,
    pub softmax_scale: f32,
}

pub(super) fn models(settings: &Settings) -> Result<Vec<Model>, CliError> {
    let names = settings
        .model
        .clone()
        .unwrap_or_else(|| vec!["deepseek-r1".to_owned()]);
    let dims = optional(&settings.dims, |text| {
        read_dims(text).ok_or_else(|| CliError::argument("dims", format!("{text:?}"), DIMS))
    })?;
    let dtypes = optional(&settings.dtype, |name| {
        named("dtype", name, DType::ALL, DType::name)
    })?;
    let formats = optional(&settings.kv, |name| {
        named("kv", name, KvFormat::ALL, KvFormat::name)
    })?;
    let mut models = Vec::new();
    for name in &names {
        let path = PathBuf::from(name);
        let config = match path.extension() {
            Some(extension) if extension == "json" => read_config("--model", &path)?,
            _ => ModelConfig::preset(name)?,
        };
        for dims in &dims {
            for dtype in &dtypes {
                let mut config = config;
                config.dims = dims.unwrap_or(config.dims);
                let dtype = dtype.or(config.dtype).unwrap_or(DType::BF16);
                let formats = formats.iter();
                models.push(Model {
                    parameters: vec![
                        ("model", name.clone()),
                        ("dims", config.dims.to_string()),
                        ("dtype", dtype.to_string()),
                    ],
                    dims: config.dims,
                    heads: config.heads,
                    dtype,
                    kv_formats: formats
                        .map(|it| it.unwrap_or(KvFormat::of(dtype)))
                        .collect(),
                    softmax_scale: config.softmax_scale() as f32,
                });
            }
        }
    }
    Ok(models)
}

/// Reads each value, or returns one `None` if the key is not given.
fn optional<T>(
    given: &Option<Vec<String>>,
    read: impl Fn(&String) -> Result<T, CliError>,
) -> Result<Vec<Option<T>>, CliError> {
    match given {
        None => Ok(vec![None]),
        Some(texts) => texts.iter().map(|text| read(text).map(Some)).collect(),
    }
}

fn named<T: Copy>(
    argument: &'static str,
    given: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, CliError> {
    let found = find_named(given, all, name);
    found.map_err(|names| CliError::argument(argument, format!("{given:?}"), names))
}
