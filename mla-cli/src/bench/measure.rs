//! One row of a benchmark: set up, time, check.

use mla_runtime::registry::Registry;

use super::attention::Attention;
use super::check::Errors;
use super::plan::{Job, Subject};
use super::statistics::Summary;
use crate::error::CliError;
use crate::stopwatch::{Conditions, Protocol, Stopwatch};

/// What was found out about one row. Times are of all its layers together.
pub(super) struct Measured {
    /// Seconds with everything that a step has to enqueue when only queries, cache, block table and
    /// lengths are on the device.
    pub(super) samples: Vec<f64>,
    /// Seconds where the schedule exists already; absent where there is none to be made.
    pub(super) planned: Option<Summary>,
    pub(super) errors: Errors,
    pub(super) peak_bytes: Option<u64>,
    pub(super) conditions: Conditions,
}

/// Measures, and compares `rows` rows of the output with the reference.
pub(super) fn measure<D: Stopwatch>(
    registry: &Registry,
    device: &D,
    flush: &mut D::Buffer,
    job: &Job,
    protocol: &Protocol,
    rows: usize,
) -> Result<Measured, CliError> {
    match &job.subject {
        Subject::Attention(what) => attention(registry, device, flush, what, protocol, rows),
        Subject::Layer(layer) => layer.measure(registry, device, flush, protocol, rows),
    }
}

fn attention<D: Stopwatch>(
    registry: &Registry,
    device: &D,
    flush: &mut D::Buffer,
    attention: &Attention,
    protocol: &Protocol,
    rows: usize,
) -> Result<Measured, CliError> {
    let watch = device.watch_memory();
    let mut work = attention.set_up(registry, device)?;
    let (samples, conditions) =
        device.time(protocol, flush, &mut |device| work.enqueue(device, false))?;
    let planned = match work.has_plan() {
        true => {
            let (samples, _) =
                device.time(protocol, flush, &mut |device| work.enqueue(device, true))?;
            Some(Summary::of(&samples))
        }
        false => None,
    };
    let peak_bytes = device.peak_memory(watch);
    let errors = work.check(device, rows)?;
    Ok(Measured {
        samples,
        planned,
        errors,
        peak_bytes,
        conditions,
    })
}
