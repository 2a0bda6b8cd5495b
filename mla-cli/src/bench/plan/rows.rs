//! Rows as they are collected: the compared backends, and errors that concern all rows together.

use std::collections::{BTreeMap, BTreeSet};

use mla_runtime::backend::{DecodeStage, PrefillStage};
use mla_runtime::layer::MlaLayer;
use mla_runtime::select::{Registry, SelectionError, SelectionRequest};
use mla_runtime::spec::{Phase, Problem, Target};

use crate::bench::settings::{Settings, effective};
use crate::bench::work::{Kind, Layer, RowPlan, Work};
use crate::device::About;
use crate::device::stopwatch::Stopwatch;
use crate::error::CliError;
use crate::run::step::Step;

/// The backends, the device, and the facts about it.
pub(crate) struct BenchContext<'a, D> {
    pub registry: &'a Registry,
    pub device: &'a D,
    pub about: &'a About,
    pub graphs: bool,
}

/// The maximum number of rows of one benchmark.
const MAX_ROWS: usize = 10_000;

/// Rows that are being collected.
pub(super) struct Rows<'a, D> {
    pub context: &'a BenchContext<'a, D>,
    pub settings: &'a Settings,
    plans: Vec<RowPlan>,
    /// For each key, a row on which it has an effect, and a row on which it has none.
    used: BTreeMap<&'static str, String>,
    unused: BTreeMap<&'static str, String>,
    /// The names of backends in the settings that some row uses.
    names: BTreeSet<String>,
}

impl<'a, D: Stopwatch> Rows<'a, D> {
    pub(super) const fn new(context: &'a BenchContext<'a, D>, settings: &'a Settings) -> Self {
        Self {
            context,
            settings,
            plans: Vec::new(),
            used: BTreeMap::new(),
            unused: BTreeMap::new(),
            names: BTreeSet::new(),
        }
    }

    /// Adds a row, unless it does not fit into memory or exceeds the maximum number.
    pub(super) fn push(&mut self, plan: RowPlan) -> Result<(), CliError> {
        if let Work::Attention(attention) = &plan.work {
            let about = self.context.about;
            about.check_memory("memory", &plan.case, attention.bytes())?;
        }
        if self.plans.len() == MAX_ROWS {
            return Err(CliError::argument(
                "SPEC",
                format!("more than {MAX_ROWS} rows"),
                format!("at most {MAX_ROWS} combinations"),
            ));
        }
        self.plans.push(plan);
        Ok(())
    }

    /// Notes that keys have or do not have an effect on a batch.
    pub(super) fn note(&mut self, batch: &str, keys: &[&'static str], effective: bool) {
        let noted = if effective {
            &mut self.used
        } else {
            &mut self.unused
        };
        for key in keys {
            noted.entry(key).or_insert_with(|| batch.to_owned());
        }
    }

    /// Returns the rows if no backend refuses one of them, and if every key and every name has an
    /// effect on a row.
    pub(super) fn finish(self) -> Result<Vec<RowPlan>, CliError> {
        for (key, values) in self.settings.given() {
            let idle = match (self.used.get(key), self.unused.get(key)) {
                (None, Some(batch)) => Some(batch),
                // Several values would give equal rows. A row has backends of its own phase alone.
                (Some(_), Some(batch)) if values > 1 && !matches!(key, "prefill" | "decode") => {
                    Some(batch)
                }
                _ => None,
            };
            if let Some(batch) = idle {
                return Err(CliError::argument(
                    key,
                    format!(
                        "{values} value{} without effect on {batch}",
                        if values == 1 { "" } else { "s" }
                    ),
                    format!("one only {}", effective(key)),
                ));
            }
        }
        self.refuse_unused_names()?;
        for plan in &self.plans {
            try_out(self.context, plan)?;
        }
        Ok(self.plans)
    }

    /// Returns the backends of a phase to compare.
    pub(super) fn backends(
        &mut self,
        problem: &Problem,
        phase: Phase,
    ) -> Result<Vec<&'static str>, CliError> {
        let registry = self.context.registry;
        let given = self.given(phase)?;
        let target: Target = self.context.device.target();
        let request = SelectionRequest::new(target, *problem);
        let explanation = registry.explain(&request)?;
        let candidates = explanation.candidates(phase);
        let none_fits = || SelectionError::NoneFits {
            phase,
            explanation: Box::new(explanation.clone()),
        };
        let Some(given) = given else {
            let best = explanation.selected(phase).ok_or_else(none_fits)?;
            return Ok(vec![best.spec.name]);
        };
        let mut names: Vec<&'static str> = Vec::new();
        for name in given {
            if name == ALL {
                let fitting = candidates.iter().filter(|candidate| candidate.is_valid());
                names.extend(fitting.map(|candidate| candidate.spec.name));
                self.names.insert(name);
                continue;
            }
            let known = registry.get(phase, &name)?.spec.name;
            // A backend that is named is accepted even if it has not been run on any GPU.
            let asked = match phase {
                Phase::Prefill => request.clone().with_prefill(known),
                Phase::Decode => request.clone().with_decode(known),
            };
            let explanation = registry.explain(&asked)?;
            let mut candidates = explanation.candidates(phase).iter();
            let candidate = candidates.find(|candidate| candidate.spec.name == known);
            if let Some(candidate) = candidate.filter(|candidate| !candidate.is_valid()) {
                return Err(SelectionError::Refused {
                    phase,
                    name: known,
                    target,
                    reasons: Box::new(candidate.reasons),
                }
                .into());
            }
            names.push(known);
            self.names.insert(name);
        }
        if names.is_empty() {
            return Err(none_fits().into());
        }
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(*name));
        Ok(names)
    }

    /// Returns the names that the settings give for a phase, which may include `all`. Returns
    /// `None` if the best backend is used.
    fn given(&self, phase: Phase) -> Result<Option<Vec<String>>, CliError> {
        let (settings, registry) = (self.settings, self.context.registry);
        let own = match phase {
            Phase::Prefill => &settings.prefill,
            Phase::Decode => &settings.decode,
        };
        if own.is_some() {
            return Ok(own.clone());
        }
        let Some(both) = &settings.backends else {
            return Ok(None);
        };
        // A backend name of the other phase does not affect this phase.
        let phases = [Phase::Decode, Phase::Prefill];
        let is_known =
            |name: &String| *name == ALL || phases.iter().any(|it| registry.get(*it, name).is_ok());
        if let Some(name) = both.iter().find(|name| !is_known(name)) {
            let [decode, prefill] = phases.map(|phase| registry.names(phase).join(", "));
            let similar = phases
                .iter()
                .find_map(|phase| match registry.get(*phase, name) {
                    Err(SelectionError::Unknown { suggestion, .. }) => suggestion,
                    _ => None,
                });
            let question = similar.map(|name| format!("; did you mean {name}?"));
            return Err(CliError::argument(
                "--backends",
                format!("{name:?}"),
                format!(
                    "{ALL}, for decodes {decode}, for prefills {prefill}{}",
                    question.unwrap_or_default()
                ),
            ));
        }
        let of_phase = both
            .iter()
            .filter(|name| *name == ALL || registry.get(phase, name).is_ok());
        Ok(Some(of_phase.cloned().collect::<Vec<_>>()).filter(|names| !names.is_empty()))
    }

    /// Refuses a name that no row uses.
    fn refuse_unused_names(&self) -> Result<(), CliError> {
        let mut given = self.settings.backends.iter().flatten();
        match given.find(|name| !self.names.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(CliError::argument(
                "backends",
                format!("{name}, which no batch comes to"),
                "backends of the phases that the batches have",
            )),
        }
    }
}

/// Lets the backends refuse what their specs do not exclude.
fn try_out<D: Stopwatch>(context: &BenchContext<'_, D>, plan: &RowPlan) -> Result<(), CliError> {
    let attention = match &plan.work {
        Work::Attention(attention) => attention,
        Work::Layer(layer) => return try_out_layer(context, layer),
    };
    let (registry, device) = (context.registry, context.device);
    let (config, limits) = (&attention.config, attention.limits());
    match attention.kind {
        Kind::Decode => {
            let backend =
                registry.instantiate_decode(attention.backend, device, &attention.config)?;
            drop(backend.state(device, &limits)?);
        }
        Kind::Prefill { .. } => {
            let backend = registry.instantiate_prefill(attention.backend, device, config)?;
            drop(backend.state(device, &limits)?);
        }
    }
    Ok(())
}

/// Refuses a step that does not fit into memory, and one that the backends would refuse when it is
/// set up.
fn try_out_layer<D: Stopwatch>(
    context: &BenchContext<'_, D>,
    what: &Layer,
) -> Result<(), CliError> {
    let (device, about) = (context.device, context.about);
    let step = step_of(context, what)?;
    // Each layer has its own cache.
    let layers = what.layers as u32;
    let plan = step
        .layer
        .memory_plan(&step.limits, layers, step.workload.pages)?;
    about.check_plan("memory", &what.spec, &step.limits, &plan)?;
    drop(step.layer.prefill().state(device, &step.limits)?);
    drop(step.layer.decode().state(device, &step.limits)?);
    Ok(())
}

/// Makes the step of a layer.
pub(crate) fn step_of<D: Stopwatch>(
    context: &BenchContext<'_, D>,
    what: &Layer,
) -> Result<Step<D>, CliError> {
    let (registry, device, config) = (context.registry, context.device, &what.config);
    let prefill = registry.instantiate_prefill(what.prefill, device, config)?;
    let decode = registry.instantiate_decode(what.decode, device, config)?;
    let workload = what.workload()?;
    Ok(Step {
        layer: MlaLayer::new(device, config, prefill, decode)?,
        limits: workload.limits(what.rows)?,
        workload,
        seed: what.seed,
    })
}

/// The name that stands for every backend that fits.
pub(crate) const ALL: &str = "all";
