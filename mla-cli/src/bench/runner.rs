//! A benchmark, which measures one row after another on a device.

use std::path::Path;

use mla_runtime::select::Registry;
use mla_runtime::spec::Platform;

use super::cases::Case;
use super::ceilings::Ceilings;
use super::crossover::{self, Known};
use super::environment::Environment;
use super::measure::calibration::calibrate;
use super::measure::{Sampling, measure};
use super::plan::rows::BenchContext;
use super::plan::sweep::{cases, sweep};
use super::record::{Report, Row, SCHEMA};
use super::settings::Settings;
use super::work::Layer;
use crate::device::progress::Progress;
use crate::device::stopwatch::{Protocol, Stopwatch};
use crate::device::{About, DeviceName, Job};
use crate::error::CliError;

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

    /// Called after each row, with all rows measured so far.
    fn after_row(&mut self, _: &Report) -> Result<(), CliError> {
        Ok(())
    }
}

/// A watcher that does nothing.
pub(crate) struct Unwatched;

impl Watcher for Unwatched {}

/// Runs the cases, or the settings' batches without cases, and shows which one is being run.
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

/// The rows to time on any device.
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
        let protocol = protocol::<D>(settings)?;
        let registry = Registry::linked()?;
        let ceilings = Ceilings::find(self.ceilings, &about.description)?;
        let context = BenchContext {
            registry: &registry,
            device,
            about,
            graphs: protocol.graphs,
        };
        let plans = match self.cases {
            Some(of_file) => cases(&context, settings, of_file)?,
            None => sweep(&context, settings)?,
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
            settings: settings.keys().into(),
            protocol,
            ceilings,
            rows: Vec::with_capacity(plans.len()),
            missing: plans.len(),
            crossovers: Vec::new(),
        };
        for (index, row) in plans.iter().enumerate() {
            let message = format!("{} runs {}", row.contender, row.case);
            self.progress.begin_row(index + 1, plans.len(), &message);
            let mut sampling = Sampling {
                protocol: &report.protocol,
                rounds: self.watcher.rounds(),
                after_round: &mut |samples| {
                    self.watcher.after_round(&row.case, samples)?;
                    // The bar is drawn again, in case another one was drawn meanwhile.
                    self.progress.resume(&message);
                    Ok(())
                },
            };
            let measured = measure(&context, &mut flush, row, &mut sampling, check)?;
            let measured = Row::new(row, measured, report.ceilings.as_ref())?;
            report.rows.push(measured);
            report.missing -= 1;
            self.watcher.after_row(&report)?;
        }
        let of_gpu = Known::of(device.machine(), report.ceilings.as_ref());
        report.crossovers = crossover::find(&plans, &report.rows, |layer| {
            of_gpu.unwrap_or_else(|| known_by_timing(&context, &mut flush, layer, self.progress))
        });
        self.progress.finish();
        Ok(report)
    }
}

/// Predicts a crossover by a short run, on a device with unknown figures.
fn known_by_timing<D: Stopwatch>(
    context: &BenchContext<'_, D>,
    flush: &mut D::Buffer,
    layer: &Layer,
    progress: &Progress,
) -> Known {
    progress.step("timing each path on little context, for a prediction");
    calibrate(context, flush, layer).unwrap_or_else(|error| {
        progress.line(&format!("there is no prediction: {error}"));
        Known::NOTHING
    })
}

/// Returns the protocol by which samples are taken.
fn protocol<D: Stopwatch>(settings: &Settings) -> Result<Protocol, CliError> {
    let on_gpu = D::PLATFORM == Platform::Cuda;
    let graphs = settings.graphs.unwrap_or(on_gpu);
    if graphs && !on_gpu {
        return Err(CliError::argument(
            "graphs",
            "on",
            "off: a CPU has no graphs to replay",
        ));
    }
    Ok(Protocol {
        samples: settings.samples.unwrap_or(30) as usize,
        warm_up: settings.warm_up.unwrap_or(3) as usize,
        cold_cache: settings.cold_cache.unwrap_or(true),
        graphs,
    })
}
