//! `mla models`: which backends each public model gets on which GPU, and what its cache takes.
//!
//! The output is docs/support.md, and a test compares the two. The output must not depend on the
//! features of this build: a backend that is left out counts as if it were included.

mod measured;
mod page;

use mla_runtime::model::{KvFormat, ModelConfig, PRESETS, Preset};
use mla_runtime::select::{Candidate, Registry, SelectionRequest};
use mla_runtime::spec::{Capability, Cause, Phase, Platform, Problem, Target};
use serde::Serialize;

use crate::args::{Format, features};
use crate::error::CliError;
use measured::Measured;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the result. The table is the page docs/support.md.
    #[arg(long, default_value = "table")]
    format: Format,
}

pub(crate) fn output(args: &Args) -> Result<String, CliError> {
    let report = Report::new()?;
    Ok(args.format.write(&report, || page::write(&report)))
}

/// Hardware in the report.
const HARDWARE: &[(&str, Target)] = &[
    ("A100", gpu(8, 0)),
    ("RTX 4090", gpu(8, 9)),
    ("L40S", gpu(8, 9)),
    ("H100", gpu(9, 0)),
    ("H200", gpu(9, 0)),
    ("B200", gpu(10, 0)),
    ("RTX 5090", gpu(12, 0)),
    ("CPU", Target::CPU),
];

const fn gpu(major: u8, minor: u8) -> Target {
    Target::dry_run(Capability::new(major, minor))
}

/// The lowest capability of GPUs with the device's indexer (for keys that are not pooled), and the
/// feature that compiles it.
const INDEXER: (Capability, &str) = (Capability::new(9, 0), "sm90");

/// The report on all models.
#[derive(Serialize)]
struct Report {
    models: Vec<ModelReport>,
    refused: Vec<Refused>,
    measured: Vec<Measured>,
}

/// A model that cannot be read, since no backend has a part of it.
#[derive(Serialize)]
struct Refused {
    name: &'static str,
    source: &'static str,
    unconfirmed: &'static [&'static str],
    reason: String,
}

/// The report on a model.
#[derive(Serialize)]
struct ModelReport {
    name: &'static str,
    source: &'static str,
    /// The fields that no file of the publisher confirms.
    unconfirmed: &'static [&'static str],
    heads: u32,
    layers: u32,
    /// L, P, R and V.
    dims: [u32; 4],
    /// Entries of each query token's list, if the model is sparse.
    slots: Option<u32>,
    positions: Option<u32>,
    softmax_scale: f64,
    memory: Vec<Memory>,
    hardware: Vec<HardwareReport>,
    #[serde(skip)]
    config: ModelConfig,
}

/// The memory of a token in the cache of one format.
#[derive(Serialize)]
struct Memory {
    format: &'static str,
    /// Bytes in each layer, without the indexer's keys.
    layer_bytes: usize,
    /// Bytes of the index keys in each layer with an indexer.
    index_bytes: usize,
    /// Bytes in all layers together.
    model_bytes: usize,
}

/// The support of a model on some hardware.
#[derive(Serialize, PartialEq)]
struct HardwareReport {
    name: &'static str,
    capability: Option<String>,
    /// The support for prefill. Absent for a sparse model, which uses the decode backend for its
    /// prompts.
    prefill: Option<Support>,
    decode: Support,
    indexer: Option<Indexer>,
}

/// The backends of one phase.
#[derive(Serialize, PartialEq)]
struct Support {
    /// The backend that a selection takes once its feature is on.
    native: Option<Native>,
    /// The backends of crates that adapt third-party kernels.
    adapted: Vec<Adapted>,
    /// The reasons against the native backends, if none fits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasons: Vec<String>,
}

#[derive(Serialize, PartialEq)]
struct Native {
    name: &'static str,
    feature: Option<&'static str>,
    run: Ran,
}

/// The evidence that a backend runs.
#[derive(Serialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Ran {
    /// All tests passed on these GPUs of the capability, or on a CPU, where the tests run anyway.
    On(Vec<&'static str>),
    /// It is declared, but has run on no GPU of this capability.
    Declared,
}

#[derive(Serialize, PartialEq)]
struct Adapted {
    name: &'static str,
    package: &'static str,
}

/// The maker of the lists for a sparse model.
#[derive(Serialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Indexer {
    /// The device makes them, with a feature turned on if one is named.
    Native(Option<&'static str>),
    /// The engine makes them, since the device has no indexer on this hardware.
    Engine,
    /// The engine makes them, since the device does not have the model's kind of indexer, for this
    /// reason.
    Foreign(&'static str),
}

impl Report {
    fn new() -> Result<Self, CliError> {
        let registry = Registry::linked()?;
        let (mut models, mut refused) = (Vec::new(), Vec::new());
        for preset in PRESETS {
            match preset.config() {
                Ok(config) => models.push(ModelReport::new(preset, &config, &registry)?),
                Err(error) => refused.push(Refused {
                    name: preset.name,
                    source: preset.source,
                    unconfirmed: preset.unconfirmed,
                    reason: error.to_string(),
                }),
            }
        }
        Ok(Self {
            models,
            refused,
            measured: measured::measured(),
        })
    }
}

impl ModelReport {
    fn new(preset: &Preset, config: &ModelConfig, registry: &Registry) -> Result<Self, CliError> {
        let dims = config.dims;
        let layers = config.layers.unwrap_or(1);
        // With pooled keys, the tail of a page counts for the page's tokens.
        let page = 64;
        let index_bytes = config
            .indexer
            .map_or(0, |it| it.page_bytes(page).div_ceil(page));
        let memory = |format: KvFormat| {
            let layer_bytes = format.row_bytes(dims);
            let indexers = config.indexers(layers) as usize;
            Memory {
                format: format.name(),
                layer_bytes,
                index_bytes,
                model_bytes: layers as usize * layer_bytes + indexers * index_bytes,
            }
        };
        let formats = [KvFormat::BF16, KvFormat::Fp8, KvFormat::Fp8DsMla];
        let hardware = HARDWARE
            .iter()
            .map(|(name, target)| HardwareReport::new(name, *target, config, registry));
        Ok(Self {
            name: preset.name,
            source: preset.source,
            unconfirmed: preset.unconfirmed,
            heads: config.heads,
            layers,
            dims: [dims.latent, dims.head.nope, dims.head.rope, dims.head.v],
            slots: config.index_topk,
            positions: config.rope.max_positions,
            softmax_scale: config.softmax_scale(),
            memory: formats
                .into_iter()
                .filter(|format| format.holds(dims))
                .map(memory)
                .collect(),
            hardware: hardware.collect::<Result<_, _>>()?,
            config: *config,
        })
    }
}

impl HardwareReport {
    fn new(
        name: &'static str,
        target: Target,
        config: &ModelConfig,
        registry: &Registry,
    ) -> Result<Self, CliError> {
        let sparse = config.index_topk.is_some();
        let dtype = config.dtype.unwrap_or(mla_runtime::model::DType::BF16);
        let problem = Problem::new(config.dims, config.heads, dtype)
            .with_sparse(sparse)
            .with_features(features(config));
        let explanation = registry.explain(&SelectionRequest::new(target, problem))?;
        let pooled = config.indexer.is_some_and(|it| it.pool > 1);
        let indexer = match (config.foreign_indexer, target.capability) {
            (Some(reason), _) => Indexer::Foreign(reason),
            (None, None) => Indexer::Native(None),
            (None, Some(capability)) if capability == INDEXER.0 && !pooled => {
                Indexer::Native(Some(INDEXER.1))
            }
            (None, Some(_)) => Indexer::Engine,
        };
        Ok(Self {
            name,
            capability: target.capability.map(|it| it.to_string()),
            prefill: (!sparse)
                .then(|| Support::new(explanation.candidates(Phase::Prefill), target)),
            decode: Support::new(explanation.candidates(Phase::Decode), target),
            indexer: sparse.then_some(indexer),
        })
    }
}

impl Support {
    fn new(candidates: &[Candidate], target: Target) -> Self {
        let could_run = |candidate: &&Candidate| {
            let mut reasons = candidate.reasons.iter();
            reasons.all(|reason| reason.cause().is_some_and(another_build_has_it))
        };
        let mut fits = candidates.iter().filter(could_run);
        let (mut native, mut adapted) = (None, Vec::new());
        for candidate in &mut fits {
            match package(candidate) {
                Some(package) => adapted.push(Adapted {
                    name: candidate.spec.name,
                    package,
                }),
                None if native.is_none() => native = Some(Native::new(candidate, target)),
                None => {}
            }
        }
        adapted.sort_by_key(|it| it.name);
        let reasons = match native {
            Some(_) => Vec::new(),
            None => reasons(candidates),
        };
        Self {
            native,
            adapted,
            reasons,
        }
    }
}

/// Returns the reasons against the native backends of this platform, except those that depend on
/// the build.
fn reasons(candidates: &[Candidate]) -> Vec<String> {
    let native = |it: &&Candidate| package(it).is_none();
    let lines = candidates.iter().filter(native).filter_map(|it| {
        let all = || it.reasons.iter();
        let is_elsewhere = all().any(|reason| reason.field() == "platform");
        let own = all().filter(|reason| reason.cause().is_none());
        let own: Vec<_> = own.map(|reason| reason.to_string()).collect();
        (!is_elsewhere).then(|| format!("{}: {}", it.spec.name, own.join("; ")))
    });
    lines.collect()
}

/// True if another program could run it: one with other features or crates, or on matching
/// hardware.
fn another_build_has_it(cause: Cause) -> bool {
    let by_a_build = matches!(
        cause,
        Cause::NotLinked(_)
            | Cause::FeatureOff { .. }
            | Cause::FeaturesOff { .. }
            | Cause::CompiledFor(_)
    );
    by_a_build || cause.is_local()
}

/// Returns the crate that adapts a backend's kernels, or `None` if they are this project's own.
fn package(candidate: &Candidate) -> Option<&'static str> {
    if candidate.spec.provider == "native" {
        return None;
    }
    let package = candidate
        .reasons
        .iter()
        .find_map(|reason| match reason.cause()? {
            Cause::NotLinked(package)
            | Cause::FeatureOff { package, .. }
            | Cause::FeaturesOff { package, .. } => Some(package),
            _ => None,
        });
    Some(package.unwrap_or(candidate.spec.provider))
}

impl Native {
    fn new(candidate: &Candidate, target: Target) -> Self {
        let runs = candidate.kernels.run_on.unwrap_or(&[]);
        let here = |run: &&mla_runtime::spec::Run| Some(run.capability) == target.capability;
        let gpus: Vec<_> = runs.iter().filter(here).map(|run| run.gpu).collect();
        let run = match candidate.spec.platform {
            Platform::Cpu => Ran::On(Vec::new()),
            _ if gpus.is_empty() => Ran::Declared,
            _ => Ran::On(gpus),
        };
        Self {
            name: candidate.spec.name,
            feature: feature(candidate),
            run,
        }
    }
}

/// Returns the feature that compiles a backend, on or off.
fn feature(candidate: &Candidate) -> Option<&'static str> {
    let off = candidate
        .reasons
        .iter()
        .find_map(|reason| match reason.cause()? {
            Cause::FeatureOff { feature, .. } => Some(feature),
            _ => None,
        });
    let families = candidate.kernels.families.unwrap_or(&[]);
    off.or_else(|| families.first().map(|family| family.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_backends_have_reasons() {
        let mut config = ModelConfig::preset("deepseek-v3").unwrap();
        config.dims.latent = 1024;
        let registry = Registry::linked().unwrap();
        let report = HardwareReport::new("H100", gpu(9, 0), &config, &registry).unwrap();
        assert!(report.decode.native.is_none());
        let reasons = report.decode.reasons.join("\n");
        assert!(
            reasons.contains("WGMMA_MLA: cache_dims: given (1024,64), accepted (512,64)"),
            "{reasons}"
        );
        assert!(!reasons.contains("CPU"), "{reasons}");
        let report = HardwareReport::new("CPU", Target::CPU, &config, &registry).unwrap();
        assert!(report.decode.native.is_some() && report.decode.reasons.is_empty());
    }
}
