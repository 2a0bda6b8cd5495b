//! The backends that are compared.

use std::collections::BTreeSet;

use mla_runtime::select::{RegistryError, SelectionError, SelectionRequest};
use mla_runtime::spec::{Phase, Problem, Target};

use crate::bench::settings::Settings;
use crate::bench::site::Site;
use crate::error::CliError;
use crate::stopwatch::Stopwatch;

/// The name that stands for every backend that fits.
pub(crate) const ALL: &str = "all";

/// Finds backends by what the settings say of them.
pub(super) struct Contenders<'a, D> {
    site: &'a Site<'a, D>,
    settings: &'a Settings,
    /// The names of the settings that some row uses.
    names: BTreeSet<String>,
}

impl<'a, D: Stopwatch> Contenders<'a, D> {
    pub(super) const fn new(site: &'a Site<'a, D>, settings: &'a Settings) -> Self {
        Self {
            site,
            settings,
            names: BTreeSet::new(),
        }
    }

    /// The backends of a phase that are to be compared.
    pub(super) fn of(
        &mut self,
        problem: &Problem,
        phase: Phase,
    ) -> Result<Vec<&'static str>, CliError> {
        let registry = self.site.registry;
        let given = self.given(phase)?;
        let target: Target = self.site.device.target();
        let request = SelectionRequest::new(target, *problem);
        let explanation = registry.explain(&request)?;
        let candidates = &explanation.phase(phase).candidates;
        let none_fits = || SelectionError::NoneFits {
            phase,
            explanation: Box::new(explanation.clone()),
        };
        let Some(given) = given else {
            let best = explanation.phase(phase).selected().ok_or_else(none_fits)?;
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
            // A backend that is asked for by name is accepted even if it has run nowhere.
            let asked = match phase {
                Phase::Prefill => request.clone().with_prefill(known),
                Phase::Decode => request.clone().with_decode(known),
            };
            let explanation = registry.explain(&asked)?;
            let mut candidates = explanation.phase(phase).candidates.iter();
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

    /// The names that the settings give for a phase, `all` among them; none if the best backend is
    /// to be taken.
    fn given(&self, phase: Phase) -> Result<Option<Vec<String>>, CliError> {
        let (settings, registry) = (self.settings, self.site.registry);
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
        // A name of the other phase says nothing about this one.
        let phases = [Phase::Decode, Phase::Prefill];
        let is_known =
            |name: &String| *name == ALL || phases.iter().any(|it| registry.get(*it, name).is_ok());
        if let Some(name) = both.iter().find(|name| !is_known(name)) {
            let [decode, prefill] = phases.map(|phase| registry.names(phase).join(", "));
            let similar = phases
                .iter()
                .find_map(|phase| match registry.get(*phase, name) {
                    Err(RegistryError::Unknown { suggestion, .. }) => suggestion,
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
    pub(super) fn finish(&self) -> Result<(), CliError> {
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
