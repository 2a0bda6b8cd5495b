//! One row of a benchmark: set-up, timing and check.

pub(crate) mod calibration;

use super::ceilings::Ceilings;
use super::plan::rows::{BenchContext, step_of};
use super::record::Row;
use super::work::{Attention, Layer, RowPlan, Work};
use crate::device::progress::Progress;
use crate::device::statistics::Summary;
use crate::device::stopwatch::{Conditions, Loaded, Memory, Protocol, Stopwatch};
use crate::error::CliError;
use crate::run::data::Data;
use crate::run::deviation::Errors;
use crate::run::reference;

/// The results of one row. Times are of all its layers together.
pub struct Measured {
    /// Seconds with everything that a step has to enqueue when only queries, cache, block table and
    /// lengths are on the device.
    pub sampled: Sampled,
    /// Seconds if the schedule exists already. Absent if there is no schedule to make.
    pub planned: Option<Summary>,
    pub errors: Errors,
}

/// The settings for taking samples: the protocol, the number of rounds, and a hook. After each
/// round, the hook is called with the number of the round's samples.
pub(super) struct Sampling<'a> {
    pub protocol: &'a Protocol,
    pub rounds: usize,
    pub after_round: &'a mut dyn FnMut(usize) -> Result<(), CliError>,
}

/// The samples, and observations that were made meanwhile.
pub struct Sampled {
    pub samples: Vec<f64>,
    /// The conditions of the first round.
    pub conditions: Conditions,
    /// The code that was loaded for the kernels, if they were replayed as a graph.
    pub loaded: Vec<Loaded>,
    /// The peak of the first round. The hook after a round may need memory of its own.
    pub peak_bytes: Option<u64>,
}

impl Sampling<'_> {
    /// Takes samples of `work`.
    pub(super) fn time<D: Stopwatch>(
        &mut self,
        device: &D,
        flush: &mut D::Buffer,
        watch: Memory,
        work: &mut dyn FnMut(&D) -> mla_runtime::Result<()>,
    ) -> Result<Sampled, CliError> {
        let mut samples = Vec::with_capacity(self.protocol.samples);
        let mut first = None;
        for round in 0..self.rounds {
            let protocol = Protocol {
                samples: share(self.protocol.samples, self.rounds, round),
                ..*self.protocol
            };
            let (more, conditions) = device.time(&protocol, flush, work)?;
            samples.extend(more);
            first.get_or_insert_with(|| (conditions, device.peak_memory(watch)));
            (self.after_round)(protocol.samples)?;
        }
        let (conditions, peak_bytes) = first.unwrap_or_default();
        let loaded = match self.protocol.graphs {
            true => device.loaded(work)?,
            false => Vec::new(),
        };
        Ok(Sampled {
            samples,
            loaded,
            conditions,
            peak_bytes,
        })
    }
}

/// Returns the number of samples in one of `rounds` rounds, divided as evenly as possible.
const fn share(samples: usize, rounds: usize, round: usize) -> usize {
    samples * (round + 1) / rounds - samples * round / rounds
}

/// Measures a row, and compares `rows` rows of the output with the reference.
pub(super) fn measure<D: Stopwatch>(
    context: &BenchContext<'_, D>,
    flush: &mut D::Buffer,
    plan: &RowPlan,
    sampling: &mut Sampling<'_>,
    rows: usize,
) -> Result<Measured, CliError> {
    match &plan.work {
        Work::Attention(what) => attention(context, flush, what, sampling, rows),
        Work::Layer(what) => layer(context, flush, what, sampling, rows),
    }
}

fn attention<D: Stopwatch>(
    &BenchContext {
        registry, device, ..
    }: &BenchContext<'_, D>,
    flush: &mut D::Buffer,
    attention: &Attention,
    sampling: &mut Sampling<'_>,
    rows: usize,
) -> Result<Measured, CliError> {
    let watch = device.watch_memory();
    let mut work = attention.set_up(registry, device)?;
    let planning = work.planning(device)?;
    let mut sampled = sampling.time(device, flush, watch, &mut |device| {
        work.enqueue(device, planning.is_some())
    })?;
    let planned = match (planning, work.has_plan()) {
        (Some(seconds), _) => {
            let planned = Summary::of(&sampled.samples);
            sampled
                .samples
                .iter_mut()
                .for_each(|sample| *sample += seconds);
            Some(planned)
        }
        (None, true) => {
            let (samples, _) = device.time(sampling.protocol, flush, &mut |device| {
                work.enqueue(device, true)
            })?;
            Some(Summary::of(&samples))
        }
        (None, false) => None,
    };
    Ok(Measured {
        sampled,
        planned,
        errors: work.check(device, rows)?,
    })
}

/// Times the whole layer.
fn layer<D: Stopwatch>(
    context: &BenchContext<'_, D>,
    flush: &mut D::Buffer,
    what: &Layer,
    sampling: &mut Sampling<'_>,
    rows: usize,
) -> Result<Measured, CliError> {
    let device = context.device;
    let watch = device.watch_memory();
    let step = step_of(context, what)?;
    let (layer, progress) = (&step.layer, Progress::hidden());
    let mut workspace = step.workspace()?;
    let mut layers = Vec::with_capacity(what.layers);
    for number in 0..what.layers {
        let seed = what.seed.wrapping_add(number as u32);
        layers.push(Data::new(layer, &step.workload, seed, &progress)?);
    }
    let sampled = sampling.time(device, flush, watch, &mut |_| {
        for data in &mut layers {
            let call = data.call(layer.config())?;
            layer.forward(&mut workspace, call)?;
        }
        Ok(())
    })?;
    let last = &layers[what.layers - 1];
    let errors = reference::compare(&step, last, &workspace, rows as u32, &progress)?;
    Ok(Measured {
        sampled,
        planned: None,
        errors: Errors::of_paths(errors),
    })
}

impl Row {
    pub fn new(
        plan: &RowPlan,
        measured: Measured,
        ceilings: Option<&Ceilings>,
    ) -> Result<Self, CliError> {
        let work = &plan.work;
        let per_layer = 1e6 / work.layers() as f64;
        let samples_us: Vec<f64> = measured
            .sampled
            .samples
            .iter()
            .map(|s| s * per_layer)
            .collect();
        let us = Summary::of(&samples_us);
        let (cost, seconds) = (work.cost()?, us.median / 1e6);
        let requests = work.requests();
        let tokens = requests.iter().map(|r| r.q as usize).sum();
        let dtype = work.config().problem.dtype;
        let ceilings = ceilings.filter(|ceilings| ceilings.hold_for(dtype));
        let parameters = plan.parameters.iter();
        Ok(Self {
            id: plan.case.clone(),
            kind: work.kind().to_owned(),
            contender: plan.contender.clone(),
            batch: plan.label.clone(),
            parameters: parameters
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect(),
            requests: requests.len(),
            tokens,
            max_query_len: requests.iter().map(|r| r.q).max().unwrap_or(0),
            max_kv_len: requests.iter().map(|r| r.kv).max().unwrap_or(0),
            e2e_us: us.median,
            planned_us: measured.planned.map(|planned| planned.median * per_layer),
            us,
            tokens_per_second: tokens as f64 / seconds,
            tflops: cost.flop / seconds / 1e12,
            gbps: cost.bytes / seconds / 1e9,
            of_limit: ceilings.map(|ceilings| ceilings.seconds(cost) / seconds),
            peak_bytes: measured.sampled.peak_bytes,
            errors: measured.errors,
            conditions: measured.sampled.conditions,
            loaded: measured.sampled.loaded,
            cost,
            samples_us,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::share;

    #[test]
    fn rounds_share_all_samples() {
        for samples in [1, 2, 29, 30, 31] {
            for rounds in 1..=samples {
                let shares: Vec<usize> = (0..rounds).map(|r| share(samples, rounds, r)).collect();
                assert_eq!(shares.iter().sum::<usize>(), samples);
                let (min, max) = (shares.iter().min(), shares.iter().max());
                assert!(max.unwrap() - min.unwrap() <= 1, "{shares:?}");
            }
        }
    }
}
