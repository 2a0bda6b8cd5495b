//! One row of a benchmark: set up, time, check.

use mla_runtime::registry::Registry;

use super::attention::Attention;
use super::check::Errors;
use super::statistics::Summary;
use crate::error::CliError;
use crate::stopwatch::{Conditions, Protocol, Stopwatch};

/// What was found out about one attention. Times are of all its layers together.
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

pub(super) fn measure<D: Stopwatch>(
    registry: &Registry,
    device: &D,
    flush: &mut D::Buffer,
    attention: &Attention,
    protocol: &Protocol,
    rows: usize,
) -> Result<Measured, CliError> {
    let watch = device.watch_memory();
    let mut work = attention.set_up(registry, device)?;
    let samples = device.time(protocol, flush, &mut |device| work.enqueue(device, false))?;
    let conditions = device.conditions();
    let planned = match work.has_plan() {
        true => Some(device.time(protocol, flush, &mut |device| work.enqueue(device, true))?),
        false => None,
    };
    let peak_bytes = device.peak_memory(watch);
    let errors = work.check(device, rows)?;
    Ok(Measured {
        samples,
        planned: planned.map(|samples| Summary::of(&samples)),
        errors,
        peak_bytes,
        conditions,
    })
}
