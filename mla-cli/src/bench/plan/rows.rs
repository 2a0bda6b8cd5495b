//! Rows as they are collected, and what is wrong with all of them together.

use std::collections::BTreeMap;

use mla_runtime::backend::{DecodeStage, PrefillStage};

use super::contenders::Contenders;
use crate::bench::attention::Kind;
use crate::bench::job::{Job, Subject};
use crate::bench::settings::{Key, Settings};
use crate::bench::site::Site;
use crate::error::CliError;
use crate::stopwatch::Stopwatch;

/// The maximal number of rows of one benchmark.
const MAX_ROWS: usize = 10_000;

/// Rows as they are being collected.
pub(super) struct Rows<'a, D> {
    pub site: &'a Site<'a, D>,
    pub settings: &'a Settings,
    pub contenders: Contenders<'a, D>,
    jobs: Vec<Job>,
    /// A row that each key has an effect on, and a row that it has no effect on.
    used: BTreeMap<Key, String>,
    unused: BTreeMap<Key, String>,
}

impl<'a, D: Stopwatch> Rows<'a, D> {
    pub(super) const fn new(site: &'a Site<'a, D>, settings: &'a Settings) -> Self {
        Self {
            site,
            settings,
            contenders: Contenders::new(site, settings),
            jobs: Vec::new(),
            used: BTreeMap::new(),
            unused: BTreeMap::new(),
        }
    }

    /// Adds a row, unless it would not fit into memory or is one too many.
    pub(super) fn push(&mut self, job: Job) -> Result<(), CliError> {
        if let Subject::Attention(attention) = &job.subject {
            let about = self.site.about;
            about.check_memory("memory", &job.case, attention.bytes())?;
        }
        if self.jobs.len() == MAX_ROWS {
            return Err(CliError::argument(
                "SPEC",
                format!("more than {MAX_ROWS} rows"),
                format!("at most {MAX_ROWS} combinations"),
            ));
        }
        self.jobs.push(job);
        Ok(())
    }

    /// Notes which keys have an effect on a batch, and which have none.
    pub(super) fn note(&mut self, batch: &str, effective: &[Key], idle: &[Key]) {
        for key in effective {
            self.used.entry(*key).or_insert_with(|| batch.to_owned());
        }
        for key in idle {
            self.unused.entry(*key).or_insert_with(|| batch.to_owned());
        }
    }

    /// The rows, none of which a backend refuses, if every key and every name has an effect on
    /// some.
    pub(super) fn finish(self) -> Result<Vec<Job>, CliError> {
        for (key, values) in self.settings.given() {
            let idle = match (self.used.get(&key), self.unused.get(&key)) {
                (None, Some(batch)) => Some(batch),
                // Several values would give the same row several times.
                (Some(_), Some(batch)) if values > 1 => Some(batch),
                _ => None,
            };
            if let Some(batch) = idle {
                return Err(CliError::argument(
                    key.name(),
                    format!(
                        "{values} value{} without effect on {batch}",
                        if values == 1 { "" } else { "s" }
                    ),
                    format!("one only {}", key.effective()),
                ));
            }
        }
        self.contenders.finish()?;
        for job in &self.jobs {
            try_out(self.site, job)?;
        }
        Ok(self.jobs)
    }
}

/// Lets the backends refuse what their spec does not say.
fn try_out<D: Stopwatch>(site: &Site<'_, D>, job: &Job) -> Result<(), CliError> {
    let attention = match &job.subject {
        Subject::Attention(attention) => attention,
        Subject::Layer(layer) => return layer.try_out(site),
    };
    let (registry, device) = (site.registry, site.device);
    let (config, limits) = (&attention.config, attention.limits());
    match attention.kind {
        Kind::Decode => {
            let backend = attention.decode_backend(registry, device)?;
            drop(backend.state(device, &limits)?);
        }
        Kind::Prefill { .. } => {
            let backend = registry.instantiate_prefill(attention.backend, device, config)?;
            drop(backend.state(device, &limits)?);
        }
    }
    Ok(())
}
