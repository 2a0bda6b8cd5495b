//! One row of a benchmark: set up, time, check.

use mla_runtime::select::Registry;

use super::attention::Attention;
use super::job::{Job, Subject};
use super::sampling::{Measured, Sampling};
use super::statistics::Summary;
use crate::error::CliError;
use crate::stopwatch::Stopwatch;

/// Measures, and compares `rows` rows of the output with the reference.
pub(super) fn measure<D: Stopwatch>(
    registry: &Registry,
    device: &D,
    flush: &mut D::Buffer,
    job: &Job,
    sampling: &mut Sampling<'_>,
    rows: usize,
) -> Result<Measured, CliError> {
    match &job.subject {
        Subject::Attention(what) => attention(registry, device, flush, what, sampling, rows),
        Subject::Layer(layer) => layer.measure(registry, device, flush, sampling, rows),
    }
}

fn attention<D: Stopwatch>(
    registry: &Registry,
    device: &D,
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
