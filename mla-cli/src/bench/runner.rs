//! A benchmark: every row measured on a device, one after another.

use std::path::Path;

use mla_runtime::select::Registry;

use super::calibration::calibrate;
use super::cases::Case;
use super::ceilings::Ceilings;
use super::crossover::Known;
use super::environment::Environment;
use super::layer::Layer;
use super::report::{Report, SCHEMA};
use super::row::Row;
use super::sampling::Sampling;
use super::settings::Settings;
use super::site::Site;
use super::{crossover, measure, plan};
use crate::device::{About, DeviceName, Job};
use crate::error::CliError;
use crate::progress::Progress;
use crate::stopwatch::Stopwatch;

/// Hooks around the measuring of rows.
pub trait Watcher {
    /// The number of rounds in which the samples of a row are taken.
    fn rounds(&self) -> usize {
        1
    }

    /// Called after each round of a row, with the row's id and the samples of the round.
    fn after_round(&mut self, _: &str, _: usize) -> Result<(), CliError> {
        Ok(())
    }

    /// Called after each row, with all rows so far.
    fn after_row(&mut self, _: &Report) -> Result<(), CliError> {
        Ok(())
    }
}

/// Nothing goes on.
pub(crate) struct Unwatched;

impl Watcher for Unwatched {}

/// Runs the cases, or the settings' batches where there are none, and tells which is being run.
pub fn run_on_device<'a>(
    settings: &'a Settings,
    cases: Option<Vec<Case>>,
    ceilings: Option<&'a Path>,
    watcher: &'a mut dyn Watcher,
    progress: &'a Progress,
) -> Result<Report, CliError> {
    settings.device.unwrap_or(DeviceName::Cpu).run(Bench {
        settings,
        cases,
        ceilings,
        watcher,
        progress,
    })
}

/// The rows to time, on whichever device.
struct Bench<'a> {
    settings: &'a Settings,
    cases: Option<Vec<Case>>,
    ceilings: Option<&'a Path>,
    watcher: &'a mut dyn Watcher,
    progress: &'a Progress,
}

impl Job for Bench<'_> {
    type Output = Report;

    fn run<D: Stopwatch>(self, device: &D, about: &About) -> Result<Report, CliError> {
        let settings = self.settings;
        let protocol = plan::protocol::<D>(settings)?;
        let registry = Registry::linked()?;
        let ceilings = Ceilings::find(self.ceilings, &about.description)?;
        let site = Site {
            registry: &registry,
            device,
            about,
            graphs: protocol.graphs,
        };
        let jobs = match self.cases {
            Some(cases) => plan::cases(&site, settings, cases)?,
            None => plan::sweep(&site, settings)?,
        };
        let check = settings.check.unwrap_or(16) as usize;
        let mut flush = device.allocate(match protocol.cold_cache {
            true => device.flush_bytes(),
            false => size_of::<f32>(),
        })?;
        let mut report = Report {
            schema: SCHEMA,
            device: about.description.clone(),
            environment: Environment::here(),
            // Strings, numbers and lists.
            settings: serde_json::to_value(settings).expect("settings are JSON"),
            protocol,
            ceilings,
            rows: Vec::with_capacity(jobs.len()),
            missing: jobs.len(),
            crossovers: Vec::new(),
        };
        for (index, job) in jobs.iter().enumerate() {
            let message = format!("{} runs {}", job.contender, job.case);
            self.progress.begin_row(index + 1, jobs.len(), &message);
            let mut sampling = Sampling {
                protocol: &report.protocol,
                rounds: self.watcher.rounds(),
                after_round: &mut |samples| {
                    self.watcher.after_round(&job.case, samples)?;
                    // Again, where that was others' turn.
                    self.progress.resume(&message);
                    Ok(())
                },
            };
            let measured =
                measure::measure(&registry, device, &mut flush, job, &mut sampling, check)?;
            let row = Row::new(job, measured, report.ceilings.as_ref())?;
            report.rows.push(row);
            report.missing -= 1;
            self.watcher.after_row(&report)?;
        }
        let of_gpu = Known::of(device.machine(), report.ceilings.as_ref());
        report.crossovers = crossover::find(&jobs, &report.rows, |layer| {
            of_gpu.unwrap_or_else(|| known_by_timing(&site, &mut flush, layer, self.progress))
        });
        self.progress.finish();
        Ok(report)
    }
}

/// Predicts a crossover on a device of which nothing is known.
fn known_by_timing<D: Stopwatch>(
    site: &Site<'_, D>,
    flush: &mut D::Buffer,
    layer: &Layer,
    progress: &Progress,
) -> Known {
    progress.step("timing each path on little context, for a prediction");
    calibrate(site, flush, layer).unwrap_or_else(|error| {
        progress.line(&format!("there is no prediction: {error}"));
        Known::NOTHING
    })
}
