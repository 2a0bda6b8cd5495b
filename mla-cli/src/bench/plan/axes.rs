//! The batches and models of a sweep.

use std::collections::BTreeSet;
use std::path::PathBuf;

use mla_runtime::model::{DType, KvFormat, ModelConfig};

use crate::args::read_config;
use crate::batch::BatchSpec;
use crate::bench::dims::{DIMS, read_dims};
use crate::bench::settings::Settings;
use crate::bench::settings::template::Template;
use crate::error::CliError;

/// A batch of a sweep.
pub(super) struct Batch {
    pub spec: BatchSpec,
    pub text: String,
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
    pub config: ModelConfig,
    pub dtype: DType,
    pub kv_formats: Vec<KvFormat>,
}

pub(super) fn models(settings: &Settings) -> Result<Vec<Model>, CliError> {
    let names = settings
        .model
        .clone()
        .unwrap_or_else(|| vec!["deepseek-r1".to_owned()]);
    let dims = match &settings.dims {
        None => vec![None],
        Some(dims) => dims
            .iter()
            .map(|text| {
                let dims = read_dims(text).map(Some);
                dims.ok_or_else(|| CliError::argument("dims", format!("{text:?}"), DIMS))
            })
            .collect::<Result<_, _>>()?,
    };
    let dtypes = match &settings.dtype {
        None => vec![None],
        Some(names) => names
            .iter()
            .map(|name| named("dtype", name, DType::ALL, DType::name).map(Some))
            .collect::<Result<_, _>>()?,
    };
    let mut models = Vec::new();
    for name in &names {
        let path = PathBuf::from(name);
        let config = if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            read_config("--model", &path)?
        } else {
            ModelConfig::preset(name)?
        };
        for dims in &dims {
            for dtype in &dtypes {
                let mut config = config;
                config.dims = dims.unwrap_or(config.dims);
                let dtype = dtype.or(config.dtype).unwrap_or(DType::BF16);
                let kv_formats = match &settings.kv {
                    None => vec![KvFormat::of(dtype)],
                    Some(names) => names
                        .iter()
                        .map(|name| named("kv", name, KvFormat::ALL, KvFormat::name))
                        .collect::<Result<_, _>>()?,
                };
                models.push(Model {
                    parameters: vec![
                        ("model", name.clone()),
                        ("dims", config.dims.to_string()),
                        ("dtype", dtype.to_string()),
                    ],
                    config,
                    dtype,
                    kv_formats,
                });
            }
        }
    }
    Ok(models)
}

fn named<T: Copy>(
    argument: &'static str,
    given: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, CliError> {
    let found = all.iter().copied().find(|value| name(*value) == given);
    found.ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|value| name(*value)).collect();
        CliError::argument(argument, format!("{given:?}"), names.join(", "))
    })
}
